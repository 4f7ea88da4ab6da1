"""LaCT on a GPU: three launches a chunk, backward by recomputation on batched products of the library.

What tokens read needs only the weights before their chunk, so a chunk's read shares its launches with the update (see
`products.py`). The weights before every chunk are kept for the backward pass, nothing of its inside; there, reads of several
chunks are one product, and one Triton kernel lies between two of them (see `passes.py`).
Products are bfloat16 for bfloat16 inputs and float32 otherwise; weights, sums, directions and rates are float32.

R are rows of the batched products: sequences times heads. Flat matrices `[R, 3 M D]` hold W0, W2, W1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import few_tokens, needs_backward
from ..gpu import Prepared, custom, on_device
from ..tiling import Tiling
from . import passes
from .chunk import in_chunks, read_plainly, waiting_tokens
from .muon import Orthogonal, orthogonal_backward, retraced, split
from .products import Products
from .rules import LactState, Options, Tokens

READ_TOKENS = 1 << 14
"""Of the backward pass of one read: enough to fill the card."""


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
    w0, w2, w1 = flat.unflatten(1, (3, -1)).transpose(0, 1).contiguous().unflatten(1, (-1, heads))
    return w0.unflatten(2, (hidden, size)), w1.unflatten(2, (size, hidden)), w2.unflatten(2, (hidden, size))


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
    rates = torch.stack([lr0, lr1, lr2]).flatten(1, -2)
    kept = momentum.mean(-1).flatten() if options.momentum else None
    keep = needs_backward((q, k, v, rates, kept, weights, sums, norms, last))
    o_tiles, weights, new_sums, new_last, *_ = _scan_operator(
        tile(q), k, v, rates, kept, full, weights, sums, norms, last, steps,
        [heads, hidden, updates, int(options.muon), int(keep)],
    )  # fmt: skip
    fields = [weights, new_sums, new_last]
    if tiling is None:
        o = o_tiles.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        if whole < length:
            (rest,) = _read_operator(q[:, whole:].transpose(1, 2).flatten(0, 1), weights, hidden)
            o = torch.cat([o, rest.unflatten(0, (batch, heads)).transpose(1, 2)], 1)
        pending = _waiting(tokens, whole, chunk)
        count = torch.full_like(state.count, length - whole)
    else:
        o = tiling.untile(o_tiles, heads)
        fields = [_leave(tiling, x, heads) for x in fields]
        pending, count = waiting_tokens(tiling, tiles, heads, chunk)
    moved, own_sums, directions = ([*_unpack(x, heads, size, hidden)] if x.numel() else [] for x in fields)
    waiting = (x.to(old.dtype) for x, old in zip(pending, state.pending, strict=True))
    return o, LactState._make(
        (*moved, *(own_sums or moved), *state[6:9], *(directions or state[9:12]), *waiting, count)
    )


def _enter(tiling: Tiling, x: Tensor, heads: int) -> Tensor:
    return tiling.enter(x.unflatten(0, (-1, heads))).flatten(0, 1)


def _leave(tiling: Tiling, x: Tensor, heads: int) -> Tensor:
    return tiling.leave(x.unflatten(0, (-1, heads))).flatten(0, 1) if x.numel() else x


def _waiting(tokens: Tokens, start: int, chunk: int) -> list[Tensor]:
    """The tokens from `start` on, with zeros up to C: `[B, C, ..]`."""
    if start < tokens.k.shape[1]:
        return [F.pad(x[:, start:], (0, 0) * (x.ndim - 2) + (0, chunk - x.shape[1] + start)) for x in tokens]
    shapes = [(x.shape[0], chunk, *x.shape[2:]) for x in tokens]
    made = []
    for first, last in ((0, 2), (2, 6)):  # of one dtype, made at once
        sizes = [math.prod(shape) for shape in shapes[first:last]]
        pieces = tokens[first].new_zeros(sum(sizes)).split(sizes)
        made += [x.view(shape) for x, shape in zip(pieces, shapes[first:last], strict=True)]
    return made


# --- the operator of a scan ---

Matrices = list[tuple[Tensor, Tensor]]  # W0 over W2 `[n, 2 M, D]`, and W1 `[n, D, M]`


@dataclass(frozen=True)
class _Call:
    """Sizes of a call, and views of its tensors.

    Attributes:
        steps: active rows of every chunk number. heads, chunk, size, hidden: H, C, D, M. updates: chunk numbers that can be full.
        dense: tiles are `[S, R, C, F]`; otherwise `[sum of steps, C, F]`.
    """

    steps: list[int]
    heads: int
    chunk: int
    size: int
    hidden: int
    updates: int
    dense: bool

    @property
    def span(self) -> int:
        """Chunk numbers that are read at once: some of one row, or one of all rows, whichever are more tiles."""
        return some if self.dense and (some := self._some) > self.steps[0] else 1

    @property
    def by_row(self) -> bool:
        """Whether a read takes chunks of one row."""
        return self.span > 1

    @property
    def most(self) -> int:
        """Tiles of a read, at most."""
        return self.span if self.by_row else self.steps[0]

    @property
    def _some(self) -> int:
        return min(READ_TOKENS // self.chunk, len(self.steps))

    @property
    def blocks(self) -> list[int]:
        """Rows of what is kept of the weights: before the first chunk, then after every update."""
        return [*self.steps[:1], *self.steps[: self.updates]]

    @property
    def firsts(self) -> list[int]:
        """Rows of all chunk numbers before each one."""
        return [0, *itertools.accumulate(self.steps)]

    def chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Tiles of every chunk number."""
        return x.unbind(0) if self.dense else x.split(self.steps)

    def readable(self, x: Tensor) -> Tensor | Sequence[Tensor]:
        """Tiles as `reads` takes them."""
        return x if self.by_row else self.chunks(x)

    def matrices(self, flat: Tensor, blocks: list[int]) -> Matrices:
        """W0 over W2, and W1, of every block of flat matrices."""
        return list(zip(*(x.split(blocks) for x in split(flat, self.size, self.hidden)), strict=True))

    def reads(self, tiles: Sequence[Any], weights: Sequence[tuple[Tensor, Matrices]]) -> Iterator[list[Tensor]]:
        """What is read at once: of all `tiles`, as of `readable`, then both matrices of all `weights`, flat ones and `matrices` of them."""
        if not self.by_row:
            for i, rows in enumerate(self.steps):
                both = (_first(x, rows) for _, pieces in weights for x in pieces[i])
                yield [*(x[i] for x in tiles), *both]
            return
        rows, count = self.steps[0], len(self.steps)
        by_chunk = [flat[: count * rows].unflatten(0, (count, rows)) for flat, _ in weights]
        for row, first in itertools.product(range(rows), range(0, count, self.most)):
            here = slice(first, min(first + self.most, count))
            both = (x for flat in by_chunk for x in split(flat[here, row], self.size, self.hidden))
            yield [*(x[here, row] for x in tiles), *both]


