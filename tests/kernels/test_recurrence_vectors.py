"""gated_delta and linear_attention against their float64 golden vectors, and wrong variants that these must reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_cases import load
from recurrence_cases import VECTORS, run

from compare import errors, too_large
from fwzoo.kernels import gated_delta, linear_attention

vectors = pytest.mark.parametrize("path", VECTORS, ids=[f"{path.parent.name}-{path.stem}" for path in VECTORS])


def test_vectors_are_there() -> None:
    assert [sum(path.parent.name == name for path in VECTORS) for name in ("gated_delta", "linear_attention")] == [9, 9]


@pytest.mark.parametrize("level", ["reference", "chunk"])
@vectors
def test_float64(path: Path, level: str) -> None:
    options, given, expected = load(path)
    found = run(path.parent.name, given, {**options, "level": level}, torch.float64)
    wrong = {name: e for name, e in errors({n: found[n] for n in expected}, expected).items() if not e < 1e-9}
    assert not wrong, wrong


@vectors
def test_chunk_float32(path: Path) -> None:
    options, given, expected = load(path)
    plain = run(path.parent.name, given, {**options, "level": "reference"}, torch.float32)
    found = run(path.parent.name, given, {**options, "level": "chunk"}, torch.float32)
    wrong = too_large({n: found[n] for n in expected}, expected, {n: plain[n] for n in expected}, torch.float32)
    assert not wrong, wrong


# --- negative controls: each plausible mistake must fail the comparison above on the named vector ---


def residual_before_decay(*, v: Any, log_decay: Any, **arguments: Any) -> Any:
    """falcon1's order: b (v - S_{t-1}^T k) is written, and the read-out of the old state does not decay."""
    arguments["beta"] = arguments["beta"] * (-log_decay).exp()
    return gated_delta(v=v * log_decay.exp()[..., None], log_decay=log_decay, **arguments)


def unscaled(**arguments: Any) -> Any:
    return gated_delta(**{**arguments, "scale": 1.0})


def undecayed_normaliser(**arguments: Any) -> Any:
    """The sum of keys forgets nothing although the fast weights do."""
    o, new = linear_attention(**{**arguments, "normalize": False})
    _, plain = linear_attention(**{**arguments, "log_decay": None})
    return o, new._replace(z=plain.z)


def forgotten_normaliser(**arguments: Any) -> Any:
    """Continuing with the fast weights but without the sum of keys."""
    state = arguments.pop("state")
    return linear_attention(**arguments, state=state._replace(z=0 * state.z))


def masked_tokens_decay(**arguments: Any) -> Any:
    mask = arguments.pop("mask")[..., None]
    arguments["k"] = arguments["k"].masked_fill(~mask[..., None], 0)
    return linear_attention(**arguments)


@pytest.mark.parametrize(
    ("wrong", "name", "case"),
    [
        (residual_before_decay, "gated_delta", "beta_extreme"),
        (unscaled, "gated_delta", "beta_extreme"),
        (undecayed_normaliser, "linear_attention", "eps"),
        (forgotten_normaliser, "linear_attention", "packed_state"),
        (masked_tokens_decay, "linear_attention", "mask_state"),
    ],
)
@pytest.mark.parametrize("level", ["reference", "chunk"])
def test_negative_controls(wrong: Any, name: str, case: str, level: str) -> None:
    options, given, expected = load(next(p for p in VECTORS if p.parent.name == name and p.stem == case))
    found = run(name, given, {**options, "level": level}, torch.float64, operator=wrong)
    names = [n for n in expected if not n.startswith("grad")]
    assert max(errors({n: found[n] for n in names}, {n: expected[n] for n in names}).values()) > 1e-3
