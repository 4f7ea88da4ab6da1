"""Product-key memory for all tokens at once.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import compute_dtype
from ..product_keys import select, sort_bags, sum_rows
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


class SparseTableGradient(torch.autograd.Function):
    """`v` as it is, and for the table a sparse gradient that holds the rows read, each once."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, values: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """v `[B, T, V]`, values `[n * n, V]`, slots and weights `[B, T, H, k]`."""
        ctx.save_for_backward(slots, weights)
        ctx.shape = values.shape
        return v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_v: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """The gradient of v, and that of the table."""
        if not ctx.needs_input_grad[1]:
            return d_v, None, None, None
        slots, weights = (x.flatten(0, 1).flatten(1) for x in ctx.saved_tensors)
        rows, bags = sort_bags(d_v.to(weights.dtype).flatten(0, 1), slots, weights)
        change = bags.sum().to(d_v.dtype)
        table = torch.sparse_coo_tensor(rows[None], change, ctx.shape, is_coalesced=True, check_invariants=False)
        return d_v, table, None, None
