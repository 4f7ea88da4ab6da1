"""Triton kernels of falcon2a (see `columns.py`) for 16-bit inputs: linear attention on values rescaled about the middle of every 8 rows.

With log-decay prefix u_tv of column v, m(t) the middle of the 8 rows that hold t, and R_tv = exp(u_tv - u_m(t)v),

    o_tv = R_tv * (read of q_t from the state at m(t), and from b_jv / R_jv of the rows j <= t of its 8)

is linear attention whose decays change only from one 8 rows to the next: matrix products on b / R, times a factor for every 8
rows and column. Nothing is neglected: 4 decays of 1e-4 (no decay floor may be smaller) make R at most 1e16, inside the range of bfloat16 and float32 (which
float16 inputs take), and the factors from middle to middle are at least 1e-32.

What the kernels need of beta and v is made once (`_rescale`): b / R, R, and decays of every 8 rows, in
chunks `[M, H, C, V]`. They walk over a segment `STEP` rows a step, the state in registers, value columns (for the gradients of queries
and keys: key columns) as the rows of every product. Backward is the same walk from the end: pairs and readers, and the ends
of every step, change places. Segments, and the scan over their states: see `associative.py`.
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
from ..gpu import block, dot, key_pointers, launch, of_chunk, on_device, parts, read, row_of, tables
from ..ranks import CHUNK, Ranks
from .rules import Options

STEP = 16  # rows of a step: 16 or 32
CUTS = {"scores": (64, 4), "gains": (32, 4)}  # value columns that a program holds, and warps
# Below it, gradients of decays are found pair by pair: what is read and what is written after one cancel, and it divides the rest.
LOW = tl.constexpr(0.25)


@triton.jit
def _gate(beta, strength, upto, upto_low, row, token, slot, dv, decay_floor, V: tl.constexpr, DIVIDE: tl.constexpr):
    """Gain, 1 / denominator, decay before it is held above the floor, and what multiplies 1 - gain (or gain) in it."""
    gain = read(beta + row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]).to(tl.float32)
    pull = tl.load(upto_low + slot)[:, None]
    raw = (tl.load(upto + slot)[:, None] + (1.0 - gain) * pull) if DIVIDE else (1.0 - gain * pull)
    return gain, tl.load(strength + slot)[:, None], raw, pull


@triton.jit(do_not_specialize=["T", "NC"])
def _rescale(
    v,
    beta,
    strength,
    upto,
    upto_low,
    b,
    scale,
    decays,
    docs,
    chunk_doc,
    rows,
    decay_floor,
    T,
    NC,
    H: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """b / R and R, `[M, H, C, V]`, and decays of every 8 rows, `[M, H, C / 8, 4, V]`: over their first and their second half, from the
    chunk's start to their middle, and from there to the chunk's end.
    """
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    eight, dv = tl.arange(0, C // 8), tl.program_id(1) * BV + tl.arange(0, BV)
    in_v = (dv < V)[None, :]
    at = (c * H + h) * C
    u = tl.zeros([C // 8, BV], tl.float32)
    for s in tl.static_range(4):
        e = 8 * eight + s
        token = i * C + e < length
        row = row_of(rows, start, i * C + e, token, MASKED) * H + h
        _, _, raw, _ = _gate(beta, strength, upto, upto_low, row, token, at + e, dv, decay_floor, V, DIVIDE)
        u -= tl.log(tl.maximum(raw, decay_floor))
    own = decays + (at // 8 + eight)[:, None] * 4 * V + dv[None, :]
    first = u
    tl.store(own, tl.exp(-u), mask=(eight >= 0)[:, None] & in_v)
    for s in tl.static_range(8):
        e = 8 * eight + s
        token = i * C + e < length
        row = row_of(rows, start, i * C + e, token, MASKED) * H + h
        gain, inverse, raw, _ = _gate(beta, strength, upto, upto_low, row, token, at + e, dv, decay_floor, V, DIVIDE)
        value = read(v + row[:, None] * V + dv[None, :], token[:, None] & in_v).to(tl.float32)
        before = u
        u += tl.log(tl.maximum(raw, decay_floor))
        out = (at + e)[:, None] * V + dv[None, :]
        tl.store(b + out, value * gain * inverse * tl.exp(-u), mask=(e >= 0)[:, None] & in_v)
        if not AFTER:
            u, before = before, u
        tl.store(scale + out, tl.exp(u), mask=(e >= 0)[:, None] & in_v)
        if not AFTER:
            u = before
    tl.store(own + V, tl.exp(u), mask=(eight >= 0)[:, None] & in_v)
    through = tl.cumsum(u - first, 0)
    to_end = tl.sum(u - first, 0)[None, :] - through
    tl.store(own + 2 * V, tl.exp(through - u), mask=(eight >= 0)[:, None] & in_v)
    tl.store(own + 3 * V, tl.exp(tl.minimum(to_end + u, 0.0)), mask=(eight >= 0)[:, None] & in_v)


@triton.jit
def _to_middle(decays, slot, d, g, behind, V: tl.constexpr, STEP: tl.constexpr, BACK: tl.constexpr):
    """Decay from the middle of the 8 rows before number g of a step to theirs, by column (BACK: numbered and seen from the end).

    behind: decay over the what of the 8 rows before the step lies behind their middle.
    """
    number, half = g, 0
    if BACK:
        number, half = STEP // 8 - 1 - g, 1
    at = decays + (slot // 8 + number) * 4 * V + d
    near = tl.load(at + half * V, mask=d < V, other=0.0)
    if g > 0:
        before = at - 4 * V
        if BACK:
            before = at + 4 * V
        behind = tl.load(before + (1 - half) * V, mask=d < V, other=0.0)
    return near * behind


@triton.jit
def _behind(decays, slot, d, V: tl.constexpr, STEP: tl.constexpr, BACK: tl.constexpr):
    """Decay over what of a step lies behind its last middle."""
    at = decays + (slot // 8 + STEP // 8 - 1) * 4 * V + V + d
    if BACK:
        at = decays + slot // 8 * 4 * V + d
    return tl.load(at, mask=d < V, other=0.0)


@triton.jit
def _slot(step, begin, end, chunk, h, H, C: tl.constexpr, STEP: tl.constexpr, BACK: tl.constexpr):
    """First slot of a step in `[M, H, C]`."""
    j = step
    if BACK:
        j = begin + end - 1 - step
    return ((chunk + j // (C // STEP)) * H + h) * C + j % (C // STEP) * STEP


@triton.jit(do_not_specialize=FIXED)
def _rescaled_states(
    query,
    k,
    head_x,
    weights,
    decays,
    state,
    total,
    low,
    borders,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    M,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """What the pairs of a segment (BACK: its queries and output gradients) add to the state at its end (BACK: start), and its
    log-decay. weights and blocks: as for `_rescaled_values`.

    borders: instead, from the state before the segment (BACK: its gradient after it), those before (after) all chunks, `[M, H, K, V]`,
    of segments with a low decay. low: `[BLOCKS, M, H]`, see `_gain_gradients`.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    e, dk, dv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = dk < K, dv < V
    S = tl.zeros([BV, BK], tl.float32)
    sum_u = tl.zeros([BV], tl.float32)
    place, inside = dv[:, None] + dk[None, :] * V, in_v[:, None] & in_k[None, :]
    own_state = state + (q * H + h) * K * V + place
    if borders is not None:
        each = begin + e  # a segment has no more chunks
        found = tl.zeros([C], tl.int32)
        for part in tl.static_range(BLOCKS):
            found += tl.load(low + (part * M + chunk + each) * H + h, mask=each < end, other=0)
        end = tl.where(tl.max(found, 0) > 0, end, begin)
        S += tl.load(own_state, mask=inside & (begin + place * 0 < end), other=0.0)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        r = i * C + e
        at = ((chunk + i) * H + h) * C
        if borders is not None:
            tl.store(borders + ((chunk + i) * H + h) * K * V + place, S, mask=inside)
        pairs, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        if BACK:
            ok = r < length
            pairs = query + (row_of(rows, start, r, ok, MASKED) * H + h) * K
        pair = read(pairs[:, None] + dk[None, :], ok[:, None] & in_k[None, :])
        both = in_v[:, None] & (e >= 0)[None, :]
        w = read(weights + (at + e)[None, :] * V + dv[:, None], both)
        own = decays + ((at + e) // 8 * 4 * V)[None, :] + dv[:, None]
        far = tl.load(own + (2 * V if BACK else 3 * V), mask=both, other=0.0)
        last = decays + (at // 8 + C // 8 - 1) * 4 * V + dv
        kept = tl.load(last + 2 * V, mask=in_v, other=1.0) * tl.load(last + V, mask=in_v, other=1.0)
        S = kept[:, None] * S + dot((w * far).to(w.dtype), pair)
        sum_u += tl.log(tl.maximum(kept, 1e-37))
    if borders is None:
        tl.store(own_state, S, mask=inside)
        tl.store(total + (q * H + h) * V + dv, sum_u, mask=in_v)


@triton.jit(do_not_specialize=FIXED)
def _rescaled_values(
    query,
    k,
    head_x,
    weights,
    scale,
    decays,
    state,
    out,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STEP: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Outputs of a segment from the state before it (BACK: gradients of b in chunks, from the gradient of the state after it).

    weights: b / R (BACK: R d_o). A program holds a block of value columns, and the state transposed, `[BV, BK]`.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    t, dk, dv = tl.arange(0, STEP), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = dk < K, (dv < V)[:, None]
    own = state + (q * H + h) * K * V + dv[:, None] + dk[None, :] * V
    S = tl.load(own, mask=in_v & in_k[None, :], other=0.0)
    behind = tl.full(
        [BV], 1.0, tl.float32
    )  # decay from where the state stands, the last middle, to the end of its rows
    order, apart = t // 8, t[None, :] - t[:, None]
    if BACK:
        order, apart = STEP // 8 - 1 - t // 8, t[:, None] - t[None, :]
    begin, end = begin * (C // STEP), tl.minimum(end * (C // STEP), tl.cdiv(length, STEP))
    here = _slot(begin, begin, end, chunk, h, H, C, STEP, BACK) + t
    factor = read(scale + here[None, :] * V + dv[:, None], in_v & (begin + t * 0 < end)[None, :])
    for step in range(begin, end):
        j = step
        if BACK:
            j = begin + end - 1 - step
        r = j * STEP + t
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = _slot(step, begin, end, chunk, h, H, C, STEP, BACK)
        # R of the next step: what waits for memory waits behind this step's products
        there = _slot(tl.minimum(step + 1, end - 1), begin, end, chunk, h, H, C, STEP, BACK) + t
        next_factor = read(scale + there[None, :] * V + dv[:, None], in_v & (t >= 0)[None, :])
        pairs, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        asks, asked = query + row * K, token
        if BACK:
            pairs, ok, asks, asked = asks, asked, pairs, ok
        pair = read(pairs[:, None] + dk[None, :], ok[:, None] & in_k[None, :])
        w = read(weights + (slot + t)[None, :] * V + dv[:, None], in_v & (t >= 0)[None, :])
        # loaded before they are needed
        passed = _to_middle(decays, slot, dv, 0, behind, V, STEP, BACK)
        to_1 = _to_middle(decays, slot, dv, 1, behind, V, STEP, BACK)
        to_2, to_3 = to_1, to_1
        if STEP == 32:
            to_2 = _to_middle(decays, slot, dv, 2, behind, V, STEP, BACK)
            to_3 = _to_middle(decays, slot, dv, 3, behind, V, STEP, BACK)
        behind = _behind(decays, slot, dv, V, STEP, BACK)
        ask = read(asks[None, :] + dk[:, None], asked[None, :] & in_k[:, None])
        scores = tl.where(apart >= 1 - AFTER, dot(pair, ask), 0.0).to(w.dtype)
        carried = dot(S.to(w.dtype), ask)
        # one 8 rows after the other: what they read stands where their middle is
        found = carried * passed[:, None] + dot(w, scores)
        moved = w.to(tl.float32)
        for g in tl.static_range(1, STEP // 8):
            between = to_1
            if g == 2:
                between = to_2
            if g == 3:
                between = to_3
            passed *= between
            moved *= tl.where(order[None, :] < g, between[:, None], 1.0)
            more = carried * passed[:, None] + dot(moved.to(w.dtype), scores)
            found = tl.where(order[None, :] == g, more, found)
        S = passed[:, None] * S + dot(moved.to(w.dtype), pair)
        if BACK:
            to = out + (slot + t)[None, :] * V + dv[:, None]
            tl.store(to, found / tl.where(in_v, factor.to(tl.float32), 1.0), mask=in_v & token[None, :])
        else:
            tl.store(out + row[None, :] * V + dv[:, None], found * factor.to(tl.float32), mask=in_v & token[None, :])
        factor = next_factor


@triton.jit(do_not_specialize=["T", "NC"])
def _rescaled_scores(
    d_o,
    b,
    scale,
    decays,
    given,
    scores,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    STEP: tl.constexpr,
    AFTER: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """R d_o, `[M, H, C, V]`, and the gradient of q_t . x_j inside every step of rows, `[M, H, C, STEP]`."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e = tl.arange(0, C)
    token = i * C + e < length
    row = row_of(rows, start, i * C + e, token, MASKED) * H + h
    at = (c * H + h) * C
    found = tl.zeros([C, C], tl.float32)
    for begin in range(0, V, BV):
        dv = begin + tl.arange(0, BV)
        in_v = (dv < V)[None, :] & (e >= 0)[:, None]
        slot = (at + e)[:, None] * V + dv[None, :]
        g = read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v).to(tl.float32)
        g = (g * read(scale + slot, in_v).to(tl.float32)).to(given.dtype.element_ty)
        tl.store(given + slot, g, mask=in_v)
        w = read(b + slot, in_v)
        within = dot(g.to(w.dtype), tl.trans(w))
        moved = w.to(tl.float32)
        order = e % STEP // 8
        first = decays + ((at + e // STEP * STEP) // 8 * 4 * V)[:, None] + dv[None, :]
        for n in tl.static_range(1, STEP // 8):
            middle = first + n * 4 * V
            between = tl.load(middle, mask=in_v, other=0.0) * tl.load(middle - 3 * V, mask=in_v, other=0.0)
            moved *= tl.where(order[:, None] < n, between, 1.0)
            within = tl.where(order[:, None] == n, dot(g.to(w.dtype), tl.trans(moved.to(w.dtype))), within)
        found += within
    found = tl.where(e[:, None] - e[None, :] >= 1 - AFTER, found, 0.0)
    to = scores + (at + e)[:, None] * STEP + e[None, :] % STEP
    tl.store(to, found, mask=e[:, None] // STEP == e[None, :] // STEP)


@triton.jit(do_not_specialize=FIXED)
def _rescaled_keys(
    query,
    k,
    head_x,
    asking,
    writing,
    decays,
    scores,
    state,
    d_energy,
    out,
    head_out,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STEP: tl.constexpr,
    SHIFT: tl.constexpr,
    ENERGY: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the queries from the states before segments (BACK: of the keys, from the gradients of the states after them).

    asking: R d_o (BACK: b / R). writing: the other one. A program holds a block of key columns, and the state, `[BK, BV]`.
    ENERGY (of keys): add what comes through their energy.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    t, dv, dk = tl.arange(0, STEP), tl.arange(0, BV), tl.program_id(1) * BK + tl.arange(0, BK)
    in_k, in_v = (dk < K)[:, None], dv < V
    own = state + (q * H + h) * K * V + dk[:, None] * V + dv[None, :]
    S = tl.load(own, mask=in_k & in_v[None, :], other=0.0)
    behind = tl.full([BV], 1.0, tl.float32)
    order = t // 8
    if BACK:
        order = STEP // 8 - 1 - t // 8
    begin, end = begin * (C // STEP), tl.minimum(end * (C // STEP), tl.cdiv(length, STEP))
    for step in range(begin, end):
        j = step
        if BACK:
            j = begin + end - 1 - step
        r = j * STEP + t
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = _slot(step, begin, end, chunk, h, H, C, STEP, BACK)
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        if BACK:
            pair = read((query + row * K)[None, :] + dk[:, None], token[None, :] & in_k)
            p = read(scores + (slot + t)[:, None] * STEP + t[None, :], (t >= 0)[:, None])
            to, ok = key_pointers(out, head_out, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        else:
            pair = read(xp[None, :] + dk[:, None], xok[None, :] & in_k)
            p = read(scores + (slot + t)[None, :] * STEP + t[:, None], (t >= 0)[:, None])
            to, ok = out + row * K, token
        # loaded before they are needed
        passed = _to_middle(decays, slot, dv, 0, behind, V, STEP, BACK)
        to_1 = _to_middle(decays, slot, dv, 1, behind, V, STEP, BACK)
        to_2, to_3 = to_1, to_1
        if STEP == 32:
            to_2 = _to_middle(decays, slot, dv, 2, behind, V, STEP, BACK)
            to_3 = _to_middle(decays, slot, dv, 3, behind, V, STEP, BACK)
        behind = _behind(decays, slot, dv, V, STEP, BACK)
        a = read(asking + (slot + t)[None, :] * V + dv[:, None], in_v[:, None] & (t >= 0)[None, :])
        w = read(writing + (slot + t)[:, None] * V + dv[None, :], in_v[None, :] & (t >= 0)[:, None])
        asked, moved = a.to(tl.float32) * passed[:, None], w.to(tl.float32)
        for g in tl.static_range(1, STEP // 8):
            between = to_1
            if g == 2:
                between = to_2
            if g == 3:
                between = to_3
            passed *= between
            asked *= tl.where(order[None, :] >= g, between[:, None], 1.0)
            moved *= tl.where(order[:, None] < g, between[None, :], 1.0)
        pair = pair.to(w.dtype)
        found = dot(S.to(w.dtype), asked.to(w.dtype)) + dot(pair, p)
        S = passed[None, :] * S + dot(pair, moved.to(w.dtype))
        if ENERGY:
            factor = 2.0 * tl.load(d_energy + (start + r) * H + h, mask=token, other=0.0)
            found += factor[None, :] * read(xp[None, :] + dk[:, None], xok[None, :] & in_k).to(tl.float32)
        tl.store(to[None, :] + dk[:, None], found, mask=ok[None, :] & in_k)


@triton.jit(do_not_specialize=FIXED)
def _gain_gradients(
    v,
    beta,
    d_o,
    o,
    strength,
    upto,
    upto_low,
    d_b,
    product,
    d_v,
    d_beta,
    d_strength,
    d_decay,
    low,
    docs,
    segment_doc,
    rows,
    decay_floor,
    T,
    NC,
    NS,
    SEG,
    M,
    H: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """From the gradient of b: those of v and beta, and the sums over columns of beta times the gradients of eta and gamma.

    The gradient of a log-decay is all that is read from it on, minus all that is written from it on, plus state times gradient
    at the segment's end (`product`). low, `[programs, M, H]`: 1 where a decay of the chunk is below LOW, so that this is no good.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    e, dv = tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    in_v = (dv < V)[None, :]
    crossing = tl.load(product + (q * H + h) * V + dv, mask=dv < V, other=0.0)
    later = tl.where(e[None, :] >= e[:, None], 1.0, 0.0)
    for step in range(begin, end):
        i = begin + end - 1 - step
        r = i * C + e
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = ((chunk + i) * H + h) * C + e
        ok, at = token[:, None] & in_v, row[:, None] * V + dv[None, :]
        grad = tl.load(d_b + slot[:, None] * V + dv[None, :], mask=ok, other=0.0).to(tl.float32)
        reads = read(o + at, ok).to(tl.float32) * read(d_o + at, ok).to(tl.float32)
        gain, inverse, raw, pull = _gate(beta, strength, upto, upto_low, row, token, slot, dv, decay_floor, V, DIVIDE)
        tl.store(d_v + at, grad * gain * inverse, mask=ok)
        grad *= read(v + at, ok).to(tl.float32)
        rest = reads - grad * gain * inverse
        d_log_decay = tl.dot(later, rest, input_precision="tf32") + crossing[None, :]  # o has fewer digits
        if not AFTER:
            d_log_decay -= reads
        crossing += tl.sum(rest, 0)
        d_gamma = tl.where(raw >= decay_floor, d_log_decay / tl.maximum(raw, decay_floor), 0.0)
        tl.store(d_beta + at, grad * inverse - d_gamma * pull, mask=ok)
        part = tl.program_id(1).to(tl.int64) * M * H * C + slot
        tl.store(d_strength + part, tl.sum(gain * grad, 1))
        tl.store(d_decay + part, tl.sum(gain * d_gamma, 1))
        smallest = tl.min(tl.min(tl.where(raw >= decay_floor, raw, 1.0), 1), 0)
        tl.store(low + (tl.program_id(1) * M + chunk + i) * H + h, (smallest < LOW).to(tl.int32))


@dataclass(frozen=True)
class Rescaled:
    """One call of falcon2a: inputs `[B, T, H, .]` (contiguous), gates of `prepass.gates`, tables and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    head_x: Tensor | None
    found: Tensor
    ranks: Ranks
    options: Options

    def _launch(self, kernel: Any, grid: tuple[int, int], blocks: dict[str, int], **arguments: Any) -> None:
        """Run a kernel with what it takes of the inputs, tables and options, and `arguments`."""
        ranks, options = self.ranks, self.options
        common = {
            **tables(ranks),
            "query": self.q,
            "k": self.k,
            "head_x": self.head_x,
            "v": self.v,
            "beta": self.beta,
            "strength": self.found[0],
            "upto": self.found[1],
            "upto_low": self.found[2],
            "segment_doc": ranks.segment_doc,
            "decay_floor": options.decay_floor,
            "NS": ranks.segments // ranks.documents,
            "SEG": ranks.segment,
            "M": ranks.chunks,
            "H": self.q.shape[2],
            "K": self.k.shape[3],
            "V": self.v.shape[3],
            "STEP": STEP,
            "SHIFT": int(options.shifted),
            "AFTER": int(options.read_after_write),
            "DIVIDE": options.step == "beta",
        }
        launch(kernel, grid, **{**common, **blocks}, **arguments)

    def _rescale(self, after: bool) -> tuple[Tensor, Tensor, Tensor]:
        """b / R and R (`after` the decay of its token), and decays of every 8 rows, see the kernel."""
        chunks, heads, size = self.ranks.chunks, self.q.shape[2], self.v.shape[3]
        dtype = torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32
        b, scale = (self.q.new_empty(chunks, heads, CHUNK, size, dtype=dtype) for _ in range(2))
        decays = self.q.new_empty(chunks, heads, CHUNK // 8, 4, size, dtype=torch.float32)
        columns = min(128, block(size))
        self._launch(
            _rescale, (chunks * heads, parts(size, columns)), {"BV": columns, "AFTER": after}, b=b, scale=scale,
            decays=decays,
        )  # fmt: skip
        return b, scale, decays

    def _values(self, weights: Tensor, scale: Tensor, decays: Tensor, state: Tensor, out: Tensor, back: bool) -> None:
        grid, launch = self._cut(self.k.shape[3], self.v.shape[3], "BK", "BV")
        self._launch(
            _rescaled_values, grid, launch, weights=weights, scale=scale, decays=decays, state=state, out=out, BACK=back
        )

    def _cut(self, rows: int, columns: int, row: str, column: str) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid of segments and blocks of 64 columns (by the name `column`), and launch options, of kernels that hold a state."""
        many = block(rows) > 128
        launch = {row: block(rows), column: 64, "num_warps": 8 if many else 4, "num_stages": 2 if many else 3}
        return (self.ranks.segments * self.q.shape[2], parts(columns, 64)), launch

    def _states(self, weights: Tensor, decays: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        segments, heads = self.ranks.segments, self.q.shape[2]
        state = self.q.new_empty(segments, heads, self.k.shape[3], self.v.shape[3], dtype=torch.float32)
        total = self.q.new_empty(segments, heads, self.v.shape[3], dtype=torch.float32)
        grid, launch = self._cut(self.k.shape[3], self.v.shape[3], "BK", "BV")
        self._launch(
            _rescaled_states,
            grid,
            launch,
            weights=weights,
            decays=decays,
            state=state,
            total=total,
            BLOCKS=0,
            BACK=back,
        )
        return state, total

    def forward(self, S: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, state after the last token, states before the segments and the segments' log-decay."""
        o = self.ranks.new_like(self.v)
        with on_device(self.q):
            b, scale, decays = self._rescale(self.options.read_after_write)
            states, total = self._states(b, decays, False)
            S, _ = scan(states, total, S, self.ranks)
            self._values(b, scale, decays, states, o, False)
        return o, S, states, total

    def backward(
        self,
        d_o: Tensor,
        o: Tensor,
        d_S: Tensor | None,
        S_end: Tensor,
        states: Tensor,
        total: Tensor,
        through_gates: Callable[[Tensor, Tensor], Tensor | None] | None,
        low_chunks: Callable[..., None],
    ) -> tuple[Any, ...]:
        """Gradients of q, k, v, beta, head_x and S, and beta times those of eta and gamma summed over columns, see `Columns`.

        Args:
            low_chunks: makes those of v, beta, eta and gamma anew in the chunks that have a low decay.
        """
        ranks, d_o, heads, v_size = self.ranks, d_o.contiguous(), self.q.shape[2], self.v.shape[3]
        d_q, d_v, d_beta = (ranks.new_like(x) for x in (self.q, self.v, self.beta))
        d_k = ranks.new_pairs_like(self.k, -1 if self.options.shifted else None)
        d_head_x = None if self.head_x is None else torch.zeros_like(self.head_x)
        with on_device(self.q):
            b, scale, decays = self._rescale(self.options.read_after_write)
            given = torch.empty_like(b)
            scores = b.new_empty(ranks.chunks, heads, CHUNK, STEP)
            columns, warps = CUTS["scores"]
            self._launch(
                _rescaled_scores, (ranks.chunks * heads, 1), {"BV": min(columns, block(v_size))}, d_o=d_o, b=b, scale=scale, decays=decays,
                given=given, scores=scores, num_warps=warps, num_stages=1,
            )  # fmt: skip
            d_states, _ = self._states(given, decays, True)
            d_S, product = scan(d_states, total, d_S, ranks, states, S_end)
            self._keys(given, b, decays, scores, states, None, d_q, d_head_x, False)
            d_b = torch.empty_like(b, dtype=torch.float32)
            if not self.options.read_after_write:  # what is read lies before the decay, what is written behind it
                _, scale, _ = self._rescale(True)
            self._values(given, scale, decays, d_states, d_b, True)
            columns, warps = CUTS["gains"]
            columns = min(columns, 32 if block(self.k.shape[3]) <= 128 else 16)  # of `Columns.low_values`, too
            blocks = parts(v_size, columns)
            sums = self.q.new_empty(2, blocks, ranks.chunks, heads, CHUNK, dtype=torch.float32)
            low = torch.zeros(blocks, ranks.chunks, heads, dtype=torch.int32, device=d_o.device)
            self._launch(
                _gain_gradients, (ranks.segments * heads, blocks), {"BV": columns}, d_o=d_o, o=o, d_b=d_b,
                product=product.sum(2), d_v=d_v, d_beta=d_beta, d_strength=sums[0], d_decay=sums[1],
                low=low, num_warps=warps, num_stages=1,
            )  # fmt: skip
            del d_b, scale
            before, after = (b.new_empty(ranks.chunks, *states.shape[1:]) for _ in range(2))
            for weights, state, borders in ((b, states, before), (given, d_states, after)):
                grid, launch = self._cut(self.k.shape[3], v_size, "BK", "BV")
                self._launch(
                    _rescaled_states, grid, launch, weights=weights, decays=decays, state=state, low=low, borders=borders,
                    BLOCKS=blocks, BACK=state is d_states,
                )  # fmt: skip
            low_chunks(
                low,
                columns,
                state=after,
                before=before,
                d_o=d_o,
                out=d_v,
                d_beta=d_beta,
                d_strength=sums[0],
                d_decay=sums[1],
            )
            d_strength, d_decay = sums.sum(1)
            d_energy = None if through_gates is None else through_gates(d_strength, d_decay)
            self._keys(b, given, decays, scores, d_states, d_energy, d_k, d_head_x, True)
        return d_q, d_k, d_v, d_beta, d_head_x, d_S, d_strength, d_decay

    def _keys(
        self,
        asking: Tensor,
        writing: Tensor,
        decays: Tensor,
        scores: Tensor,
        state: Tensor,
        d_energy: Tensor | None,
        out: Tensor,
        head_out: Tensor | None,
        back: bool,
    ) -> None:
        grid, launch = self._cut(self.v.shape[3], self.k.shape[3], "BV", "BK")
        self._launch(
            _rescaled_keys, grid, launch, asking=asking, writing=writing, decays=decays, scores=scores, state=state,
            d_energy=d_energy, out=out, head_out=head_out, ENERGY=d_energy is not None, BACK=back,
        )  # fmt: skip
