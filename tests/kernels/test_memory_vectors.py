"""Both levels of the memories against the float64 golden vectors, and wrong variants that these vectors must reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cases import OPERATORS, load, run, vectors

from compare import errors, too_large

VECTORS = [path for op in OPERATORS for path in vectors(op)]
NAMES = [f"{path.parent.name}-{path.stem}" for path in VECTORS]


def test_vectors_are_there() -> None:
    assert {op: len(vectors(op)) for op in OPERATORS} == {"pkm": 4, "fwpkm": 13, "fwmlp": 7}


@pytest.mark.parametrize("level", ["reference", "chunk"])
@pytest.mark.parametrize("path", VECTORS, ids=NAMES)
def test_float64(path: Path, level: str) -> None:
    op, options, given, expected = load(path)
    found = run(op, given, {**options, "level": level})
    wrong = {name: e for name, e in errors(found, expected).items() if not e < 1e-9}
    assert not wrong, wrong


@pytest.mark.parametrize("path", VECTORS, ids=NAMES)
def test_chunk_float32(path: Path) -> None:
    op, options, given, expected = load(path)
    plain = run(op, given, {**options, "level": "reference"}, torch.float32)
    found = run(op, given, {**options, "level": "chunk"}, torch.float32)
    wrong = too_large(found, expected, plain, torch.float32)
    assert not wrong, wrong


# --- negative controls: each plausible mistake must fail the comparison on a vector ---

CONTROLS: list[tuple[str, str, dict[str, Any]]] = [
    ("fwpkm", "sequence_heads", {"lookahead": False}),
    ("fwpkm", "sequence_heads", {"normalize_targets": False}),
    ("fwpkm", "sequence_heads", {"row_averaging": False}),
    ("fwpkm", "sequence_heads", {"gate_weighting": False}),
    ("fwpkm", "sequence_heads", {"address_loss": False}),
    ("fwpkm", "sequence_heads", {"key_lr": 0.5}),
    ("fwpkm", "sequence_heads", {"score": "dot"}),
    ("fwpkm", "sequence_no_row_averaging", {"row_averaging": True}),
    ("fwpkm", "batch_no_gate_weighting", {"gate_weighting": True}),
    ("fwpkm", "sequence_no_lookahead", {"lookahead": True}),
    ("fwpkm", "sequence_packed_mask", {"mask": None}),
    ("fwpkm", "batch_packed_state", {"state": None}),
    ("fwmlp", "sequence_state4", {"state": None}),
    ("fwmlp", "sequence_raw_targets", {"normalize_targets": True}),
    ("fwmlp", "batch_lr", {"lr": 1.0}),
    ("fwmlp", "batch_mask_holes", {"mask": None}),
]


@pytest.mark.parametrize("level", ["reference", "chunk"])
@pytest.mark.parametrize(("op", "case", "change"), CONTROLS, ids=lambda x: str(x))
def test_negative_controls(op: str, case: str, change: dict[str, Any], level: str) -> None:
    path = next(p for p in vectors(op) if p.stem == case)
    _, options, given, expected = load(path)

    def wrong(**arguments: Any) -> Any:
        return OPERATORS[op](**{**arguments, **change})

    found = run(op, given, {**options, "level": level}, operator=wrong)
    assert max(errors(found, expected).values()) > 1e-3