def _call(k: Tensor, steps: list[int], sizes: list[int]) -> _Call:
    return _Call(steps, sizes[0], k.shape[-2], k.shape[-1], sizes[1], sizes[2], k.ndim == 4)


def _first(x: Tensor, n: int) -> Tensor:
    """The first n of `x`, which is often all of it (an index costs as much as a launch)."""
    return x if n == x.shape[0] else x[:n]


def _reader_backward(both: Tensor, d_hidden: Tensor) -> Callable[..., None]:
    """What fills d_q `[R, C, D]` and the gradients of the matrices; both `[R, C, 2 M]` and d_hidden `[R, C, M]` are its own."""
    differentiate, transposed = passes.swiglu_backward(both, d_hidden), both.mT

    def run(d_o: Tensor, q: Tensor, d_q: Tensor, w02: Tensor, w1: Tensor, d_w02: Tensor, d_w1: Tensor) -> None:
        torch.bmm(q, w02.mT, out=both)
        torch.bmm(d_o, w1, out=d_hidden)
        differentiate()
        torch.bmm(both, w02, out=d_q)
        torch.bmm(transposed, q, out=d_w02)
        torch.bmm(d_o.mT, d_hidden, out=d_w1)

    return run


def _read_all_backward(call: _Call, d_o: Tensor, q: Tensor, d_q: Tensor, saved: Tensor, d_saved: Tensor) -> None:
    """The backward pass of all reads: fills d_q, and the gradients of the weights that every chunk number reads."""
    both, d_hidden = (q.new_empty(call.most, call.chunk, n * call.hidden) for n in (2, 1))
    reader = functools.cache(lambda n: _reader_backward(_first(both, n), _first(d_hidden, n)))
    weights = [(x, call.matrices(x, blocks)) for x, blocks in ((saved, call.blocks), (d_saved, call.steps))]
    for own_d_o, *own in call.reads([call.readable(x) for x in (d_o, q, d_q)], weights):
        reader(own_d_o.shape[0])(own_d_o, *own)


