"""Linear attention as its definition: one token after the other, plain torch.

Source: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import compute_dtype, empty_weights
from ..documents import each_document, each_token, select


class LinearAttentionState(NamedTuple):
    """Complete state of linear attention, float32 (float64 for float64 inputs).

    Attributes:
        S: fast weights `[N, H, K, V]`.
        z: sum of keys `[N, H, K]`, the normaliser.
    """

    S: Tensor
    z: Tensor


def empty_state(documents: int, q: Tensor, v: Tensor) -> LinearAttentionState:
    """The state before the first token, for sequences shaped like q `[B, T, H, K]` and v `[B, T, H, V]`."""
    S = empty_weights(documents, q, v)
    return LinearAttentionState(S, torch.zeros_like(S[..., 0]))


def started(state: LinearAttentionState | None, q: Tensor, v: Tensor, bounds: list[int] | None) -> LinearAttentionState:
    """`state`, or that before the first token of every document."""
    if state is not None:
        return state
    return empty_state(q.shape[0] if bounds is None else len(bounds) - 1, q, v)


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    normalize: bool,
    eps: float,
    state: LinearAttentionState | None,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LinearAttentionState]:
    """Token loop over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.linear_attention`, checked."""
    dtype, state = compute_dtype(q.dtype), started(state, q, v, bounds)
    if log_decay is None:
        log_decay = q.new_zeros(q.shape[:3], dtype=dtype)
    loop = functools.partial(_loop, normalize=normalize, eps=eps)
    o, state = each_document(loop, [x.to(dtype) for x in (q, k, v, log_decay)], state, mask, bounds)
    return o.to(v.dtype), state


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: LinearAttentionState,
    mask: Tensor | None,
    *,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, LinearAttentionState]:
    S, z = state
    outputs = []
    for (q_t, k_t, v_t, log_decay_t), real in each_token((q, k, v, log_decay), mask):
        kept = log_decay_t.exp()[..., None]
        S = kept[..., None] * S + torch.einsum("nhk,nhv->nhkv", k_t, v_t)  # a masked token adds 0 and keeps exp(0)
        z = kept * z + k_t
        o = torch.einsum("nhk,nhkv->nhv", q_t, S)
        if normalize:
            seen = torch.einsum("nhk,nhk->nh", q_t, z)[..., None] + eps
            o = o / (seen if real is None else select(real, seen, 1))
        outputs.append(o)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), LinearAttentionState(S, z)
