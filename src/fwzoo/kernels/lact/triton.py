"""LaCT on a GPU: batched matrix products of the library, one Triton kernel between them, backward by recomputation.

What tokens read needs only the weights before their chunk, so reading is apart from the chain of updates and runs over
many chunks at once. An update is five launches: k and v against the weights, the rows that are written, their products with
k and v, and the step of the weights. The weights before every chunk are kept for the backward pass, nothing of its inside.
Products are bfloat16 for bfloat16 inputs and float32 otherwise; weights, sums, directions and rates are float32.

R are rows of the batched products: sequences times heads. Flat matrices `[R, 3 M D]` hold W0, W2, W1 (see `passes.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import few_tokens, needs_backward
from ..gpu import custom
from ..tiling import Tiling
from . import passes
from .chunk import in_chunks, read_plainly, waiting_tokens
from .muon import Trail, orthogonal, orthogonal_backward, split
from .rules import LactState, Options, Tokens

READ_TOKENS = 1 << 16  # tokens times heads of one read: enough to fill the card, and its hidden units fit in its memory


def lact_triton(
    q: Tensor,
    tokens: Tokens,
    options: Options,
    state: LactState,
    counts: list[int],
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LactState]:
    """GPU form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.lact`, checked; counts is `state.count`."""
    dtype = q.dtype
    if dtype == torch.float16:  # which a fast SwiGLU leaves
        q, tokens = q.float(), Tokens._make((tokens.k.float(), tokens.v.float(), *tokens[2:]))
    few = few_tokens((q, *tokens, *state), None, bounds)
    o, new = in_chunks(_scan, read_plainly if few else _read, q, tokens, options, state, counts, mask, bounds)
    return o.to(dtype), new


def _read(w0: Tensor, w1: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    """`rules.read` of queries `[N, H, C, D]`."""
    flat = _pack(w0.flatten(0, 1), w1.flatten(0, 1), w2.flatten(0, 1))
    (o,) = _read_operator(q.flatten(0, 1), flat, w0.shape[2])
    return o.view_as(q)


def _pack(w0: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Flat matrices of W0, W2 `[R, M, D]` and W1 `[R, D, M]`."""
    return torch.cat([x.flatten(1) for x in (w0, w2, w1)], 1)


def _unpack(flat: Tensor, heads: int, size: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """W0, W1, W2 with axes `[N, H, .., ..]`."""
    both, w1 = split(flat, size, hidden)
    w0, w2 = both.unflatten(1, (2, hidden)).unbind(1)
    return tuple(x.unflatten(0, (-1, heads)).contiguous() for x in (w0, w1, w2))


def _scan(
    q: Tensor, tokens: Tokens, options: Options, state: LactState, mask: Tensor | None, bounds: list[int] | None
) -> tuple[Tensor, LactState]:
    """Chunk after chunk, for documents without pending tokens."""
    batch, length, heads, size = q.shape
    hidden, chunk = state.w0.shape[2], options.chunk
    weights = _pack(*(x.flatten(0, 1) for x in state[:3]))
    sums = _pack(*(x.flatten(0, 1) for x in state[3:6])) if options.prenorm else None
    norms = torch.cat([state.n0, state.n2, state.n1], 2).flatten(0, 1)
    last = _pack(*(x.flatten(0, 1) for x in state[9:12])) if options.momentum else None
    tiling = None
    if mask is None and bounds is None:
        chunks = length // chunk
        whole = chunks * chunk
        steps, updates, full = [batch * heads] * chunks, chunks, None

        def tile(x: Tensor) -> Tensor:
            """`[S, B H, C, F]`: a view where B or H is 1."""
            x = x if whole == length else x[:, :whole]
            return x.unflatten(1, (chunks, chunk)).permute(1, 0, 3, 2, 4).flatten(1, 2)

    else:
        longest = length if bounds is None else max(b - a for a, b in itertools.pairwise(bounds))
        tiling = Tiling(batch, length, min(chunk, longest), mask=mask, bounds=bounds, device=q.device)
        steps, updates, whole = [n * heads for n in tiling.steps], longest // chunk, length
        borders = torch.arange(1, updates + 1, device=q.device)[:, None] * chunk
        full, tile = (tiling.lengths >= borders).int(), tiling.tile
        weights, norms = _enter(tiling, weights, heads), _enter(tiling, norms, heads)
        sums, last = (x if x is None else _enter(tiling, x, heads) for x in (sums, last))
    tiles = Tokens._make((*(tile(x) for x in tokens[:5]), tile(tokens.momentum[..., None]).squeeze(-1)))
    k, v, lr0, lr1, lr2, momentum = tiles
    kept = momentum.mean(-1).flatten() if options.momentum else None
    rates = torch.stack([x.reshape(-1, x.shape[-1]) for x in (lr0, lr1, lr2)])
    keep = needs_backward((q, k, v, rates, kept, weights, sums, norms, last))
    o_tiles, weights, new_sums, new_last, *_ = _scan_operator(
        tile(q), k, v, rates, kept, full, weights, sums, norms, last, steps,
        [heads, hidden, updates, int(options.muon), int(keep)],
    )  # fmt: skip
    fields = [weights, new_sums if options.prenorm else weights, new_last]
    if tiling is None:
        o = o_tiles.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        if whole < length:
            flat = weights
            (rest,) = _read_operator(q[:, whole:].transpose(1, 2).flatten(0, 1), flat, hidden)
            o = torch.cat([o, rest.unflatten(0, (batch, heads)).transpose(1, 2)], 1)
        pending = [_padded(x[:, whole:], chunk) for x in tokens]
        count = torch.full_like(state.count, length - whole)
    else:
        o = tiling.untile(o_tiles, heads)
        fields = [_leave(tiling, x, heads) for x in fields]
        pending, count = waiting_tokens(tiling, tiles, heads, chunk)
    new = [_unpack(x, heads, size, hidden) for x in fields[: 3 if options.momentum else 2]]
    new[1] = new[1] if options.prenorm else new[0]
    directions = new[2] if options.momentum else state[9:12]
    waiting = (x.to(old.dtype) for x, old in zip(pending, state.pending, strict=True))
    return o, LactState._make((*new[0], *new[1], *state[6:9], *directions, *waiting, count))


def _enter(tiling: Tiling, x: Tensor, heads: int) -> Tensor:
    return tiling.enter(x.unflatten(0, (-1, heads))).flatten(0, 1)


def _leave(tiling: Tiling, x: Tensor, heads: int) -> Tensor:
    return tiling.leave(x.unflatten(0, (-1, heads))).flatten(0, 1) if x.numel() else x


def _padded(x: Tensor, chunk: int) -> Tensor:
    """`[B, t, ..]` with zeros up to C tokens."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, chunk - x.shape[1]))


# --- the operator of a scan ---


@dataclass(frozen=True)
class _Call:
    """Sizes of a call, and views of its tensors.

    Attributes:
        steps: active rows of every chunk number. heads, size, hidden: H, D, M. updates: chunk numbers that can be full.
        dense: tiles are `[S, R, C, F]`; otherwise `[sum of steps, C, F]`.
    """

    steps: list[int]
    heads: int
    size: int
    hidden: int
    updates: int
    dense: bool

    @property
    def by_row(self) -> bool:
        """Whether a read takes many chunks of one row, and not all rows of one chunk."""
        return self.dense and len(self.steps) > self.steps[0]

    @property
    def blocks(self) -> list[int]:
        """Rows of what is kept of the weights: before the first chunk, then after every update."""
        return [*self.steps[:1], *self.steps[: self.updates]]

    def chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Tiles of every chunk number."""
        return x.unbind(0) if x.ndim == 4 else x.split(self.steps)

    def before(self, saved: Tensor) -> list[Tensor]:
        """Flat matrices before every chunk number."""
        return [block[:rows] for block, rows in zip(saved.split(self.blocks), self.steps, strict=False)]

    def groups(self, x: Tensor, tokens: int) -> list[Tensor]:
        """Tiles, or flat matrices `[sum of steps, ..]`, in the pieces that are read at once; tokens: C."""
        if not self.by_row:
            return list(self.chunks(x))
        x = x if x.ndim == 4 else x.unflatten(0, (len(self.steps), -1))
        return [piece for row in x.unbind(1) for piece in row.split(max(1, READ_TOKENS // tokens))]

    def groups_before(self, saved: Tensor, tokens: int) -> list[Tensor]:
        """The same for the weights that they read."""
        if not self.by_row:
            return self.before(saved)
        return self.groups(saved[: len(self.steps) * self.steps[0]], tokens)

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """W0 over W2 `[R, 2 M, D]`, and W1 `[R, D, M]`."""
        return split(flat, self.size, self.hidden)


def _call(k: Tensor, steps: list[int], sizes: list[int]) -> _Call:
    return _Call(steps, sizes[0], k.shape[-1], sizes[1], sizes[2], k.ndim == 4)


def _read_tiles(q: Tensor, flat: Tensor, size: int, hidden: int, out: Tensor) -> None:
    both, w1 = split(flat, size, hidden)
    torch.bmm(passes.swiglu(torch.bmm(q, both.mT)), w1.mT, out=out)


def _read_tiles_backward(d_o: Tensor, q: Tensor, flat: Tensor, size: int, hidden: int, d_q: Tensor, d: Tensor) -> None:
    """Fills d_q `[R, C, D]` and `d`, the gradient of the flat matrices."""
    w02, w1 = split(flat, size, hidden)
    both, d_hidden = torch.bmm(q, w02.mT), torch.bmm(d_o, w1)
    passes.swiglu_backward(both, d_hidden)
    torch.bmm(both, w02, out=d_q)
    d_w02, d_w1 = split(d, size, hidden)
    torch.bmm(both.mT, q, out=d_w02)
    torch.bmm(d_o.mT, d_hidden, out=d_w1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, new weights, sums and direction; then the weights before and after every chunk in the products' dtype, the
    norms of the rows before they were rescaled, and the directions.
    """
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[3:])
    size, hidden, momentum = call.size, call.hidden, last is not None
    chunk, rows, entries = k.shape[-2], steps[0], weights.shape[1]
    saved = k.new_empty(sum(call.blocks), entries)
    saved_last = k.new_empty(sum(call.blocks) if muon or (momentum and keep) else 0, entries)
    lengths = norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1])
    weights = weights.clone(memory_format=torch.contiguous_format)
    sums = weights if sums is None else sums.clone(memory_format=torch.contiguous_format)
    if last is not None:
        last = last.clone(memory_format=torch.contiguous_format)
    norms = norms.contiguous()
    saved[:rows].copy_(weights[:rows])
    if saved_last.shape[0] and last is not None:
        saved_last[:rows].copy_(last[:rows])
    blocks, blocks_last = saved.split(call.blocks), saved_last.split(call.blocks) if saved_last.shape[0] else None
    blocks_lengths = lengths.split(steps[: call.updates]) if keep else None
    both, error = k.new_empty(rows, chunk, 2 * hidden), k.new_empty(rows, chunk, hidden)
    step = k.new_empty(rows, entries)
    first = 0
    for i, (own_k, own_v) in enumerate(zip(call.chunks(k), call.chunks(v), strict=True)):
        if i == call.updates:
            break
        n = steps[i]
        w02, w1 = call.split(blocks[i][:n])
        own_both, own_error, own_step = both[:n], error[:n], step[:n]
        torch.bmm(own_k, w02.mT, out=own_both)
        torch.bmm(own_v, w1, out=own_error)
        passes.written(own_both, own_error, rates, first * chunk)
        step02, step1 = call.split(own_step)
        if rates.shape[2] == 1:
            torch.bmm(own_both.mT, own_k, out=step02)
        else:
            for j, part in ((0, slice(None, hidden)), (2, slice(hidden, None))):
                torch.bmm(own_both[..., part].mT, _scaled(own_k, rates[j], first), out=step02[:, part])
        torch.bmm(own_v.mT, own_error, out=step1)
        own_kept = None if kept is None else kept[first : first + n]
        own_full = None if full is None else full[i]
        own_last = None if last is None else last[:n]
        own_saved_last = None if blocks_last is None else blocks_last[i + 1]
        if muon:
            assert own_saved_last is not None
            _direction(own_step, own_last, own_kept, own_full, call.heads, own_saved_last)
            own_step, _ = orthogonal(own_saved_last, size, hidden)
            own_last = own_kept = own_saved_last = None
        own_weights = weights[:n]
        passes.step_weights(
            own_step, own_last, own_kept, own_full, call.heads, own_weights if sums is weights else sums[:n],
            own_weights, norms, blocks[i + 1], None if blocks_lengths is None else blocks_lengths[i], own_saved_last,
            size, hidden,
        )  # fmt: skip
        first += n
    o = torch.empty_like(q)
    for own_q, flat, out in zip(
        call.groups(q, chunk), call.groups_before(saved, chunk), call.groups(o, chunk), strict=True
    ):
        _read_tiles(own_q, flat, size, hidden, out)
    empty = weights.new_empty(0)
    if not keep:
        saved, saved_last = k.new_empty(0), k.new_empty(0)
    return (
        o,
        weights,
        empty if sums is weights else sums,
        empty.clone() if last is None else last,
        saved,
        lengths,
        saved_last,
    )


def _scaled(k: Tensor, rate: Tensor, first: int) -> Tensor:
    """Keys `[R, C, D]` times a rate a channel, `[rows, D]` from row `first * C` on."""
    begin = first * k.shape[1]
    return (k * rate[begin : begin + k.shape[0] * k.shape[1]].view(k.shape)).to(k.dtype)


def _alive(full: Tensor | None, heads: int) -> Tensor | None:
    return None if full is None else full.bool().repeat_interleave(heads)[:, None]


def _direction(
    step: Tensor, last: Tensor | None, kept: Tensor | None, full: Tensor | None, heads: int, out: Tensor
) -> None:
    """The direction with its momentum, which also replaces the last one: what Newton-Schulz gets."""
    if last is None or kept is None:
        out.copy_(step)
        return
    new = step + kept[:, None] * last
    if (alive := _alive(full, heads)) is not None:
        new = torch.where(alive[: new.shape[0]], new, last)
    last.copy_(new)
    out.copy_(new)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[3:])
    flat = torch.empty_like(weights, memory_format=torch.contiguous_format)
    empty, kept_rows = weights.new_empty(0), (sum(call.blocks), weights.shape[1])
    directions = keep and (muon or last is not None)
    return (
        torch.empty_like(q), flat, empty if sums is None else torch.empty_like(flat),
        empty.clone() if last is None else torch.empty_like(flat),
        k.new_empty(*kept_rows) if keep else k.new_empty(0),
        norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1]),
        k.new_empty(*kept_rows) if directions else k.new_empty(0),
    )  # fmt: skip


def _backward(
    d_o: Tensor | None, d_weights: Tensor | None, d_sums: Tensor | None, d_last: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
    o: Tensor, new_weights: Tensor, new_sums: Tensor, new_last: Tensor, saved: Tensor, lengths: Tensor,
    saved_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call, muon = _call(k, steps, sizes), bool(sizes[3])
    size, hidden, momentum = call.size, call.hidden, last is not None
    chunk, rows, entries = k.shape[-2], steps[0], weights.shape[1]
    ends = d_weights is None and d_sums is None and d_last is None  # the last chunk's update reaches nothing
    updates = call.updates - int(ends and call.updates == len(steps))
    d_weights = torch.zeros_like(new_weights) if d_weights is None else d_weights.float().clone().contiguous()
    if sums is not None:
        d_sums = torch.zeros_like(new_weights) if d_sums is None else d_sums.clone().contiguous()
    if last is not None:
        d_last = torch.zeros_like(new_weights) if d_last is None else d_last.clone().contiguous()
    norms, d_norms = norms.contiguous(), torch.zeros_like(norms, memory_format=torch.contiguous_format)
    make = torch.empty_like if updates == len(steps) else torch.zeros_like
    d_k, d_v, d_rates, d_q = make(k), make(v), make(rates), torch.empty_like(q)
    parts = norms.new_zeros(sum(steps) if momentum else 0, norms.shape[1])

    d_o = torch.zeros_like(o) if d_o is None else d_o
    d_read = k.new_empty(sum(steps), entries)
    for own_d_o, own_q, flat, own_d_q, own_d in zip(
        *(call.groups(x, chunk) for x in (d_o, q)), call.groups_before(saved, chunk),
        *(call.groups(x, chunk) for x in (d_q, d_read)), strict=True,
    ):  # fmt: skip
        _read_tiles_backward(own_d_o, own_q, flat, size, hidden, own_d_q, own_d)

    four, two = k.new_empty(rows, chunk, 4 * hidden), k.new_empty(rows, chunk, 2 * hidden)
    beside, d_write = k.new_empty(rows, 2 * entries), k.new_empty(rows, entries)
    blocks, reads = saved.split(call.blocks), d_read.split(steps)
    blocks_last = saved_last.split(call.blocks) if saved_last.numel() else None
    blocks_lengths = lengths.split(steps[: call.updates])
    firsts = [0, *itertools.accumulate(steps)]
    tiles = [call.chunks(x) for x in (k, v, d_k, d_v)]
    for i in reversed(range(updates)):
        n, first = steps[i], firsts[i]
        own_k, own_v, own_d_k, own_d_v = (x[i] for x in tiles)
        own_kept = None if kept is None else kept[first : first + n]
        own_full = None if full is None else full[i]
        own_d_last, before_last, own_parts = None, None, None
        if momentum:
            assert d_last is not None and blocks_last is not None
            own_d_last, before_last, own_parts = d_last[:n], blocks_last[i][:n], parts[first : first + n]
        later = (reads[i + 1] if i + 1 < len(steps) else None, d_write if i + 1 < updates else None)
        some = steps[i + 1] if i + 1 < len(steps) else 0
        before, own_beside = blocks[i][:n], beside[:n]
        target = new_weights.new_empty(n, entries) if muon else own_beside
        passes.step_weights_backward(
            d_weights[:n], None if sums is None else d_sums[:n], later, some, None if muon else own_d_last,  # type: ignore[index]
            before_last, own_kept, own_full, call.heads, blocks[i + 1], None if muon else before, blocks_lengths[i], norms,
            d_norms, target, own_parts, size, hidden,
        )  # fmt: skip
        beside02 = own_beside[:, : 4 * hidden * size].unflatten(1, (4 * hidden, size))
        beside1 = own_beside[:, 4 * hidden * size :].unflatten(1, (size, 2 * hidden))
        if muon:
            assert blocks_last is not None
            d_direction = _muon_backward(target, blocks_last[i + 1], size, hidden)
            d_direction = _direction_backward(
                d_direction, own_d_last, before_last, own_kept, own_full, call.heads, own_parts
            )
            for at, x in ((0, d_direction), (1, before)):
                x02, x1 = call.split(x)
                beside02[:, 2 * hidden * at : 2 * hidden * (at + 1)].copy_(x02)
                beside1[..., hidden * at : hidden * (at + 1)].copy_(x1)
        own_four, own_two = four[:n], two[:n]
        per_channel = rates.shape[2] > 1
        if per_channel:
            torch.bmm(own_k, beside02[:, 2 * hidden :].mT, out=own_four[..., 2 * hidden :])
            for j, part in ((0, slice(None, hidden)), (2, slice(hidden, 2 * hidden))):
                torch.bmm(_scaled(own_k, rates[j], first), beside02[:, part].mT, out=own_four[..., part])
        else:
            torch.bmm(own_k, beside02.mT, out=own_four)
        torch.bmm(own_v, beside1, out=own_two)
        passes.written_backward(own_four, own_two, rates, d_rates, first * chunk)
        if per_channel:
            d = torch.bmm(own_four[..., 2 * hidden :], beside02[:, 2 * hidden :]).float()
            here = slice(first * chunk, (first + n) * chunk)
            for j, part in ((0, slice(None, hidden)), (2, slice(hidden, 2 * hidden))):
                d_scaled = torch.bmm(own_four[..., part], beside02[:, part]).float()
                d_rates[j, here] = (d_scaled * own_k).flatten(0, 1)
                d += d_scaled * rates[j, here].view(d.shape)
            own_d_k.copy_(d)
        else:
            torch.bmm(own_four, beside02, out=own_d_k)
        torch.bmm(own_two, beside1.mT, out=own_d_v)
        d02, d1 = call.split(d_write[:n])
        torch.bmm(own_four[..., 2 * hidden :].mT, own_k, out=d02)
        torch.bmm(own_v.mT, own_two[..., hidden:], out=d1)
    d_weights[:rows] += reads[0]
    if updates:
        d_weights[:rows] += d_write
    none = norms.new_empty(0)
    return (
        d_q, d_k, d_v, d_rates, parts.sum(1) if momentum else none, d_weights, none.clone() if d_sums is None else d_sums,
        d_norms, none.clone() if d_last is None else d_last,
    )  # fmt: skip


def _muon_backward(d_step: Tensor, direction: Tensor, size: int, hidden: int) -> Tensor:
    trail: Trail
    _, trail = orthogonal(direction, size, hidden)
    return orthogonal_backward(d_step, direction, trail, size, hidden)


def _direction_backward(
    d: Tensor, d_last: Tensor | None, last: Tensor | None, kept: Tensor | None, full: Tensor | None, heads: int,
    parts: Tensor | None,
) -> Tensor:  # fmt: skip
    """The backward pass of `_direction`: the gradient of the step; that of the last direction in place of the new one's."""
    if d_last is None or last is None or kept is None or parts is None:
        return d
    total, alive = d + d_last, _alive(full, heads)
    alive = torch.ones_like(total[:, :1], dtype=torch.bool) if alive is None else alive[: d.shape[0]]
    d_last.copy_(torch.where(alive, kept[:, None] * total, d_last))
    total = torch.where(alive, total, 0)
    parts[:, 0] = (total * last).sum(1)
    return total


def _fake_backward(
    d_o: Any, d_weights: Any, d_sums: Any, d_last: Any, q: Tensor, k: Tensor, v: Tensor, rates: Tensor,
    kept: Tensor | None, full: Any, weights: Tensor, sums: Tensor | None, norms: Tensor, last: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    flat = torch.empty_like(weights, memory_format=torch.contiguous_format)
    none = norms.new_empty(0)
    return (
        torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(rates),
        none if kept is None else torch.empty_like(kept), flat, none.clone() if sums is None else torch.empty_like(flat),
        torch.empty_like(norms, memory_format=torch.contiguous_format),
        none.clone() if last is None else torch.empty_like(flat),
    )  # fmt: skip


_scan_operator = custom(
    "lact", _forward, _backward, _fake_forward, _fake_backward, outputs=4, inputs=(0, 1, 2, 3, 4, 6, 7, 8, 9),
    module=__name__, materialize=False,
)  # fmt: skip


# --- the operator of one read ---


def _read_forward(q: Tensor, flat: Tensor, hidden: int) -> tuple[Tensor]:
    o = torch.empty_like(q)
    _read_tiles(q, flat.to(q.dtype), q.shape[2], hidden, o)
    return (o,)


def _read_backward(d_o: Tensor, q: Tensor, flat: Tensor, hidden: int, o: Tensor) -> tuple[Tensor, Tensor]:
    narrow, d_q = flat.to(q.dtype), torch.empty_like(q)
    d = torch.empty_like(narrow)
    _read_tiles_backward(d_o, q, narrow, q.shape[2], hidden, d_q, d)
    return d_q, d.to(flat.dtype)


_read_operator = custom(
    "lact_read",
    _read_forward,
    _read_backward,
    lambda q, flat, hidden: (torch.empty_like(q),),
    lambda d_o, q, flat, *_: (torch.empty_like(q), torch.empty_like(flat)),
    outputs=1,
    inputs=range(2),
    module=__name__,
)
