"""LaCT on a GPU: batched matrix products of the library, one Triton kernel between them, backward by recomputation.

What tokens read needs only the weights before their chunk, so reading is apart from the chain of updates (see `chain.py`)
and runs over many chunks at once. The weights before every chunk are kept for the backward pass, nothing of its inside.
Products are bfloat16 for bfloat16 inputs and float32 otherwise; weights, sums, directions and rates are float32.

R are rows of the batched products: sequences times heads. Flat matrices `[R, 3 M D]` hold W0, W2, W1 (see `passes.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import few_tokens, needs_backward
from ..gpu import custom
from ..tiling import Tiling
from . import passes
from .chain import Backward, Forward, Shape, chain_for, first
from .chunk import in_chunks, read_plainly, waiting_tokens
from .muon import split
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
    gates = _gates((lr0, lr1, lr2), momentum, steps)
    keep = needs_backward((q, k, v, gates, weights, sums, norms, last))
    o_tiles, weights, new_sums, new_last, *_ = _scan_operator(
        tile(q), k, v, gates, full, weights, sums, norms, last, steps,
        [heads, hidden, updates, lr0.shape[-1], int(options.muon), int(keep)],
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


def _gates(rates: tuple[Tensor, ...], momentum: Tensor, steps: list[int]) -> Tensor:
    """Every chunk's rates and mean momentum in one row, as `_Call.gates` takes them apart."""
    kept = momentum.mean(-1)
    if kept.ndim == 2:
        return torch.cat([*(x.flatten(1) for x in rates), kept], 1).flatten()
    parts = zip(*(x.split(steps) for x in (*rates, kept)), strict=True)
    return torch.cat([x.flatten() for part in parts for x in part])


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
        return [first(block, rows) for block, rows in zip(saved.split(self.blocks), self.steps, strict=False)]

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

    def gates(self, x: Tensor) -> Sequence[Tensor]:
        """The gates of every chunk number: rates `[3, n, C, L]`, then `[n]`, the share of the last direction that is kept."""
        each = x.numel() // sum(self.steps)
        return x.split([each * n for n in self.steps])


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


Flags = tuple[bool, bool, bool, bool, bool]


def _chain(kind: Any, call: _Call, k: Tensor, rates: int, flags: Flags, places: list[list[int]]) -> Any:
    """Buffers and launches for a call; flags: momentum, muon, prenorm, keep, ragged. places: of its first two chunks."""
    aligned = all(place[i] % 16 == 0 for place in places for i in passes.ALIGNED_SLOTS)
    shape = Shape(call.steps[0], call.heads, k.shape[-2], call.size, call.hidden, rates, *flags, aligned, k.dtype)
    return chain_for(kind, shape, k.device)


def _places(slots: Iterable[tuple[Any, Tensor | None]], tiles: Iterable[tuple[Any, Tensor]] = ()) -> list[int]:
    """Addresses by slot, for `passes.Table`. tiles: `[R, C, F]` with any strides but the last."""
    place = [0] * passes.SLOTS
    for slot, x in slots:
        place[slot.value] = 0 if x is None else x.data_ptr()
    for slot, x in tiles:
        size = x.element_size()
        place[slot.value : slot.value + 3] = [x.data_ptr(), x.stride(0) * size, x.stride(1) * size]
    return place


