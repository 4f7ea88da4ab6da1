"""What both levels of FwMLP share: the weights, options and the state.

Axis letters: N sequences, G memories (N with scope "sequence", 1 with scope "batch"), C chunk, M width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..clock import FastOptions, remember_count

WEIGHTS = ("w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down")


@dataclass(frozen=True)
class Options(FastOptions):
    """Validated keyword options of `fwzoo.kernels.fwmlp`."""

    lr: float


class FwmlpState(NamedTuple):
    """Complete state of a FwMLP memory: continuing from it equals never having stopped.

    Attributes:
        w_gate, w_up: `[G, M, K]`. b_gate, b_up: `[G, M]`. w_down: `[G, V, M]`. b_down: `[G, V]`. float32 (float64 for
            float64 inputs).
        q, v: pending tokens `[N, C, K]`, `[N, C, V]`. real: bool `[N, C]`, which of them are real.
        count: int64 `[G]`, pending ticks.
    """

    w_gate: Tensor
    b_gate: Tensor
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor
    b_down: Tensor
    q: Tensor
    v: Tensor
    real: Tensor
    count: Tensor


def empty_state(
    sequences: int, q: Tensor, v: Tensor, weights: tuple[Tensor, ...], options: Options, dtype: torch.dtype
) -> FwmlpState:
    """The state before the first token."""
    groups, chunk = (1 if options.shared else sequences), options.chunk_size
    return FwmlpState(
        **{n: x.detach().to(dtype).repeat(groups, *[1] * x.ndim) for n, x in zip(WEIGHTS, weights, strict=True)},
        q=q.new_zeros(sequences, chunk, q.shape[2]),
        v=v.new_zeros(sequences, chunk, v.shape[2]),
        real=torch.zeros(sequences, chunk, dtype=torch.bool, device=q.device),
        count=remember_count(torch.zeros(groups, dtype=torch.long, device=q.device), [0] * groups),
    )
