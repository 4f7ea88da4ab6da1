"""Product-key memory on a GPU: search, read and gradients as kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gpu import custom
from ..product_key_search import Found, backward, key_gradient, search_and_read, table_gradient


def pkm_triton(
    q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton form over `[B, T, H, K]`; arguments are those of `fwzoo.kernels.pkm`, checked."""
    v, weights, slots, *_ = _pkm(
        q.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        top_k,
        score,
        eps,
        keys.requires_grad,
        values.requires_grad,
    )
    return v, slots.long(), weights


def _forward(
    q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float, keys_grad: bool, values_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    queries = q.flatten(0, 1)[None]
    v, found = search_and_read(queries, keys[None], top_k, score, eps, values, out_dtype=values.dtype)
    shape = q.shape[:2]
    v, weights, slots = (x[0].unflatten(0, shape) for x in (v, found.weights, found.slots))
    return v, weights, slots, found.index, found.half


def _fake_forward(q: Tensor, keys: Tensor, values: Tensor, top_k: int, *_: Any) -> Any:
    batch, tokens, heads, _size = q.shape
    return (
        values.new_empty(batch, tokens, values.shape[1]),
        q.new_empty(batch, tokens, heads, top_k, dtype=torch.float32),
        q.new_empty(batch, tokens, heads, top_k, dtype=torch.int32),
        q.new_empty(1, batch * tokens, heads, 2, top_k, dtype=torch.int32),
        q.new_empty(1, batch * tokens, heads, 2, top_k, dtype=torch.float32),
    )


def _backward(
    d_v: Tensor,
    d_weights: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    top_k: int,
    score: str,
    eps: float,
    keys_grad: bool,
    values_grad: bool,
    v: Tensor,
    weights: Tensor,
    slots: Tensor,
    index: Tensor,
    half: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, d_v = q.flatten(0, 1)[None], d_v.flatten(0, 1)
    found = Found(slots.flatten(0, 1)[None], weights.flatten(0, 1)[None], index, half)
    d_weights, d_values = d_weights.flatten(0, 1)[None], values.new_empty(0)
    if values_grad:
        slots, weights = found.slots[0].flatten(1), found.weights[0].flatten(1)
        d_values, through = table_gradient(d_v, slots, weights, values, d_weights[0].flatten(1))
        d_q, *pull = backward(queries, keys[None], found, score, through.view_as(d_weights))
    else:
        d_q, *pull = backward(queries, keys[None], found, score, d_weights, d_v[None], values)
    d_keys = key_gradient(queries, keys[None], score, *pull)[0].to(keys.dtype) if keys_grad else keys.new_empty(0)
    return d_q[0].unflatten(0, q.shape[:2]), d_keys, d_values


def _fake_backward(
    d_v: Tensor,
    d_weights: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    top_k: int,
    score: str,
    eps: float,
    keys_grad: bool,
    values_grad: bool,
    *_: Any,
) -> Any:
    wanted = ((keys, keys_grad), (values, values_grad))
    return torch.empty_like(q), *(torch.empty_like(x) if want else x.new_empty(0) for x, want in wanted)


_pkm = custom("pkm", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(3), module=__name__)