def _parts(gates: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Of a chunk's gates: where the rates begin, and the momentum `[n]`."""
    return gates, gates[len(gates) - n :]


def _walk(chain: Any, order: Sequence[int], steps: list[int], place: Callable[[int], list[int]], ragged: bool) -> None:
    """Run the chunks in order; without ragged documents, each lies as far behind the last one as the second does."""
    for j, i in enumerate(order):
        if ragged or j == 0:
            chain.table.aim(place(i), place(order[1]) if len(order) > 1 and not ragged else None)
        chain.run(steps[i])


def _dense(x: Tensor) -> Tensor:
    """`x` as the kernels read it: the last axis without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, full: Tensor | None, weights: Tensor, sums: Tensor | None,
    norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, new weights, sums and direction; then the weights before and after every chunk in the products' dtype, the
    norms of the rows before they were rescaled, and the directions.
    """
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[4:])
    rows, chunk, entries = steps[0], k.shape[-2], weights.shape[1]
    saved = k.new_empty(sum(call.blocks), entries)
    directed = keep and (muon or last is not None)
    saved_last = k.new_empty(sum(call.blocks) if directed else 0, entries)
    lengths = norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1])
    o, new = torch.empty_like(q), [x if x is None else x.clone() for x in (weights, sums, last)]
    blocks, all_lengths = saved.split(call.blocks), lengths.split(steps[: call.updates]) if keep else None
    directions, all_gates = saved_last.split(call.blocks) if directed else None, call.gates(gates)
    keys, values = (call.chunks(_dense(x)) for x in (k, v))

    def place(i: int) -> list[int]:
        rates, kept = _parts(all_gates[i], steps[i])
        return _places(
            [
                (passes.RATES, rates), (passes.KEPT, kept), (passes.FULL, None if full is None else full[i]),
                (passes.SAVED, blocks[i + 1]), (passes.LENGTHS, None if all_lengths is None else all_lengths[i]),
                (passes.DIRECTION, None if directions is None else directions[i + 1]),
            ],
            [(passes.KEYS, keys[i]), (passes.VALUES, values[i])],
        )  # fmt: skip

    flags = last is not None, muon, sums is not None, keep, full is not None
    order = range(call.updates)
    chain = _chain(Forward, call, k, sizes[3], flags, [place(i) for i in order[: None if full is not None else 2]])
    with chain.call():
        state = [
            (chain.weights, weights),
            (chain.sums, sums),
            (chain.last, last),
            (chain.narrow, weights),
            (chain.norms, norms),
        ]
        for own, x in state:
            if own is not None and x is not None:
                own.copy_(x[:rows])
        blocks[0].copy_(chain.narrow)
        if directions is not None and last is not None:
            directions[0].copy_(last[:rows])
        _walk(chain, order, steps, place, full is not None)
        for own, x in zip((chain.weights, chain.sums, chain.last), new, strict=True):
            if own is not None and x is not None:
                x[:rows].copy_(own)
    for own_q, flat, out in zip(
        call.groups(q, chunk), call.groups_before(saved, chunk), call.groups(o, chunk), strict=True
    ):
        _read_tiles(own_q, flat, call.size, call.hidden, out)
    if not keep:
        saved = k.new_empty(0)
    none = norms.new_empty(0)
    return (
        o,
        new[0],
        none if new[1] is None else new[1],
        none.clone() if new[2] is None else new[2],
        saved,
        lengths,
        saved_last,
    )


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, full: Tensor | None, weights: Tensor, sums: Tensor | None,
    norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    call, (muon, keep) = _call(k, steps, sizes), (bool(x) for x in sizes[4:])
    none, blocks, entries = norms.new_empty(0), sum(call.blocks), weights.shape[1]
    return (
        torch.empty_like(q), torch.empty_like(weights), none if sums is None else torch.empty_like(sums),
        none.clone() if last is None else torch.empty_like(last),
        k.new_empty(blocks, entries) if keep else k.new_empty(0),
        norms.new_empty(sum(steps[: call.updates]) if keep else 0, norms.shape[1]),
        k.new_empty(blocks if keep and (muon or last is not None) else 0, entries),
    )  # fmt: skip


