"""A memory as a folder or Hub repository: tensors, a small record of whose they are, and a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import cached_file

from .._version import __version__

FORMAT = "fwzoo-memory-folder-1"
TENSORS, RECORD, CARD_FILE = "memory.safetensors", "memory.json", "README.md"

CARD = """\
---
{metadata}
---

# A fast-weight memory

What a {model_type} model keeps of {tokens:,} tokens: {source}

It is {size:,} bytes. It fits the model with fingerprint `{fingerprint}` and no other.

```python
import fwzoo
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base_model}")
memory = fwzoo.FastWeightCache.from_pretrained("{name}", model)
# model.generate(prompt, past_key_values=memory) goes on from it
```

Made with fwzoo {version}.
"""


def write_memory(
    folder: str | Path, tensors: dict[str, Tensor], record: dict[str, Any], name: str, base_model: str | None
) -> None:
    """Write the three files. `record` holds fingerprint, model_type, layers, tokens_seen and source."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: x.cpu() for key, x in tensors.items()}, folder / TENSORS, {"format": "pt"})
    record = {"format": FORMAT, "fwzoo_version": __version__, **record}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    tags = ["fwzoo", "fast-weight-memory", record["model_type"]]
    card = CARD.format(
        metadata=ModelCardData(library_name="fwzoo", tags=tags, base_model=base_model).to_yaml(line_break="\n").strip(),
        model_type=record["model_type"],
        tokens=record["tokens_seen"],
        source=record["source"] or "its source was not noted.",
        size=(folder / TENSORS).stat().st_size,
        fingerprint=record["fingerprint"],
        base_model=base_model or "MODEL",
        name=name,
        version=__version__,
    )
    (folder / CARD_FILE).write_text(card, encoding="utf-8")


def read_memory(name: str | Path, **hub: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the record of a memory in a folder or on the Hub.

    Raises:
        OSError: there is no such folder or repository, or it lacks a file. ValueError: a file is damaged or of another kind.
    """
    path = cached_file(str(name), RECORD, **hub)
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        fields = {"format", "fingerprint", "model_type", "layers", "tokens_seen", "source"}
        known = isinstance(record, dict) and record.get("format") == FORMAT and fields <= set(record)
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{RECORD} of {str(name)!r} is not the record of a memory that this version of fwzoo knows")
    try:
        return load_file(cached_file(str(name), TENSORS, **hub)), record
    except SafetensorError as error:
        raise ValueError(f"{TENSORS} of {str(name)!r} is damaged ({error})") from error
