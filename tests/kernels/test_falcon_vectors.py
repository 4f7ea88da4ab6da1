"""Both levels against the float64 golden vectors, and wrong variants that these vectors must reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_cases import VECTORS, load, run

from compare import errors, too_large
from fwzoo.kernels import FalconState, falcon

NAMES = [f"{path.parent.name}-{path.stem}" for path in VECTORS]


def test_vectors_are_there() -> None:
    assert len(VECTORS) > 60
    assert {path.parent.name for path in VECTORS} == {
        "falcon1",
        "falcon2",
        "falcon3",
        "falcon1a",
        "falcon2a",
        "falcon3a",
    }


@pytest.mark.parametrize("level", ["reference", "chunk"])
@pytest.mark.parametrize("path", VECTORS, ids=NAMES)
def test_float64(path: Path, level: str) -> None:
    options, given, expected = load(path)
    found = run(given, {**options, "level": level}, torch.float64)
    wrong = {name: e for name, e in errors({n: found[n] for n in expected}, expected).items() if not e < 1e-9}
    assert not wrong, wrong


@pytest.mark.parametrize("path", VECTORS, ids=NAMES)
def test_chunk_float32(path: Path) -> None:
    options, given, expected = load(path)
    plain = run(given, {**options, "level": "reference"}, torch.float32)
    found = run(given, {**options, "level": "chunk"}, torch.float32)
    wrong = too_large({n: found[n] for n in expected}, expected, {n: plain[n] for n in expected}, torch.float32)
    assert not wrong, wrong


# --- negative controls: each plausible mistake must fail the comparison above on at least one vector ---


def unshifted_key(**arguments: Any) -> tuple[torch.Tensor, FalconState]:
    return falcon(**{**arguments, "pairing": "same_step"})


def decay_at_sentinel(**arguments: Any) -> tuple[torch.Tensor, FalconState]:
    """The first token of a document writes and decays although it has no pair."""
    state = arguments.pop("state")
    return falcon(**arguments, state=state._replace(has_key=torch.ones_like(state.has_key)))


def dropped_tail(**arguments: Any) -> tuple[torch.Tensor, FalconState]:
    state = arguments.pop("state")
    return falcon(
        **arguments,
        state=state._replace(
            tail_x=torch.zeros_like(state.tail_x),
            tail_v=torch.zeros_like(state.tail_v),
            count=torch.zeros_like(state.count),
        ),
    )


def stale_key(**arguments: Any) -> tuple[torch.Tensor, FalconState]:
    state = arguments.pop("state")
    o, new = falcon(**arguments, state=state._replace(key=state.key.roll(1, -1)))
    return o, new


def sum_over_window(**arguments: Any) -> tuple[torch.Tensor, FalconState]:
    """The window's residuals are added up instead of averaged."""
    return falcon(**{**arguments, "beta": arguments["beta"] * arguments.get("window", 4)})


CONTROLS = [
    (unshifted_key, "plain", ["falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a"]),
    (decay_at_sentinel, "state_unknown_key", ["falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a"]),
    (dropped_tail, "state", ["falcon3", "falcon3a"]),
    (stale_key, "state", ["falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a"]),
    (sum_over_window, "plain", ["falcon3", "falcon3a"]),
]


@pytest.mark.parametrize(
    ("wrong", "case", "rule"),
    [pytest.param(w, case, rule, id=f"{w.__name__}-{rule}") for w, case, rules in CONTROLS for rule in rules],
)
@pytest.mark.parametrize("level", ["reference", "chunk"])
def test_negative_controls(wrong: Any, case: str, rule: str, level: str) -> None:
    path = next(p for p in VECTORS if p.parent.name == rule and p.stem == case)
    options, given, expected = load(path)
    found = run(given, {**options, "level": level}, torch.float64, operator=wrong)
    assert (
        max(errors({n: found[n] for n in ("o", "state.S")}, {n: expected[n] for n in ("o", "state.S")}).values()) > 1e-3
    )
