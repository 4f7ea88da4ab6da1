"""The generated code beside a saved model, and whether it is as it was generated."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

CODE_KEY = "fwzoo_code"
"""Field of `config.json`: the version that generated the code, and a digest of every file."""


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check_code(name: str | Path, **hub: Any) -> dict[str, Any]:
    """Compare every code file with its digest in `config.json`; returns what is recorded there.

    Args:
        name: folder or Hub name. hub: `revision`, `token`, `cache_dir`, as for `from_pretrained`.

    Raises:
        ValueError: a file differs or is missing, or no digest is recorded; the message names it.
    """
    recorded = json.loads(Path(cached_file(str(name), "config.json", **hub)).read_text(encoding="utf-8")).get(CODE_KEY)
    if not isinstance(recorded, dict) or "sha256" not in recorded:
        raise ValueError(f"{str(name)!r} records no digests of its code; save it with fwzoo to verify it")
    for file, expected in recorded["sha256"].items():
        try:
            found = digest(Path(cached_file(str(name), file, **hub)).read_bytes())
        except OSError as error:
            raise ValueError(f"{file} of {str(name)!r} is missing, but config.json records its digest") from error
        if found != expected:
            raise ValueError(f"{file} of {str(name)!r} was edited: its SHA-256 is {found}; recorded is {expected}")
    return recorded
