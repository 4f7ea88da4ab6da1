"""Falcon as its definition: one token after the other, plain torch.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..contract import compute_dtype
from ..documents import each_document, select
from .rules import FalconState, Options, started, step_and_decay, window_energy


def falcon_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState | None,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FalconState]:
    """Token loop over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.falcon`, checked."""
    state = started(state, q, v, bounds, options)
    loop = functools.partial(_loop, options=options)
    return each_document(loop, (q, k, v, beta, ridge), state, mask, bounds)


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    state: FalconState,
    mask: Tensor | None,
    *,
    options: Options,
) -> tuple[Tensor, FalconState]:
    rule, window, dtype = options.rule, options.window, compute_dtype(q.dtype)
    S, key, has_key, tail_x, tail_v, count = state
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(has_key) if mask is None else mask[:, t]
        # a masked token may hold anything, NaN included: select, never multiply
        q_t, k_t, v_t, beta_t, ridge_t = (select(real, x[:, t], 0) for x in (q, k, v, beta, ridge))
        x_t = key if options.shifted else k_t
        writes = (real & has_key) if options.shifted else real
        # the window: the last `pairs` rows of [N, W, H, .], the rows before them are 0
        window_x = torch.cat([tail_x, select(writes, x_t, 0)[:, None]], 1)
        window_v = torch.cat([tail_v, select(writes, v_t, 0)[:, None]], 1)
        pairs = (count + 1).clamp(max=window)
        x, values = window_x.to(dtype), window_v.to(dtype)
        energy = None
        if options.needs_energy:
            if rule.sliding:
                energy = window_energy(x.transpose(1, 2), pairs[:, None], rule)
            else:
                energy = x[:, -1].square().sum(-1)
        eta, gamma = step_and_decay(beta_t.to(dtype), ridge_t.to(dtype), energy, writes[:, None], options)
        written = values
        if rule.regression:
            written = values - torch.einsum("nwhk,nhkv->nwhv", x, S)
        if rule.per_column:
            new = S * gamma[:, :, None] + torch.einsum("nwhk,nwhv->nhkv", x, eta[:, None] * written)
        else:
            step = (eta / pairs[:, None])[..., None, None]
            new = S * gamma[..., None, None] + step * torch.einsum("nwhk,nwhv->nhkv", x, written)
        new = select(writes, new, S)
        read = new if options.read_after_write else S
        outputs.append(torch.einsum("nhk,nhkv->nhv", q_t.to(dtype), read))
        S = new
        key, has_key = select(real, k_t, key), has_key | real
        tail_x, tail_v = select(writes, window_x[:, 1:], tail_x), select(writes, window_v[:, 1:], tail_v)
        count = torch.where(writes, (count + 1).clamp(max=window - 1), count)
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(v, dtype=dtype)
    return o.to(v.dtype), FalconState(S, key, has_key, tail_x, tail_v, count)
