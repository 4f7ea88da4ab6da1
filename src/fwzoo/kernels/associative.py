"""Triton kernels of the inner-product rules with one decay a token: falcon1a, falcon3a, linear attention.

Within a chunk, with log-decay prefix u, strengths c and windows of W pairs (slots and chunks: see `ranks.py`), pair j is
written by tokens j ... j + W - 1. Let P_jd be what tokens j ... j + d have written of it, at token j + d:

    P_jd = exp(u_{j+d} - u_{j+d-1}) P_{j,d-1} + c_{j+d}
    o_t  = exp(u_t) S_0^T q_t + sum_j M_tj (q_t . x_j) v_j      M_tj = P_{j,t-j} near the diagonal (t - j < W - 1), and
                                                                       P_{j,W-1} exp(u_t - u_{j+W-1}) far from it
    S_C  = exp(u_C) S_0 + sum_j w_j x_j v_j^T                   w_j  = P_{j,W-1} exp(u_C - u_{j+W-1})

so that a window costs a few selects more than a single pair. Tokens behind the chunk's end write nothing here (c = 0) and
do not decay: what they write of these pairs is the next chunk's.

A document's chunks are grouped into segments. Four steps, and only the states between segments go through memory: what each
segment adds by itself (`_segment_states`), a scan over segments (`_scan`), then every segment walks over its chunks with the
state in registers (`_walk`). Backward is the same again: the gradient of q is the walk with (q, x, v) replaced by (d_o, v, x),
and the gradients of v and x are a walk from the end with the gradient of the state (`_walk_back`).

The normaliser z of linear attention is a column of ones behind v: `ONES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu import (
    block,
    dot,
    into_chunks,
    key_pointers,
    launch,
    missing_pairs,
    of_chunk,
    on_device,
    parts,
    power,
    read,
    row_of,
    tables,
    value_pointers,
)
from .ranks import CHUNK, Ranks

FIXED = ["T", "NC", "NS", "SEG", "M", "NIL"]  # no recompilation for another length


@triton.jit
def _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN: tl.constexpr, STRIDE: tl.constexpr):
    """Document, first row, length, first chunk of the document, and the range of its chunks that segment `q` holds."""
    if PLAIN:
        n = (q // NS).to(tl.int64)
        start, length, chunk = n * T, tl.zeros_like(n) + T, n * NC
        own = q - n * NS
    else:
        n = tl.load(segment_doc + q).to(tl.int64)
        at = docs + 4 * n
        start, length, chunk = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        own = q - tl.load(at + 3)
    begin = own * SEG
    return n, start, length, chunk, begin, tl.minimum(begin + SEG, tl.cdiv(length, STRIDE))


@triton.jit
def _decays(upto, upto_low, at, later, LOW: tl.constexpr):
    """The two halves of u at slots `later`, 0 before the chunk."""
    high = tl.load(upto + at + later, mask=later >= 0, other=0.0)
    low = tl.zeros_like(high)
    if LOW:
        low = tl.load(upto_low + at + later, mask=later >= 0, other=0.0)
    return high, low


@triton.jit
def _decay(high, low, s_high, s_low, apart, LOW: tl.constexpr):
    """exp(u_t - u_{j+W-1}), 1 for pairs that t still writes (there the difference is not negative), 0 for later ones.

    apart: last token that t reads, minus j.
    """
    difference = high - s_high
    if LOW:
        difference += low - s_low
    return tl.where(apart >= 0, tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit
def _parts(weights, apart, e, W: tl.constexpr, C: tl.constexpr):
    """What multiplies the decay in M (pairs are rows): P_{j,W-1} far from the diagonal, P_jd near it.

    weights: where those of the chunk begin.
    """
    found = tl.load(weights + (W - 1) * C + e)[:, None]
    for d in tl.static_range(W - 1):
        found = tl.where(apart == d, tl.load(weights + d * C + e)[:, None], found)
    return found


@triton.jit
def weigh(
    strength,
    upto,
    upto_low,
    weights,
    mixes,
    at,
    W: tl.constexpr,
    AFTER: tl.constexpr,
    LOW: tl.constexpr,
    C: tl.constexpr,
):
    """Of every slot of the chunk at `at`, `[M, H, W + 3, C]`: P_j0 ... P_{j,W-1}; the decay of whole pairs to the chunk's end; that from
    the chunk's start to what a token reads; and w_j, the product of the last P and its decay to the end.

    strength: None for 1. mixes: where M goes (pairs are rows; without a window its decays alone), `[M, H, C, C]`, or None. All walks read it: making it
    takes them as long as a product.
    """
    e = tl.arange(0, C)
    out = weights + at * (W + 3) + e
    p = tl.zeros([C], tl.float32)
    for d in tl.static_range(W):
        p = p * _decay_of(upto, upto_low, at, e + d, LOW, C)
        if strength is None:
            p += tl.where(e + d < C, 1.0, 0.0)
        else:
            p += tl.load(strength + at + e + d, mask=e + d < C, other=0.0)
        tl.store(out + d * C, p)
    high, low = _decays(upto, upto_low, at, tl.minimum(e + W - 1, C - 1), LOW)
    end, end_low = _decays(upto, upto_low, at, e * 0 + C - 1, LOW)
    to_end = tl.exp(tl.minimum(end - high + (end_low - low), 0.0))
    tl.store(out + W * C, to_end)
    high, low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
    tl.store(out + (W + 1) * C, tl.exp(high + low))
    tl.store(out + (W + 2) * C, p * to_end)
    if mixes is not None:
        tl.debug_barrier()  # slots are read again by other threads
        s_high, s_low = _decays(upto, upto_low, at, tl.minimum(e + W - 1, C - 1), LOW)
        distance = e[None, :] - (1 - AFTER) - e[:, None]
        mix = _decay(high[None, :], low[None, :], s_high[:, None], s_low[:, None], distance, LOW)
        if W > 1:
            mix *= _parts(weights + at * (W + 3), distance, e, W, C)
        tl.store(mixes + at * C + e[:, None] * C + e[None, :], mix.to(mixes.dtype.element_ty))


@triton.jit
def _weigh(
    upto,
    upto_low,
    weights,
    mixes,
    W: tl.constexpr,
    AFTER: tl.constexpr,
    LOW: tl.constexpr,
    C: tl.constexpr,
):
    weigh(None, upto, upto_low, weights, mixes, tl.program_id(0).to(tl.int64) * C, W, AFTER, LOW, C)


@triton.jit
def _decay_of(upto, upto_low, at, slot, LOW: tl.constexpr, C: tl.constexpr):
    """The decay of one token: 1 in slot 0 (where no pair is yet written) and behind the chunk."""
    now, before = tl.minimum(slot, C - 1), tl.minimum(slot - 1, C - 1)
    high, low = _decays(upto, upto_low, at, now, LOW)
    b_high, b_low = _decays(upto, upto_low, at, before, LOW)
    return tl.exp(tl.minimum(high - b_high + (low - b_low), 0.0))


@triton.jit
def _operands(
    left, head_x, right, head_v, weights, rows, n, start, length, missing, i, at, h, dk, dv, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, SHIFT: tl.constexpr, BACK: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keys, values and weights of the pairs that a chunk adds to the state at its end (BACK: queries, output gradients, at its start)."""
    e = tl.arange(0, C)
    r = i * (C - W + 1) - (W - 1) + e
    if BACK:
        ok = (e >= W - 1) & (r < length)
        row = row_of(rows, start, r, ok, MASKED) * H + h
        lp, rp, lok, rok = left + row * K, right + row * V, ok, ok
        w = tl.load(weights + at * (W + 3) + (W + 1) * C + e)
    else:
        lp, lok = key_pointers(left, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        rp, rok = value_pointers(right, head_v, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        w = tl.load(weights + at * (W + 3) + (W + 2) * C + e)
    x = read(lp[:, None] + dk[None, :], lok[:, None] & (dk < K)[None, :])
    y = read(rp[:, None] + dv[None, :], rok[:, None] & (dv < V)[None, :])
    return x, y, w


@triton.jit(do_not_specialize=FIXED)
def _segment_states(
    left,
    head_x,
    right,
    head_v,
    first,
    weights,
    upto,
    upto_low,
    weight,
    state,
    z,
    total,
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
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    BACK: tl.constexpr,
    ONES: tl.constexpr,
    LOW: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """What the pairs of a segment (BACK: its queries and output gradients) add to the state at its end (BACK: start)."""
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C - W + 1)
    e, dk = tl.arange(0, C), tl.arange(0, BK)
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    S = tl.zeros([BK, BV], tl.float32)
    own_z = tl.zeros([BK], tl.float32)
    sum_u = tl.zeros([1], tl.float32)
    missing = missing_pairs(first, n, SHIFT)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        at = ((chunk + i) * H + h) * C
        u_end = tl.load(upto + at + C - 1)
        low_end = u_end * 0.0
        if LOW:
            low_end = tl.load(upto_low + at + C - 1)
        x, y, w = _operands(
            left, head_x, right, head_v, weights, rows, n, start, length, missing, i, at, h, dk, dv, H, K, V, W, SHIFT, BACK, MASKED, C
        )  # fmt: skip
        kept = tl.exp(u_end + low_end)
        S = S * kept + dot(tl.trans(x), (y.to(tl.float32) * w[:, None]).to(x.dtype))
        if ONES:
            part = w
            if BACK:
                part = w * tl.load(weight + at + e)
            own_z = own_z * kept + tl.sum(x.to(tl.float32) * part[:, None], 0)
        sum_u += u_end + low_end
    at = (q * H + h) * K
    tl.store(state + (at + dk)[:, None] * V + dv[None, :], S, mask=(dk < K)[:, None] & (dv < V)[None, :])
    if tl.program_id(1) == 0:
        if ONES:
            tl.store(z + at + dk, own_z, mask=dk < K)
        tl.store(total + q * H + h + tl.arange(0, 1), sum_u)


@triton.jit(do_not_specialize=["NS"])
def _scan(
    state,
    total,
    initial,
    final,
    other,
    other_final,
    product,
    docs,
    NS,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    BACK: tl.constexpr,
    PRODUCT: tl.constexpr,
    SINGLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Turn what segments add into the states before them (BACK: the gradients of the states after them), in place.

    With PRODUCT, also sums of products with `other`, the states before the segments: SINGLE, of exp(total) times the state
    before with the gradient after; else of the state after with the gradient after. With COLUMNS, `total` is `[Q, H, V]`
    and so are the products (of every block of rows).
    """
    n, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BV)
    inside = (row < K)[:, None] & (column < V)[None, :]
    d = row[:, None] * V + column[None, :]
    if PLAIN:
        begin, end = n * NS, n * NS + NS
    else:
        begin, end = tl.load(docs + 4 * n + 3), tl.load(docs + 4 * n + 7)
    S = tl.zeros([ROWS, BV], tl.float32)
    if initial is not None:
        S += tl.load(initial + (n * H + h) * K * V + d, mask=inside, other=0.0).to(tl.float32)
    after = tl.zeros([ROWS, BV], tl.float32)
    if PRODUCT and not SINGLE:
        after = tl.load(other_final + (n * H + h) * K * V + d, mask=inside, other=0.0)
    # the next segment is loaded while this one is added
    q = begin
    if BACK:
        q = end - 1
    added = tl.load(state + (q * H + h) * K * V + d, mask=inside & (begin + row * 0 < end)[:, None], other=0.0)
    for step in range(begin, end):
        q, near = step, step + 1
        if BACK:
            q = begin + end - 1 - step
            near = q - 1
        more = tl.load(state + (near * H + h) * K * V + d, mask=inside & (step + 1 + row * 0 < end)[:, None], other=0.0)
        tl.store(state + (q * H + h) * K * V + d, S, mask=inside)
        if COLUMNS:
            kept = tl.exp(tl.load(total + (q * H + h) * V + column, mask=column < V, other=0.0))[None, :]
        else:
            kept = tl.exp(tl.load(total + q * H + h))
        if PRODUCT:
            before = tl.load(other + (q * H + h) * K * V + d, mask=inside, other=0.0)
            if SINGLE:
                pair = before * kept * S
            else:
                pair = after * S
                after = before
            tile = (q * H + h) * tl.num_programs(1) + tl.program_id(1)
            if COLUMNS:
                tl.store(product + tile * V + column, tl.sum(pair, 0), mask=column < V)
            else:
                tl.store(product + tile, tl.sum(tl.sum(pair, 1), 0))
        S = S * kept + added
        added = more
    tl.store(final + (n * H + h) * K * V + d, S, mask=inside)


@triton.jit(do_not_specialize=FIXED)
def _walk(
    query,
    k,
    head_x,
    v,
    head_v,
    d_o,
    first,
    weights,
    mixes,
    upto,
    upto_low,
    state,
    z,
    weight,
    out,
    seen,
    inner,
    docs,
    segment_doc,
    rows,
    eps,
    T,
    NC,
    NS,
    SEG,
    M,
    NIL,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BA: tl.constexpr,
    BB: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    SWAP: tl.constexpr,
    ONES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    INNER: tl.constexpr,
    LOW: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Outputs of a segment from the state before it. SWAP: keys and values change places, d_o is read with, and out is d_q.

    Outputs are the rows of every product, `[BB, C]`, and so is the state, `[BB, BA]`: it is read from registers. What is read from
    memory stands near its use, because it waits in registers from there on.
    NORMALIZE: divide by seen + eps. INNER: also q . (the part of out that comes from the state).
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C - W + 1)
    A: tl.constexpr = V if SWAP else K
    B: tl.constexpr = K if SWAP else V
    part = tl.program_id(1).to(tl.int64)
    e, da = tl.arange(0, C), tl.arange(0, BA)
    db = tl.program_id(1) * BB + tl.arange(0, BB)
    in_a, in_b = (da < A)[None, :], (db < B)[None, :]
    own = state + (q * H + h) * K * V
    if SWAP:
        own = own + da[None, :] + db[:, None] * V
    else:
        own = own + da[None, :] * V + db[:, None]
    S = tl.load(own, mask=in_a & (db < B)[:, None], other=0.0)
    # z has the rows of the state: a block of them, or all where they are multiplied with keys
    dn, count = da, A
    if SWAP:
        dn, count = db, B
    if ONES:
        sum_x = tl.load(z + (q * H + h) * K + dn, mask=dn < count, other=0.0)
    missing = missing_pairs(first, n, SHIFT)
    for i in range(begin, end):
        r = i * (C - W + 1) - (W - 1) + e
        at = ((chunk + i) * H + h) * C
        token = (e >= W - 1) & (r < length)
        row = row_of(rows, start, r, token, MASKED) * H + h
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        vp, vok = value_pointers(v, head_v, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        if SWAP:
            ask = read(d_o + row[:, None] * A + da[None, :], token[:, None] & in_a)
            pair = read(vp[:, None] + da[None, :], vok[:, None] & in_a)
        else:
            ask = read(query + row[:, None] * A + da[None, :], token[:, None] & in_a)
            pair = read(xp[:, None] + da[None, :], xok[:, None] & in_a)
        u_end = tl.load(upto + at + C - 1)
        if LOW:
            u_end += tl.load(upto_low + at + C - 1)
        kept = tl.exp(u_end)
        own_weights = weights + at * (W + 3)
        carried = dot(S.to(ask.dtype), tl.trans(ask))
        if ONES and SWAP:
            one = tl.load(weight + at + e)
            carried += sum_x[:, None] * one[None, :]
        found = carried * tl.load(own_weights + (W + 1) * C + e)[None, :]
        if INNER:
            other = read(query + row[None, :] * B + db[:, None], token[None, :] & (db < B)[:, None]).to(tl.float32)
            tl.store(inner + part * M * H * C + at + e, tl.sum(other * found, 0))
        if SWAP:
            value = read(xp[:, None] + db[None, :], xok[:, None] & in_b)
        else:
            value = read(vp[:, None] + db[None, :], vok[:, None] & in_b)
        give = tl.load(own_weights + (W + 2) * C + e)
        given = (tl.trans(value).to(tl.float32) * give[None, :]).to(value.dtype)
        S = S * kept + dot(given, pair)
        scores = dot(pair, tl.trans(ask))
        if ONES and SWAP:
            scores += one[None, :]
        if mixes is not None:
            p = scores * read(mixes + at * C + e[:, None] * C + e[None, :], (e >= 0)[:, None])
            if W == 1:
                p *= tl.load(own_weights + e)[:, None]
        else:
            high, low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
            s_high, s_low = _decays(upto, upto_low, at, tl.minimum(e + W - 1, C - 1), LOW)
            now = e
            if W > 1:  # NIL is 0, unknown to the compiler: no table of comparisons is kept in registers over the loop
                now = e + (NIL * i).to(tl.int32)
            distance = now[None, :] - (1 - AFTER) - e[:, None]
            scores *= _decay(high[None, :], low[None, :], s_high[:, None], s_low[:, None], distance, LOW)
            p = scores * _parts(own_weights, distance, e, W, C)
        found += dot(tl.trans(value), p.to(value.dtype))
        if NORMALIZE:
            from_start = tl.load(own_weights + (W + 1) * C + e)
            divisor = tl.sum(p, 0) + from_start * tl.sum(tl.trans(ask).to(tl.float32) * sum_x[:, None], 0) + eps
            found = found / divisor[None, :]
            if part == 0:
                tl.store(seen + row, divisor, mask=token)
        tl.store(out + row[None, :] * B + db[:, None], found, mask=token[None, :] & (db < B)[:, None])
        if ONES:
            # sums over pairs of what the ones behind the values give
            if SWAP:
                sum_x = sum_x * kept + tl.sum(tl.trans(value).to(tl.float32) * give[None, :], 1)
            else:
                sum_x = sum_x * kept + tl.sum(pair.to(tl.float32) * give[:, None], 0)


@triton.jit(do_not_specialize=FIXED)
def _walk_back(
    query,
    k,
    head_x,
    v,
    head_v,
    d_o,
    o,
    first,
    weights,
    mixes,
    upto,
    upto_low,
    d_state,
    d_z,
    weight,
    inner,
    product,
    d_energy,
    out,
    head_out,
    overlap,
    far,
    close,
    apart,
    docs,
    segment_doc,
    rows,
    eps,
    T,
    NC,
    NS,
    SEG,
    M,
    NIL,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BA: tl.constexpr,
    BB: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    SWAP: tl.constexpr,
    ONES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GATES: tl.constexpr,
    COUNT: tl.constexpr,
    TILES: tl.constexpr,
    ENERGY: tl.constexpr,
    LOW: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of a segment's values (SWAP: keys), from its end; d_state is the gradient of the state after the segment.

    The last key, and the first value where there is no key before, belong to no pair: theirs are 0.

    GATES (of values): also, for this block of value columns, what every token reads times its gradient (inner), the sum of state times
    gradient at the chunk's end (apart), and the gradients of P_{j,W-1} (far); with a window only what comes through the state of these, the
    rest is that of `_pulls`. Where LOW instead (inner is given then: the part read from the state) the gradients of P_{j,W-1} (far), of P_jd
    with d < W - 1 (close, `[W - 1, C]` a chunk), and the gradient of every token's log-decay that comes from far pairs and
    the states, pair by pair, so that nothing cancels (apart).
    ENERGY (of keys): add what comes through the energy of the keys.
    Everything is computed transposed (pairs as rows, queries as columns) from loaded operands: no accumulator is transposed.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C - W + 1)
    A: tl.constexpr = V if SWAP else K
    B: tl.constexpr = K if SWAP else V
    part = tl.program_id(1).to(tl.int64)
    e, da = tl.arange(0, C), tl.arange(0, BA)
    db = tl.program_id(1) * BB + tl.arange(0, BB)
    in_a, in_b = (da < A)[None, :], (db < B)[None, :]
    own = d_state + (q * H + h) * K * V
    if SWAP:
        dS = tl.load(own + da[:, None] + db[None, :] * V, mask=(da < A)[:, None] & in_b, other=0.0)
    else:
        dS = tl.load(own + da[:, None] * V + db[None, :], mask=(da < A)[:, None] & in_b, other=0.0)
    # z has the rows of the state: a block of them, or all where they are multiplied with keys
    dn, count = da, A
    if SWAP:
        dn, count = db, B
    if ONES:
        dz = tl.load(d_z + (q * H + h) * K + dn, mask=dn < count, other=0.0)
    once = tl.where(part == 0, 1.0, 0.0)  # what does not belong to a block of columns
    crossing = once * 0.0
    if GATES:
        tile = tl.arange(0, TILES)
        crossing = once * tl.sum(tl.load(product + (q * H + h) * COUNT + tile, mask=tile < COUNT, other=0.0), 0)
    missing = missing_pairs(first, n, SHIFT)
    if PLAIN and SHIFT:
        if SWAP:
            if end * (C - W + 1) >= length:
                tl.store(out + ((start + length - 1) * H + h) * B + db, db * 0.0, mask=db < B)
        elif W > 1 and first is None:
            if begin == 0:
                tl.store(out + (start * H + h) * B + db, db * 0.0, mask=db < B)
    for step in range(begin, end):
        i = begin + end - 1 - step
        r = i * (C - W + 1) - (W - 1) + e
        at = ((chunk + i) * H + h) * C
        token = (e >= W - 1) & (r < length)
        row = row_of(rows, start, r, token, MASKED) * H + h
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        vp, vok = value_pointers(v, head_v, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        if SWAP:
            pair = read(vp[:, None] + da[None, :], vok[:, None] & in_a)
            ask = read(d_o + row[:, None] * A + da[None, :], token[:, None] & in_a)
            value = read(query + row[:, None] * B + db[None, :], token[:, None] & in_b)
        else:
            pair = read(xp[:, None] + da[None, :], xok[:, None] & in_a)
            ask = read(query + row[:, None] * A + da[None, :], token[:, None] & in_a)
            value = read(d_o + row[:, None] * B + db[None, :], token[:, None] & in_b)
        full = tl.load(weights + at * (W + 3) + (W - 1) * C + e)
        u_end = tl.load(upto + at + C - 1)
        low_end = u_end * 0.0
        if LOW:
            low_end = tl.load(upto_low + at + C - 1)
        to_end = tl.load(weights + at * (W + 3) + W * C + e)
        scores = dot(pair, tl.trans(ask))
        if ONES and SWAP:
            scores += tl.load(weight + at + e)[None, :]
        if mixes is not None:
            p = scores * read(mixes + at * C + e[:, None] * C + e[None, :], (e >= 0)[:, None])
        if mixes is not None and W == 1:
            scores = p
        elif mixes is None:
            s_high, s_low = _decays(upto, upto_low, at, tl.minimum(e + W - 1, C - 1), LOW)
            high, low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
            now = e
            if W > 1:  # as in `_walk`
                now = e + (NIL * i).to(tl.int32)
            distance = now[None, :] - (1 - AFTER) - e[:, None]
            scores *= _decay(high[None, :], low[None, :], s_high[:, None], s_low[:, None], distance, LOW)
        slot = part * M * H * C + at + e
        if GATES and LOW:
            # the gradient of P_jd: products of pairs that are d apart, undecayed there; of P_{j,W-1}: those of all far ones
            y = read(vp[:, None] + db[None, :], vok[:, None] & in_b)
            pull = dot(y, tl.trans(value))
            if ONES:
                pull += once * tl.load(weight + at + e)[None, :]
            pull *= scores
            for d in tl.static_range(W - 1):
                near = tl.sum(tl.where(distance == d, pull, 0.0), 1)
                tl.store(close + (part * M * H * C + at) * (W - 1) + d * C + e, near)
            if W > 1:
                pull = tl.where(distance >= W - 1, pull, 0.0)
            d_full = tl.sum(pull, 1)
        carried = dot(pair, dS.to(pair.dtype))
        if ONES and SWAP:
            carried += dz[None, :]
        if GATES and W == 1 and not LOW:
            # the same as the product of the pair with what P_{j,W-1} multiplies
            found = to_end[:, None] * carried + dot(scores.to(pair.dtype), value)
            d_full = tl.sum(read(vp[:, None] + db[None, :], vok[:, None] & in_b).to(tl.float32) * found, 1)
            if ONES:
                d_full += once * tl.sum(scores * tl.load(weight + at + e)[None, :], 1)
                d_full += once * to_end * tl.sum(pair.to(tl.float32) * dz[None, :], 1)
            given = d_full * full
            found *= full[:, None]
        else:
            if W == 1:
                p = scores * full[:, None]
            elif mixes is None:
                p = scores * _parts(weights + at * (W + 3), distance, e, W, C)
            found = (full * to_end)[:, None] * carried + dot(p.to(pair.dtype), value)
            if GATES and not LOW:  # the rest of this gradient is that of `_pulls`
                y = read(vp[:, None] + db[None, :], vok[:, None] & in_b).to(tl.float32)
                d_full = to_end * tl.sum(y * carried, 1)
                given = tl.sum(y * found, 1)
            elif GATES:
                written = tl.sum(y.to(tl.float32) * carried, 1)
                if ONES:
                    written += once * tl.sum(pair.to(tl.float32) * dz[None, :], 1)
                written *= to_end
                d_full += written
        if GATES:
            tl.store(far + slot, d_full)
        if GATES and not LOW:
            if NORMALIZE:
                reads = -eps * once * tl.load(weight + at + e)
            else:
                answer = read(o + row[:, None] * B + db[None, :], token[:, None] & in_b).to(tl.float32)
                reads = tl.sum(answer * value.to(tl.float32), 1)
            tl.store(inner + slot, reads)
            tl.store(apart + slot, crossing + tl.zeros([C], tl.float32))
            crossing += tl.sum(reads - given, 0)
        if GATES and LOW:
            # token r decays what earlier tokens wrote, for later ones to read
            reads = once * tl.load(inner + at + e)
            earlier = e[None, :] + W - 1 < e[:, None]
            pull = dot(tl.where(earlier, 1.0, 0.0), pull * full[:, None]) + reads[None, :]
            grad = tl.sum(tl.where(e[None, :] - e[:, None] >= 1 - AFTER, pull, 0.0), 1)
            grad += tl.sum(tl.where(earlier, (written * full)[None, :], 0.0), 1)
            tl.store(apart + slot, grad + crossing)
        initial = i + e * 0 == 0  # whether this is a document's first chunk
        ours = (e >= W - 1) | initial
        if SWAP:
            op, ok = key_pointers(out, head_out, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        else:
            op, ok = value_pointers(out, head_out, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        if W > 1:
            shared = overlap + (((chunk + i) * H + h) * (W - 1) + e) * B
            tl.store(shared[:, None] + db[None, :], found, mask=(ok & (e < W - 1) & ~initial)[:, None] & in_b)
        if ENERGY:
            factor = tl.zeros([C], tl.float32)
            for w in tl.static_range(W):
                there = (r + w >= 0) & (r + w < length)
                factor += tl.load(d_energy + (start + r + w) * H + h, mask=there, other=0.0)
            found += 2.0 * factor[:, None] * read(xp[:, None] + db[None, :], xok[:, None] & in_b).to(tl.float32)
        tl.store(op[:, None] + db[None, :], found, mask=(ok & ours)[:, None] & in_b)
        kept = tl.exp(u_end + low_end)
        from_start = tl.load(weights + at * (W + 3) + (W + 1) * C + e)
        dS = dS * kept + dot(tl.trans(ask), (value.to(tl.float32) * from_start[:, None]).to(pair.dtype))
        if ONES:
            share = from_start * tl.load(weight + at + e)
            if SWAP:
                dz = dz * kept + tl.sum(value.to(tl.float32) * share[:, None], 0)
            else:
                dz = dz * kept + tl.sum(ask.to(tl.float32) * share[:, None], 0)


@triton.jit(do_not_specialize=["T", "NC"])
def _pulls(
    query,
    k,
    head_x,
    v,
    head_v,
    d_o,
    first,
    upto,
    far,
    close,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of P within every chunk of a window, for 16-bit inputs: those of P_jd with d < W - 1 (close), and of P_{j,W-1} through
    queries of the chunk (far). All chunks at once, where the walk would wait for its sums.
    """
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, dk, dv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = (dk < K)[None, :], (dv < V)[None, :]
    r = i * (C - W + 1) - (W - 1) + e
    at = (c * H + h) * C
    token = (e >= W - 1) & (r < length)
    row = row_of(rows, start, r, token, MASKED) * H + h
    xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    vp, vok = value_pointers(
        v, head_v, rows, n, start, length, missing_pairs(first, n, SHIFT), h, r, H, V, W, SHIFT, MASKED
    )
    pair = read(xp[:, None] + dk[None, :], xok[:, None] & in_k)
    pull = dot(pair, tl.trans(read(query + row[:, None] * K + dk[None, :], token[:, None] & in_k)))
    value = read(vp[:, None] + dv[None, :], vok[:, None] & in_v)
    pull *= dot(value, tl.trans(read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v)))
    distance = e[None, :] - (1 - AFTER) - e[:, None]
    for d in tl.static_range(W - 1):
        tl.store(close + at * (W - 1) + d * C + e, tl.sum(tl.where(distance == d, pull, 0.0), 1))
    whole, low = _decays(upto, upto, at, tl.minimum(e + W - 1, C - 1), False)
    read_at, low = _decays(upto, upto, at, e - (1 - AFTER), False)
    decay = tl.exp(tl.minimum(read_at[None, :] - whole[:, None], 0.0))
    tl.store(far + at + e, tl.sum(tl.where(distance >= W - 1, pull * decay, 0.0), 1))


SMALL = tl.constexpr(0.25)  # decays below it (and above the floor) have their gradients from `_low_decays`


@triton.jit(do_not_specialize=FIXED)
def _low_decays(
    query,
    k,
    head_x,
    v,
    head_v,
    d_o,
    first,
    weights,
    upto,
    state,
    d_state,
    low,
    exact,
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
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of log-decays through pairs that are written before them and read behind them, pair by pair, of chunks with a low decay.

    All that is read from a token on and all that is written from it on, as elsewhere in 16 bits, cancel but for rounding, and the gradient
    of a decay is that of its logarithm divided by it. low: 1 for such chunks, `[M, H]`. exact: by blocks of value columns,
    `[blocks, M, H, C]`. state, d_state: before segments, and its gradient after them, from which the walks to such a chunk begin.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C - W + 1)
    e, dk, dv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    missing = missing_pairs(first, n, SHIFT)
    each = begin + tl.arange(0, C)  # a segment has no more chunks
    slots = upto + ((chunk + each) * H + h)[:, None] * C + e[None, :]
    to = tl.load(slots, mask=(each < end)[:, None] & (e >= 0)[None, :], other=0.0)
    decay = tl.exp(to - tl.load(slots - 1, mask=(each < end)[:, None] & (e > 0)[None, :], other=0.0))
    found = tl.max(((decay < SMALL) & (decay > 1.0001 * decay_floor)).to(tl.int32), 1)
    tl.store(low + (chunk + each) * H + h, found, mask=each < tl.where(tl.program_id(1) == 0, end, 0))
    if tl.max(found, 0) > 0:
        place = (q * H + h) * K * V + dk[:, None] * V + dv[None, :]
        inside = (dk < K)[:, None] & (dv < V)[None, :]
        for i in range(begin, end):
            if tl.max(tl.where(each == i, found, 0), 0) > 0:
                S = tl.load(state + place, mask=inside, other=0.0)
                for j in range(begin, i):
                    at = ((chunk + j) * H + h) * C
                    x, y, w = _operands(
                        k, head_x, v, head_v, weights, rows, n, start, length, missing, j, at, h, dk, dv, H, K, V, W, SHIFT, False, MASKED, C
                    )  # fmt: skip
                    S = S * tl.exp(tl.load(upto + at + C - 1)) + dot(
                        tl.trans(x), (y.to(tl.float32) * w[:, None]).to(x.dtype)
                    )
                dS = tl.load(d_state + place, mask=inside, other=0.0)
                for j in range(i + 1, end):
                    at = ((chunk + end + i - j) * H + h) * C
                    x, y, w = _operands(
                        query, head_x, d_o, head_v, weights, rows, n, start, length, missing, end + i - j, at, h, dk, dv, H, K, V, W, SHIFT, True, MASKED, C
                    )  # fmt: skip
                    dS = dS * tl.exp(tl.load(upto + at + C - 1)) + dot(
                        tl.trans(x), (y.to(tl.float32) * w[:, None]).to(x.dtype)
                    )
                at = ((chunk + i) * H + h) * C
                x, y, _w = _operands(
                    k, head_x, v, head_v, weights, rows, n, start, length, missing, i, at, h, dk, dv, H, K, V, W, SHIFT, False, MASKED, C
                )  # fmt: skip
                ask, grad, from_start = _operands(
                    query, head_x, d_o, head_v, weights, rows, n, start, length, missing, i, at, h, dk, dv, H, K, V, W, SHIFT, True, MASKED, C
                )  # fmt: skip
                full = tl.load(weights + at * (W + 3) + (W - 1) * C + e)
                to_end = tl.load(weights + at * (W + 3) + W * C + e)
                reads = from_start * tl.sum(grad.to(tl.float32) * dot(ask, S.to(ask.dtype)), 1)
                written = full * to_end * tl.sum(y.to(tl.float32) * dot(x, dS.to(x.dtype)), 1)
                distance = e[None, :] - (1 - AFTER) - e[:, None]
                whole, _low = _decays(upto, upto, at, tl.minimum(e + W - 1, C - 1), False)
                until, _low = _decays(upto, upto, at, e - (1 - AFTER), False)
                pull = dot(x, tl.trans(ask)) * dot(y, tl.trans(grad)) * full[:, None]
                pull *= tl.exp(tl.minimum(until[None, :] - whole[:, None], 0.0))
                # token r decays what earlier tokens wrote, for later ones to read
                earlier = e[None, :] + W - 1 < e[:, None]
                pull = dot(tl.where(earlier, 1.0, 0.0), tl.where(distance >= W - 1, pull, 0.0)) + reads[None, :]
                d_u = tl.sum(tl.where(e[None, :] - e[:, None] >= 1 - AFTER, pull, 0.0), 1)
                d_u += tl.sum(tl.where(earlier, written[None, :], 0.0), 1)
                d_u += tl.sum(tl.sum(S * dS, 1), 0) * tl.exp(tl.load(upto + at + C - 1))
                tl.store(exact + tl.program_id(1).to(tl.int64) * M * H * C + at + e, d_u)


@triton.jit
def gradients_of_chunk(
    low,
    exact,
    upto,
    upto_low,
    weights,
    inner,
    far,
    close,
    apart,
    at,
    size,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    AFTER: tl.constexpr,
    LOW: tl.constexpr,
    C: tl.constexpr,
):
    """From the gradients of P, and products of the walks, to those of strength and log-decay of every token of the chunk at `at`.

    low, exact: of `_low_decays`, or None.
    """
    apart_from_walks: tl.constexpr = W > 1 and not LOW  # see `_pulls`
    FAR: tl.constexpr = PARTS + 1 if apart_from_walks else PARTS
    CLOSE: tl.constexpr = 1 if apart_from_walks else PARTS
    e = tl.arange(0, C)
    d_c = tl.zeros([C], tl.float32)
    d_u = tl.zeros([C], tl.float32)
    reads = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        d_u += tl.load(apart + part * size + at + e)
        if not LOW:
            reads += tl.load(inner + part * size + at + e)
    if not LOW:
        # far pairs: all reads from here on, minus all that was written from here on, plus state times gradient at the end
        full = tl.zeros([C], tl.float32)
        for part in tl.static_range(FAR):
            full += tl.load(far + part * size + at + e)
        full *= tl.load(weights + at * (W + 3) + (W - 1) * C + e)
        for d in tl.static_range(W - 1):
            j = e - d - (1 - AFTER)
            own = tl.load(weights + at * (W + 3) + d * C + j, mask=j >= 0, other=0.0)
            for part in tl.static_range(CLOSE):
                near = close + (part * size + at) * (W - 1) + d * C + j
                reads -= own * tl.load(near, mask=j >= 0, other=0.0)
        later = e[None, :] - e[:, None]
        d_u += tl.sum(tl.where(later >= 1 - AFTER, reads[None, :], 0.0), 1)
        d_u -= tl.sum(tl.where(later >= 1 - W, full[None, :], 0.0), 1)
        if low is not None:
            is_low = tl.load(low + at // C + e * 0) > 0
            by_pairs = tl.zeros([C], tl.float32)
            for part in tl.static_range(PARTS):
                by_pairs += tl.load(exact + part * size + at + e, mask=is_low, other=0.0)
            d_u = tl.where(is_low, by_pairs, d_u)
    for back in tl.static_range(W):
        # this token is number `back` of those that write pair j
        j = e - back
        grad = tl.zeros([C], tl.float32)
        for up in tl.static_range(W - back):
            for part in tl.static_range(FAR if up == 0 else CLOSE):
                if up == 0:
                    grad += tl.load(far + part * size + at + j, mask=j >= 0, other=0.0)
                else:
                    near = close + (part * size + at) * (W - 1) + (W - 1 - up) * C + j
                    grad += tl.load(near, mask=j >= 0, other=0.0)
            if back < W - 1 - up:
                grad *= _decay_of(upto, upto_low, at, j + W - 1 - up, LOW, C)
        d_c += grad
        if back > 0:
            before = tl.load(weights + at * (W + 3) + (back - 1) * C + j, mask=j >= 0, other=0.0)
            d_u += grad * before * _decay_of(upto, upto_low, at, e, LOW, C)
    return d_c, d_u


@triton.jit
def _gate_gradients(
    upto,
    upto_low,
    weights,
    inner,
    far,
    close,
    apart,
    d_log_decay,
    size,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    AFTER: tl.constexpr,
    LOW: tl.constexpr,
    C: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * C
    _d_c, d_u = gradients_of_chunk(
        None, None, upto, upto_low, weights, inner, far, close, apart, at, size, PARTS, W, AFTER, LOW, C
    )
    tl.store(d_log_decay + at + tl.arange(0, C), d_u)


@triton.jit(do_not_specialize=["T", "NC"])
def _add_overlap(
    overlap,
    k,
    head_x,
    docs,
    chunk_doc,
    rows,
    first,
    T,
    NC,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    SHIFT: tl.constexpr,
    VALUES: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Add what a chunk gives to the pairs of the chunk before it."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, d = tl.arange(0, BW), tl.arange(0, BK)
    r = i * (C - W + 1) - (W - 1) + e
    if VALUES:
        p, ok = value_pointers(
            k, head_x, rows, n, start, length, missing_pairs(first, n, SHIFT), h, r, H, K, W, SHIFT, MASKED
        )
    else:
        p, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    # the last chunk of a document may hold no token of its own under a mask: then nothing was written for it
    ok = (ok & (e < W - 1) & (i + e * 0 > 0) & (r + W - 1 - e < length))[:, None] & (d < K)[None, :]
    added = tl.load(overlap + ((c * H + h) * (W - 1) + e)[:, None] * K + d[None, :], mask=ok, other=0.0)
    p = p[:, None] + d[None, :]
    tl.store(p, read(p, ok).to(tl.float32) + added, mask=ok)


# elements of the state that a program holds, warps, pipeline stages: for 16-bit inputs, and for float32
CUTS = {
    "states": ((16384, 4, 1), (4096, 4, 1)),
    "walk": ((16384, 8, 3), (4096, 4, 1)),  # in float32 with 8 warps, Triton 3.6 makes wrong code of small tiles
    "values": ((8192, 4, 2), (4096, 4, 1)),
    "keys": ((8192, 4, 2), (4096, 4, 1)),
}


def cut(kind: str, rows: int, columns: int, like: Tensor) -> tuple[int, dict[str, int]]:
    """Columns of a state `[rows, columns]` that one program holds, and its launch options; by sizes and dtype alone."""
    room, warps, stages = CUTS[kind][like.dtype == torch.float32]
    least = 16
    if kind == "walk" and like.dtype != torch.float32:
        # columns are rows of the products, of which Hopper's tensor cores take 64; shared memory holds less of many rows
        least, stages = 64, min(stages, 2 if block(rows) > 128 else 3)
    return min(max(least, block(columns)), max(least, room // block(rows))), {"num_warps": warps, "num_stages": stages}


def segment_length(q: Tensor, overlap: int) -> int:
    """Chunks of a segment, so that there are about 256 segments to fill a GPU. float32 keeps every state for its digits."""
    if q.dtype == torch.float32:
        return 1
    return min(64, max(1, parts(q.shape[0] * q.shape[1] * q.shape[2], 256 * (CHUNK - overlap))))


def scan(
    state: Tensor,
    total: Tensor,
    initial: Tensor | None,
    ranks: Ranks,
    other: Tensor | None = None,
    other_final: Tensor | None = None,
    single: bool = False,
) -> tuple[Tensor, Tensor]:
    """States before (with `other`, the states: gradients after) all segments in place; the one at the end; and products.

    Args:
        state: `[Q, H, K, V]`, or `[Q, H, K]`. total: log-decay of every segment, `[Q, H]`, or `[Q, H, V]` for every column.
        initial: `[N, H, K, V]`, None for zeros. other_final: state after the last token.
    Returns: final state, and products by blocks of 16 rows `[Q, H, K / 16]` or `[Q, H, K / 16, V]`, see `_scan`.
    """
    segments, heads, k_size = state.shape[:3]
    v_size, columns, back = state.shape[3] if state.ndim == 4 else 1, total.ndim == 3, other is not None
    final, tiles = state.new_empty(ranks.documents, *state.shape[1:]), parts(k_size, 16)
    product = state.new_empty((segments, heads, tiles, *([v_size] if columns else [])) if back else (0,))
    launch(
        _scan, (ranks.documents * heads, tiles), state=state, total=total, initial=None if initial is None else initial.contiguous(), final=final,
        other=other, other_final=other_final, product=product, docs=ranks.docs, NS=segments // ranks.documents, H=heads, K=k_size, V=v_size, ROWS=16, BV=block(v_size), BACK=back,
        PRODUCT=back, SINGLE=single, COLUMNS=columns, PLAIN=ranks.docs is None,
    )  # fmt: skip
    return final, product


def new_weights(q: Tensor, ranks: Ranks, window: int) -> tuple[Tensor, Tensor]:
    """Where `weights` and `mixes` of `weigh` go; the second is empty for float32, which keeps its digits."""
    shape, dtype = (ranks.chunks, q.shape[2]), q.dtype
    mixed = dtype != torch.float32
    if dtype == torch.float16:
        dtype = torch.float32  # strengths are larger than float16 can be
    weights = q.new_empty(*shape, window + 3, CHUNK, dtype=torch.float32)
    return weights, q.new_empty((*shape, CHUNK, CHUNK) if mixed else (0,), dtype=dtype)


def weights_of(q: Tensor, decay: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Those of `weigh` for pairs that each token writes with strength 1, from the halves of the log-decay's prefix `[2, M, H, C]`."""
    weights, mixes = new_weights(q, ranks, 1)
    with on_device(q):
        launch(
            _weigh, (ranks.chunks * q.shape[2],), upto=decay[0], upto_low=decay[1], weights=weights,
            mixes=mixes if mixes.numel() else None, W=1, AFTER=1, LOW=q.dtype == torch.float32, C=CHUNK,
        )  # fmt: skip
    return weights, mixes


def gate_gradients(grads: dict[str, Any], like: Tensor) -> Tensor:
    """Gradient of every token's log-decay, `[M, H, C]`, from what `Associative.backward` hands over."""
    d_log_decay = torch.empty_like(like)
    launch(
        _gate_gradients, (like.shape[0] * like.shape[1],), **grads, d_log_decay=d_log_decay, W=1, AFTER=1, C=CHUNK, num_warps=1
    )  # fmt: skip
    return d_log_decay


class Kept(NamedTuple):
    """What backward needs besides inputs and gates: states before the segments, their decays, the divisors of the read."""

    states: Tensor
    z: Tensor
    total: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Associative:
    """One call: its inputs and options; see the module for the recurrence.

    Attributes:
        q, k, v: `[B, T, H, .]`, contiguous. head_x, head_v, first: see `falcon.prepass.heads_of`; None for documents that begin here.
        upto, upto_low: the two halves of the log-decay's prefix in chunks, float32 `[M, H, C]`. weights, mixes: of `new_weights`.
        ranks: with overlap W - 1. window: W. shift: 1 when a token's pair has the key before it.
        after: whether a token reads what it has written. ones: whether there is a normaliser z. normalize: whether it divides.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    head_x: Tensor | None
    head_v: Tensor | None
    first: Tensor | None
    upto: Tensor
    upto_low: Tensor
    weights: Tensor
    mixes: Tensor
    ranks: Ranks
    window: int = 1
    shift: int = 0
    after: bool = True
    ones: bool = False
    normalize: bool = False
    eps: float = 0.0

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @functools.cached_property
    def _common(self) -> dict[str, Any]:
        """What several kernels take."""
        ranks = self.ranks
        return {
            "query": self.q,
            "k": self.k,
            "v": self.v,
            "head_x": self.head_x,
            "head_v": self.head_v,
            "first": self.first,
            "upto": self.upto,
            "upto_low": self.upto_low,
            "weights": self.weights,
            "mixes": self.mixes if self.mixes.numel() else None,
            "docs": ranks.docs,
            "segment_doc": ranks.segment_doc,
            "rows": ranks.rows,
            "T": ranks.tokens,
            "NC": ranks.chunks // ranks.documents,
            "NS": ranks.segments // ranks.documents,
            "SEG": ranks.segment,
            "M": ranks.chunks,
            "NIL": 0,
            "H": self.heads,
            "K": self.k.shape[3],
            "V": self.v.shape[3],
            "W": self.window,
            "SHIFT": self.shift,
            "AFTER": int(self.after),
            "LOW": self.q.dtype == torch.float32,
            "PLAIN": ranks.docs is None,
            "MASKED": ranks.rows is not None,
            "C": CHUNK,
            "eps": self.eps,
        }

    def _states(
        self, left: Tensor, right: Tensor, total: Tensor, weight: Tensor | None, back: bool
    ) -> tuple[Tensor, Tensor]:
        """What every segment adds to the state, `[Q, H, K, V]`, and to z."""
        k_size, v_size, segments = self.k.shape[3], self.v.shape[3], self.ranks.segments
        columns, options = cut("states", k_size, v_size, self.k)
        state = self.q.new_empty(segments, self.heads, k_size, v_size, dtype=torch.float32)
        z = self.q.new_empty(segments, self.heads, k_size if self.ones else 0, dtype=torch.float32)
        launch(
            _segment_states, (segments * self.heads, parts(v_size, columns)), left=left, right=right, weight=weight, state=state, z=z,
            total=total, **self._common, BK=block(k_size), BV=columns, BACK=back,
            ONES=self.ones and (weight is not None or not back), **options,
        )  # fmt: skip
        return state, z

    def forward(self, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """Output `[B, T, H, V]`, state and z after the last token, and what backward needs."""
        ranks = self.ranks
        o = ranks.new_like(self.v)
        make = self.q.new_empty if ranks.rows is None else self.q.new_ones
        seen = make(self.q.shape[:3] if self.normalize else (0,), dtype=torch.float32)
        total = self.q.new_empty(ranks.segments, self.heads, dtype=torch.float32)
        with on_device(self.q):
            states, z_states = self._states(self.k, self.v, total, None, False)
            S, _ = scan(states, total, S, self.ranks)
            z = scan(z_states, total, z, self.ranks)[0] if self.ones else z_states
            self._walk(states, z_states if self.normalize else None, o, seen=seen)
        return o, S, z, Kept(states, z_states, total, seen)

    def _walk(self, state: Tensor, z: Tensor | None, out: Tensor, swap: bool = False, **tensors: Tensor | None) -> None:
        """z: states of the normaliser, where it plays a part. tensors: d_o, weight, inner, seen."""
        k_size, v_size = self.k.shape[3], self.v.shape[3]
        inner_size, size = (v_size, k_size) if swap else (k_size, v_size)
        columns, options = cut("walk", inner_size, size, self.k)
        launch(
            _walk, (self.ranks.segments * self.heads, parts(size, columns)), state=state, z=z, out=out, **tensors, **self._common,
            BA=block(inner_size), BB=columns, SWAP=swap, ONES=z is not None, NORMALIZE=self.normalize and not swap,
            INNER=tensors.get("inner") is not None, **options,
        )  # fmt: skip

    def backward(
        self,
        d_o: Tensor,
        o: Tensor,
        d_S: Tensor | None,
        d_z: Tensor | None,
        S_end: Tensor,
        z_end: Tensor,
        kept: Kept,
        through_gates: Callable[[dict[str, Any]], Tensor | None] | None,
        decay_floor: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """Gradients of q, k, v, head_x, head_v, S and z (None: it is 0).

        Args:
            through_gates: gets the arguments from which `gradients_of_chunk` makes the gradients of strength and log-decay, and may
                return that of the energies of keys, `[B * T, H]` by first row plus rank, to be added to that of the keys. None: nobody
                wants them.
            decay_floor: smallest decay of a token, if `through_gates` divides by decays.
        """
        ranks, heads, k_size, v_size = self.ranks, self.heads, self.k.shape[3], self.v.shape[3]
        d_o, weight = d_o.contiguous(), None
        if self.normalize:
            weight = into_chunks(-(d_o.float() * o.float()).sum(-1) / kept.seen, ranks)
            d_o = (d_o.float() / kept.seen[..., None]).to(d_o.dtype)
        ones = self.ones and (self.normalize or d_z is not None)  # else nobody has read z
        wide, gates, total = self.q.dtype == torch.float32, through_gates is not None, torch.empty_like(kept.total)
        # the first value belongs to no pair where no key may be before it
        unpaired = 0 if self.shift and self.window > 1 and self.first is not None else None
        d_q, d_k, d_v = (
            ranks.new_like(self.q),
            ranks.new_pairs_like(self.k, None),
            ranks.new_pairs_like(self.v, unpaired),
        )
        d_head_x, d_head_v = (None if x is None else torch.zeros_like(x) for x in (self.head_x, self.head_v))
        of_values, of_keys = (
            parts(size, cut(kind, other, size, self.k)[0])
            for kind, size, other in (("values", v_size, k_size), ("walk", k_size, v_size))
        )
        size = (of_values, ranks.chunks, heads, CHUNK) if gates else (0,)
        inner = self.q.new_empty((of_keys, *size[1:]) if wide and gates else size, dtype=torch.float32)
        apart = self.q.new_empty(size, dtype=torch.float32)
        pulls = gates and self.window > 1 and not wide
        far = self.q.new_empty((size[0] + 1, *size[1:]) if pulls else size, dtype=torch.float32)
        close = self.q.new_empty((1 if pulls else size[0], *size[1:-1], self.window - 1, size[-1]), dtype=torch.float32)
        d_energy = None
        with on_device(self.q):
            d_states, d_z_states = self._states(self.q, d_o, total, weight, True)
            d_S, product = scan(d_states, kept.total, d_S, self.ranks, kept.states, S_end, wide)
            if ones:
                if weight is None:
                    d_z_states.zero_()
                d_z, more = scan(d_z_states, kept.total, d_z, self.ranks, kept.z, z_end, wide)
                product = torch.cat([product, more], -1)
            reads = wide and gates
            self._walk(
                kept.states,
                None if weight is None else kept.z,
                d_q,
                True,
                d_o=d_o,
                weight=weight,
                inner=inner if reads else None,
            )
            if reads:
                inner = inner.sum(0)
            outs = (inner, far, close, apart) if gates else None
            d_z_of_values = d_z_states if gates and ones else None
            self._walk_back(d_o, o, d_states, d_z_of_values, weight, product, (d_v, d_head_v), outs, None, False)
            if pulls:
                launch(
                    _pulls, (ranks.chunks * heads,), d_o=d_o, far=far[-1], close=close, **self._common, chunk_doc=ranks.chunk_doc,
                    BK=block(k_size), BV=block(v_size), num_warps=4, num_stages=1,
                )  # fmt: skip
            low: dict[str, Tensor] = {}
            if gates and decay_floor is not None and not wide:
                low = {
                    "low": self.q.new_empty(ranks.chunks, heads, dtype=torch.int32),
                    "exact": torch.empty_like(apart),
                }
                launch(
                    _low_decays, (ranks.segments * heads, of_values), d_o=d_o, state=kept.states, d_state=d_states, **low, **self._common,
                    decay_floor=decay_floor, BK=block(k_size), BV=cut("values", k_size, v_size, self.k)[0], num_warps=4, num_stages=1,
                )  # fmt: skip
            if through_gates is not None:
                d_energy = through_gates(
                    {
                        **low,
                        "upto": self.upto,
                        "upto_low": self.upto_low,
                        "weights": self.weights,
                        "inner": inner,
                        "far": far,
                        "close": close,
                        "apart": apart,
                        "size": ranks.chunks * heads * CHUNK,
                        "PARTS": of_values,
                        "LOW": wide,
                    }
                )
            d_z_of_keys = d_z_states if ones else None
            self._walk_back(d_o, o, d_states, d_z_of_keys, weight, None, (d_k, d_head_x), None, d_energy, True)
        return d_q, d_k, d_v, d_head_x, d_head_v, d_S, d_z if ones else None

    def _walk_back(
        self,
        d_o: Tensor,
        o: Tensor,
        d_states: Tensor,
        d_z: Tensor | None,
        weight: Tensor | None,
        product: Tensor | None,
        outs: tuple[Tensor, Tensor | None],
        gates: tuple[Tensor, ...] | None,
        d_energy: Tensor | None,
        swap: bool,
    ) -> None:
        """Into `outs`, gradients of values (swap: keys) and of those in the head; into `gates`: inner, far, close, apart."""
        ranks, k_size, v_size = self.ranks, self.k.shape[3], self.v.shape[3]
        inner_size, size = (v_size, k_size) if swap else (k_size, v_size)
        columns, options = cut("keys" if swap else "values", inner_size, size, self.k)
        overlap = self.q.new_empty(ranks.chunks, self.heads, self.window - 1, size, dtype=torch.float32)
        if d_z is not None and weight is None:
            weight = self.q.new_zeros(ranks.chunks, self.heads, CHUNK, dtype=torch.float32)
        inner, far, close, apart = gates or (None,) * 4
        count = 1 if product is None else product.shape[-1]
        launch(
            _walk_back, (ranks.segments * self.heads, parts(size, columns)), d_o=d_o, o=o, d_state=d_states, d_z=d_z, weight=weight,
            inner=inner, product=product, d_energy=d_energy, out=outs[0], head_out=outs[1], overlap=overlap, far=far, close=close,
            apart=apart, **self._common, BA=block(inner_size), BB=columns, SWAP=swap, ONES=d_z is not None,
            NORMALIZE=self.normalize, GATES=gates is not None, COUNT=count, TILES=power(count),
            ENERGY=d_energy is not None, **options,
        )  # fmt: skip
        if self.window > 1:
            launch(
                _add_overlap, (ranks.chunks * self.heads,), overlap=overlap, k=outs[0], head_x=outs[1], **tables(ranks), first=self.first, H=self.heads, K=size, BK=block(size), W=self.window,
                BW=power(self.window), SHIFT=self.shift, VALUES=not swap, num_warps=1,
            )  # fmt: skip
