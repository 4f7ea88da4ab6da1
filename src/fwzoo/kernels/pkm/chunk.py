"""Product-key memory for all tokens at once.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import compute_dtype
from ..product_keys import select, sum_rows
from .reference import pkm_reference


def pkm_chunk(
    q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Parallel form over `[B, T, H, K]`; arguments are those of `fwzoo.kernels.pkm`, checked."""
    if q.shape[1] == 0:
        return pkm_reference(q, keys, values, top_k, score, eps)
    dtype = compute_dtype(q.dtype)
    chosen = select(q.to(dtype).flatten(0, 1)[None], keys.to(dtype)[None], top_k, score, eps)
    counts = torch.full((q.shape[0] * q.shape[1],), q.shape[2] * top_k, device=q.device)
    v = sum_rows(values, chosen.slots.flatten(), chosen.weights.flatten(), counts)
    slots, weights = (x[0].unflatten(0, q.shape[:2]) for x in (chosen.slots, chosen.weights))
    return v.to(values.dtype).unflatten(0, q.shape[:2]), slots, weights
