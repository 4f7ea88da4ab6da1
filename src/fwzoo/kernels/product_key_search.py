"""Triton kernels of product-key memories: search, read and their gradients, shared by `pkm` and `fwpkm`.

Imported only by the `triton` levels. Axis letters as in `product_keys`: G memories, T tokens of one, H heads, F = K / 2,
n sub-keys a half, k slots read, V value size; M candidates.

Search in two stages that together are exact. `_candidates` scores all sub-keys on tensor cores (idw as 2 q.k - |k|^2, from
sub-keys in 16 bit) and marks those that may be among the k best, given how wrong such a score can be. `_finish` scores these
exactly (idw by differences) and takes the k best. Where more are marked than it has room for, it scores all of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .contract import INTERPRETING
from .gpu import launch_in_order, on_device
from .gpu import read as read_values

MOST_IN_BLOCK = 512  # sub-keys that a program scores: their scores stay in registers
UNSURE = 2**-15  # error of an approximate score beside that of rounded sub-keys, to the squared lengths
LARGEST = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # the bits of a float32


class Found(NamedTuple):
    """What every token reads.

    Attributes:
        slots: int32 `[G, T, H, k]`, best first. weights: their softmax weights, float32.
        index: int32 `[G, T, H, 2, k]`, the sub-keys kept of each half, best first. half: their scores, float32.
    """

    slots: Tensor
    weights: Tensor
    index: Tensor
    half: Tensor


# --- search ---


@triton.jit
def _prepare(
    keys,
    rounded,
    work,
    n,
    F: tl.constexpr,
    FP: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    BF: tl.constexpr,
):
    """Every sub-key in 16 bit, padded to `[NP, FP]` with 0; in `work` its squared length, and that of what rounding lost."""
    table = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    square, rest = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, FP, BF):
        f = start + tl.arange(0, BF)
        x = read_values(keys + (table * n + row)[:, None] * F + f[None, :], (row < n)[:, None] & (f < F)[None, :])
        x = x.to(tl.float32)
        y = x.to(rounded.dtype.element_ty)
        tl.store(rounded + (table * NP + row)[:, None] * FP + f[None, :], y, mask=(f < FP)[None, :])
        d = x - y.to(tl.float32)
        square += tl.sum(x * x, 1)
        rest += tl.sum(d * d, 1)
    squares = work.to(tl.pointer_type(tl.float32)) + table * NP + row
    tl.store(squares, square)
    tl.store(squares + tl.num_programs(0).to(tl.int64) * NP, rest)


@triton.jit(do_not_specialize=["T"])
def _candidates(
    q,
    rounded,
    work,
    T,
    H,
    n,
    unsure,
    F: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    FP: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    IDW: tl.constexpr,
):
    """Marks the sub-keys of a block that may be among the TOP best, by approximate scores.

    Bit b of word w is sub-key (w // 8 * BITS + b) * 8 + w % 8, so that a thread finds the bits of its words among the scores that
    it holds. The limit is the TOP-th best of the best scores of groups of GROUP sub-keys, which at least TOP sub-keys reach.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    block, other = tl.program_id(1) % BLOCKS, tl.program_id(1) // BLOCKS
    part, h = other // H, other % H
    g = tl.program_id(2).to(tl.int64)
    first_key = (g * 2 * H + other) * (BLOCKS * BN) + block * BN
    row = (g * T + t) * H + h
    real, i = t < T, tl.arange(0, BN)
    scores = tl.zeros([BT, BN], tl.float32)
    length, rest = tl.zeros([BT, BF], tl.float32), tl.zeros([BT, BF], tl.float32)
    for start in range(0, FP, BF):
        f = start + tl.arange(0, BF)
        x = read_values(q + (row * 2 + part)[:, None] * F + f[None, :], real[:, None] & (f < F)[None, :]).to(tl.float32)
        y = tl.load(rounded + (first_key + i)[None, :] * FP + f[:, None])
        near = x.to(y.dtype)
        d = x - near.to(tl.float32)
        length += x * x
        rest += d * d
        scores = tl.dot(near, y, scores)
    length, rest = tl.sum(length, 1), tl.sum(rest, 1)
    keys = tl.num_programs(2).to(tl.int64) * 2 * H * (BLOCKS * BN)
    squares = work.to(tl.pointer_type(tl.float32)) + first_key + i
    square = tl.load(squares)
    longest = tl.max(square, 0)
    wrong = tl.sqrt(length * tl.max(tl.load(squares + keys), 0)) + tl.sqrt(rest * longest)
    if IDW:
        wrong *= 2
    wrong += unsure * (length + longest)
    wrong = tl.where(length + longest >= 4e9, float("inf"), wrong)  # 16 bit may not hold them
    if IDW:
        scores = 2 * scores - square[None, :]
    some = (block * BN + i < n)[None, :]
    scores = tl.where(some, scores, float("-inf"))
    away = tl.max(scores, 1)[:, None] - scores  # not negative, so ordered as its bits are
    bits = tl.reshape(away.to(tl.uint32, bitcast=True), [BT, BN // (8 * GROUP), GROUP, 8])
    mins = tl.reshape(tl.min(bits, 2), [BT, BN // GROUP])
    least, limit = tl.zeros([BT], tl.uint32), tl.zeros([BT], tl.uint32)
    for _ in range(TOP):  # the lowest from `least` on: those below it wrap around to large numbers
        limit = tl.min(mins - least[:, None], 1) + least
        limit = tl.where(limit < least, INFINITE, limit)  # there is none
        least = limit + 1
    limit = (limit.to(tl.float32, bitcast=True) + 2 * wrong) * (1 + 1e-6)
    near = ((away > limit[:, None]) == 0) & some  # all, where there is a NaN
    near = tl.reshape(near.to(tl.uint32), [BT, BN // (8 * BITS), BITS, 8]) << tl.arange(0, BITS)[None, None, :, None]
    words = tl.reshape(tl.sum(near, 2), [BT, BN // BITS]).to(tl.int32, bitcast=True)
    out = ((row * 2 + part) * BLOCKS + block) * (BN // BITS)
    tl.store(work + 2 * keys + out[:, None] + tl.arange(0, BN // BITS)[None, :], words, mask=real[:, None])


@triton.jit
def _ones(x):
    """How many bits of uint32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _list_marked(words, out, part, w, BITS: tl.constexpr, BM: tl.constexpr):
    """Puts the first BM sub-keys marked in `words` `[2, W]` into `out` `[2, BM]`; how many are marked, `[2, 1]`. w: `[1, W]`."""
    words = words.to(tl.uint32, bitcast=True)
    here = _ones(words).to(tl.int32)
    upto = tl.cumsum(here, 1)
    place = upto - here
    for _ in range(tl.max(tl.max(here, 1), 0)):
        low = words & (0 - words)
        bit = ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        tl.store(out + part * BM + place, (w // 8 * BITS + bit) * 8 + w % 8, mask=(words != 0) & (place < BM))
        words = words & (words - 1)
        place += 1
    tl.debug_barrier()
    return tl.max(upto, 1)[:, None]


@triton.jit
def _ordered(x, some):
    """x where `some`, else and in place of NaN -inf: every place in an order is then taken once."""
    return tl.where(some & (x == x), x, float("-inf"))


@triton.jit
def _before(x, i, y, j):
    """Whether (x, i) comes before (y, j): the larger first, the lower index first among equals."""
    return (x > y) | ((x == y) & (i < j))


@triton.jit
def _ranks(x, i):
    """Place of every element of `[2, M]` in the order of `_before`."""
    return tl.sum(_before(x[:, None, :], i[:, None, :], x[:, :, None], i[:, :, None]).to(tl.int32), 2)


@triton.jit
def _count_before(x, i, scores, indices, part, size, SIZE: tl.constexpr, BR: tl.constexpr):
    """How many of the first `size` entries in memory, `[2, SIZE]`, come before each of (x, i) `[2, M]`."""
    count = tl.zeros_like(i)
    for start in range(0, size, BR):
        j = start + tl.arange(0, BR)[None, :]
        y = tl.load(scores + part * SIZE + j, mask=j < size, other=float("-inf"))
        k = tl.load(indices + part * SIZE + j, mask=j < size, other=LARGEST)
        count += tl.sum(_before(y[:, None, :], k[:, None, :], x[:, :, None], i[:, :, None]).to(tl.int32), 2)
    return count


@triton.jit
def _rank(x, i, scores, indices, part, M: tl.constexpr, BR: tl.constexpr):
    """Place of every element of `[2, M]` in the order of `_before`; `scores` and `indices` are room for as many."""
    if M <= BR:
        rank = _ranks(x, i)
    else:
        at = part * M + tl.arange(0, M)[None, :]
        tl.debug_barrier()
        tl.store(scores + at, x)
        tl.store(indices + at, i)
        tl.debug_barrier()
        rank = _count_before(x, i, scores, indices, part, M, M, BR)
    return rank


@triton.jit
def _scores(q, keys, i, some, H, n, eps, F: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, IDW: tl.constexpr):
    """Exact scores of both query halves at `q` with sub-keys i `[2, M]` of the tables at `keys`; -inf where not `some`."""
    part = tl.arange(0, 2)[:, None, None]
    total = tl.zeros([2, BM, BF], tl.float32)
    for start in tl.static_range(0, F, BF):
        f = (start + tl.arange(0, BF))[None, None, :]
        x = read_values(q + part * F + f, f < F).to(tl.float32)
        y = read_values(keys + (part * H * n + i[:, :, None]) * F + f, some[:, :, None] & (f < F)).to(tl.float32)
        if IDW:
            total += (x - y) * (x - y)
        else:
            total += x * y
    score = tl.sum(total, 2)
    if IDW:
        score = -tl.log(eps + score)
    return _ordered(score, some)


@triton.jit
def _pair_sums(pairs, index, half, p, n, TOP: tl.constexpr):
    """Pairs `p` of the two sorted halves: sums of scores and slots; -inf and slots behind all others where there is none."""
    pair = tl.load(pairs + p)
    a, b, some = pair & 0xFF, pair >> 8, pair >= 0
    total = tl.load(half + a, mask=some, other=0.0) + tl.load(half + TOP + b, mask=some, other=0.0)
    slot = tl.load(index + a, mask=some, other=0) * n + tl.load(index + TOP + b, mask=some, other=0)
    return _ordered(total, some), tl.where(some, slot, LARGEST - p)


@triton.jit
def _add_rows(
    total,
    slot,
    weight,
    some,
    v,
    e,
    table,
    rows,
    place,
    kept,
    V: tl.constexpr,
    PLACED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """total + the weighted sum of some rows: of the table or, where `place` of the slot is not -1, of `rows`. e: for `kept`."""
    slot = slot.to(tl.int64)
    inside = some[:, None] & (v < V)[None, :]
    if PLACED:
        at = tl.load(place + slot, mask=some, other=-1).to(tl.int64)
        x = read_values(table + slot[:, None] * V + v[None, :], inside & (at < 0)[:, None]).to(tl.float32)
        own = tl.load(rows + at[:, None] * V + v[None, :], mask=inside & (at >= 0)[:, None], other=0.0)
        x = tl.where((at >= 0)[:, None], own, x)
    else:
        x = read_values(table + slot[:, None] * V + v[None, :], inside).to(tl.float32)
    if KEEP:
        tl.store(kept + e[:, None] * V + v[None, :], x, mask=inside)
    return total + tl.sum(x * weight[:, None], 0)


@triton.jit(do_not_specialize=["T", "total", "begin"])
def _finish(
    q,
    keys,
    work,
    pairs,
    index,
    half,
    slots,
    weights,
    table,
    rows,
    place,
    kept,
    out,
    T,
    H,
    n,
    total,
    begin,
    eps,
    F: tl.constexpr,
    TOP: tl.constexpr,
    WORDS: tl.constexpr,
    BW: tl.constexpr,
    BITS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    PAIRS: tl.constexpr,
    BP: tl.constexpr,
    IDW: tl.constexpr,
    V: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
    READ: tl.constexpr,
    PLACED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One token and head: exact scores of the marked sub-keys, the best of each half, the best pairs, softmax (READ: and rows).

    total: tokens times tables. begin: of the marks in `work`.
    """
    row = tl.program_id(0).to(tl.int64)
    g, h = row // (T * H), row % H
    own_q, own_keys = q + row * 2 * F, keys + (g * 2 * H + h) * n * F
    part, r, w = tl.arange(0, 2)[:, None], tl.arange(0, BM)[None, :], tl.arange(0, BW)[None, :]
    marks = work + begin
    own_scores = (marks + total.to(tl.int64) * WORDS).to(tl.pointer_type(tl.float32)) + row * 4 * BM
    own_places = (own_scores + 2 * BM).to(tl.pointer_type(tl.int32))
    own_index, own_half = index + row * 2 * TOP, half + row * 2 * TOP
    words = tl.load(marks + (row * 2 + part) * WORDS + w, mask=w < WORDS, other=0)
    many = _list_marked(words, own_places, part, w, BITS, BM)
    some = r < many
    i = tl.load(own_places + part * BM + r, mask=some, other=0)
    tl.debug_barrier()
    score = _scores(own_q, own_keys, i, some, H, n, eps, F, BM, BF, IDW)
    i = tl.where(some, i, n + r)
    rank = _rank(score, i, own_scores, own_places, part, BM, BR)
    tl.store(own_index + part * TOP + rank, i, mask=rank < TOP)
    tl.store(own_half + part * TOP + rank, score, mask=rank < TOP)
    if tl.max(tl.max(many, 1), 0) > BM:  # not all that are marked have been scored: score all sub-keys
        o = tl.arange(0, BK)[None, :]
        for b in range(tl.cdiv(n, BM)):
            tl.debug_barrier()
            i = b * BM + r + tl.zeros([2, BM], tl.int32)
            score = _scores(own_q, own_keys, i, i < n, H, n, eps, F, BM, BF, IDW)
            tl.store(own_scores + part * BM + r, score)
            tl.store(own_places + part * BM + r, i)
            tl.debug_barrier()
            listed = tl.where(b > 0, TOP, 0)
            old = tl.load(own_half + part * TOP + o, mask=o < listed, other=float("-inf"))
            old_i = tl.load(own_index + part * TOP + o, mask=o < listed, other=LARGEST)
            rank = _count_before(score, i, own_scores, own_places, part, BM, BM, BR)
            rank += _count_before(score, i, own_half, own_index, part, listed, TOP, BR)
            old_rank = o + _count_before(old, old_i, own_scores, own_places, part, BM, BM, BR)
            tl.debug_barrier()
            tl.store(own_index + part * TOP + rank, i, mask=rank < TOP)
            tl.store(own_half + part * TOP + rank, score, mask=rank < TOP)
            tl.store(own_index + part * TOP + old_rank, old_i, mask=(o < listed) & (old_rank < TOP))
            tl.store(own_half + part * TOP + old_rank, old, mask=(o < listed) & (old_rank < TOP))
    tl.debug_barrier()
    best, slot = _pair_sums(pairs, own_index, own_half, tl.arange(0, PAIRS), n, TOP)
    place_of = tl.zeros([PAIRS], tl.int32)
    for start in range(0, PAIRS, BP):
        more, more_slots = _pair_sums(pairs, own_index, own_half, start + tl.arange(0, BP), n, TOP)
        before = _before(more[None, :], more_slots[None, :], best[:, None], slot[:, None])
        place_of += tl.sum(before.to(tl.int32), 1)
    chosen = place_of < TOP
    weight = tl.where(chosen, tl.exp(best - tl.max(best, 0)), 0.0)
    weight = weight / tl.sum(weight, 0)
    tl.store(slots + row * TOP + place_of, slot, mask=chosen)
    tl.store(weights + row * TOP + place_of, weight, mask=chosen)
    if READ:
        e = tl.arange(0, BE)
        here = place_of[None, :] == e[:, None]
        slot = tl.sum(tl.where(here, slot[None, :], 0), 1)
        weight = tl.sum(tl.where(here, weight[None, :], 0.0), 1)
        own = place
        if PLACED:
            own = place + g * (n * n)
        for start in range(0, V, BV):
            v = start + tl.arange(0, BV)
            read = tl.zeros([BV], tl.float32)
            read = _add_rows(read, slot, weight, e < TOP, v, row * TOP + e, table, rows, own, kept, V, PLACED, KEEP)
            tl.store(out + row * V + v, read, mask=v < V)


@triton.jit(do_not_specialize=["T"])
def _read(
    slots,
    weights,
    table,
    rows,
    place,
    kept,
    out,
    T,
    N,
    E: tl.constexpr,
    V: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
    PLACED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One token: the weighted sum of the rows of all heads."""
    row = tl.program_id(0).to(tl.int64)
    own = place
    if PLACED:
        own = place + (row // T) * N
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        read = tl.zeros([BV], tl.float32)
        for first in range(0, E, BE):
            e = first + tl.arange(0, BE)
            some, at = e < E, row * E + e
            slot = tl.load(slots + at, mask=some, other=0)
            weight = tl.load(weights + at, mask=some, other=0.0)
            read = _add_rows(read, slot, weight, some, v, at, table, rows, own, kept, V, PLACED, KEEP)
        tl.store(out + row * V + v, read, mask=v < V)


@functools.cache
def _pair_places(top_k: int) -> list[tuple[int, int]]:
    """Places in two sorted lists whose sum can be among the `top_k` best."""
    return [(a, b) for a in range(top_k) for b in range(top_k) if (a + 1) * (b + 1) <= top_k]


@functools.cache
def _pairs(top_k: int, device: torch.device) -> Tensor:
    """The same as a + 256 b; -1 behind them."""
    pairs = [a + 256 * b for a, b in _pair_places(top_k)]
    padded = pairs + [-1] * (max(16, triton.next_power_of_2(len(pairs))) - len(pairs))
    with _disable_current_modes():  # kept: never a fake one
        return torch.tensor(padded, dtype=torch.int32, device=device)


def search(q: Tensor, keys: Tensor, top_k: int, score: str, eps: float) -> Found:
    """The slots that queries `[G, T, H, K]` read in tables of sub-keys `[G, 2, H, n, F]`."""
    return _search(q, keys, top_k, score, eps, None)


def search_and_read(
    q: Tensor,
    keys: Tensor,
    top_k: int,
    score: str,
    eps: float,
    table: Tensor,
    rows: Tensor | None = None,
    place: Tensor | None = None,
    kept: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Found]:
    """`search`, and `read` of what it found: values `[G, T, V]`."""
    if q.shape[2] > 1 or top_k > 16:
        found = search(q, keys, top_k, score, eps)
        return read(found.slots, found.weights, table, rows, place, kept, out_dtype), found
    out = q.new_empty(*q.shape[:2], table.shape[1], dtype=out_dtype)
    return out, _search(q, keys, top_k, score, eps, (table, rows, place, kept, out))


class _Plan(NamedTuple):
    """Blocks of a search, found once for every kind of call."""

    tables: int  # of sub-keys of one memory: 2 H
    rows: int  # sub-keys of a table, padded
    size: int  # of a sub-key, padded
    room: int  # numbers that a token, head and half has in `work`
    block_t: int
    prepare: dict[str, int]
    score: dict[str, int]
    finish: dict[str, int]


@functools.cache
def _plan(top_k: int, heads: int, n: int, half_size: int, many: bool) -> _Plan:
    power = triton.next_power_of_2
    block_n = min(MOST_IN_BLOCK, max(16, power(n)))
    blocks, bits = triton.cdiv(n, block_n), min(32, block_n // 8)
    words = blocks * block_n // bits
    group = max(1, min(8, block_n // 8, power(block_n // (4 * top_k) + 1) // 2))
    rows, size = blocks * block_n, triton.cdiv(half_size, 32) * 32
    block_m = max(16, power(blocks * (top_k + top_k // 4 + 3)))
    pairs = max(16, power(len(_pair_places(top_k))))
    return _Plan(
        2 * heads,
        rows,
        size,
        words + 2 * block_m,
        block_t := 64 if many else 16,
        {"F": half_size, "FP": size, "NP": rows, "ROWS": 8, "BF": min(256, power(size))},
        {
            **{"F": half_size, "TOP": top_k, "BLOCKS": blocks, "BN": block_n, "BITS": bits, "GROUP": group},
            **{"FP": size, "BT": block_t, "BF": 32, "num_warps": 8, "num_stages": 3},
        },
        {
            **{"F": half_size, "TOP": top_k, "WORDS": words, "BW": power(words), "BITS": bits, "BM": block_m, "BR": 16},
            **{"BK": max(16, power(top_k)), "BF": min(32, power(half_size)), "PAIRS": pairs, "BP": min(32, pairs)},
            "num_warps": 1 if block_m <= 16 else 4 if block_m <= 64 else 8,
        },
    )


def _search(q: Tensor, keys: Tensor, top_k: int, score: str, eps: float, reading: Any) -> Found:
    groups, tokens, heads, size = q.shape
    n, half_size = keys.shape[3], size // 2
    plan, idw = _plan(top_k, heads, n, half_size, groups * tokens * heads >= 1 << 12), score == "idw"
    q, keys = q.contiguous(), keys.contiguous()
    tables, total = groups * plan.tables, groups * tokens * plan.tables
    rounded = torch.empty(
        tables * plan.rows * plan.size, dtype=torch.float32 if INTERPRETING else torch.float16, device=q.device
    )
    # lengths of sub-keys, marks, room to sort
    work = torch.empty(2 * tables * plan.rows + total * plan.room, dtype=torch.int32, device=q.device)
    shape = (groups, tokens, heads, top_k)
    halves = (groups, tokens, heads, 2, top_k)
    found = Found(
        torch.empty(shape, dtype=torch.int32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
        torch.empty(halves, dtype=torch.int32, device=q.device),
        torch.empty(halves, dtype=torch.float32, device=q.device),
    )
    grid = (-(-tokens // plan.block_t), plan.tables * plan.score["BLOCKS"], groups)
    with on_device(q):
        launch_in_order(_prepare, (tables, plan.rows // plan.prepare["ROWS"]), (keys, rounded, work, n), plan.prepare)
        launch_in_order(_candidates, grid, (q, rounded, work, tokens, heads, n, UNSURE), {**plan.score, "IDW": idw})
        launch_in_order(
            _finish,
            (groups * tokens * heads,),
            (
                *(q, keys, work, _pairs(top_k, q.device), found.index, found.half, found.slots, found.weights),
                *(reading or (None,) * 5),
                *(tokens, heads, n, total, 2 * tables * plan.rows, eps),
            ),
            {
                **{**plan.finish, "IDW": idw, "READ": reading is not None},
                **_row_options(top_k, reading[0] if reading else None),
                "PLACED": reading is not None and reading[2] is not None,
                "KEEP": reading is not None and reading[3] is not None,
            },
        )
    return found


def _row_options(entries: int, table: Tensor | None) -> dict[str, int]:
    return _row_blocks(entries, 1 if table is None else table.shape[1])


@functools.cache
def _row_blocks(entries: int, size: int) -> dict[str, int]:
    return {
        "V": size,
        "BE": min(16, max(8, triton.next_power_of_2(entries))),
        "BV": min(512, triton.next_power_of_2(size)),
    }


def read(
    slots: Tensor,
    weights: Tensor,
    table: Tensor,
    rows: Tensor | None = None,
    place: Tensor | None = None,
    kept: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weighted sums of rows: `[G, T, V]`, summed over heads.

    Args:
        slots, weights: `[G, T, H, k]`, int32 and float32.
        table: `[N, V]`, shared. rows: `[P, V]`, private rows, in whose place `place` int32 `[G, N]` puts them (-1: shared).
        kept: filled with the rows as they are read, `[G, T, H * k, V]`.
    """
    groups, tokens, heads, top_k = slots.shape
    out = weights.new_empty(groups, tokens, table.shape[1], dtype=out_dtype)
    with on_device(weights):
        launch_in_order(
            _read,
            (groups * tokens,),
            (slots, weights, table, rows, place, kept, out, tokens, table.shape[0]),
            {
                **{"E": heads * top_k, "PLACED": place is not None, "KEEP": kept is not None, "num_warps": 4},
                **_row_options(heads * top_k, table),
            },
        )
    return out


# --- gradients ---


@triton.jit(do_not_specialize=["T"])
def _backward(
    q,
    keys,
    index,
    half,
    slots,
    weights,
    d_weights,
    d_out,
    table,
    d_q,
    pull,
    bins,
    T,
    H,
    n,
    TOP: tl.constexpr,
    BK: tl.constexpr,
    BJ: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    IDW: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One token and head: gradients of its weights (given, and ROWS: through the rows), of its scores, of its query.

    pull: of every sub-key kept of a half, its share of the query's gradient, `[G, T, H, 2, k]`. bins: which of all sub-keys it
    is, and the number of these where its share is 0. KEPT: `table` holds the rows in the order in which they were read.
    """
    row = tl.program_id(0).to(tl.int64)
    g, h = row // (T * H), row % H
    j = tl.arange(0, BK)
    at, some = row * TOP + j, j < TOP
    weight = tl.load(weights + at, mask=some, other=0.0)
    slot = tl.load(slots + at, mask=some, other=0)
    d_weight = tl.load(d_weights + at, mask=some, other=0.0)
    if ROWS:
        from_row = slot.to(tl.int64)
        if KEPT:
            from_row = at
        for start in range(0, V, BV):
            v = start + tl.arange(0, BV)
            d = read_values(d_out + (row // H) * V + v, v < V).to(tl.float32)
            x = read_values(table + from_row[:, None] * V + v[None, :], some[:, None] & (v < V)[None, :]).to(tl.float32)
            d_weight += tl.sum(x * d[None, :], 1)
    d_sum = weight * (d_weight - tl.sum(weight * d_weight, 0))
    for part in range(2):
        kept = (row * 2 + part) * TOP + j
        i = tl.load(index + kept, mask=some, other=-1)
        own = tl.where(part == 0, slot // n, slot % n)
        c = tl.sum(tl.where((i[:, None] == own[None, :]) & some[None, :], d_sum[None, :], 0.0), 1)
        if IDW:
            c *= 2 * tl.exp(tl.load(half + kept, mask=some, other=0.0))
        tl.store(pull + kept, c, mask=some)
        bin = ((g * 2 + part) * H + h) * n + i
        tl.store(bins + kept, tl.where(c != 0, bin, tl.num_programs(0) // T * 2 * n).to(tl.int32), mask=some)
        reach = tl.max(tl.where(some & (c != 0), j + 1, 0), 0)  # only zeros follow
        own_q, own_keys = (row * 2 + part) * F, keys + ((g * 2 + part) * H + h) * n * F
        tl.debug_barrier()
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            total = tl.zeros([BF], tl.float32)
            if IDW:
                query = read_values(q + own_q + f, f < F).to(tl.float32)
            for first in range(0, reach, BJ):
                e = (row * 2 + part) * TOP + first + tl.arange(0, BJ)
                near = first + tl.arange(0, BJ) < reach
                shares = tl.load(pull + e, mask=near, other=0.0)
                inside = (shares != 0)[:, None] & (f < F)[None, :]
                from_key = own_keys + tl.load(index + e, mask=near, other=0)[:, None] * F + f[None, :]
                y = read_values(from_key, inside).to(tl.float32)
                if IDW:
                    y = y - query[None, :]
                total += tl.sum(tl.where(inside, y * shares[:, None], 0.0), 0)
            tl.store(d_q + own_q + f, total, mask=f < F)


@triton.jit
def _key_gradient(
    order,
    bounds,
    pull,
    q,
    keys,
    out,
    splits,
    TOP: tl.constexpr,
    F: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    IDW: tl.constexpr,
):
    """One of `splits` parts of the gradient of a sub-key: the sum of pulls times queries (idw: differences) in the order of tokens."""
    bin, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(bounds + bin), tl.load(bounds + bin + 1)
    length = (end - begin + splits - 1) // splits
    begin, end = begin + split * length, tl.minimum(begin + split * length + length, end)
    f, e = tl.arange(0, BF), tl.arange(0, BE)
    total = tl.zeros([BF], tl.float32)
    key = read_values(keys + bin * F + f, f < F).to(tl.float32)
    for first in range(begin, end, BE):
        some = first + e < end
        entry = tl.load(order + first + e, mask=some, other=0)
        c = tl.load(pull + entry, mask=some, other=0.0)
        x = read_values(q + (entry // TOP)[:, None] * F + f[None, :], some[:, None] & (f < F)[None, :]).to(tl.float32)
        if IDW:
            x = x - key[None, :]
        total += tl.sum(x * c[:, None], 0)
    tl.store(out + (split * tl.num_programs(0).to(tl.int64) + bin) * F + f, total, mask=f < F)


@triton.jit
def _sum_readers(
    order,
    bounds,
    weights,
    d_out,
    out,
    table,
    d_weights,
    new_d_weights,
    E: tl.constexpr,
    V: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
):
    """One row of the table's gradient: the weighted sum of what its readers got, in the order of tokens. E: reads a token.

    With `table`, also the gradient of its readers' weights, for the row is read once here: `d_weights` and what comes through
    the row.
    """
    m = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds + m), tl.load(bounds + m + 1)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        total = tl.zeros([BV], tl.float32)
        if table is not None:
            row = read_values(table + m * V + v, v < V).to(tl.float32)
        for first in range(begin, end, BE):
            e = first + tl.arange(0, BE)
            entry = tl.load(order + e, mask=e < end, other=0)
            weight = tl.load(weights + entry, mask=e < end, other=0.0)
            inside = (e < end)[:, None] & (v < V)[None, :]
            x = read_values(d_out + (entry // E)[:, None] * V + v[None, :], inside).to(tl.float32)
            total += tl.sum(x * weight[:, None], 0)
            if table is not None:
                d = tl.load(d_weights + entry, mask=(e < end) & (start == 0), other=0.0) + tl.sum(x * row[None, :], 1)
                d += tl.load(new_d_weights + entry, mask=(e < end) & (start > 0), other=0.0)
                tl.store(new_d_weights + entry, d, mask=e < end)
        tl.debug_barrier()
        tl.store(out + m * V + v, total, mask=v < V)


def backward(
    q: Tensor,
    keys: Tensor,
    found: Found,
    score: str,
    d_weights: Tensor,
    d_out: Tensor | None = None,
    table: Tensor | None = None,
    kept: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a search, and of a read from a shared table.

    Args:
        d_weights: gradient of the weights `[G, T, H, k]`.
        d_out: that of what was read from `table` `[N, V]`, `[G, T, V]`. kept: `table` holds the rows in the order in which
            they were read, `[G * T * H * k, V]`.

    Returns: the gradient of q, and what `key_gradient` needs.
    """
    groups, tokens, heads, top_k = found.slots.shape
    half_size = q.shape[3] // 2
    q, keys, d_weights = q.contiguous(), keys.contiguous(), d_weights.contiguous()
    d_q, pull, bins = torch.empty_like(q), torch.empty_like(found.half), torch.empty_like(found.index)
    block_k = max(16, triton.next_power_of_2(top_k))
    size = 1 if table is None else table.shape[1]
    with on_device(q):
        launch_in_order(
            _backward,
            (groups * tokens * heads,),
            (
                *(q, keys, found.index, found.half, found.slots, found.weights, d_weights),
                *(None if d_out is None else d_out.contiguous(), table),
                *(d_q, pull, bins, tokens, heads, keys.shape[3]),
            ),
            {
                **{"TOP": top_k, "BK": block_k, "F": half_size, "IDW": score == "idw", "V": size, "KEPT": kept},
                **{"BJ": 8, "BF": min(256, triton.next_power_of_2(half_size))},
                "BV": min(triton.next_power_of_2(size), 4096 // block_k),
                **{"ROWS": table is not None, "num_warps": 4 if table is not None else 1},
            },
        )
    return d_q, pull, bins


def key_gradient(q: Tensor, keys: Tensor, score: str, pull: Tensor, bins: Tensor) -> Tensor:
    """The gradient of the sub-keys `[G, 2, H, n, F]`, float32; `pull` and `bins` are from `backward`."""
    count, half_size, top_k = keys.shape[:4].numel(), keys.shape[4], pull.shape[4]
    ordered, order = torch.sort(bins.flatten(), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, device=q.device, dtype=torch.int32))
    splits = max(1, min(8, bins.numel() // (64 * count)))
    parts = q.new_empty(splits, *keys.shape, dtype=torch.float32)
    with on_device(q):
        launch_in_order(
            _key_gradient,
            (count, splits),
            (order, bounds, pull, q.contiguous(), keys.contiguous(), parts, splits),
            {
                **{"TOP": top_k, "F": half_size, "BE": 8, "BF": max(16, triton.next_power_of_2(half_size))},
                **{"IDW": score == "idw", "num_warps": 2},
            },
        )
    return parts.sum(0)


def table_gradient(
    d_out: Tensor, slots: Tensor, weights: Tensor, table: Tensor, d_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a table `[N, V]`, every row the sum over its readers, and that of the weights, `d_weights` included.

    Args:
        d_out: `[X, V]`. slots, weights, d_weights: `[X, E]`, the rows that were read, their weights and more of their gradient.
    """
    ordered, order = torch.sort(slots.flatten(), stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(table.shape[0] + 1, device=d_out.device, dtype=ordered.dtype))
    return _sum_of_readers(d_out, order, bounds, weights, table.dtype, table, d_weights.contiguous())


def sparse_table_gradient(d_out: Tensor, slots: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of the rows that somebody read: the rows `[M]` (ascending, each once), and their gradient `[M, V]`."""
    ordered, order = torch.sort(slots.flatten(), stable=True)
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return rows, _sum_of_readers(d_out, order, bounds, weights, dtype)[0]


READERS = (2, 1)  # of a row at a time, and warps


def _sum_of_readers(
    d_out: Tensor,
    order: Tensor,
    bounds: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    table: Tensor | None = None,
    d_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    size = d_out.shape[1]
    out = d_out.new_empty(bounds.shape[0] - 1, size, dtype=dtype)
    new_d_weights = None if d_weights is None else torch.empty_like(d_weights)
    with on_device(d_out):
        launch_in_order(
            _sum_readers,
            (out.shape[0],),
            (order, bounds, weights.contiguous(), d_out.contiguous(), out, table, d_weights, new_d_weights),
            {
                **{"E": weights.shape[1], "V": size, "BE": READERS[0], "BV": min(1024, triton.next_power_of_2(size))},
                "num_warps": READERS[1],
            },
        )
    return out, new_d_weights
