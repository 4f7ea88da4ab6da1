"""Triton kernels of product-key memories: search, read and their gradients, shared by `pkm` and `fwpkm`.

Imported only by the `triton` levels. Axis letters as in `product_keys`: G memories, T tokens of one, H heads, F = K / 2,
n sub-keys a half, k slots read, V value size; M candidates.

Search in two stages that together are exact. `_candidates` scores all sub-keys on tensor cores (idw as 2 q.k - |k|^2, from
16-bit halves of float32) and keeps the M > k best of every half in registers. `_finish` scores these exactly (idw by
differences) and takes the k best. The first stage knows how wrong it can be: where one of the sub-keys that it left out may
belong to the k best, `_finish` scores all of them exactly.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import INTERPRETING
from .gpu import on_device
from .gpu import read as read_values

MOST_SUBKEYS, MOST_READ, LARGEST_HALF = 1024, 64, 512
MOST_IN_BLOCK = 256  # sub-keys that a program scores: their scores stay in registers
SPARE = 2  # candidates of a block beyond k
CUT = tl.constexpr(4e-5)  # what the last bits hold of a candidate's distance, at most: MOST_IN_BLOCK / 2^23
NONE = tl.constexpr(0x7FFFFFFF)


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
    keys, high, low, norm, n, F: tl.constexpr, FP: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr
):
    """Two halves of every sub-key, padded to `[NP, FP]` with 0, and its squared length."""
    table = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, FP, BF):
        f = start + tl.arange(0, BF)
        x = read_values(keys + (table * n + row)[:, None] * F + f[None, :], (row < n)[:, None] & (f < F)[None, :])
        x = x.to(tl.float32)
        total += tl.sum(x * x, 1)
        first = x.to(high.dtype.element_ty)
        at = (table * NP + row)[:, None] * FP + f[None, :]
        tl.store(high + at, first)
        tl.store(low + at, (x - first.to(tl.float32)).to(low.dtype.element_ty))
    tl.store(norm + table * NP + row, total)


@triton.jit(do_not_specialize=["T"])
def _candidates(
    q,
    high,
    low,
    norm,
    found,
    bounds,
    T,
    H,
    n,
    M: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BF: tl.constexpr,
    IDW: tl.constexpr,
    SPLIT_Q: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """The M best of a block of sub-keys by approximate scores, best first.

    A candidate is how far it is from the block's best score (float32, taken as an integer) with its place in the last bits.
    bounds: the best score, and how wrong a score can be.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    block, other = tl.program_id(1) % BLOCKS, tl.program_id(1) // BLOCKS
    part, h = other // H, other % H
    g = tl.program_id(2).to(tl.int64)
    first_key = (g * 2 * H + other) * (BLOCKS * BN) + block * BN
    row = (g * T + t) * H + h
    real, i = t < T, tl.arange(0, BN)
    scores = tl.zeros([BT, BN], tl.float32)
    length = tl.zeros([BT], tl.float32)
    for start in range(0, FP, BF):
        f = start + tl.arange(0, BF)
        x = read_values(q + (row * 2 + part)[:, None] * F + f[None, :], real[:, None] & (f < F)[None, :]).to(tl.float32)
        length += tl.sum(x * x, 1)
        at = (first_key + i)[None, :] * FP + f[:, None]
        y = tl.load(high + at)
        first = x.to(y.dtype)
        scores = tl.dot(first, y, scores)
        if SPLIT_Q:
            scores = tl.dot((x - first.to(tl.float32)).to(y.dtype), y, scores)
        if SPLIT_K:
            scores = tl.dot(first, tl.load(low + at), scores)
    squares = tl.load(norm + first_key + i)
    longest = tl.max(squares, 0)
    wrong = 0.000123 * tl.sqrt(length * longest)  # 2^-13: dropped products, and sums that the tensor cores cut off
    if IDW:
        scores = 2 * scores - squares[None, :]
        wrong = 2 * wrong + 2e-6 * (length + longest)
    some = (block * BN + i < n)[None, :]
    scores = tl.where(some, scores, float("-inf"))
    best = tl.max(scores, 1)
    key = ((best[:, None] - scores).to(tl.int32, bitcast=True) & (NONE - (BN - 1))) | i[None, :]
    key = tl.where(some, key, NONE)
    last = tl.full([BT], -1, tl.int32)
    out = (row * 2 + part) * BLOCKS + block
    for j in range(M):
        last = tl.min(tl.where(key > last[:, None], key, NONE), 1)
        tl.store(found + out * M + j, last, mask=real)
    tl.store(bounds + out * 2, best, mask=real)
    tl.store(bounds + out * 2 + 1, wrong, mask=real)


