"""Falcon as its definition: one token after the other, plain torch.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ..contract import compute_dtype
from .rules import FalconState, Options, step_and_decay, window_energy


def falcon_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FalconState]:
    """Token loop over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.falcon`, checked."""
    if bounds is None:
        return _loop(q, k, v, beta, ridge, options, state, mask)
    outputs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = slice(start, end)
        own = FalconState(*(field[n : n + 1] for field in state))
        own_mask = None if mask is None else mask[:, part]
        o, own = _loop(q[:, part], k[:, part], v[:, part], beta[:, part], ridge[:, part], options, own, own_mask)
        outputs.append(o)
        states.append(own)
    return torch.cat(outputs, 1), FalconState(*(torch.cat(fields) for fields in zip(*states, strict=True)))


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState,
    mask: Tensor | None,
) -> tuple[Tensor, FalconState]:
    rule, window, dtype = options.rule, options.window, compute_dtype(q.dtype)
    S, key, has_key, tail_x, tail_v, count = state
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(has_key) if mask is None else mask[:, t]
        # a masked token may hold anything, NaN included: select, never multiply
        q_t, k_t, v_t, beta_t, ridge_t = (_where(real, x[:, t], 0) for x in (q, k, v, beta, ridge))
        x_t = key if options.shifted else k_t
        writes = (real & has_key) if options.shifted else real
        # the window: the last `pairs` rows of [N, W, H, .], the rows before them are 0
        window_x = torch.cat([tail_x, _where(writes, x_t, 0)[:, None]], 1)
        window_v = torch.cat([tail_v, _where(writes, v_t, 0)[:, None]], 1)
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
        new = _where(writes, new, S)
        read = new if options.read_after_write else S
        outputs.append(torch.einsum("nhk,nhkv->nhv", q_t.to(dtype), read))
        S = new
        key, has_key = _where(real, k_t, key), has_key | real
        tail_x, tail_v = _where(writes, window_x[:, 1:], tail_x), _where(writes, window_v[:, 1:], tail_v)
        count = torch.where(writes, (count + 1).clamp(max=window - 1), count)
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(v, dtype=dtype)
    return o.to(v.dtype), FalconState(S, key, has_key, tail_x, tail_v, count)


def _where(condition: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """`torch.where` with a condition `[N]` over the first axis of `x`."""
    return torch.where(condition.view(-1, *[1] * (x.ndim - 1)), x, other)
