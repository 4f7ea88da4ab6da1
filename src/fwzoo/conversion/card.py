"""The model card of a trained model: what its configuration says, and numbers that were measured. Nothing else."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCardData
from transformers.utils import logging

from .. import registry
from .._version import __version__

logger = logging.get_logger("fwzoo")

CARD = """\
---
{metadata}
---

# {title}

{about}

| | |
|---|---|
{sizes}

{measured}## How to load

Where only torch and transformers are installed, the code in this repository is used:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

Where fwzoo is installed, `import fwzoo` first and leave `trust_remote_code` out: the installed code is used, and none of this repository
runs. `fwzoo.conversion.verify_bundle("{name}")` checks that the code here is what fwzoo generated.

Made with {versions}.
"""


@dataclass(frozen=True)
class Measured:
    """A table of measured numbers.

    Attributes:
        what: heading of the first column, what was measured on. unit: heading of the second.
        values: row to number. note: a sentence under the table.
    """

    what: str
    unit: str
    values: Mapping[str, float]
    note: str = ""

    def __str__(self) -> str:
        rows = "\n".join(f"| {row} | {value:.3f} |" for row, value in self.values.items())
        table = f"| {self.what} | {self.unit} |\n|---|---|\n{rows}"
        return f"{table}\n\n{self.note}" if self.note else table


def measured_in(folder: str | Path) -> list[Measured]:
    """What `fwzoo train` measured on held-out text, from the `loss.json` it left; empty when there is none."""
    path = Path(folder) / "loss.json"
    if not path.is_file():
        return []
    curve = json.loads(path.read_text(encoding="utf-8"))
    if not curve.get("eval"):
        return []
    step, loss = curve["eval"][-1]
    return [Measured("held-out text", curve["unit"].replace("_", " "), {f"after {step:,} training steps": loss})]


def automatic_card(config: Any, folder: str | Path, name: str | None = None, tags: Sequence[str] = ()) -> str:
    """The card that saving writes: what the configuration says of a model without weights, named after its folder."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return render_card(model.eval(), name or Path(folder).resolve().name, tags=tags)


def is_automatic(text: str, config: Any) -> bool:
    """Whether a card is the one that saving wrote, under whatever name."""
    name = re.search(r'from_pretrained\("([^"]+)"', text)
    return name is not None and text == automatic_card(config, ".", name[1])


@registry.on_save
def write_card(config: Any, folder: str | Path, **card: Any) -> None:
    """Write README.md beside a saved `config.json`, unless the folder has one. No card ever keeps a model from being saved."""
    path = Path(folder) / "README.md"
    if type(config) not in registry.architectures().values() or path.exists():
        return
    try:
        path.write_text(automatic_card(config, folder, **card), encoding="utf-8")
    except RuntimeError as error:  # a module of somebody's own that does not run without values
        logger.warning(f"{folder} gets no card: {error}")


def render_card(
    model: Any,
    name: str = "FOLDER",
    *,
    title: str | None = None,
    about: str = "",
    measured: Sequence[Measured] = (),
    license: str | None = None,
    language: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """A card with the Hub's metadata block, in Markdown.

    Args:
        model: the model described. name: folder or Hub name under which it can be loaded.
        title: heading; None means the last part of `name`. about: a paragraph on how it came to be.
        measured: tables of measured numbers. license, language, base_model: Hub metadata; None is left out.
        tags: besides `fwzoo`, the model type and the mixers.
    """
    config = model.config
    own = dict.fromkeys(["fwzoo", config.model_type, *config.mixers, *tags])
    metadata = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        tags=list(own),
    )
    rule = (inspect.getdoc(type(config)) or "").split("\n")[0]
    text = f"{rule} {about}".strip()
    return CARD.format(
        metadata=metadata.to_yaml(line_break="\n").strip(),
        title=title or name.rstrip("/").rpartition("/")[2],
        about=text,
        sizes="\n".join(f"| {key} | {value} |" for key, value in _sizes(model).items()),
        measured="".join(f"{table}\n\n" for table in measured),
        name=name,
        versions=f"fwzoo {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    )


def _sizes(model: Any) -> dict[str, str]:
    config = model.config
    layers = itertools.groupby(zip(config.mixers, config.feed_forwards, strict=True))
    return {
        "architecture": config.model_type,
        "parameters": f"{model.num_parameters():,}",
        "layers (mixer and feed-forward)": ", ".join(
            f"{len(list(group))} × {mixer} + {feed_forward}" for (mixer, feed_forward), group in layers
        ),
        "width, heads, vocabulary": f"{config.hidden_size}, {config.num_attention_heads}, {config.vocab_size:,}",
        "memory a sequence, after one token": f"{sum(model.state_bytes()):,} bytes",
    }
