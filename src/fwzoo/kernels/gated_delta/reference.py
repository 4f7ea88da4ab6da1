"""The gated delta rule as its definition: one token after the other, plain torch.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import compute_dtype
from ..documents import each_document, each_token


class GatedDeltaState(NamedTuple):
    """Complete state of the gated delta rule.

    Attributes:
        S: fast weights `[N, H, K, V]`, float32 (float64 for float64 inputs).
    """

    S: Tensor


def gated_delta_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float,
    state: GatedDeltaState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, GatedDeltaState]:
    """Token loop over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.gated_delta`, checked."""
    dtype = compute_dtype(q.dtype)
    inputs = [x.to(dtype) for x in (scale * q.to(dtype), k, v, log_decay, beta)]
    o, state = each_document(_loop, inputs, state, mask, bounds)
    return o.to(v.dtype), state


def _loop(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: GatedDeltaState, mask: Tensor | None
) -> tuple[Tensor, GatedDeltaState]:
    (S,) = state
    outputs = []
    for (q_t, k_t, v_t, log_decay_t, beta_t), _ in each_token((q, k, v, log_decay, beta), mask):
        kept = log_decay_t.exp()[..., None, None] * S
        residual = v_t - torch.einsum("nhk,nhkv->nhv", k_t, kept)
        S = kept + torch.einsum(
            "nhk,nhv->nhkv", k_t, beta_t[..., None] * residual
        )  # with gain 0 and decay exp(0), as it was
        outputs.append(torch.einsum("nhk,nhkv->nhv", q_t, S))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), GatedDeltaState(S)
