"""LaCT as its definition: one document after the other, one chunk after the other, plain torch.

Source: "Test-Time Training Done Right" (2025).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import compute_dtype
from .rules import LactState, Options, Tokens, read, update


def lact_reference(
    q: Tensor,
    tokens: Tokens,
    options: Options,
    state: LactState,
    counts: list[int],
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LactState]:
    """Chunk loop over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.lact`, checked; counts is `state.count`."""
    outputs, states = [], []
    for n, count in enumerate(counts):
        row, part = (n, slice(None)) if bounds is None else (0, slice(bounds[n], bounds[n + 1]))
        own_mask = None if mask is None else mask[row, part]
        own_tokens = Tokens(*(x[row, part] for x in tokens))
        own_state = LactState(*(field[n] for field in state))
        o, own_state = _document(q[row, part], own_tokens, options, own_state, count, own_mask)
        outputs.append(o)
        states.append(own_state)
    o = torch.stack(outputs) if bounds is None else torch.cat(outputs)[None]
    return o.to(q.dtype), LactState(*(torch.stack(fields) for fields in zip(*states, strict=True)))


def _document(
    q: Tensor, tokens: Tokens, options: Options, state: LactState, count: int, mask: Tensor | None
) -> tuple[Tensor, LactState]:
    """One document: q `[T, H, D]`, mask `[T]`, state without its first axis."""
    dtype, length = compute_dtype(q.dtype), q.shape[0]
    real = torch.arange(length, device=q.device) if mask is None else torch.nonzero(mask).flatten()
    q, tokens = q[real].to(dtype), Tokens(*(x[real] for x in tokens))
    memory, pending = state.memory, Tokens(*(x[:count] for x in state.pending))
    outputs, start = [], 0
    while start < len(real):
        end = min(start + options.chunk - pending.k.shape[0], len(real))
        outputs.append(read(*memory[:3], q[start:end].transpose(0, 1)).transpose(0, 1))
        pending = Tokens(*(torch.cat([old, x[start:end]]) for old, x in zip(pending, tokens, strict=True)))
        if pending.k.shape[0] == options.chunk:
            memory = update(memory, Tokens(*(x.to(dtype).transpose(0, 1) for x in pending)), options)
            pending = Tokens(*(x[:0] for x in pending))
        start = end
    o = q.new_zeros(length, *q.shape[1:])
    if outputs:
        o = o.index_put((real,), torch.cat(outputs))
    free = options.chunk - pending.k.shape[0]
    filled = (F.pad(x, (0, 0) * (x.ndim - 1) + (0, free)) for x in pending)
    return o, LactState._make((*memory, *filled, torch.full_like(state.count, options.chunk - free)))