def _backward(
    d_o: Tensor | None, d_weights: Tensor | None, d_sums: Tensor | None, d_last: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, full: Tensor | None, weights: Tensor, sums: Tensor | None,
    norms: Tensor, last: Tensor | None, steps: list[int], sizes: list[int], o: Tensor, new_weights: Tensor,
    new_sums: Tensor, new_last: Tensor, saved: Tensor, lengths: Tensor, saved_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call, muon = _call(k, steps, sizes), bool(sizes[4])
    rows, chunk, size, hidden = steps[0], k.shape[-2], call.size, call.hidden
    ends = d_weights is None and d_sums is None and d_last is None  # the last chunk's update reaches nothing
    updates = call.updates - int(ends and call.updates == len(steps))
    make = torch.empty_like if updates == len(steps) else torch.zeros_like
    d_q, d_k, d_v, d_norms = torch.empty_like(q), _dense(make(k)), _dense(make(v)), torch.zeros_like(norms)
    d_gates = torch.zeros_like(gates)
    d_o = torch.zeros_like(o) if d_o is None else d_o
    last_rows = steps[-1] if call.updates == len(steps) else 0  # nothing reads what the last chunk's update leaves
    d_read = k.new_empty(sum(steps) + last_rows, saved.shape[1])
    d_read[sum(steps) :].zero_()
    for own_d_o, own_q, flat, own_d_q, own_d in zip(
        *(call.groups(x, chunk) for x in (d_o, q)), call.groups_before(saved, chunk),
        *(call.groups(x, chunk) for x in (d_q, d_read[: sum(steps)])), strict=True,
    ):  # fmt: skip
        _read_tiles_backward(own_d_o, own_q, flat, size, hidden, own_d_q, own_d)
    found = [
        None if x is None else torch.zeros_like(x) if d is None else d.clone()
        for x, d in ((weights, d_weights), (sums, d_sums), (last, d_last))
    ]
    reads, blocks, all_lengths = (
        d_read.split([*steps, last_rows]),
        saved.split(call.blocks),
        lengths.split(steps[: call.updates]),
    )
    directions = saved_last.split(call.blocks) if saved_last.numel() else None
    keys, values, d_keys, d_values = (call.chunks(x) for x in (_dense(k), _dense(v), d_k, d_v))
    all_gates, all_d_gates = call.gates(gates), call.gates(d_gates)
    chain: Backward

    def place(i: int) -> list[int]:
        (rates, kept), (d_rates, d_kept) = (_parts(x[i], steps[i]) for x in (all_gates, all_d_gates))
        return _places(
            [
                (passes.RATES, rates), (passes.KEPT, kept), (passes.FULL, None if full is None else full[i]),
                (passes.SAVED, blocks[i]), (passes.AFTER, blocks[i + 1]), (passes.LENGTHS, all_lengths[i]),
                (passes.LAST, None if directions is None else directions[i]),
                (passes.DIRECTION, None if directions is None else directions[i + 1]),
                (passes.READ, reads[i + 1] if full is None else chain.read),
                (passes.D_RATES, d_rates), (passes.D_KEPT, d_kept),
            ],
            [
                (passes.KEYS, keys[i]), (passes.VALUES, values[i]), (passes.D_KEYS, d_keys[i]),
                (passes.D_VALUES, d_values[i]),
            ],
        )  # fmt: skip

    flags = last is not None, muon, sums is not None, True, full is not None
    order = range(updates)[::-1]
    places = [place(i) for i in order[:2]] if full is None else [[8] * passes.SLOTS]
    chain = _chain(Backward, call, k, sizes[3], flags, places)
    with chain.call():
        state = [*zip((chain.d_weights, chain.d_sums, chain.d_last), found, strict=True), (chain.d_norms, d_norms)]
        for own, x in ((chain.norms, norms), *state):
            if own is not None and x is not None:
                own.copy_(x[:rows])
        chain.d_write.zero_()
        if full is None:
            _walk(chain, order, steps, place, False)
        else:
            chain.read.zero_()
            for i in order:
                n, m = steps[i], steps[i + 1] if i + 1 < len(steps) else 0
                chain.d_write[m:n].zero_()  # of documents that end here
                if m:
                    chain.read[:m].copy_(reads[i + 1])
                _walk(chain, [i], steps, place, True)
        for own, x in state:
            if own is not None and x is not None:
                x[:rows].copy_(own)
        assert found[0] is not None
        found[0][:rows] += reads[0]
        found[0][:rows] += chain.d_write
    none = norms.new_empty(0)
    return (
        d_q, d_k, d_v, d_gates, found[0], none if found[1] is None else found[1], d_norms,
        none.clone() if found[2] is None else found[2],
    )  # fmt: skip


def _fake_backward(
    d_o: Any, d_weights: Any, d_sums: Any, d_last: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, full: Any,
    weights: Tensor, sums: Tensor | None, norms: Tensor, last: Tensor | None, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    none = norms.new_empty(0)
    return (
        *(torch.empty_like(x) for x in (q, k, v, gates, weights)), none if sums is None else torch.empty_like(sums),
        torch.empty_like(norms), none.clone() if last is None else torch.empty_like(last),
    )  # fmt: skip


_scan_operator = custom(
    "lact", _forward, _backward, _fake_forward, _fake_backward, outputs=4, inputs=(0, 1, 2, 3, 5, 6, 7, 8),
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
