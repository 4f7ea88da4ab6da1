"""Triton kernels of falcon2a (and of the reads and writes of falcon2): linear attention with one step and one decay for every value column.

Within a chunk, with log-decay prefix u_tv of column v and b_jv = eta_jv v_jv,

    o_tv = exp(u_tv) (S_0^T q_t)_v + sum_{j <= t} (q_t . x_j) exp(u_tv - u_jv) b_jv

by halving: on every level the right half (2^level rows) of a block reads the left half, both rescaled to the border between them by factors
F <= 1, so the work is one matrix product F * ((q x^T, masked) @ (F * b)) a level and no [C, C, V] tensor exists. Segments,
states and the two directions are those of `associative.py`. A program holds a block of value columns. Gradients of decays are
summed pair by pair, so that none cancels: near the floor they are multiplied by 10^4. This is for float32; 16-bit inputs go to `rescaled.py`,
but for chunks with a low decay, whose gradients of gains come from here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..associative import FIXED, _segment, scan
from ..gpu import (
    block,
    dot,
    key_pointers,
    launch,
    missing_pairs,
    of_chunk,
    on_device,
    parts,
    read,
    row_of,
    value_pointers,
)
from ..ranks import CHUNK, Ranks
from .prepass import energy_backward
from .rescaled import Rescaled
from .rules import Options

ROOM = {"states": 4096, "values": 4096, "scores": 2048, "keys": 4096}  # elements of a tile that a program holds

SOME = 64  # chunks of a program that looks for low decays


def cut(kind: str, rows: int, columns: int) -> int:
    """Columns of a tile `[rows, columns]` that one program holds."""
    return min(64, block(columns), max(16, ROOM[kind] // block(rows)))


def low_columns(rows: int, columns: int) -> int:
    """Columns that a program of `Columns.low_values` holds, of a block of `columns`."""
    return min(columns, 32 if block(rows) <= 128 else 16)


@triton.jit
def _gains(beta, row, token, dv, V: tl.constexpr):
    """Gain of every token and column, `[C, BV]`."""
    return read(beta + row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]).to(tl.float32)


@triton.jit
def _unclamped(gain, upto, upto_low, at, DIVIDE: tl.constexpr, C: tl.constexpr):
    """Decay of every token and column before it is held above the floor."""
    e = tl.arange(0, C)
    pull = tl.load(upto_low + at + e)[:, None]
    if DIVIDE:
        raw = tl.load(upto + at + e)[:, None] + (1.0 - gain) * pull
    else:
        raw = 1.0 - gain * pull
    return raw


@triton.jit
def _decay_over(chosen, log_decay, PRECISION: tl.constexpr):
    """exp of the sums of log-decays `[C, BV]` over chosen rows `[C, C]`: sums, never differences of sums."""
    chosen = tl.where(chosen, 1.0, 0.0).to(log_decay.dtype)
    return tl.exp(tl.minimum(tl.dot(chosen, log_decay, input_precision=PRECISION), 0.0))


@triton.jit
def _between(row, other, level, AFTER: tl.constexpr):
    """Whether the decay of row `other` lies between row `row` and the border of its block.

    A right row reads what has decayed after the border up to itself (or to the row before), a left row is decayed after itself
    up to the border, the last row of its half.
    """
    half = row >> level
    return (half == other >> level) & tl.where(half & 1 == 1, row - other >= 1 - AFTER, other > row)


@triton.jit
def _crosses(later, earlier, level):
    """Whether row `later` is in the right half and row `earlier` in the left half of one block."""
    return (later > earlier) & ((later ^ earlier) >> level == 1)


@triton.jit(do_not_specialize=FIXED)
def _column_states(
    left,
    head_x,
    right,
    head_v,
    beta,
    first,
    strength,
    upto,
    upto_low,
    state,
    total,
    docs,
    segment_doc,
    rows,
    decay_floor,
    T,
    NC,
    NS,
    SEG,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """What the pairs of a segment (BACK: its queries and output gradients) add to the state at its end (BACK: start)."""
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    e, dk = tl.arange(0, C), tl.arange(0, BK)
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    S = tl.zeros([BK, BV], tl.float32)
    sum_u = tl.zeros([BV], tl.float32)
    missing = missing_pairs(first, n, SHIFT)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        r = i * C + e
        at = ((chunk + i) * H + h) * C
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        gain = _gains(beta, row, token, dv, V)
        eta = gain * tl.load(strength + at + e)[:, None]
        log_decay = tl.log(tl.maximum(_unclamped(gain, upto, upto_low, at, DIVIDE, C), decay_floor))
        u_end = tl.sum(log_decay, 0)
        if BACK:
            lp, rp, lok, rok = left + row * K, right + row * V, token, token
        else:
            lp, lok = key_pointers(left, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
            rp, rok = value_pointers(right, head_v, rows, n, start, length, missing, h, r, H, V, 1, SHIFT, MASKED)
        x = read(lp[:, None] + dk[None, :], lok[:, None] & (dk < K)[None, :])
        y = read(rp[:, None] + dv[None, :], rok[:, None] & (dv < V)[None, :])
        if BACK:
            w = _decay_over(e[:, None] - e[None, :] >= 1 - AFTER, log_decay.to(x.dtype), "tf32x3")
        else:
            w = eta * _decay_over(e[None, :] > e[:, None], log_decay.to(x.dtype), "tf32x3")
        S = S * tl.exp(u_end)[None, :] + dot(tl.trans(x), (y.to(tl.float32) * w).to(x.dtype))
        sum_u += u_end
    own = state + ((q * H + h) * K + dk)[:, None] * V + dv[None, :]
    tl.store(own, S, mask=(dk < K)[:, None] & (dv < V)[None, :])
    tl.store(total + (q * H + h) * V + dv, sum_u, mask=dv < V)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b.to(a.dtype), input_precision=PRECISION)


@triton.jit
def _segment_values(
    q,
    h,
    n,
    start,
    length,
    chunk,
    begin,
    end,
    query,
    k,
    head_x,
    v,
    head_v,
    beta,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    state,
    before,
    out,
    head_out,
    d_beta,
    d_strength,
    d_decay,
    rows,
    decay_floor,
    M,
    NIL,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    BACK: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    MORE: tl.constexpr,
):
    """Outputs of a segment from the state before it. BACK, from its end: gradients of values and gains.

    BACK: `state` is the gradient after the segment, `before` the state before it: a segment is one chunk. NIL is 0, unknown to
    the compiler. q: number of the segment; its document, first row, length, and chunks: as of `_segment`. out may be None.
    MORE (BACK, without `state`): add the gradients of gains that come through other readers, whose output gradients are minus d_o.
    """
    part = tl.program_id(1).to(tl.int64)
    e, dk = tl.arange(0, C), tl.arange(0, BK)
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = (dk < K)[None, :], (dv < V)[None, :]
    own = ((q * H + h) * K + dk)[:, None] * V + dv[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if not MORE:
        S += tl.load(state + own, mask=(dk < K)[:, None] & in_v, other=0.0).to(tl.float32)
    missing = missing_pairs(first, n, SHIFT)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        r = i * C + e
        at = ((chunk + i) * H + h) * C
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        gain = _gains(beta, row, token, dv, V)
        eta = gain * tl.load(strength + at + e)[:, None]
        log_decay = tl.log(tl.maximum(_unclamped(gain, upto, upto_low, at, DIVIDE, C), decay_floor))
        u_end = tl.sum(log_decay, 0)
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        vp, vok = value_pointers(v, head_v, rows, n, start, length, missing, h, r, H, V, 1, SHIFT, MASKED)
        a = read(query + row[:, None] * K + dk[None, :], token[:, None] & in_k).to(tl.float32)
        x = read(xp[:, None] + dk[None, :], xok[:, None] & in_k).to(tl.float32)
        kept = tl.exp(u_end)[None, :]
        from_start = _decay_over(e[:, None] - e[None, :] >= 1 - AFTER, log_decay, PRECISION)
        to_end = _decay_over(e[None, :] > e[:, None], log_decay, PRECISION)
        if BACK:
            given = read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v).to(tl.float32)
            if MORE:
                given = -given
            scores = _dot(x, tl.trans(a), PRECISION)  # [j, t]
            found = _dot(x, S.to(x.dtype), PRECISION) * to_end
            # log-decay s lies between what is written before s and read from s on: add exactly those pairs
            y = read(vp[:, None] + dv[None, :], vok[:, None] & in_v).to(tl.float32)
            S_before = tl.load(before + own, mask=(dk < K)[:, None] & in_v, other=0.0).to(tl.float32)
            reads = _dot(a, S_before, PRECISION) * from_start * given
            d_log_decay = tl.cumsum(reads, 0, reverse=True)
            if not AFTER:
                d_log_decay -= reads
            d_log_decay += tl.cumsum(found * y * eta, 0) - found * y * eta
            d_log_decay += tl.sum(S_before * S, 0)[None, :] * kept
            forward_scores = _dot(a, tl.trans(x), PRECISION)
            S = S * kept + _dot(tl.trans(a), (given.to(tl.float32) * from_start).to(a.dtype), PRECISION)
        else:
            b = read(vp[:, None] + dv[None, :], vok[:, None] & in_v).to(tl.float32) * eta
            scores = _dot(a, tl.trans(x), PRECISION)  # [t, j]
            found = _dot(a, S.to(a.dtype), PRECISION) * from_start
            S = S * kept + _dot(tl.trans(x), (b * to_end).to(a.dtype), PRECISION)
            given = b.to(a.dtype)
        if AFTER:
            found += tl.sum(tl.where(e[:, None] == e[None, :], scores, 0.0), 1)[:, None] * given
        scores = scores.to(a.dtype)
        for level in range(LEVELS):
            F = _decay_over(_between(e[:, None], e[None, :], level, AFTER), log_decay, PRECISION)
            if BACK:
                crossed = tl.where(_crosses(e[None, :], e[:, None], level), scores, 0.0)
            else:
                crossed = tl.where(_crosses(e[:, None], e[None, :], level), scores, 0.0)
            more = F * _dot(crossed.to(a.dtype), F * given, PRECISION)
            found += more
            if BACK:
                crossed = tl.where(_crosses(e[:, None], e[None, :], level), forward_scores, 0.0)
                pairs = more * y * eta + F * _dot(crossed, F * y * eta, PRECISION) * given
                between = _between(e[None, :], e[:, None], level, AFTER)
                d_log_decay += _dot(tl.where(between, 1.0, 0.0), pairs, PRECISION)
        if BACK:
            # loaded again: nothing of it is held in registers over the levels
            gain = _gains(beta + NIL * i, row, token, dv, V)
            inverse = tl.load(strength + at + e)[:, None]
            raw = _unclamped(gain, upto, upto_low, at, DIVIDE, C)
            eta = gain * inverse
            y = read(vp[:, None] + (dv + NIL * i)[None, :], vok[:, None] & in_v).to(tl.float32)
            if out is not None:
                op, ok = value_pointers(out, head_out, rows, n, start, length, missing, h, r, H, V, 1, SHIFT, MASKED)
                tl.store(op[:, None] + dv[None, :], found * eta, mask=ok[:, None] & in_v)
            d_eta = found * y
            d_gamma = tl.where(raw >= decay_floor, d_log_decay / tl.maximum(raw, decay_floor), 0.0)
            d_gain = d_eta * inverse - d_gamma * tl.load(upto_low + at + e)[:, None]
            d_eta, d_gamma = tl.sum(gain * d_eta, 1), tl.sum(gain * d_gamma, 1)
            to, slot, ok = d_beta + row[:, None] * V + dv[None, :], part * M * H * C + at + e, token[:, None] & in_v
            if MORE:
                d_gain += read(to, ok).to(tl.float32)
                d_eta, d_gamma = d_eta + tl.load(d_strength + slot), d_gamma + tl.load(d_decay + slot)
            tl.store(to, d_gain, mask=ok)
            tl.store(d_strength + slot, d_eta)
            tl.store(d_decay + slot, d_gamma)
        else:
            tl.store(out + row[:, None] * V + dv[None, :], found, mask=token[:, None] & in_v)


@triton.jit(do_not_specialize=[*FIXED, "NIL"])
def _column_values(
    query,
    k,
    head_x,
    v,
    head_v,
    beta,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    state,
    before,
    out,
    head_out,
    d_beta,
    d_strength,
    d_decay,
    docs,
    segment_doc,
    rows,
    decay_floor,
    T,
    NC,
    NS,
    SEG,
    M,
    NIL,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """`_segment_values` of every segment and block of columns."""
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    _segment_values(
        q, h, n, start, length, chunk, begin, end, query, k, head_x, v, head_v, beta, d_o, first, strength, upto, upto_low, state, before, out, head_out, d_beta, d_strength, d_decay, rows, decay_floor, M, NIL, H, K, V, BK, BV, LEVELS, SHIFT, AFTER, DIVIDE, BACK, MASKED, C, "tf32x3", False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NC", "M", "NIL"])
def _low_column_values(
    low,
    query,
    k,
    head_x,
    v,
    head_v,
    beta,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    state,
    before,
    out,
    head_out,
    d_beta,
    d_strength,
    d_decay,
    docs,
    chunk_doc,
    rows,
    decay_floor,
    T,
    NC,
    M,
    NIL,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    SOME: tl.constexpr,
    SHARE: tl.constexpr,
    MORE: tl.constexpr,
):
    """`_segment_values`, BACK, of those chunks that have a low decay (see `rescaled.LOW`); a program looks at SOME of them.

    low: `[blocks, M, H]`, for every SHARE blocks of columns of this kernel.
    """
    some = tl.program_id(0) * SOME
    low += tl.program_id(1) // SHARE * M * H
    each = some + tl.arange(0, SOME)
    if tl.max(tl.load(low + each, mask=each < M * H, other=0), 0) > 0:
        for index in range(some, tl.minimum(some + SOME, (M * H).to(tl.int32))):
            if tl.load(low + index) > 0:
                q, h = (index // H).to(tl.int64), index % H
                n, start, length, i = of_chunk(q, docs, chunk_doc, T, NC, PLAIN)
                _segment_values(
                    q, h, n, start, length, q - i, i, i + 1, query, k, head_x, v, head_v, beta, d_o, first, strength, upto, upto_low, state, before, out, head_out, d_beta, d_strength, d_decay, rows, decay_floor, M, NIL, H, K, V, BK, BV, LEVELS, SHIFT, AFTER, DIVIDE, True, MASKED, C, "tf32", MORE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NC"])
def _column_scores(
    v,
    head_v,
    beta,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    scores,
    docs,
    chunk_doc,
    rows,
    decay_floor,
    T,
    NC,
    H,
    V: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of q_t . x_j within every chunk, `[M, H, C, C]`: sum over columns of d_o_t exp(u_t - u_j) b_j."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e = tl.arange(0, C)
    r = i * C + e
    at = (c * H + h) * C
    token = r < length
    row = row_of(rows, start, r, token, MASKED) * H + h
    vp, vok = value_pointers(
        v, head_v, rows, n, start, length, missing_pairs(first, n, SHIFT), h, r, H, V, 1, SHIFT, MASKED
    )
    inverse = tl.load(strength + at + e)[:, None]
    found = tl.zeros([C, C], tl.float32)
    for begin in range(0, V, BV):
        dv = begin + tl.arange(0, BV)
        in_v = (dv < V)[None, :]
        gain = _gains(beta, row, token, dv, V)
        y = read(vp[:, None] + dv[None, :], vok[:, None] & in_v)
        g = read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v)
        b = (y.to(tl.float32) * gain * inverse).to(y.dtype)
        log_decay = tl.log(tl.maximum(_unclamped(gain, upto, upto_low, at, DIVIDE, C), decay_floor)).to(y.dtype)
        if AFTER:
            same = tl.sum(g.to(tl.float32) * b.to(tl.float32), 1)
            found += tl.where(e[:, None] == e[None, :], same[:, None], 0.0)
        for level in range(LEVELS):
            F = _decay_over(_between(e[:, None], e[None, :], level, AFTER), log_decay, "tf32x3")
            more = dot((F * g).to(y.dtype), tl.trans((F * b).to(y.dtype)))
            found += tl.where(_crosses(e[:, None], e[None, :], level), more, 0.0)
    tl.store(scores + (at + e)[:, None] * C + e[None, :], found)


@triton.jit(do_not_specialize=FIXED)
def _column_keys(
    query,
    k,
    head_x,
    v,
    head_v,
    beta,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    scores,
    state,
    out,
    head_out,
    docs,
    segment_doc,
    rows,
    decay_floor,
    T,
    NC,
    NS,
    SEG,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the queries from the states before segments. BACK: of the keys, from the gradients of the states after them.

    A program holds a block of key columns, and the state transposed, `[BV, BK]`. scores: of `_column_scores`.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    e, dv = tl.arange(0, C), tl.arange(0, BV)
    dk = tl.program_id(1) * BK + tl.arange(0, BK)
    in_k, in_v = (dk < K)[None, :], (dv < V)[None, :]
    own = (q * H + h) * K * V + dv[:, None] + dk[None, :] * V
    S = tl.load(state + own, mask=(dv < V)[:, None] & in_k, other=0.0)
    missing = missing_pairs(first, n, SHIFT)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        r = i * C + e
        at = ((chunk + i) * H + h) * C
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        gain = _gains(beta, row, token, dv, V)
        eta = gain * tl.load(strength + at + e)[:, None]
        log_decay = tl.log(tl.maximum(_unclamped(gain, upto, upto_low, at, DIVIDE, C), decay_floor))
        kept = tl.exp(tl.sum(log_decay, 0))[:, None]
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        vp, vok = value_pointers(v, head_v, rows, n, start, length, missing, h, r, H, V, 1, SHIFT, MASKED)
        y = read(vp[:, None] + dv[None, :], vok[:, None] & in_v)
        g = read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v)
        log_decay = log_decay.to(y.dtype)
        g_start = (g * _decay_over(e[:, None] - e[None, :] >= 1 - AFTER, log_decay, "tf32x3")).to(y.dtype)
        b_end = (y.to(tl.float32) * eta * _decay_over(e[None, :] > e[:, None], log_decay, "tf32x3")).to(y.dtype)
        if BACK:
            z = read(query + row[:, None] * K + dk[None, :], token[:, None] & in_k)
            weight = read(scores + at * C + e[:, None] + e[None, :] * C, e[:, None] >= 0)
            found = dot(b_end, S.to(y.dtype)) + dot(weight, z)
            S = S * kept + dot(tl.trans(g_start), z)
            op, ok = key_pointers(out, head_out, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        else:
            z = read(xp[:, None] + dk[None, :], xok[:, None] & in_k)
            weight = read(scores + at * C + e[:, None] * C + e[None, :], e[:, None] >= 0)
            found = dot(g_start, S.to(y.dtype)) + dot(weight, z)
            S = S * kept + dot(tl.trans(b_end), z)
            op, ok = out + row * K, token
        tl.store(op[:, None] + dk[None, :], found, mask=ok[:, None] & in_k)


@dataclass(frozen=True)
class Columns:
    """One call: inputs `[B, T, H, .]` (contiguous), gates of `prepass.gates`, tables and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    head_x: Tensor | None
    head_v: Tensor | None
    first: Tensor | None
    found: Tensor
    ranks: Ranks
    options: Options

    @property
    def _rescaled(self) -> Rescaled | None:
        """What runs instead for 16-bit inputs."""
        if self.q.dtype == torch.float32:
            return None
        return Rescaled(self.q, self.k, self.v, self.beta, self.head_x, self.found, self.ranks, self.options)

    def _common(self) -> dict[str, Any]:
        ranks, options = self.ranks, self.options
        return {
            "first": self.first,
            "strength": self.found[0],
            "upto": self.found[1],
            "upto_low": self.found[2],
            "beta": self.beta,
            "decay_floor": options.decay_floor,
            "docs": ranks.docs,
            "segment_doc": ranks.segment_doc,
            "rows": ranks.rows,
            "T": ranks.tokens,
            "NC": ranks.chunks // ranks.documents,
            "NS": ranks.segments // ranks.documents,
            "SEG": ranks.segment,
            "H": self.q.shape[2],
            "K": self.k.shape[3],
            "V": self.v.shape[3],
            "BK": block(self.k.shape[3]),
            "SHIFT": int(options.shifted),
            "AFTER": int(options.read_after_write),
            "DIVIDE": options.step == "beta",
            "PLAIN": ranks.docs is None,
            "MASKED": ranks.rows is not None,
            "C": CHUNK,
        }

    def _cut(self, kind: str) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and launch options."""
        columns = cut(kind, self.k.shape[3], self.v.shape[3])
        grid = (self.ranks.segments * self.q.shape[2], parts(self.v.shape[3], columns))
        return grid, {"BV": columns, "num_warps": 4, "num_stages": 1}

    def _states(self, left: Tensor, right: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        segments, heads = self.ranks.segments, self.q.shape[2]
        state = self.q.new_empty(segments, heads, self.k.shape[3], self.v.shape[3], dtype=torch.float32)
        total = self.q.new_empty(segments, heads, self.v.shape[3], dtype=torch.float32)
        grid, options = self._cut("states")
        launch(
            _column_states, grid, left=left, head_x=self.head_x, right=right, head_v=self.head_v, state=state, total=total, BACK=back,
            **self._common(), **options,
        )  # fmt: skip
        return state, total

    def _values(self, state: Tensor, back: bool, **tensors: Tensor | None) -> None:
        names = ("d_o", "before", "out", "head_out", "d_beta", "d_strength", "d_decay")
        grid, options = self._cut("values")
        launch(
            _column_values, grid, query=self.q, k=self.k, head_x=self.head_x, v=self.v, head_v=self.head_v, state=state, BACK=back,
            M=self.ranks.chunks, NIL=0, LEVELS=(CHUNK - 1).bit_length(), **{name: tensors.get(name) for name in names},
            **self._common(), **options,
        )  # fmt: skip

    def low_values(self, low: Tensor, width: int, more: bool = False, **tensors: Tensor | None) -> None:
        """Gradients of values and gains, from the end as by `_values`, of chunks and blocks of columns where `low`, `[blocks, M, H]`, is not 0.

        Args:
            width: columns of such a block, of which a program holds `low_columns`. more: see `_segment_values`.
        """
        (_, chunks, heads), columns = low.shape, low_columns(self.k.shape[3], width)
        names = ("state", "before", "out", "d_beta", "d_strength", "d_decay")
        given = {"query": self.q, **{name: tensors.get(name) for name in names}, **tensors}
        launch(
            _low_column_values, (parts(chunks * heads, SOME), parts(self.v.shape[3], columns)), low=low, k=self.k, head_x=self.head_x, v=self.v,
            head_v=self.head_v, **given, **self._common(), chunk_doc=self.ranks.chunk_doc, M=chunks, NIL=0, MORE=more,
            LEVELS=(CHUNK - 1).bit_length(), BV=columns, SOME=SOME, SHARE=width // columns, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _keys(
        self, d_o: Tensor, scores: Tensor, state: Tensor, out: Tensor, head_out: Tensor | None, back: bool
    ) -> None:
        k_size, v_size = self.k.shape[3], self.v.shape[3]
        columns = cut("keys", v_size, k_size)
        launch(
            _column_keys, (self.ranks.segments * self.q.shape[2], parts(k_size, columns)), query=self.q, k=self.k, head_x=self.head_x, v=self.v, head_v=self.head_v, d_o=d_o, scores=scores, state=state,
            out=out, head_out=head_out, BACK=back, **{**self._common(), "BK": columns, "BV": block(v_size)}, num_warps=4,
            num_stages=1,
        )  # fmt: skip

    def _scores(self, d_o: Tensor) -> Tensor:
        """`[M, H, C, C]` of `_column_scores`."""
        heads, v_size = self.q.shape[2], self.v.shape[3]
        scores = self.q.new_empty(self.ranks.chunks, heads, CHUNK, CHUNK)
        columns = cut("scores", CHUNK, v_size)
        launch(
            _column_scores, (self.ranks.chunks * heads,), v=self.v, head_v=self.head_v, d_o=d_o, scores=scores, chunk_doc=self.ranks.chunk_doc, BV=columns,
            LEVELS=(CHUNK - 1).bit_length(), num_warps=4, num_stages=1, **self._common(),
        )  # fmt: skip
        return scores

    def forward(self, S: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, state after the last token, states before the segments and the segments' log-decay."""
        if (rescaled := self._rescaled) is not None:
            return rescaled.forward(S)
        o = self.ranks.new_like(self.v)
        with on_device(self.q):
            states, total = self._states(self.k, self.v, False)
            S, _ = scan(states, total, S, self.ranks)
            self._values(states, False, out=o)
        return o, S, states, total

    def backward(
        self,
        d_o: Tensor,
        o: Tensor,
        d_S: Tensor | None,
        S_end: Tensor,
        states: Tensor,
        total: Tensor,
        through_gates: Callable[[Tensor, Tensor], Tensor | None] | None = None,
    ) -> tuple[Any, ...]:
        """Gradients of q, k, v, beta, head_x, head_v, S, and beta times those of eta and gamma summed over columns.

        Args:
            through_gates: gets the last two, `[M, H, C]`, and may return the gradient of the energies of keys, `[B * T, H]` by first row
                plus rank, to be added to that of the keys.
        """
        ranks, d_o = self.ranks, d_o.contiguous()
        if (rescaled := self._rescaled) is not None:
            found = rescaled.backward(d_o, o, d_S, S_end, states, total, through_gates, self.low_values)
            d_head_v = None if self.head_v is None else torch.zeros_like(self.head_v)
            return *found[:5], d_head_v, *found[5:]
        d_q, d_beta = ranks.new_like(self.q), ranks.new_like(self.beta)
        d_k = ranks.new_pairs_like(self.k, -1 if self.options.shifted else None)
        d_v = ranks.new_pairs_like(self.v, None)
        d_head_x, d_head_v = (None if x is None else torch.zeros_like(x) for x in (self.head_x, self.head_v))
        of_values = self._cut("values")[0][1]
        sums = self.q.new_empty(2, of_values, ranks.chunks, self.q.shape[2], CHUNK, dtype=torch.float32)
        with on_device(self.q):
            d_states, _ = self._states(self.q, d_o, True)
            d_S, _ = scan(d_states, total, d_S, ranks, states, S_end)
            scores = self._scores(d_o)
            self._keys(d_o, scores, states, d_q, d_head_x, False)
            self._keys(d_o, scores, d_states, d_k, d_head_x, True)
            self._values(
                d_states, True, d_o=d_o, before=states, out=d_v, head_out=d_head_v,
                d_beta=d_beta, d_strength=sums[0], d_decay=sums[1],
            )  # fmt: skip
        d_strength, d_decay = sums.sum(1)
        if through_gates is not None:
            d_energy = through_gates(d_strength, d_decay)
            if d_energy is not None:
                energy_backward(self.k, self.head_x, d_energy, None, d_k, d_head_x, ranks, self.options)
        return d_q, d_k, d_v, d_beta, d_head_x, d_head_v, d_S, d_strength, d_decay
