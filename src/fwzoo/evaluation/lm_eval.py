"""Models of the zoo in lm-evaluation-harness, through its own Hugging Face backend, as its model `fwzoo`.

`python -m fwzoo.evaluation.lm_eval` is the harness's own command line, with the zoo's architectures known to it:

    python -m fwzoo.evaluation.lm_eval run --model fwzoo --model_args pretrained=my-model --tasks lambada_openai
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import fwzoo  # noqa: F401  (registers every architecture with the Auto classes that the backend uses)

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("evaluation in the harness needs lm-evaluation-harness: pip install 'fwzoo[eval]'.") from error


@register_model("fwzoo")
class FwzooLM(HFLM):
    """The harness's Hugging Face backend for a model of the zoo.

    Args:
        pretrained: a folder, a Hub name or a model.
        tokenizer: a folder, a Hub name or a tokenizer; None means the one beside `pretrained`.
        max_length: tokens that are read for a request at most; longer contexts lose their beginning. The models
            themselves have no maximum.
        options: further options of `lm_eval.models.huggingface.HFLM`: batch_size, device, dtype, ...

    Example:
        >>> lm_eval.simple_evaluate(FwzooLM("my-model", batch_size=8), tasks=["lambada_openai"])
    """

    def __init__(self, pretrained: Any, tokenizer: Any = None, max_length: int = 4096, **options: Any) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            beside = pretrained if isinstance(pretrained, str) else pretrained.name_or_path
            tokenizer = AutoTokenizer.from_pretrained(tokenizer or beside)
        if tokenizer.bos_token_id is None:
            # a byte tokenizer adds an end of text, which would stand between a context and its continuation
            options.setdefault("add_bos_token", False)
        super().__init__(pretrained, "causal", tokenizer=tokenizer, max_length=max_length, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