@triton.jit
def _score(total, eps, IDW: tl.constexpr):
    if IDW:
        total = -tl.log(eps + total)
    return total


@triton.jit
def _for_order(x):
    """x with NaN as the lowest value, so that every place in an order is taken once."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _before(x, i, y, j):
    """Whether (x, i) comes before (y, j): the larger first, the lower index first among equals."""
    return (x > y) | ((x == y) & (i < j))


@triton.jit
def _ranks(x, i):
    """Place of every element in the order of `_before`."""
    return tl.sum(_before(x[None, :], i[None, :], x[:, None], i[:, None]).to(tl.int32), 1)


@triton.jit
def _all_scores(q, keys, index, half, n, eps, TOP: tl.constexpr, F: tl.constexpr, NP: tl.constexpr, IDW: tl.constexpr):
    """The TOP best of all n sub-keys at `keys` for the query half at `q`, by exact scores."""
    i, total = tl.arange(0, NP), tl.zeros([NP], tl.float32)
    for start in range(0, F, 8):
        f = start + tl.arange(0, 8)
        x = read_values(q + f, f < F).to(tl.float32)[None, :]
        y = read_values(keys + i[:, None] * F + f[None, :], (i < n)[:, None] & (f < F)[None, :]).to(tl.float32)
        if IDW:
            total += tl.sum((x - y) * (x - y), 1)
        else:
            total += tl.sum(x * y, 1)
    score = _score(total, eps, IDW)
    rest = (i < n).to(tl.int32)
    for j in range(TOP):
        order = tl.where(rest > 0, _for_order(score), float("-inf"))
        best = tl.max(order, 0)
        at = tl.min(tl.where((rest > 0) & (order == best), i, NP), 0)
        tl.store(index + j, at)
        tl.store(half + j, tl.sum(tl.where(i == at, score, 0.0), 0))
        rest = tl.where(i == at, 0, rest)


@triton.jit
def _pair_sums(pairs, index, half, p, n, TOP: tl.constexpr):
    """Pairs `p` of the two sorted halves: sums of scores and slots; -inf and slots behind all others where there is none."""
    pair = tl.load(pairs + p)
    a, b = pair & 0xFF, pair >> 8
    some = pair >= 0
    total = tl.load(half + a, mask=some, other=0.0) + tl.load(half + TOP + b, mask=some, other=0.0)
    slot = tl.load(index + a, mask=some, other=0) * n + tl.load(index + TOP + b, mask=some, other=0)
    return tl.where(some, total, float("-inf")), tl.where(some, slot, NONE - p)


@triton.jit
def _sum_rows(
    slots,
    weights,
    table,
    rows,
    place,
    kept,
    out,
    row,
    g,
    N,
    E: tl.constexpr,
    V: tl.constexpr,
    BE: tl.constexpr,
    BV: tl.constexpr,
    PLACED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The weighted sum of the E rows of token `row`, from the table or, where `place` of the slot is not -1, from `rows`."""
    first_e = row * E
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        total = tl.zeros([BV], tl.float32)
        for first in range(0, E, BE):
            e = first + tl.arange(0, BE)
            slot = tl.load(slots + first_e + e, mask=e < E, other=0).to(tl.int64)
            weight = tl.load(weights + first_e + e, mask=e < E, other=0.0)
            inside = (e < E)[:, None] & (v < V)[None, :]
            if PLACED:
                at = tl.load(place + g * N + slot, mask=e < E, other=-1).to(tl.int64)
                x = read_values(table + slot[:, None] * V + v[None, :], inside & (at < 0)[:, None]).to(tl.float32)
                own = tl.load(rows + at[:, None] * V + v[None, :], mask=inside & (at >= 0)[:, None], other=0.0)
                x = tl.where((at >= 0)[:, None], own, x)
            else:
                x = read_values(table + slot[:, None] * V + v[None, :], inside).to(tl.float32)
            if KEEP:
                tl.store(kept + (first_e + e)[:, None] * V + v[None, :], x, mask=inside)
            total += tl.sum(x * weight[:, None], 0)
        tl.store(out + row * V + v, total, mask=v < V)


