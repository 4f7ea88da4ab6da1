"""LaCT for batches of documents: dense tiles of one chunk, and a scan over chunks that is recomputed in backward.

Reading and updating are separate checkpoints: between the passes only the weights before each chunk are kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..contract import may_overwrite_states
from ..tiling import Tiling
from .reference import lact_reference
from .rules import LactState, Memory, Options, Tokens, read, update

Scan = Callable[..., tuple[Tensor, LactState]]  # of q, tokens, options, a state without pending tokens, mask, bounds


def lact_chunk(
    q: Tensor,
    tokens: Tokens,
    options: Options,
    state: LactState,
    counts: list[int],
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LactState]:
    """Batched form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.lact`, checked; counts is `state.count`."""
    return in_chunks(_scan, read_plainly, q, tokens, options, state, counts, mask, bounds)


def in_chunks(
    scan: Scan,
    read_tiles: Callable[..., Tensor],
    q: Tensor,
    tokens: Tokens,
    options: Options,
    state: LactState,
    counts: list[int],
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LactState]:
    """What `scan` makes of documents without pending tokens, for any state; for calls in which no chunk becomes full,

    `read_tiles(w0, w1, w2, q)` of weights `[N, H, .., ..]` and queries `[N, H, T, D]`.
    """
    if q.shape[1] == 0:
        return lact_reference(q, tokens, options, state, counts, mask, bounds)
    if bounds is None and max(counts) + q.shape[1] < options.chunk:
        return _within_chunk(read_tiles, q, tokens, state, mask)
    width = max(counts)
    if width:
        return _after_pending(scan, width, q, tokens, options, state, counts, mask, bounds)
    return scan(q, tokens, options, state, mask, bounds)


def _within_chunk(
    read_tiles: Callable[..., Tensor], q: Tensor, tokens: Tokens, state: LactState, mask: Tensor | None
) -> tuple[Tensor, LactState]:
    """No chunk can become full: all tokens read the same weights and wait."""
    chunk = state.pk.shape[1]
    real = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    queries = torch.where(real[..., None, None], q, 0)
    o = read_tiles(state.w0, state.w1, state.w2, queries.transpose(1, 2)).transpose(1, 2)
    slot = state.count[:, None] + real.cumsum(1) - 1
    pending = []
    for old, x in zip(state.pending, tokens, strict=True):
        x = x.to(old.dtype)
        if mask is None:
            index = _along(slot, x)
            pending.append(old.scatter_(1, index, x) if may_overwrite_states() else old.scatter(1, index, x))
        else:  # masked tokens go into one slot behind the chunk, which is cut off
            room = torch.cat([old, torch.zeros_like(old[:, :1])], 1)
            pending.append(room.scatter(1, _along(torch.where(real, slot, chunk), x), x)[:, :chunk])
    return o, LactState._make((*state.memory, *pending, state.count + real.sum(1)))


def _along(slot: Tensor, x: Tensor) -> Tensor:
    """Slots `[N, T]` as an index for `[N, T, ..]`."""
    return slot.view(*slot.shape, *[1] * (x.ndim - 2)).expand_as(x)


def _after_pending(
    scan: Scan,
    width: int,
    q: Tensor,
    tokens: Tokens,
    options: Options,
    state: LactState,
    counts: list[int],
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LactState]:
    """The pending tokens, `width` slots a document, go in front of the new ones; then nothing is pending at the start."""
    batch, length = q.shape[:2]
    documents = len(counts)
    order, extended = None, None
    if bounds is not None:
        extended = [bound + width * n for n, bound in enumerate(bounds)]
        new = torch.arange(documents * width, documents * width + length)
        order = torch.cat(
            [
                part
                for n, (start, end) in enumerate(itertools.pairwise(bounds))
                for part in (torch.arange(n * width, (n + 1) * width), new[start:end])
            ]
        ).to(q.device)

    def prepend(old: Tensor, x: Tensor) -> Tensor:
        """Pending slots `[N, width, ..]` before the tokens `[B, T, ..]` of their document."""
        x = torch.cat([old.reshape(batch, -1, *x.shape[2:]).to(x.dtype), x], 1)
        return x if order is None else x.index_select(1, order)

    whole = mask is None and min(counts) == width
    own_mask = None
    if not whole:
        filled = torch.arange(width, device=q.device) < state.count[:, None]
        own_mask = prepend(filled, torch.ones_like(q[:, :, 0, 0], dtype=torch.bool) if mask is None else mask)
    tokens = Tokens(*(prepend(old[:, :width], x) for old, x in zip(state.pending, tokens, strict=True)))
    o, new_state = scan(
        prepend(q.new_zeros(documents, width, *q.shape[2:]), q), tokens, options, state, own_mask, extended
    )
    if order is None:
        return o[:, width:], new_state
    return o.index_select(1, torch.argsort(order)[documents * width :]), new_state


def _scan(
    q: Tensor, tokens: Tokens, options: Options, state: LactState, mask: Tensor | None, bounds: list[int] | None
) -> tuple[Tensor, LactState]:
    """Chunk after chunk, for documents without pending tokens."""
    heads, chunk = q.shape[2], options.chunk
    longest = q.shape[1] if bounds is None else max(b - a for a, b in itertools.pairwise(bounds))
    size = min(chunk, longest)  # a chunk that no document fills needs no more slots than its tokens
    tiling = Tiling(q.shape[0], q.shape[1], size, mask=mask, bounds=bounds, device=q.device)
    memory = Memory(*(tiling.enter(field).flatten(0, 1) for field in state.memory))
    q_tiles = tiling.tile(q)
    tiles = Tokens._make((*(tiling.tile(x) for x in tokens[:5]), tiling.tile(tokens.momentum[..., None]).squeeze(-1)))
    parts = [x.split([n * heads for n in tiling.steps]) for x in (q_tiles, *tiles)]
    recompute = (
        len(tiling.steps) > 1 and torch.is_grad_enabled() and any(x.requires_grad for x in (*memory, q_tiles, *tiles))
    )
    run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if recompute else _call
    outputs = []
    for step, documents in enumerate(tiling.steps):
        active = Memory(*(field[: documents * heads] for field in memory))
        own_q, *own = (part[step] for part in parts)
        outputs.append(run(read_plainly, *active[:3], own_q))
        if (step + 1) * chunk > longest:
            continue
        full = None if tiling.dense else tiling.lengths[:documents] >= (step + 1) * chunk
        new = run(_update, active, full, options, *own)
        memory = Memory(*(torch.cat([x, field[documents * heads :]]) for x, field in zip(new, memory, strict=True)))
    o = tiling.untile(torch.cat(outputs), heads)
    kept = (tiling.leave(field.unflatten(0, (-1, heads))) for field in memory)
    pending, count = waiting_tokens(tiling, tiles, heads, chunk)
    waiting = (x.to(old.dtype) for x, old in zip(pending, state.pending, strict=True))
    return o, LactState._make((*kept, *waiting, count))


def waiting_tokens(tiling: Tiling, tiles: Tokens, heads: int, chunk: int) -> tuple[list[Tensor], Tensor]:
    """The tokens `[N, C, H, ..]` of every document behind its last full chunk, and their number, from their tiles."""
    count = tiling.lengths % chunk
    slot = (tiling.lengths - count)[:, None] + torch.arange(chunk, device=count.device)
    slot = torch.where(slot < tiling.lengths[:, None], slot, -1)
    pending = [
        tiling.leave(tiling.pick(x, slot, heads).transpose(1, 2)) for x in (*tiles[:5], tiles.momentum[..., None])
    ]
    pending[5] = pending[5].squeeze(-1)
    return pending, tiling.leave(count)


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def read_plainly(w0: Tensor, w1: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    """`rules.read` in the dtype of the weights, returned in that of the queries."""
    return read(w0, w1, w2, q.to(w0.dtype)).to(q.dtype)


def _update(memory: Memory, full: Tensor | None, options: Options, *tokens: Tensor) -> Memory:
    """The memory `[n * H, ..]` after the chunk, for the documents whose chunk is full (None: all)."""
    new = update(memory, Tokens(*(x.to(memory.w0.dtype) for x in tokens)), options)
    if full is None:
        return new
    full = full.repeat_interleave(memory.w0.shape[0] // full.shape[0])
    return Memory(
        *(torch.where(full.view(-1, *[1] * (x.ndim - 1)), x, old) for x, old in zip(new, memory, strict=True))
    )
