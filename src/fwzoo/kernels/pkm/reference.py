"""Product-key memory as its definition: score, sort, add, sort, read.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import compute_dtype


def read_reference(
    q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One query a head, `[H, K]`, in sub-keys `[2, H, n, K / 2]` and values `[n * n, V]`.

    Returns: the value read `[V]`, slots and weights `[H, k]`, and of each half the sub-keys kept and their scores `[2, H, k]`.
    """
    n = keys.shape[2]
    halves = q.unflatten(-1, (2, -1)).transpose(0, 1)[:, :, None]
    distance = (halves - keys).square().sum(-1)
    scores = (halves * keys).sum(-1) if score == "dot" else -(eps + distance).log()
    index = _best(scores, top_k).sort(-1).values
    kept = scores.gather(-1, index)
    sums = (kept[0, :, :, None] + kept[1, :, None, :]).flatten(-2)
    rows = (index[0, :, :, None] * n + index[1, :, None, :]).flatten(-2)
    best = _best(sums, top_k)
    slots, weights = rows.gather(-1, best), sums.gather(-1, best).softmax(-1)
    return (weights[..., None] * values[slots]).sum((0, 1)), slots, weights, index, kept


def _best(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest, best first, the lower position first among equals."""
    return torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices[..., :k]


def pkm_reference(
    q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Token loop over `[B, T, H, K]`; arguments are those of `fwzoo.kernels.pkm`, checked."""
    dtype = compute_dtype(q.dtype)
    tokens = [read_reference(x.to(dtype), keys.to(dtype), values.to(dtype), top_k, score, eps) for x in q.flatten(0, 1)]
    shape = q.shape[:3]
    if not tokens:
        empty = q.new_zeros(*shape, top_k, dtype=dtype)
        return values.new_zeros(*shape[:2], values.shape[1]), empty.long(), empty
    v, slots, weights = (torch.stack(x).unflatten(0, shape[:2]) for x in list(zip(*tokens, strict=True))[:3])
    return v.to(values.dtype), slots, weights
