"""FwPKM as its definition: one token after the other, and after every chunk a gradient step on the written losses.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..clock import Token, run_reference
from ..contract import compute_dtype
from ..pkm.reference import read_reference
from ..product_keys import Bags, keep_read, watching
from .overlay import Overlay
from .state import FwpkmState, Options


def fwpkm_reference(
    q: Tensor,
    v: Tensor,
    gate: Tensor,
    keys: Tensor,
    values: Tensor,
    options: Options,
    state: FwpkmState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FwpkmState]:
    """Token loop over `[B, T, .]`; arguments are those of `fwzoo.kernels.fwpkm`, checked."""
    options.check_reference()
    dtype = compute_dtype(q.dtype)
    tables = list(state.table(values))
    sub_keys = list(state.keys)
    overlay = Overlay(values, state, options.max_slots, options.evict)

    def read(g: int, token: Token) -> Token:
        retrieval = (options.top_k, options.score, options.score_eps)
        return read_reference(token[0].to(dtype), sub_keys[g], tables[g], *retrieval)[:3]

    def update(g: int, tokens: list[tuple[Token, Tensor | None]]) -> None:
        sub_keys[g], rows, change = step_reference(sub_keys[g], tables[g], tokens, options)
        overlay.add(g * overlay.size + rows, Bags.of_rows(change))
        every = torch.arange(g * overlay.size, (g + 1) * overlay.size, device=rows.device)
        tables[g] = overlay.get(every)

    inputs = (q, v.detach(), gate.detach())
    nothing = v.new_zeros(q.shape[2], options.top_k, dtype=dtype)
    zeros = (v.new_zeros(v.shape[2], dtype=dtype), nothing.long(), nothing)
    pending = (state.q, state.v, state.gate)
    (o, slots, weights), waiting, real, count = run_reference(
        inputs,
        pending,
        state.real,
        state.count,
        options.chunk_size,
        options.lookahead,
        options.shared,
        mask,
        bounds,
        read,
        update,
        zeros,
    )
    if watching():
        keep_read(slots, weights)
    new = FwpkmState(
        torch.stack(sub_keys),
        **overlay.fields(),
        q=waiting[0],
        v=waiting[1],
        gate=waiting[2],
        real=real,
        count=count,
        base=state.base,
    )
    return o.to(v.dtype), new


@torch.enable_grad()
def step_reference(
    keys: Tensor, table: Tensor, tokens: list[tuple[Token, Tensor | None]], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """One update of keys `[2, H, n, F]` and table `[n * n, V]` by a chunk of tokens and their targets.

    Returns: the new keys, the rows written (ascending) and what is added to them.
    """
    dtype, n = table.dtype, keys.shape[2]
    keys, table = keys.detach().requires_grad_(), table.detach().requires_grad_()
    loss = table.sum() * 0
    reads = torch.zeros(table.shape[0], dtype=torch.long, device=table.device)
    use = []
    for (q, _, gate), target in tokens:
        v_hat, slots, _, index, half = read_reference(
            q.detach().to(dtype), keys, table, options.top_k, options.score, options.score_eps
        )
        use.append(torch.zeros(*index.shape[:2], n, dtype=dtype, device=q.device).scatter(-1, index, half.softmax(-1)))
        if target is None:
            continue
        target = options.written(target, dtype)
        weight = gate.to(dtype) if options.gate_weighting else 1.0
        loss = loss + weight * 0.5 * (target - v_hat).square().sum()
        reads.index_add_(0, slots.flatten(), torch.ones_like(slots.flatten()))
    change = -torch.autograd.grad(loss, table, retain_graph=True)[0]
    if options.row_averaging:
        change = change / reads.clamp(min=1)[:, None]
    new_keys = keys.detach()
    if options.address_loss:
        mean = torch.stack(use).mean(0)
        negative_entropy = torch.special.xlogy(mean, torch.where(mean > 0, mean, 1)).sum()
        new_keys = new_keys - options.key_lr * torch.autograd.grad(negative_entropy, keys)[0]
    rows = torch.nonzero(reads)[:, 0]
    return new_keys, rows, options.value_lr * change[rows]
