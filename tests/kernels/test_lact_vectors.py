"""Both levels of LaCT against the float64 golden vectors, and wrong variants that these vectors must reject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_cases import load
from lact_cases import VECTORS, beyond, run
from torch import Tensor

from compare import errors
from fwzoo.kernels import LactState, lact

paths = pytest.mark.parametrize("path", VECTORS, ids=[path.stem for path in VECTORS])


def test_vectors_are_there() -> None:
    assert len(VECTORS) >= 7


@pytest.mark.parametrize("level", ["reference", "chunk"])
@paths
def test_float64(path: Path, level: str) -> None:
    options, given, expected = load(path)
    found = run(given, {**options, "level": level}, torch.float64)
    wrong = {name: e for name, e in errors({n: found[n] for n in expected}, expected).items() if not e < 1e-9}
    assert not wrong, wrong


@paths
def test_chunk_float32(path: Path) -> None:
    options, given, expected = load(path)
    plain = run(given, {**options, "level": "reference"}, torch.float32)
    found = run(given, {**options, "level": "chunk"}, torch.float32)
    found, plain = ({name: results[name] for name in expected} for results in (found, plain))
    assert not (wrong := beyond(found, expected, plain, torch.float32, options)), wrong


# --- negative controls: each plausible mistake must fail the comparison above on at least one vector ---


def no_momentum(**arguments: Any) -> tuple[Tensor, LactState]:
    return lact(**{**arguments, "momentum": None})


def no_muon(**arguments: Any) -> tuple[Tensor, LactState]:
    return lact(**{**arguments, "muon": False})


def other_norm(**arguments: Any) -> tuple[Tensor, LactState]:
    return lact(**{**arguments, "prenorm": not arguments.get("prenorm", False)})


def swapped_rates(**arguments: Any) -> tuple[Tensor, LactState]:
    return lact(**{**arguments, "lr0": arguments["lr2"], "lr2": arguments["lr0"]})


def late_border(**arguments: Any) -> tuple[Tensor, LactState]:
    return lact(**{**arguments, "chunk_size": arguments["chunk_size"] + 1})


def masked_tokens_count(**arguments: Any) -> tuple[Tensor, LactState]:
    """Padding takes part in the chunks, as zero keys."""
    mask = arguments.pop("mask")[..., None, None]
    return lact(**{n: torch.where(mask, x, 0) if n in "qkv" else x for n, x in arguments.items()})


def chunks_of_the_batch(**arguments: Any) -> tuple[Tensor, LactState]:
    """Packed documents are read as one."""
    documents = len(arguments.pop("cu_seqlens")) - 1
    o, state = lact(**arguments)
    return o, LactState(*(x.expand(documents, *x.shape[1:]) for x in state))


def forgotten(**arguments: Any) -> tuple[Tensor, LactState]:
    """The fast weights start anew with every call."""
    return lact(**{**arguments, "state": None})


def lost_pending(**arguments: Any) -> tuple[Tensor, LactState]:
    state = arguments.pop("state")
    return lact(**arguments, state=state._replace(count=torch.zeros_like(state.count)))


CONTROLS = [
    (no_momentum, "muon_prenorm_momentum"),
    (no_muon, "muon_prenorm_momentum"),
    (other_norm, "sgd_postnorm"),
    (other_norm, "state_partial_prenorm"),
    (swapped_rates, "lr_dim_muon_prenorm"),
    (late_border, "t9"),
    (masked_tokens_count, "packed_mask"),
    (chunks_of_the_batch, "packed_mask"),
    (forgotten, "state_partial_prenorm"),
    (lost_pending, "state_partial_prenorm"),
]


@pytest.mark.parametrize(("wrong", "case"), CONTROLS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("level", ["reference", "chunk"])
def test_negative_controls(wrong: Any, case: str, level: str) -> None:
    options, given, expected = load(next(path for path in VECTORS if path.stem == case))
    found = run(given, {**options, "level": level}, torch.float64, operator=wrong)
    worst = errors({n: found[n] for n in ("o", "state.w0")}, {n: expected[n] for n in ("o", "state.w0")})
    assert max(worst.values()) > 1e-3, worst