@triton.jit(do_not_specialize=["T"])
def _finish(
    q,
    keys,
    found,
    bounds,
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
    eps,
    TOP: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    NP: tl.constexpr,
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
    """One token and head: exact scores of the candidates, the best of each half, the best pairs, softmax (READ: and rows)."""
    row = tl.program_id(0).to(tl.int64)
    g, h = row // (T * H), row % H
    own_index, own_half = index + row * 2 * TOP, half + row * 2 * TOP
    j = tl.arange(0, BM)
    block = j // M
    for part in tl.static_range(2):
        at = (row * 2 + part) * BLOCKS
        key = tl.load(found + at * M + j, mask=block < BLOCKS, other=NONE)
        some = key != NONE
        i = tl.where(some, block * BN + (key & (BN - 1)), n + j)
        away = (key & (NONE - (BN - 1))).to(tl.float32, bitcast=True)
        approximate = tl.load(bounds + (at + block) * 2, mask=block < BLOCKS, other=0.0) - away
        wrong = tl.max(tl.load(bounds + (at + block) * 2 + 1, mask=block < BLOCKS, other=0.0), 0)
        first = _ranks(tl.where(some, _for_order(approximate), float("-inf")), i) < TOP
        least = tl.min(tl.where(first, approximate - CUT * away, float("inf")), 0) - 2 * wrong
        near = some & (approximate >= least)  # without those left out, the best are among these
        some = first | near
        missed = tl.max((near & (j % M == M - 1)).to(tl.int32), 0) > 0
        own_q, own_keys = q + (row * 2 + part) * F, keys + ((g * 2 + part) * H + h) * n * F
        total = tl.zeros([BM], tl.float32)
        for start in range(0, F, BF):
            f = start + tl.arange(0, BF)
            x = read_values(own_q + f, f < F).to(tl.float32)[None, :]
            y = read_values(own_keys + i[:, None] * F + f[None, :], some[:, None] & (f < F)[None, :]).to(tl.float32)
            if IDW:
                total += tl.sum((x - y) * (x - y), 1)
            else:
                total += tl.sum(x * y, 1)
        score = _score(total, eps, IDW)
        rank = _ranks(tl.where(some, _for_order(score), float("-inf")), tl.where(some, i, n + j))
        tl.store(own_index + part * TOP + rank, i, mask=rank < TOP)
        tl.store(own_half + part * TOP + rank, score, mask=rank < TOP)
        if missed:
            tl.debug_barrier()
            _all_scores(own_q, own_keys, own_index + part * TOP, own_half + part * TOP, n, eps, TOP, F, NP, IDW)
    tl.debug_barrier()
    total, slot = _pair_sums(pairs, own_index, own_half, tl.arange(0, PAIRS), n, TOP)
    order = _for_order(total)
    rank = tl.zeros([PAIRS], tl.int32)
    for start in range(0, PAIRS, BP):
        more, more_slots = _pair_sums(pairs, own_index, own_half, start + tl.arange(0, BP), n, TOP)
        before = _before(_for_order(more)[None, :], more_slots[None, :], order[:, None], slot[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    best = rank < TOP
    weight = tl.where(best, tl.exp(total - tl.max(order, 0)), 0.0)
    weight = weight / tl.sum(weight, 0)
    tl.store(slots + row * TOP + rank, slot, mask=best)
    tl.store(weights + row * TOP + rank, weight, mask=best)
    if READ:
        tl.debug_barrier()
        _sum_rows(slots, weights, table, rows, place, kept, out, row, g, n * n, TOP, V, BE, BV, PLACED, KEEP)


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
    _sum_rows(slots, weights, table, rows, place, kept, out, row, row // T, N, E, V, BE, BV, PLACED, KEEP)


@functools.cache
def _pairs(top_k: int, device: torch.device) -> Tensor:
    """Places (a, b) in two sorted lists whose sum can be among the `top_k` best, a + 256 b; -1 behind them."""
    pairs = [a + 256 * b for a in range(top_k) for b in range(top_k) if (a + 1) * (b + 1) <= top_k]
    padded = pairs + [-1] * (triton.next_power_of_2(max(len(pairs), 16)) - len(pairs))
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
    if q.shape[2] > 1:
        found = search(q, keys, top_k, score, eps)
        return read(found.slots, found.weights, table, rows, place, kept, out_dtype), found
    out = q.new_empty(*q.shape[:2], table.shape[1], dtype=out_dtype)
    return out, _search(q, keys, top_k, score, eps, (table, rows, place, kept, out))


def _search(q: Tensor, keys: Tensor, top_k: int, score: str, eps: float, reading: Any) -> Found:
    groups, tokens, heads, size = q.shape
    n, half_size = keys.shape[3], size // 2
    q, keys = q.contiguous(), keys.contiguous()
    padded = max(16, triton.next_power_of_2(n))
    block_n = min(MOST_IN_BLOCK, padded)
    blocks = triton.cdiv(n, block_n)
    candidates = top_k + (0 if blocks > 1 and top_k >= 16 else SPARE)  # of a block: that all are in one is improbable
    block_f = 32
    size_f = triton.cdiv(half_size, block_f) * block_f
    wide = torch.float32 if INTERPRETING else torch.bfloat16
    high = q.new_empty(groups * 2 * heads, blocks * block_n, size_f, dtype=wide)
    low = torch.empty_like(high)
    norm = q.new_empty(high.shape[:2], dtype=torch.float32)
    shape = (groups, tokens, heads, 2)
    best = q.new_empty(*shape, blocks, candidates, dtype=torch.int32)
    bounds = q.new_empty(*shape, blocks, 2, dtype=torch.float32)
    found = Found(
        q.new_empty(*shape[:3], top_k, dtype=torch.int32),
        q.new_empty(*shape[:3], top_k, dtype=torch.float32),
        q.new_empty(*shape, top_k, dtype=torch.int32),
        q.new_empty(*shape, top_k, dtype=torch.float32),
    )
    pairs = _pairs(top_k, q.device)
    idw = score == "idw"
    block_t = 64 if groups * tokens * heads >= 1 << 12 else 16
    block_m = max(16, triton.next_power_of_2(blocks * candidates))
    with on_device(q):
        _prepare[(groups * 2 * heads, blocks * block_n // 16)](
            keys, high, low, norm, n, F=half_size, FP=size_f, NP=blocks * block_n, ROWS=16, BF=block_f
        )
        _candidates[(triton.cdiv(tokens, block_t), 2 * heads * blocks, groups)](
            q,
            high,
            low,
            norm,
            best,
            bounds,
            tokens,
            heads,
            n,
            M=candidates,
            F=half_size,
            FP=size_f,
            BLOCKS=blocks,
            BN=block_n,
            BT=block_t,
            BF=block_f,
            IDW=idw,
            SPLIT_Q=wide != torch.float32 and q.dtype != torch.bfloat16,
            SPLIT_K=wide != torch.float32 and keys.dtype != torch.bfloat16,
            num_warps=4,
            num_stages=3,
        )
        _finish[(groups * tokens * heads,)](
            q,
            keys,
            best,
            bounds,
            pairs,
            *(found.index, found.half, found.slots, found.weights),
            *(reading or (None,) * 5),
            tokens,
            heads,
            n,
            eps,
            TOP=top_k,
            M=candidates,
            BM=block_m,
            F=half_size,
            BF=min(triton.next_power_of_2(half_size), 8192 // block_m),
            BLOCKS=blocks,
            BN=block_n,
            NP=padded,
            PAIRS=pairs.shape[0],
            BP=min(32, pairs.shape[0]),
            IDW=idw,
            **_row_options(top_k, reading[0] if reading else None),
            READ=reading is not None,
            PLACED=reading is not None and reading[2] is not None,
            KEEP=reading is not None and reading[3] is not None,
            num_warps=4 if block_m <= 128 else 8,
        )
    return found


def _row_options(entries: int, table: Tensor | None) -> dict[str, int]:
    size = 1 if table is None else table.shape[1]
    return {"V": size, "BE": min(8, triton.next_power_of_2(entries)), "BV": min(512, triton.next_power_of_2(size))}


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
        _read[(groups * tokens,)](
            slots,
            weights,
            table,
            rows,
            place,
            kept,
            out,
            tokens,
            table.shape[0],
            E=heads * top_k,
            **_row_options(heads * top_k, table),
            PLACED=place is not None,
            KEEP=kept is not None,
            num_warps=4,
        )
    return out