@contextlib.contextmanager
def _alone(x: Tensor) -> Iterator[None]:
    """The device of `x` is current, and products are of the dtypes they are given (a backward pass may run under autocast)."""
    with on_device(x), torch.autocast(x.device.type, enabled=False):
        yield


def _by_rows(x: Tensor) -> Tensor:
    """Tokens whose numbers lie one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _owned(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, new weights, sums and direction; then the weights before and after every chunk in the products' dtype, the
    norms of the rows before they were rescaled, and the directions: all empty where no backward pass follows.
    """
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[3:])
    size, hidden, rows, chunk, entries = call.size, call.hidden, steps[0], k.shape[-2], weights.shape[1]
    blocks = call.blocks if keep else [rows]  # without a backward pass, the weights' next values replace them
    q = _by_rows(q)
    saved, o = k.new_empty(sum(blocks), entries), torch.empty_like(q)
    directed = keep and (muon or last is not None)
    saved_last = k.new_empty(sum(blocks) if directed else 0, entries)
    lengths = norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1])
    weights, norms = _owned(weights), norms.contiguous()
    sums, last = (x if x is None else _owned(x) for x in (sums, last))
    slots = saved.split(blocks)
    slots[0].copy_(weights[:rows])
    directions: Sequence[Tensor] = ()  # in the products' dtype
    if directed or muon:
        directions = saved_last.split(blocks) if directed else [k.new_empty(rows, entries)]
    if directed and last is not None:
        directions[0].copy_(last[:rows])
    room = k.new_empty(4, rows * chunk * hidden)  # of a chunk's units, then of what orthogonalises its direction
    units, pairs, ones = (x.view(rows, chunk, -1) for x in (room[0], room[1:3], room[3]))
    step = None if muon or last is not None else torch.empty_like(weights)
    full_at = 0 if full is None else full.shape[1]
    tiles = [call.chunks(x) for x in (q, o, *(_by_rows(x) for x in (k, v)))]

    @functools.cache
    def products(n: int, writes: bool) -> Products:
        """For chunks of n rows."""
        own_q, own_o, own_k, own_v = (x[0][:n] for x in tiles)
        own_units, own_pairs, own_ones = (_first(x, n) for x in (units, pairs, ones))
        if not writes:
            return Products(own_q, own_o, own_units, hidden)
        return Products(
            own_q, own_o, own_units, hidden, k=own_k, v=own_v, rates=rates, pairs=own_pairs, ones=own_ones, last=last,
            step=step, directed=bool(directions), kept=kept, full=full, heads=call.heads,
        )  # fmt: skip

    @functools.cache
    def orthogonaliser(n: int) -> Orthogonal:
        return Orthogonal(_first(slots[0], n), size, hidden, room)

    @functools.cache
    def put(n: int) -> Prepared:
        """Steps the weights of n rows."""
        before = weights if sums is None else sums
        return passes.step_weights(n, full, call.heads, before, weights, norms, lengths if keep else None, size, hidden)

    with _alone(q):
        for i, (n, first, own_q, own_o, own_k, own_v) in enumerate(zip(steps, call.firsts, *tiles, strict=False)):
            narrow, at = slots[i % len(slots)], (first, i * full_at)
            if i >= call.updates:
                products(n, False)(own_q, own_o, narrow, *at)
                continue
            direction = [_first(x, n) for x in directions[(i + 1) % len(blocks) :][:1]]
            products(n, True)(own_q, own_o, narrow, *at, own_k, own_v, *direction)
            move = orthogonaliser(n)(direction[0]) if muon else last if last is not None else step
            put(n)(*at, move, slots[(i + 1) % len(slots)])
    if not keep:
        saved = k.new_empty(0)
    none = norms.new_empty(0)
    return (
        o,
        weights,
        none if sums is None else sums,
        none.clone() if last is None else last,
        saved,
        lengths,
        saved_last,
    )


