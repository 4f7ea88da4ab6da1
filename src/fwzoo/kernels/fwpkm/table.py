"""The tables of all memories during a call on a GPU: a map from slots to rows, and the kernels that read and write rows.

A written row lies in `held`, the rows of the incoming state, which stay as they are, or in a pool that only grows. Which
one is said by a number: 0 for the checkpoint's row, 1 to P for the rows of `held`, more for the pool.

While a chunk is read, every entry (a token and one of the slots that it reads) is counted at its slot. When the chunk is
written, every slot gets a run of places, its entries are put there, and added up in pieces. Atomic additions decide in what
order they lie, so they are added up as whole numbers, where any order gives the same: multiples of a unit that the largest
of a slot sets. Sub-keys and their entries are handled in the same way.

Axis letters: X tokens of a chunk, all sequences after one another; E = H * k entries a token; S = n * n slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_in_order, on_device, power, read
from ..gpu import parts as count_parts
from ..product_key_search import Found
from .state import FwpkmState, Options

TILE = 4096  # numbers that a program holds at a time
LINE = 512  # entries of a program that handles them one by one
PIECE, SUB_PIECE, MOST = 32, 32, 32  # least entries of a piece of a slot and of a sub-key; most pieces
FIELDS = 7  # numbers that describe a piece
PROGRAMS = 4224  # that write rows or move sub-keys: as many as an H200 runs at once
ROOM = 512 << 20  # bytes that the pool may have to spare without looking at how much of it is used
UNIT = 40  # the use of a sub-key is counted in units of 2^-UNIT


@triton.jit
def _units(bound, BITS: tl.constexpr):
    """A factor that makes numbers as large as `bound`, the bits of a float32, less than 2^BITS, and one that undoes it.

    The second is NaN where the bound is infinite or NaN.
    """
    exponent = bound >> 23
    within = tl.maximum(exponent, BITS)
    factor, unit = (253 + BITS - within) << 23, (within + 1 - BITS) << 23
    return factor.to(tl.float32, bitcast=True), tl.where(
        exponent < 255, unit.to(tl.float32, bitcast=True), float("nan")
    )


@triton.jit
def _rows(number, slot, ok, values, held, pool, P, c, V: tl.constexpr, WRITTEN: tl.constexpr):
    """The rows `[., BV]` of slots in float32. number: where they lie; not WRITTEN: all in `values`."""
    inside = ok[:, None] & (c < V)[None, :]
    row = values + slot.to(tl.int64)[:, None] * V
    if WRITTEN:
        own = (number > 0)[:, None]
        place = (number - 1).to(tl.int64)[:, None]
        written = tl.where(place < P, held + place * V, pool + (place - P) * V)
        if values.dtype == held.dtype:
            x = read(tl.where(own, written, row) + c[None, :], inside).to(tl.float32)
        else:
            x = read(row + c[None, :], inside & (number <= 0)[:, None]).to(tl.float32)
            x = tl.where(own, read(written + c[None, :], inside & own).to(tl.float32), x)
    else:
        x = read(row + c[None, :], inside).to(tl.float32)
    return x


@triton.jit
def _pack(row, weight):
    """An entry of a slot or sub-key: which row of the chunk it brings, and its weight."""
    return (row.to(tl.int64) << 32) | weight.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _unpack(entry):
    return entry >> 32, (entry & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _normalised(x, c, V: tl.constexpr):
    """One row with mean 0 and variance 1."""
    mean = tl.sum(x, 0) / V
    centred = tl.where(c < V, x - mean, 0.0)
    return centred / tl.sqrt(tl.sum(centred * centred, 0) / V + 1e-5)


@triton.jit(do_not_specialize=["P", "S1", "W", "L", "start", "per", "first", "L_out"])
def _read_kernel(
    slots,
    weights,
    numbers,
    values,
    held,
    pool,
    P,
    S1,
    o,
    kept,
    index,
    half,
    v,
    target,
    known,
    real,
    due,
    gate,
    residual,
    peak,
    does,
    count,
    sub_count,
    use,
    W,
    L,
    start,
    per,
    first,
    L_out,
    E: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    N_SUB: tl.constexpr,
    WRITES: tl.constexpr,
    KEYS: tl.constexpr,
    GATED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """What one token reads; when its chunk is written, also its residual, and its entries are counted.

    does: 1 if the token writes rows, and 2 more if it moves sub-keys.
    Loads come before what waits for them, and nothing waits for an addition to the counts.
    """
    x = tl.program_id(0).to(tl.int64)
    n, g = x // W, x // per
    tick = n * L + start + x - n * W
    c, e = tl.arange(0, BV), tl.arange(0, BE)
    at = x * E + e
    slot = tl.load(slots + at, mask=e < E, other=0)
    weight = tl.load(weights + at, mask=e < E, other=0.0)
    if WRITES:
        alive, moves, there = (
            tl.load(known + tick).to(tl.int32),
            tl.load(real + tick).to(tl.int32),
            tl.load(target + tick),
        )
        strength = 1.0
        if GATED:
            strength = tl.load(gate + tick).to(tl.float32)
        if due is not None:
            now = tl.load(due + n).to(tl.int32)
            alive, moves = alive * now, moves * now
        if KEYS:
            r, j = tl.arange(0, BH), tl.arange(0, BK)
            sub_ok = (r < 2 * H)[:, None] & (j < K)[None, :]
            sub_at = (x * 2 * H + r)[:, None] * K + j[None, :]
            score = tl.load(half + sub_at, mask=sub_ok, other=float("-inf"))
            sub_key = tl.load(index + sub_at, mask=sub_ok, other=0)
        goal = read(v + (n * L + there) * V + c, c < V * alive).to(tl.float32)
    total = tl.zeros([BV], tl.float32)
    for begin in range(0, E, BE):
        number = slot
        if numbers is not None:
            number = tl.load(numbers + g * S1 + slot, mask=begin + e < E, other=0)
            if kept is not None:
                tl.store(kept + at + begin, number, mask=begin + e < E)
        rows = _rows(number, slot, begin + e < E, values, held, pool, P, c, V, numbers is not None)
        if WRITES:
            tl.atomic_add(count + g * S1 + slot, 1, mask=begin + e < E * alive, sem="relaxed")
        if WRITES and KEYS and begin == 0:
            share = tl.exp(score - tl.max(score, 1)[:, None])
            share = share / tl.sum(share, 1)[:, None]
            bin = (((g * 2 + r % 2) * H + r // 2) * N_SUB)[:, None] + sub_key
            counts = (r < 2 * H)[:, None] & (j < K * moves)[None, :]
            tl.atomic_add(sub_count + bin, 1, mask=counts, sem="relaxed")
            tl.atomic_add(use + bin, (share.to(tl.float64) * (1 << UNIT)).to(tl.int64), mask=counts, sem="relaxed")
        total += tl.sum(rows * weight[:, None], 0)
        slot = tl.load(slots + at + begin + BE, mask=begin + BE + e < E, other=0)
        weight = tl.load(weights + at + begin + BE, mask=begin + BE + e < E, other=0.0)
    out = n * L_out + start - first + x - n * W
    tl.store(o + out * V + c, total.to(o.dtype.element_ty), mask=c < V)
    if WRITES:
        if NORMALIZE:
            goal = _normalised(goal, c, V)
        step = tl.where(c < V * alive, goal - total, 0.0) * strength
        tl.store(residual + x * V + c, step, mask=c < V)
        tl.store(peak + x, tl.max(tl.abs(step), 0))
        tl.store(does + x, alive + 2 * moves)


@triton.jit
def _piece(size, least, MOST: tl.constexpr):
    """Entries of a piece of a bin of `size` entries, of at least `least` where it has several, and how many pieces it has."""
    length = tl.maximum((size + (MOST - 1)) // MOST, least)
    return length, tl.maximum((size + length - 1) // length, 1)


@triton.jit
def _list_pieces(pieces, first, most, parts, length, start, size, least, bin, old, new):
    """Describe the pieces of bins, from place `first` on: the fields that `_next_piece` loads."""
    for i in range(0, tl.max(parts, 0)):
        to, ok = pieces + first + i, i < parts
        tl.store(to, start + i * length, mask=ok)
        tl.store(to + most, tl.minimum(size - i * length, length), mask=ok)
        tl.store(to + 2 * most, start // least, mask=ok)
        tl.store(to + 3 * most, size, mask=ok)
        tl.store(to + 4 * most, bin, mask=ok)
        if old is not None:
            tl.store(to + 5 * most, old, mask=ok)
            tl.store(to + 6 * most, new, mask=ok)


@triton.jit
def _next_piece(pieces, i, most, ROWS: tl.constexpr):
    """Of piece `i`, if there can be so many: its first place and entries, where it is joined with others, the entries of its
    bin, and which bin that is; ROWS: also where the row was (-slot for the checkpoint's) and where it is to go.
    """
    at, ok = pieces + i, i < most
    start, size = tl.load(at, mask=ok, other=0), tl.load(at + most, mask=ok, other=0)
    shared, whole = tl.load(at + 2 * most, mask=ok, other=0), tl.load(at + 3 * most, mask=ok, other=0)
    bin, old, new = tl.load(at + 4 * most, mask=ok, other=0), start, start
    if ROWS:
        old, new = tl.load(at + 5 * most, mask=ok, other=0), tl.load(at + 6 * most, mask=ok, other=0)
    return start, size, shared, whole, bin, old, new


@triton.jit
def _sub_bin(r, index, per, H: tl.constexpr, N_SUB: tl.constexpr):
    """Sub-key `index` of a half of a token and head, among all: rows r of `[G, T, H, 2]` to `[G, 2, H, n]`."""
    return ((r // (2 * H * per) * 2 + r % 2) * H + r // 2 % H) * N_SUB + index


@triton.jit(do_not_specialize=["P", "S1", "per", "entries", "stamp", "blocks", "sub_piece", "most"])
def _allocate_kernel(
    slots,
    does,
    count,
    begin,
    pieces,
    bound,
    numbers,
    written,
    stamps,
    sub_count,
    sub_begin,
    sub_pieces,
    cursor,
    used,
    P,
    S1,
    per,
    entries,
    stamp,
    blocks,
    sub_piece,
    most,
    E: tl.constexpr,
    BINS: tl.constexpr,
    KEEP: tl.constexpr,
    PIECE: tl.constexpr,
    MOST: tl.constexpr,
    LINE: tl.constexpr,
    BB: tl.constexpr,
):
    """A run of places for the entries of every slot, by whichever of them comes first; the pieces in which they are added up; a
    row. The same for every sub-key. What is counted is 0 again.

    begin, sub_begin: of every slot and sub-key, its first place. bound: 0 for every slot. most: pieces of sub-keys that can be.
    cursor: places of slots, and 2^32 times their pieces; pieces of sub-keys. used: rows of the pool.
    """
    block, lane = tl.program_id(0), tl.arange(0, LINE)
    if block < blocks:
        entry = block * LINE + lane
        g = entry // (per * E)
        alive = (tl.load(does + entry // E, mask=entry < entries, other=0) & 1) > 0
        own = tl.load(slots + entry, mask=entry < entries, other=0)
        slot = g * S1 + own
        size = tl.where(alive, tl.atomic_xchg(count + slot, tl.zeros_like(own), mask=alive, sem="relaxed"), 0)
        head = size > 0
        old = tl.load(numbers + slot, mask=head, other=0)
        length, parts = _piece(size, PIECE, MOST)
        parts = tl.where(head, parts, 0)
        both = size.to(tl.int64) + (parts.to(tl.int64) << 32)
        fresh = (head & ((old <= P) | KEEP)).to(tl.int32)
        first = tl.atomic_add(cursor, tl.sum(both, 0), sem="relaxed") + tl.cumsum(both, 0) - both
        row = tl.atomic_add(used, tl.sum(fresh, 0), sem="relaxed").to(tl.int32) + tl.cumsum(fresh, 0) + P
        new = tl.where(fresh > 0, row, old)
        begins, part = (first & 0xFFFFFFFF).to(tl.int32), (first >> 32).to(tl.int32)
        tl.store(begin + slot, begins, mask=head)
        tl.store(bound + slot, 0, mask=head)
        tl.store(numbers + slot, new, mask=fresh > 0)
        tl.store(written + slot, tl.load(stamps + g, mask=head, other=0) + stamp, mask=head)
        source = tl.where(old > 0, old, -own)
        _list_pieces(pieces, part, entries, parts, length, begins, size, PIECE, slot, source, new)
    else:
        memory = block - blocks
        before = memory * per * 2 * E
        for start in range(0, BINS, BB):
            here = start + tl.arange(0, BB)
            bin, real = memory * BINS + here, here < BINS
            size = tl.load(sub_count + bin, mask=real, other=0)
            tl.store(sub_count + bin, 0, mask=real)
            length, parts = _piece(size, sub_piece, MOST)
            parts = tl.where(real, parts, 0)
            begins = before + tl.cumsum(size, 0) - size
            tl.store(sub_begin + bin, begins, mask=real)
            before += tl.sum(size, 0)
            first = tl.atomic_add(cursor + 1, tl.sum(parts, 0).to(tl.int64), sem="relaxed").to(tl.int32)
            first += tl.cumsum(parts, 0) - parts
            _list_pieces(sub_pieces, first, most, parts, length, begins, size, sub_piece, bin, None, None)


@triton.jit(do_not_specialize=["S1", "per", "entries", "blocks", "sub_blocks"])
def _place_kernel(
    slots,
    weights,
    does,
    begin,
    peak,
    bound,
    placed,
    q,
    index,
    half,
    sub_begin,
    sub_bound,
    sub_placed,
    use,
    tokens,
    S1,
    per,
    entries,
    blocks,
    sub_blocks,
    E: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    N_SUB: tl.constexpr,
    IDW: tl.constexpr,
    UNIT: tl.constexpr,
    LINE: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
):
    """Put every entry into a place of its slot, with its weight; those of the sub-keys with their weights in the gradient.

    begin, sub_begin: the next free place of a slot and of a sub-key. sub_blocks: programs of a memory.
    bound, sub_bound: the largest number that an entry of a slot adds, and one of a memory's sub-keys, as bits.
    """
    block = tl.program_id(0)
    if block < blocks:
        entry = block * LINE + tl.arange(0, LINE)
        inside = entry < entries
        some = (tl.load(does + entry // E, mask=inside, other=0) & 1) > 0
        slot = entry // (per * E) * S1 + tl.load(slots + entry, mask=inside, other=0)
        weight = tl.load(weights + entry, mask=inside, other=0.0)
        peaks = tl.load(peak + entry // E, mask=inside, other=0.0)
        tl.atomic_max(bound + slot, tl.abs(weight * peaks).to(tl.int32, bitcast=True), mask=some, sem="relaxed")
        to = tl.atomic_add(begin + slot, 1, mask=some, sem="relaxed")
        tl.store(placed + to, _pack(entry // E, weight), mask=some)
    else:
        g = (block - blocks) // sub_blocks
        r, j = (block - blocks) % sub_blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, BK)
        there, r = r < 2 * H * per, r + g * 2 * H * per
        ok = there[:, None] & (j < K)[None, :]
        at = r.to(tl.int64)[:, None] * K + j[None, :]
        moves = tl.load(does + r // (2 * H), mask=there, other=0) > 1
        counts = ok & moves[:, None]
        score = tl.load(half + at, mask=ok, other=float("-inf"))
        share = tl.exp(score - tl.where(there, tl.max(score, 1), 0.0)[:, None])
        share = share / tl.where(there, tl.sum(share, 1), 1.0)[:, None]
        bin = _sub_bin(r[:, None], tl.load(index + at, mask=ok, other=0), per, H, N_SUB)
        number = tl.maximum(tl.load(tokens + g), 1).to(tl.float32)
        total = tl.load(use + bin, mask=counts, other=0).to(tl.float64) * (1.0 / (1 << UNIT))
        mean = total.to(tl.float32) / number
        mean = tl.log(tl.where(mean > 0, mean, 1.0))
        pull = share * (mean - tl.sum(share * mean, 1)[:, None]) / number
        if IDW:
            score = tl.where(ok, score, 0.0)
            pull = 2.0 * pull * tl.exp(score)
            most = tl.abs(pull) * tl.exp(-0.5 * score) * 1.01  # no difference is longer than its vector
        else:
            f = tl.arange(0, BF)
            query = read(q + r.to(tl.int64)[:, None] * F + f[None, :], there[:, None] & (f < F)[None, :])
            most = tl.abs(pull) * tl.max(tl.abs(query.to(tl.float32)), 1)[:, None]
        place = tl.atomic_add(sub_begin + bin, 1, mask=counts, sem="relaxed")
        tl.store(sub_placed + place, _pack(r[:, None], pull), mask=counts)
        most = tl.max(tl.max(tl.where(counts, most, 0.0), 1), 0)
        tl.atomic_max(sub_bound + g, most.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _joined(total, shared, parts, sums, finished, c, V: tl.constexpr):
    """Whether this piece is the last of `parts` to be added up, and then the sum of all.

    sums: int64, at `shared` of those in several pieces; 0 before and after. finished: how many of their pieces are.
    """
    last = parts == 1
    if parts > 1:
        own = sums + shared.to(tl.int64) * V + c
        tl.atomic_add(own, total, mask=c < V, sem="relaxed")
        tl.debug_barrier()
        last = tl.atomic_add(finished + shared, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.load(own, mask=c < V, other=0.0, cache_modifier=".cg")
            tl.debug_barrier()  # the thread that clears a number need not be the one that loads it
            tl.store(own, tl.zeros_like(total), mask=c < V)
            tl.store(finished + shared, 0)
    return last, total


@triton.jit(do_not_specialize=["P", "rate", "most"])
def _write_kernel(
    pieces,
    bound,
    placed,
    residual,
    values,
    held,
    pool,
    sums,
    finished,
    cursor,
    P,
    rate,
    most,
    V: tl.constexpr,
    AVERAGE: tl.constexpr,
    BITS: tl.constexpr,
    PIECE: tl.constexpr,
    MOST: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
):
    """One piece of a slot's entries after the other: what they add to its row. The next one is loaded before it is needed."""
    c, e = tl.arange(0, BV), tl.arange(0, BE)
    one = tl.zeros([1], tl.int32)
    next_start, next_size, next_shared, next_whole, next_slot, next_old, next_new = _next_piece(
        pieces, tl.program_id(0), most, True
    )
    for i in range(tl.program_id(0), (tl.load(cursor) >> 32).to(tl.int32), tl.num_programs(0)):
        start, size, shared, whole, slot = next_start, next_size, next_shared, next_whole, next_slot
        old, new = next_old + one, (next_new - 1 - P).to(tl.int64)
        next_start, next_size, next_shared, next_whole, next_slot, next_old, next_new = _next_piece(
            pieces, i + tl.num_programs(0), most, True
        )
        row = tl.reshape(_rows(old, -old, one == 0, values, held, pool, P, c, V, True), [BV])
        last = whole == 1
        if whole == 1:
            from_row, weight = _unpack(tl.load(placed + start))
            change = weight * read(residual + from_row * V + c, c < V)
        else:
            factor, unit = _units(tl.load(bound + slot), BITS)
            total = tl.zeros([BV], tl.int64)
            for first in range(0, size, BE):
                ok = first + e < size
                from_row, weight = _unpack(tl.load(placed + start + first + e, mask=ok, other=0))
                step = read(residual + (from_row * V)[:, None] + c[None, :], ok[:, None] & (c < V)[None, :])
                total += tl.sum((step * (weight * factor)[:, None]).to(tl.int32), 0).to(tl.int64)
            _length, parts = _piece(whole, PIECE, MOST)
            last, total = _joined(total, shared, parts, sums, finished, c, V)
            change = total.to(tl.float32) * unit
        if last:
            tl.store(pool + new * V + c, row + change * (rate / (whole if AVERAGE else 1)), mask=c < V)


@triton.jit(do_not_specialize=["rate", "sub_piece", "most"])
def _keys_kernel(
    q,
    keys,
    new_keys,
    pieces,
    bound,
    placed,
    sums,
    finished,
    cursor,
    rate,
    sub_piece,
    most,
    BINS: tl.constexpr,
    F: tl.constexpr,
    IDW: tl.constexpr,
    BITS: tl.constexpr,
    MOST: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
):
    """One piece of a sub-key's entries after the other: what they add to its gradient, and the step. BINS: sub-keys of a memory."""
    f, e = tl.arange(0, BF), tl.arange(0, BE)
    next_start, next_size, next_shared, next_whole, next_bin, _old, _new = _next_piece(
        pieces, tl.program_id(0), most, False
    )
    for i in range(tl.program_id(0), tl.load(cursor + 1).to(tl.int32), tl.num_programs(0)):
        start, size, shared, whole, bin = next_start, next_size, next_shared, next_whole, next_bin
        next_start, next_size, next_shared, next_whole, next_bin, _old, _new = _next_piece(
            pieces, i + tl.num_programs(0), most, False
        )
        entry = tl.load(placed + start + e, mask=e < size, other=0)
        at = bin.to(tl.int64) * F + f
        factor, unit = _units(tl.load(bound + bin // BINS), BITS)
        key = tl.load(keys + at, mask=f < F, other=0.0)
        total = tl.zeros([BF], tl.int64)
        for first in range(0, size, BE):
            from_row, weight = _unpack(entry)
            query = read(q + (from_row * F)[:, None] + f[None, :], (first + e < size)[:, None] & (f < F)[None, :]).to(
                tl.float32
            )
            if IDW:
                query = query - key[None, :]
            step = (query * (weight * factor)[:, None]).to(tl.int32)
            entry = tl.load(placed + start + first + BE + e, mask=first + BE + e < size, other=0)
            total += tl.sum(step, 0).to(tl.int64)
        _length, parts = _piece(whole, sub_piece, MOST)
        last, total = _joined(total, shared, parts, sums, finished, f, F)
        if last:
            tl.store(new_keys + at, key - rate * (total.to(tl.float32) * unit), mask=f < F)


@triton.jit(do_not_specialize=["P", "M", "halvings", "T", "C"])
def _step_kernel(
    slots,
    weights,
    found,
    where,
    values,
    held,
    P,
    M,
    halvings,
    mask,
    o,
    q,
    v,
    gate,
    count,
    old_q,
    old_v,
    old_gate,
    old_real,
    T,
    C,
    E: tl.constexpr,
    V: tl.constexpr,
    QUERY: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
    BQ: tl.constexpr,
):
    """One token of a memory that is not written yet: what it reads, by binary search; and it is put with what waits.

    found: slots of the state, `[G, M]`. where: their rows in `held`.
    """
    x = tl.program_id(0).to(tl.int64)
    n = x // T
    c, e = tl.arange(0, BV), tl.arange(0, BE)
    alive = 1
    if mask is not None:
        alive = tl.load(mask + x).to(tl.int32)
    total = tl.zeros([BV], tl.float32)
    for begin in range(0, E, BE):
        ok = begin + e < E * alive
        slot = tl.load(slots + x * E + begin + e, mask=ok, other=0)
        weight = tl.load(weights + x * E + begin + e, mask=ok, other=0.0)
        number = slot
        if found is not None:
            at, half = n * M + tl.zeros([BE], tl.int64), M
            for _ in range(halvings):
                half = half // 2
                at += tl.where(tl.load(found + at + half - 1, mask=ok, other=0) < slot, half, 0)
            mine = ok & (tl.load(found + at, mask=ok, other=-1) == slot)
            number = (tl.load(where + at, mask=mine, other=-1) + 1).to(tl.int32)
        rows = _rows(number, slot, ok, values, held, held, P, c, V, found is not None)
        total += tl.sum(rows * weight[:, None], 0)
    tl.store(o + x * V + c, total.to(o.dtype.element_ty), mask=c < V)
    to = n * C + tl.load(count + n) + x - n * T
    d = tl.arange(0, BQ)
    tl.store(old_q + to * QUERY + d, tl.load(q + x * QUERY + d, mask=d < QUERY), mask=d < QUERY * alive)
    tl.store(old_v + to * V + c, tl.load(v + x * V + c, mask=c < V), mask=c < V * alive)
    tl.store(old_gate + to, tl.load(gate + x).to(old_gate.dtype.element_ty), mask=alive > 0)
    tl.store(old_real + to, alive > 0, mask=alive > 0)


@triton.jit(do_not_specialize=["P", "W", "first", "L_out"])
def _weights_backward_kernel(
    d_o,
    d_weights,
    slots,
    kept,
    values,
    held,
    pool,
    P,
    W,
    first,
    L_out,
    E: tl.constexpr,
    V: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
):
    """Gradient of the weights of the rows that one token read, from that of what it read."""
    x = tl.program_id(0).to(tl.int64)
    n = x // W
    c, e = tl.arange(0, BV), tl.arange(0, BE)
    upstream = read(d_o + (n * L_out + first + x - n * W) * V + c, c < V).to(tl.float32)
    for begin in range(0, E, BE):
        ok = begin + e < E
        at = x * E + begin + e
        slot = tl.load(slots + at, mask=ok, other=0)
        number = slot
        if kept is not None:
            number = tl.load(kept + at, mask=ok, other=0)
        rows = _rows(number, slot, ok, values, held, pool, P, c, V, kept is not None)
        tl.store(d_weights + at, tl.sum(rows * upstream[None, :], 1), mask=ok)


class Chunk(NamedTuple):
    """Where the tokens of a chunk lie in the streams, and what is known of them.

    Attributes:
        start, width: first tick, and how many. total: ticks of a stream. first, read: the first tick that is read in the
            call, and how many are.
        v: values `[N, L, V]`. gate `[N, L]`. target: int64 `[N, L]`. known, real: bool `[N, L]`.
        due: bool `[N]`, sequences whose memory is written after this chunk; None: all.
        tokens: int32 `[G]`, real tokens of the chunk.
    """

    start: int
    width: int
    total: int
    first: int
    read: int
    v: Tensor
    gate: Tensor
    target: Tensor
    known: Tensor
    real: Tensor
    due: Tensor | None
    tokens: Tensor


class Table:
    """The tables of G memories.

    Args:
        values: the checkpoint's table `[n * n, V]`. state: where to start; none of its tensors is written.
        updates: how often the call will write. tokens: most tokens of a chunk, all sequences together.
        keep: never write a row twice, so that a backward pass finds the rows as they were read.
    """

    def __init__(
        self, values: Tensor, state: FwpkmState, options: Options, heads: int, updates: int, tokens: int, keep: bool
    ) -> None:
        self.values, self.held, self.state, self.options = values, state.shared_rows.contiguous(), state, options
        self.groups, self.size, self.width = state.slots.shape[0], values.shape[0], values.shape[1]
        self.heads, self.sub, self.entries = heads, state.keys.shape[3], heads * options.top_k
        self.keep, self.updates = keep, updates
        self.places, device = state.slots.shape[1], values.device
        self.numbers: Tensor | None = None
        self.pool = self.held.new_empty(0, self.width)
        self.changed = False
        bins = state.keys.shape[:4].numel()
        self.line = self.size // 4 * 4 + 4  # more by 1 to 4: for the unused places of the state's lists, and aligned
        if updates or self.places:
            self.numbers, self.written, *counts = torch.zeros(
                3 if updates else 2, self.groups, self.line, dtype=torch.int32, device=device
            )
        if self.places:
            self.numbers.scatter_(1, state.slots, state.where.int() + 1)  # type: ignore[union-attr]
            self.written.scatter_(1, state.slots, state.written.int())
        if updates:
            self.stamps = self.written.amax(1)
            self.count = counts[0]
            self.begin, self.largest = torch.empty(2, *self.count.shape, dtype=torch.int32, device=device)
            self.sub_count, self.sub_begin = torch.zeros(2, bins, dtype=torch.int32, device=device)
            self.sub_bounds = torch.zeros(updates, count_parts(self.groups, 4) * 4, dtype=torch.int32, device=device)
            self.use = torch.zeros(updates, bins, dtype=torch.int64, device=device)
            self.cursors = torch.zeros(updates + 1, 2, dtype=torch.int64, device=device)  # last: rows of the pool
            # of a chunk, from when it is read until it is written: residuals, the largest number of each, and whether a token
            # writes; then the pieces, and the entries slot by slot
            entries = tokens * self.entries
            self.residual, self.peak = (
                torch.empty(tokens, self.width, device=device),
                torch.empty(tokens, device=device),
            )
            self.does = torch.empty(tokens, dtype=torch.int32, device=device)
            self.placed = torch.empty(entries, dtype=torch.int64, device=device)
            self.sub_placed = torch.empty(2 * entries, dtype=torch.int64, device=device)
            # rows and sub-keys that are added up in several pieces
            large = [entries // PIECE + 1, 2 * entries // SUB_PIECE + 1]
            self.pieces = torch.empty(FIELDS, entries, dtype=torch.int32, device=device)
            self.sub_pieces = torch.empty(FIELDS, bins + large[1], dtype=torch.int32, device=device)
            self.sums = torch.zeros(large[0], self.width, dtype=torch.int64, device=device)
            self.sub_sums = torch.zeros(large[1], state.keys.shape[4], dtype=torch.int64, device=device)
            self.finished, self.sub_finished = (torch.zeros(x, dtype=torch.int32, device=device) for x in large)
            self.stamp = 0
            self.most = min(tokens * self.entries, self.groups * self.size)  # rows that a chunk can add
            self.limit = updates * self.most if keep else min(updates * self.most, self.groups * self.size)
            room = self.limit if keep else max(self.most, ROOM // (4 * self.width))
            self.pool = self.held.new_empty(min(self.limit, room), self.width)
            self.bound = 0

    def read(self, found: Found, o: Tensor, chunk: Chunk, write: bool) -> Tensor | None:
        """Read the slots `found` of a chunk into `o` `[N, ticks, V]`; `write` keeps what writing it needs.

        Returns: where the rows lie, int32 `[X * E]`, if they are to be found again (None: in `values`).
        """
        tokens, options = o.shape[0] * chunk.width, self.options
        numbers = self.numbers if self.places or self.changed else None
        kept = None
        if self.keep and numbers is not None:
            kept = torch.empty(tokens * self.entries, dtype=torch.int32, device=o.device)
        given = (
            *(found.slots, found.weights, numbers, self.values, self.held, self.pool, self.held.shape[0]),
            *(self.line, o, kept),
            *((found.index, found.half) if write else (None, None)),
            *((chunk.v, chunk.target, chunk.known, chunk.real, chunk.due, chunk.gate) if write else [None] * 6),
            *((self.residual, self.peak, self.does, self.count) if write else [None] * 4),
            *((self.sub_count, self.use[self.stamp]) if write else [None] * 2),
            *(chunk.width, chunk.total, chunk.start, tokens // self.groups, chunk.first, chunk.read),
        )
        sizes = {
            **{"E": self.entries, "V": self.width, "H": self.heads, "K": options.top_k, "N_SUB": self.sub},
            **{"WRITES": write, "KEYS": options.address_loss, "GATED": options.gate_weighting},
            **{"NORMALIZE": options.normalize_targets, "UNIT": UNIT, "num_warps": 2},
            "BH": power(2 * self.heads),
            "BK": power(options.top_k),
        }
        with on_device(o):
            launch_in_order(_read_kernel, (tokens,), given, {**sizes, **_tile(self.entries, self.width)})
        return kept

    def write(self, found: Found, q: Tensor, keys: Tensor, chunk: Chunk) -> Tensor:
        """Move the rows by what a chunk of queries `[G, T, H, K]` read, and the sub-keys `[G, 2, H, n, F]`: the new ones."""
        self._reserve()
        options, tokens, width, size = self.options, self.peak.shape[0], self.width, keys.shape[4]
        entries, moves, bins = tokens * self.entries, options.address_loss, 2 * self.heads * self.sub
        P, line, per = self.held.shape[0], self.line, tokens // self.groups
        cursor, use, sub_bound = self.cursors[self.stamp], self.use[self.stamp], self.sub_bounds[self.stamp]
        self.stamp += 1
        blocks, at_once = count_parts(entries, LINE), max(1, 512 // power(options.top_k))
        if options.score == "dot":
            at_once = min(at_once, max(1, 8192 // power(size)))
        sub_blocks = count_parts(per * 2 * self.heads, at_once)
        sub_piece, most = max(SUB_PIECE, power(count_parts(2 * entries, PROGRAMS))), self.sub_pieces.shape[1]
        wide, new_keys = _tile(1, width)["BV"], torch.empty_like(keys) if moves else keys
        at_a_time = min(4, max(1, 2048 // wide))
        sizes = {
            **{"E": self.entries, "H": self.heads, "K": options.top_k, "N_SUB": self.sub, "BINS": bins, "F": size},
            **{"IDW": options.score == "idw", "PIECE": PIECE, "MOST": MOST, "LINE": LINE},
            **{"UNIT": UNIT, "BF": max(16, power(size)), "num_warps": 4},
        }
        with on_device(q):
            launch_in_order(
                _allocate_kernel,
                (blocks + (self.groups if moves else 0),),
                (
                    *(found.slots, self.does, self.count, self.begin, self.pieces, self.largest, self.numbers),
                    *(self.written, self.stamps, self.sub_count, self.sub_begin, self.sub_pieces, cursor),
                    *(self.cursors[-1], P, line, per, entries, self.stamp, blocks, sub_piece, most),
                ),
                {**sizes, "KEEP": self.keep, "BB": min(1024, power(bins))},
            )
            launch_in_order(
                _place_kernel,
                (blocks + (self.groups * sub_blocks if moves else 0),),
                (
                    *(found.slots, found.weights, self.does, self.begin, self.peak, self.largest),
                    *(self.placed, q, found.index, found.half, self.sub_begin),
                    *(sub_bound, self.sub_placed, use, chunk.tokens),
                    *(line, per, entries, blocks, sub_blocks),
                ),
                {**sizes, "ROWS": at_once, "BK": power(options.top_k)},
            )
            launch_in_order(
                _write_kernel,
                (min(PROGRAMS, entries),),
                (
                    *(self.pieces, self.largest, self.placed, self.residual, self.values, self.held, self.pool),
                    *(self.sums, self.finished, cursor, P, options.value_lr, entries),
                ),
                {
                    **{**sizes, "V": width, "AVERAGE": options.row_averaging},
                    **{"BE": at_a_time, "BITS": 32 - at_a_time.bit_length(), "BV": wide},
                },
            )
            if moves:
                launch_in_order(
                    _keys_kernel,
                    (min(PROGRAMS, most),),
                    (
                        *(q, keys, new_keys, self.sub_pieces, sub_bound, self.sub_placed, self.sub_sums),
                        *(self.sub_finished, cursor, options.key_lr, sub_piece, most),
                    ),
                    {**sizes, "BE": 8, "BITS": 28, "num_warps": 2},
                )
        self.changed = True
        return new_keys

    def _reserve(self) -> None:
        """Room in the pool for the rows of one more chunk."""
        self.bound = min(self.bound + self.most, self.limit)
        if self.bound <= self.pool.shape[0]:
            return
        used = int(self.cursors[-1, 0])  # waits for the device; before, no more than could have been used was counted
        self.bound = min(used + self.most, self.limit)
        if self.bound > self.pool.shape[0]:
            pool = self.pool.new_empty(min(self.limit, max(self.bound, 2 * self.pool.shape[0])), self.width)
            pool[:used] = self.pool[:used]
            self.pool = pool

    def fields(self) -> dict[str, Tensor]:
        """The fields of the state that describe the table."""
        if not self.changed or self.numbers is None:
            return {name: getattr(self.state, name) for name in ("slots", "where", "written", "shared_rows")}
        P, numbers = self.held.shape[0], self.numbers[:, : self.size]
        memory, slot = torch.nonzero(numbers, as_tuple=True)
        number = numbers[memory, slot].long() - 1
        old = number < P
        counts = torch.bincount(memory, minlength=self.groups)
        # rows that are still held, in their order, and then the written ones, in that of their slots
        still = torch.zeros(P, dtype=torch.bool, device=number.device)
        still[number[old]] = True
        kept, fresh = torch.nonzero(still)[:, 0], number[~old] - P
        where = torch.where(old, 0, (~old).cumsum(0) - 1 + kept.shape[0])
        if P:
            where += torch.where(old, (still.cumsum(0) - 1)[number.clamp(max=P - 1)], 0)
        rows = self.held.new_empty(kept.shape[0] + fresh.shape[0], self.width)
        torch.index_select(self.held, 0, kept, out=rows[: kept.shape[0]])
        torch.index_select(self.pool, 0, fresh, out=rows[kept.shape[0] :])
        longest = int(counts.max()) if self.groups else 0
        places = power(longest) if longest else 0
        rank = torch.arange(memory.shape[0], device=memory.device) - (counts.cumsum(0) - counts)[memory]

        def spread(x: Tensor, empty: int) -> Tensor:
            out = torch.full((self.groups, places), empty, device=x.device, dtype=torch.int64)
            out[memory, rank] = x.long()
            return out

        return {
            "slots": spread(slot, self.size),
            "where": spread(where, -1),
            "written": spread(self.written[memory, slot], 0),
            "shared_rows": rows,
        }


def _tile(entries: int, width: int) -> dict[str, int]:
    """Block sizes of kernels that hold some of a token's rows."""
    wide = max(16, power(width))
    return {"BE": max(1, min(power(entries), TILE // wide)), "BV": wide}


def step(
    found: Any, values: Tensor, state: FwpkmState, q: Tensor, v: Tensor, gate: Tensor, mask: Tensor | None
) -> tuple[Tensor, FwpkmState]:
    """A few tokens of memories that are not written after them: what they read `[N, T, V]`, and the state.

    Args:
        found: their slots. values: the checkpoint's table. state: its pending tensors are written here.
        q: `[N, T, H, K]`. v: `[N, T, V]`. gate: `[N, T]`. mask: bool `[N, T]` or None; with one, T is 1.
    """
    entries, places, held = q.shape[2] * found.slots.shape[3], state.slots.shape[1], state.shared_rows
    o = torch.empty_like(v)
    with on_device(q):
        _step_kernel[(q.shape[0] * q.shape[1],)](
            *(found.slots, found.weights, state.slots if places else None, state.where if places else None),
            *(values, held, held.shape[0], places, places.bit_length() - 1, mask, o, q, v, gate, state.count),
            *(state.q, state.v, state.gate, state.real, q.shape[1], state.q.shape[1]),
            E=entries,
            V=v.shape[2],
            QUERY=q.shape[2] * q.shape[3],
            BQ=power(q.shape[2] * q.shape[3]),
            **_tile(entries, v.shape[2]),
            num_warps=4,
        )
    return o, state._replace(count=state.count.add_(q.shape[1] if mask is None else mask[:, 0].long()))


def weights_backward(d_o: Tensor, slots: Tensor, kept: Tensor | None, table: Table, chunk: Chunk) -> Tensor:
    """Gradient of the weights `[G, T, H, k]` of a chunk's slots, from that of what is read in the call, `[N, ticks, V]`."""
    d_weights = torch.empty(slots.shape, dtype=torch.float32, device=d_o.device)
    with on_device(d_o):
        _weights_backward_kernel[(d_o.shape[0] * chunk.width,)](
            *(d_o, d_weights, slots, kept, table.values, table.held, table.pool, table.held.shape[0]),
            *(chunk.width, chunk.start - chunk.first, chunk.read),
            E=table.entries,
            V=table.width,
            **_tile(table.entries, table.width),
            num_warps=4,
        )
    return d_weights
