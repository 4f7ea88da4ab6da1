"""`fwzoo serve`: one model behind transformers' own server, which speaks OpenAI's protocol."""

import copy
import socket
from contextlib import suppress
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.import_utils import is_serve_available

from fwzoo import FastWeightCache
from fwzoo.modeling.cache import CACHE_KEY

from .common import bad, blamed_on, load_model, quiet_transformers

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""The chat template of a model that has none: what was said, line by line."""


class OneModel(model_manager.ModelManager):
    """transformers' manager of models, with the one model there is loaded already."""

    loaded: tuple[Any, PreTrainedTokenizerBase]

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded[0]

    def _load_processor(self, *args: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
        return self.loaded[1]

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """What `/v1/models` lists before transformers 5.24."""
        return [{"owned_by": "", "id": self.force_model, "object": "model", "created": 0}]


def run(model: str, memory: str | None, host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    quiet_transformers()
    if not is_serve_available():
        raise bad("serve", "the server needs fastapi, uvicorn, openai and pydantic: pip install 'fwzoo[serve]'.")
    _check_address(host, port)
    loaded, tokenizer = load_model("MODEL", model)
    tokenizer = _streamable(tokenizer)
    if memory is not None:
        with blamed_on("--memory"):
            start_from(loaded, FastWeightCache.from_pretrained(memory, loaded))
    if loaded.generation_config.do_sample is None:  # as a client expects; temperature 0 is greedy
        loaded.generation_config.do_sample = True
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_CHAT
    console = Console(stderr=True)
    console.print(f"serving {model!r} at http://{host}:{port}/v1; Ctrl-C stops", soft_wrap=True, highlight=False)
    OneModel.loaded = loaded, tokenizer
    model_manager.ModelManager = OneModel  # where the server takes it from
    with suppress(KeyboardInterrupt):  # Ctrl-C, after the server has shut down
        Serve(force_model=model, host=host, port=port, log_level="error")


def start_from(model: Any, memory: FastWeightCache) -> None:
    """Make every call of `model.generate` that brings no cache of its own go on from a copy of `memory`."""
    generate = model.generate

    def generate_from_memory(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{CACHE_KEY: copy.deepcopy(memory), **kwargs})

    model.generate = generate_from_memory


def _streamable(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer with the same ids whose text the server can stream, which takes one of the `tokenizers` library."""
    if hasattr(tokenizer, "_tokenizer"):
        return tokenizer
    if not isinstance(tokenizer, ByT5Tokenizer):
        raise bad(
            "MODEL", f"its tokenizer is a {type(tokenizer).__name__}; allowed are ByT5's and those of `tokenizers`."
        )
    names = bytes_to_unicode()
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {names[byte]: 3 + byte for byte in range(256)}
    rust = Tokenizer(models.BPE(vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=tokenizer.convert_ids_to_tokens(list(range(259, len(tokenizer)))),
        model_input_names=["input_ids", "attention_mask"],
        chat_template=tokenizer.chat_template,
    )


def _check_address(host: str, port: int) -> None:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise bad("--port", f"{port} on {host!r} cannot be used ({error.strerror}); give another --port.") from error