def _scaled(k: Tensor, rate: Tensor, first: int) -> Tensor:
    """Keys `[n, C, D]` times a rate a channel, `[rows C, D]` from row `first` on."""
    begin = first * k.shape[1]
    return (k * rate[begin : begin + k.shape[0] * k.shape[1]].view(k.shape)).to(k.dtype)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[3:])
    flat = torch.empty_like(weights, memory_format=torch.contiguous_format)
    none, blocks, entries = norms.new_empty(0), sum(call.blocks), weights.shape[1]
    return (
        torch.empty_like(_by_rows(q)), flat, none if sums is None else torch.empty_like(flat),
        none.clone() if last is None else torch.empty_like(flat),
        k.new_empty(blocks, entries) if keep else k.new_empty(0),
        norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1]),
        k.new_empty(blocks if keep and (muon or last is not None) else 0, entries),
    )  # fmt: skip


def _backward(
    d_o: Tensor | None, d_weights: Tensor | None, d_sums: Tensor | None, d_last: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, kept: Tensor | None, full: Tensor | None, weights: Tensor,
    sums: Tensor | None, norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
    o: Tensor, new_weights: Tensor, new_sums: Tensor, new_last: Tensor, saved: Tensor, lengths: Tensor,
    saved_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call, muon = _call(k, steps, sizes), bool(sizes[3])
    rows, chunk, size, hidden, entries = steps[0], k.shape[-2], call.size, call.hidden, weights.shape[1]
    ends = d_weights is None and d_sums is None and d_last is None  # the last chunk's update reaches nothing
    updates, firsts = call.updates - int(ends and call.updates == len(steps)), call.firsts
    d_weights, d_sums, d_last = (
        None if x is None else torch.zeros_like(new_weights) if d is None else _owned(d)
        for x, d in ((weights, d_weights), (sums, d_sums), (last, d_last))
    )
    assert d_weights is not None
    norms, d_norms = norms.contiguous(), torch.zeros_like(norms, memory_format=torch.contiguous_format)
    d_q, d_k, d_v, d_rates = (torch.empty_like(x) for x in (q, k, v, rates))
    d_rates[:, firsts[updates] * chunk :].zero_()
    for x in (d_k, d_v):
        x[updates if call.dense else firsts[updates] :].zero_()
    d_kept = norms.new_zeros(0 if kept is None else sum(steps), norms.shape[1])  # of the gradient of `kept`
    d_o = torch.zeros_like(o) if d_o is None else d_o
    d_read = k.new_empty(sum(steps), entries)
    with _alone(q):
        _read_all_backward(call, d_o, q, d_q, saved, d_read)
        four, two = k.new_empty(rows, chunk, 4 * hidden), k.new_empty(rows, chunk, 2 * hidden)
        beside, d_write = k.new_empty(rows, 2 * entries), k.new_empty(rows, entries)
        d_step = k.new_empty(rows if muon else 0, entries)

        def launches(n: int) -> tuple[Any, ...]:
            """For chunks of n rows: what takes a step back, what goes through the momentum, and what is behind that."""
            own_four, own_two, own_beside, own_write = (_first(x, n) for x in (four, two, beside, d_write))
            cut = 4 * hidden * size
            w02 = own_beside[:, :cut].unflatten(1, (4 * hidden, size))
            w1 = own_beside[:, cut:].unflatten(1, (size, 2 * hidden))
            d_write02, d_write1 = split(own_write, size, hidden)
            per_channel = ((0, slice(None, hidden)), (2, slice(hidden, 2 * hidden)))
            write = passes.written_backward(own_four, own_two, rates, d_rates)

            def project(own_k: Tensor, own_v: Tensor, own_d_k: Tensor, own_d_v: Tensor, first: int) -> None:
                if rates.shape[2] == 1:
                    torch.bmm(own_k, w02.mT, out=own_four)
                else:
                    torch.bmm(own_k, w02[:, 2 * hidden :].mT, out=own_four[..., 2 * hidden :])
                    for j, part in per_channel:
                        torch.bmm(_scaled(own_k, rates[j], first), w02[:, part].mT, out=own_four[..., part])
                torch.bmm(own_v, w1, out=own_two)
                write(first * chunk)
                torch.bmm(own_four[..., 2 * hidden :].mT, own_k, out=d_write02)
                torch.bmm(own_v.mT, own_two[..., hidden:], out=d_write1)
                if rates.shape[2] == 1:
                    torch.bmm(own_four, w02, out=own_d_k)
                else:
                    d = torch.bmm(own_four[..., 2 * hidden :], w02[:, 2 * hidden :]).float()
                    here = slice(first * chunk, (first + n) * chunk)
                    for j, part in per_channel:
                        d_scaled = torch.bmm(own_four[..., part], w02[:, part]).float()
                        d_rates[j, here] = (d_scaled * own_k).flatten(0, 1)
                        d += d_scaled * rates[j, here].view(d.shape)
                    own_d_k.copy_(d)
                torch.bmm(own_two, w1.mT, out=own_d_v)

            rest, own_step = (kept, full, call.heads), _first(d_step, n) if muon else None
            take = passes.step_weights_backward(
                n, d_weights, d_sums, d_write, None if muon else d_last, *rest, lengths, norms, d_norms, own_step, beside,
                d_kept, size, hidden,
            )  # fmt: skip
            direct = passes.direct_backward(n, d_last, *rest, beside, d_kept, size, hidden) if muon else None
            return take, own_step, direct, project

        prepared = functools.cache(launches)
        reads, slots = d_read.split(steps), saved.split(call.blocks)
        directions = saved_last.split(call.blocks) if saved_last.numel() else None
        keys, values, d_keys, d_values = (call.chunks(x) for x in (k, v, d_k, d_v))
        for i in reversed(range(updates)):
            n, at = steps[i], (firsts[i], 0 if full is None else i * full.shape[1])
            take, own_step, direct, project = prepared(n)
            later = steps[i + 1] if i + 1 < len(steps) else 0
            before = [] if directions is None or d_last is None else [directions[i]]
            written = later if i + 1 < updates else 0
            read = reads[min(i + 1, len(steps) - 1)]
            take(*at, read, later, written, slots[i + 1], slots[i], *([] if muon else before))
            if direct is not None and directions is not None:
                direction = directions[i + 1]
                trail = retraced(direction, size, hidden)
                direct(*at, orthogonal_backward(own_step, direction, trail, size, hidden), *before)
            project(keys[i], values[i], d_keys[i], d_values[i], firsts[i])
    d_weights[:rows] += reads[0]
    if updates:
        d_weights[:rows] += d_write
    none = norms.new_empty(0)
    return (
        d_q, d_k, d_v, d_rates, none.clone() if kept is None else d_kept.sum(1), d_weights,
        none.clone() if d_sums is None else d_sums, d_norms, none.clone() if d_last is None else d_last,
    )  # fmt: skip


def _fake_backward(
    d_o: Any, d_weights: Any, d_sums: Any, d_last: Any, q: Tensor, k: Tensor, v: Tensor, rates: Tensor,
    kept: Tensor | None, full: Any, weights: Tensor, sums: Tensor | None, norms: Tensor, last: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    flat, none = torch.empty_like(weights, memory_format=torch.contiguous_format), norms.new_empty(0)
    return (
        *(torch.empty_like(x) for x in (q, k, v, rates)), none.clone() if kept is None else torch.empty_like(kept), flat,
        none.clone() if sums is None else torch.empty_like(flat),
        torch.empty_like(norms, memory_format=torch.contiguous_format),
        none.clone() if last is None else torch.empty_like(flat),
    )  # fmt: skip


_scan_operator = custom(
    "lact", _forward, _backward, _fake_forward, _fake_backward, outputs=4, inputs=(0, 1, 2, 3, 4, 6, 7, 8, 9),
    module=__name__, materialize=False,
)  # fmt: skip


# --- the operator of one read ---


def _read_forward(q: Tensor, flat: Tensor, hidden: int) -> tuple[Tensor]:
    q = _by_rows(q)
    o, narrow = torch.empty_like(q), flat.to(q.dtype)
    with _alone(q):
        Products(q, o, q.new_empty(*q.shape[:2], hidden), hidden)(q, o, narrow)
    return (o,)


def _read_backward(d_o: Tensor, q: Tensor, flat: Tensor, hidden: int, o: Tensor) -> tuple[Tensor, Tensor]:
    narrow, d_q = flat.to(q.dtype), torch.empty_like(q)
    d = torch.empty_like(narrow)
    with _alone(q):
        both, d_hidden = (q.new_empty(*q.shape[:2], n * hidden) for n in (2, 1))
        run = _reader_backward(both, d_hidden)
        run(d_o, q, d_q, *split(narrow, q.shape[2], hidden), *split(d, q.shape[2], hidden))
    return d_q, d.to(flat.dtype)


_read_operator = custom(
    "lact_read",
    _read_forward,
    _read_backward,
    lambda q, flat, hidden: (torch.empty_like(_by_rows(q)),),
    lambda d_o, q, flat, *_: (torch.empty_like(q), torch.empty_like(flat)),
    outputs=1,
    inputs=range(2),
    module=__name__,
)
