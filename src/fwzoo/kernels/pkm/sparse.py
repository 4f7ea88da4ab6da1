"""The gradient of a product-key memory's table as the rows that were read.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..product_keys import sort_bags

Readers = Callable[[Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def sum_readers(d_v: Tensor, slots: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows read `[M]` (ascending, each once), and for each the weighted sum of what its readers got `[M, V]`.

    Args:
        d_v: `[X, V]`. slots, weights: `[X, E]`, the rows that were read and their weights.
    """
    rows, bags = sort_bags(d_v.to(weights.dtype), slots, weights)
    return rows, bags.sum().to(dtype)


class SparseTableGradient(torch.autograd.Function):
    """`v` as it is, and for the table a sparse gradient that holds the rows read, each once."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, values: Tensor, slots: Tensor, weights: Tensor, readers: Readers) -> Tensor:
        """v `[B, T, V]`, values `[n * n, V]`, slots and weights `[B, T, H, k]`; readers: `sum_readers`, or one that equals it."""
        ctx.save_for_backward(slots, weights)
        ctx.shape, ctx.readers = values.shape, readers
        return v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_v: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """The gradient of v, and that of the table."""
        if not ctx.needs_input_grad[1]:
            return d_v, None, None, None, None
        slots, weights = (x.flatten(0, 1).flatten(1) for x in ctx.saved_tensors)
        rows, change = ctx.readers(d_v.flatten(0, 1), slots, weights, d_v.dtype)
        table = torch.sparse_coo_tensor(rows[None].long(), change, ctx.shape, is_coalesced=True, check_invariants=False)
        return d_v, table, None, None, None
