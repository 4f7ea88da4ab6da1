"""Triton kernels of the inner-product rules with one decay a token: falcon1a, falcon3a, linear attention.

Within a chunk, with log-decay prefix u, strengths c and windows of W pairs (slots and chunks: see `ranks.py`),

    o_t = exp(u_t) S_0^T q_t + sum_j M_tj (q_t . x_j) v_j      M_tj = sum of c_s exp(u_t - u_s) over s = j ... min(t, j + W - 1)
    S_C = exp(u_C) S_0 + sum_j w_j x_j v_j^T                   w_j  = sum of c_s exp(u_C - u_s) over s = j ... j + W - 1

A document's chunks are grouped into segments. Four steps, and only the states between segments go through memory: what each
segment adds by itself (`_segment_states`), a scan over segments (`_scan`), then every segment walks over its chunks with the
state in registers (`_walk`). Backward is the same again: the gradient of q is the walk with (q, x, v) replaced by (d_o, v, x),
and the gradients of v and x are a walk from the end with the gradient of the state (`_walk_back`).

The normaliser z of linear attention is a column of ones behind v: `ONES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu import block, dot, into_chunks, key_pointers, of_chunk, on_device, read, row_of, tables, value_pointers
from .ranks import CHUNK, Ranks

FIXED = ["T", "NC", "NS", "SEG", "M"]  # no recompilation for another length


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
def _to_end(strength, upto, upto_low, at, e, end, end_low, W: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr):
    """w_j: how much of pair j is in the state at the chunk's end."""
    w = tl.zeros([C], tl.float32)
    for back in tl.static_range(W):
        inside = e + back < C
        c = tl.load(strength + at + e + back, mask=inside, other=0.0)
        difference = end - tl.load(upto + at + e + back, mask=inside, other=0.0)
        if LOW:
            difference += end_low - tl.load(upto_low + at + e + back, mask=inside, other=0.0)
        w += c * tl.exp(tl.minimum(difference, 0.0))
    return w


@triton.jit(do_not_specialize=FIXED)
def _segment_states(
    left,
    head_left,
    right,
    head_right,
    first,
    strength,
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
    H,
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
    missing = tl.load(first + n)
    for step in range(begin, end):
        i = step
        if BACK:
            i = begin + end - 1 - step
        r = i * (C - W + 1) - (W - 1) + e
        at = ((chunk + i) * H + h) * C
        u_end = tl.load(upto + at + C - 1)
        low_end = u_end * 0.0
        if LOW:
            low_end = tl.load(upto_low + at + C - 1)
        if BACK:
            ok = (e >= W - 1) & (r < length)
            row = row_of(rows, start, r, ok, MASKED) * H + h
            lp, rp, lok, rok = left + row * K, right + row * V, ok, ok
            high, low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
            w = tl.exp(high + low)
        else:
            lp, lok = key_pointers(left, head_left, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
            rp, rok = value_pointers(right, head_right, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
            w = _to_end(strength, upto, upto_low, at, e, u_end, low_end, W, LOW, C)
        x = read(lp[:, None] + dk[None, :], lok[:, None] & (dk < K)[None, :])
        y = read(rp[:, None] + dv[None, :], rok[:, None] & (dv < V)[None, :])
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
    if ONES:
        if tl.program_id(1) == 0:
            tl.store(z + at + dk, own_z, mask=dk < K)
    if tl.program_id(1) == 0:
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
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    BACK: tl.constexpr,
    PRODUCT: tl.constexpr,
    SINGLE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Turn what segments add into the states before them (BACK: the gradients of the states after them), in place.

    With PRODUCT, also sums of products with `other`, the states before the segments: SINGLE, of exp(total) times the state
    before with the gradient after; else of the state after with the gradient after.
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
    S = tl.load(initial + (n * H + h) * K * V + d, mask=inside, other=0.0).to(tl.float32)
    after = tl.zeros([ROWS, BV], tl.float32)
    if PRODUCT and not SINGLE:
        after = tl.load(other_final + (n * H + h) * K * V + d, mask=inside, other=0.0)
    for step in range(begin, end):
        q = step
        if BACK:
            q = begin + end - 1 - step
        p = state + (q * H + h) * K * V + d
        added = tl.load(p, mask=inside, other=0.0)
        tl.store(p, S, mask=inside)
        kept = tl.exp(tl.load(total + q * H + h))
        if PRODUCT:
            before = tl.load(other + (q * H + h) * K * V + d, mask=inside, other=0.0)
            if SINGLE:
                found = tl.sum(tl.sum(before * kept * S, 1), 0)
            else:
                found = tl.sum(tl.sum(after * S, 1), 0)
                after = before
            tl.store(product + (q * H + h) * tl.num_programs(1) + tl.program_id(1), found)
        S = S * kept + added
    tl.store(final + (n * H + h) * K * V + d, S, mask=inside)


@triton.jit
def _mixed(c, high, low, s_high, s_low, t, s, AFTER: tl.constexpr, LOW: tl.constexpr):
    """c_s exp(u_t - u_s) where token t reads what s wrote, else 0; all operands broadcast to one shape."""
    difference = high - s_high
    if LOW:
        difference += low - s_low
    return tl.where(t - s >= 1 - AFTER, c * tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit(do_not_specialize=FIXED)
def _walk(
    query,
    k,
    head_x,
    v,
    head_v,
    first,
    strength,
    upto,
    upto_low,
    state,
    z,
    weight,
    out,
    against,
    inner,
    seen,
    docs,
    segment_doc,
    rows,
    eps,
    T,
    NC,
    NS,
    SEG,
    M,
    H,
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
    """Outputs of a segment from the state before it. SWAP: `query` is d_o, keys and values change places, and out is d_q.

    NORMALIZE: divide by seen + eps. INNER: also `against` . (the part of out that comes from the state).
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C - W + 1)
    A: tl.constexpr = V if SWAP else K
    B: tl.constexpr = K if SWAP else V
    e, da = tl.arange(0, C), tl.arange(0, BA)
    db = tl.program_id(1) * BB + tl.arange(0, BB)
    in_a, in_b = (da < A)[None, :], (db < B)[None, :]
    at = state + (q * H + h) * K * V
    if SWAP:
        S = tl.load(at + da[:, None] + db[None, :] * V, mask=(da < A)[:, None] & in_b, other=0.0)
    else:
        S = tl.load(at + da[:, None] * V + db[None, :], mask=(da < A)[:, None] & in_b, other=0.0)
    if NORMALIZE:
        sum_x = tl.load(z + (q * H + h) * K + da, mask=da < A, other=0.0)
    if ONES:
        sum_x = tl.load(z + (q * H + h) * K + db, mask=db < B, other=0.0)
    missing = tl.load(first + n)
    for i in range(begin, end):
        r = i * (C - W + 1) - (W - 1) + e
        at = ((chunk + i) * H + h) * C
        token = (e >= W - 1) & (r < length)
        row = row_of(rows, start, r, token, MASKED) * H + h
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        vp, vok = value_pointers(v, head_v, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        if SWAP:
            xp, vp, xok, vok = vp, xp, vok, xok
        a = read(query + row[:, None] * A + da[None, :], token[:, None] & in_a)
        x = read(xp[:, None] + da[None, :], xok[:, None] & in_a)
        y = read(vp[:, None] + db[None, :], vok[:, None] & in_b)
        c = tl.load(strength + at + e)
        high, low = _decays(upto, upto_low, at, e, LOW)
        t_high, t_low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
        u_end = tl.load(upto + at + C - 1)
        low_end = u_end * 0.0
        if LOW:
            low_end = tl.load(upto_low + at + C - 1)
        mix = _mixed(
            c[None, :], t_high[:, None], t_low[:, None], high[None, :], low[None, :], e[:, None], e[None, :], AFTER, LOW
        )
        if W > 1:
            ahead = e[:, None] - e[None, :]
            mix = dot(mix.to(a.dtype), tl.where((ahead >= 0) & (ahead < W), 1.0, 0.0))
        scores = dot(a, tl.trans(x))
        if ONES:
            scores += tl.load(weight + at + e)[:, None]
        p = scores * mix
        from_start = tl.exp(t_high + t_low)
        carried = dot(a, S.to(a.dtype))
        if ONES:
            carried += tl.load(weight + at + e)[:, None] * sum_x[None, :]
        carried *= from_start[:, None]
        o = carried + dot(p.to(a.dtype), y)
        w = _to_end(strength, upto, upto_low, at, e, u_end, low_end, W, LOW, C)
        kept = tl.exp(u_end + low_end)
        S = S * kept + dot(tl.trans(x), (y.to(tl.float32) * w[:, None]).to(x.dtype))
        if NORMALIZE:
            divisor = tl.sum(p, 1) + from_start * tl.sum(a.to(tl.float32) * sum_x[None, :], 1) + eps
            o = o / divisor[:, None]
            sum_x = sum_x * kept + tl.sum(x.to(tl.float32) * w[:, None], 0)
            if tl.program_id(1) == 0:
                tl.store(seen + row, divisor, mask=token)
        if ONES:
            sum_x = sum_x * kept + tl.sum(y.to(tl.float32) * w[:, None], 0)
        if INNER:
            other = read(against + row[:, None] * B + db[None, :], token[:, None] & in_b).to(tl.float32)
            found = tl.sum(other * carried, 1)
            tl.store(inner + tl.program_id(1).to(tl.int64) * M * H * C + at + e, found)
        tl.store(out + row[:, None] * B + db[None, :], o, mask=token[:, None] & in_b)


@triton.jit(do_not_specialize=FIXED)
def _walk_back(
    query,
    k,
    head_x,
    v,
    head_v,
    d_o,
    first,
    strength,
    upto,
    upto_low,
    d_state,
    d_z,
    weight,
    inner,
    product,
    out,
    head_out,
    overlap,
    d_strength,
    d_log_decay,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    M,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BA: tl.constexpr,
    BB: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    SWAP: tl.constexpr,
    ONES: tl.constexpr,
    GATES: tl.constexpr,
    LOW: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of a segment's values (SWAP: keys), from its end; d_state is the gradient of the state after the segment.

    GATES (with SWAP): also the part of the gradients of strength and log-decay that belongs to this block of key columns.
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
    at = d_state + (q * H + h) * K * V
    if SWAP:
        dS = tl.load(at + da[:, None] + db[None, :] * V, mask=(da < A)[:, None] & in_b, other=0.0)
    else:
        dS = tl.load(at + da[:, None] * V + db[None, :], mask=(da < A)[:, None] & in_b, other=0.0)
    if ONES:
        dz = tl.load(d_z + (q * H + h) * K + db, mask=db < B, other=0.0)
    if GATES:
        crossing = tl.load(product + (q * H + h) * tl.num_programs(1) + part)
    missing = tl.load(first + n)
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
        c = tl.load(strength + at + e)
        high, low = _decays(upto, upto_low, at, e, LOW)
        t_high, t_low = _decays(upto, upto_low, at, e - (1 - AFTER), LOW)
        u_end = tl.load(upto + at + C - 1)
        low_end = u_end * 0.0
        if LOW:
            low_end = tl.load(upto_low + at + C - 1)
        # [s, t]: how much of what s wrote token t reads
        seen = _mixed(
            1.0, t_high[None, :], t_low[None, :], high[:, None], low[:, None], e[None, :], e[:, None], AFTER, LOW
        )
        mix = c[:, None] * seen
        if W > 1:
            ahead = e[None, :] - e[:, None]
            mix = dot(tl.where((ahead >= 0) & (ahead < W), 1.0, 0.0).to(pair.dtype), mix)
        scores = dot(pair, tl.trans(ask))
        if ONES:
            scores += tl.load(weight + at + e)[None, :]
        carried = dot(pair, dS.to(pair.dtype))
        if ONES:
            carried += dz[None, :]
        w = _to_end(strength, upto, upto_low, at, e, u_end, low_end, W, LOW, C)
        found = w[:, None] * carried + dot((scores * mix).to(pair.dtype), value)
        own = (e >= W - 1) | (i == 0)
        if SWAP:
            op, ok = key_pointers(out, head_out, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        else:
            op, ok = value_pointers(out, head_out, rows, n, start, length, missing, h, r, H, V, W, SHIFT, MASKED)
        tl.store(op[:, None] + db[None, :], found, mask=(ok & own)[:, None] & in_b)
        if W > 1:
            shared = overlap + (((chunk + i) * H + h) * (W - 1) + e) * B
            tl.store(shared[:, None] + db[None, :], found, mask=(ok & (e < W - 1) & (i > 0))[:, None] & in_b)
        kept = tl.exp(u_end + low_end)
        from_start = tl.exp(t_high + t_low)
        if GATES:
            x = read(xp[:, None] + db[None, :], xok[:, None] & in_b)
            pull = scores * dot(x, tl.trans(value))
            written = tl.sum(x.to(tl.float32) * carried, 1)
            if W > 1:
                back = e[:, None] - e[None, :]
                window = (back >= 0) & (back < W)
                pull = dot(tl.where(window, 1.0, 0.0).to(pair.dtype), pull)
                written = tl.sum(tl.where(window, written[None, :], 0.0), 1)
            written *= tl.exp(tl.minimum(u_end - high + (low_end - low), 0.0))
            pull *= seen
            tl.store(d_strength + part * M * H * C + at + e, tl.sum(pull, 1) + written)
            written *= c
            reads = tl.load(inner + part * M * H * C + at + e)
            if not LOW:
                crossing -= tl.sum(written, 0)
            # token r decays what earlier tokens wrote, for later ones to read
            pull *= c[:, None]
            pull = tl.cumsum(pull, 0) - pull + reads[None, :]
            grad = tl.sum(tl.where(e[None, :] - e[:, None] >= 1 - AFTER, pull, 0.0), 1)
            grad += tl.sum(tl.where(e[None, :] < e[:, None], written[None, :], 0.0), 1)
            tl.store(d_log_decay + part * M * H * C + at + e, grad + crossing)
            if not LOW:
                crossing += tl.sum(reads, 0)
        dS = dS * kept + dot(tl.trans(ask), (value.to(tl.float32) * from_start[:, None]).to(pair.dtype))
        if ONES:
            share = from_start * tl.load(weight + at + e)
            dz = dz * kept + tl.sum(value.to(tl.float32) * share[:, None], 0)


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
    H,
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
        p, ok = value_pointers(k, head_x, rows, n, start, length, tl.load(first + n), h, r, H, K, W, SHIFT, MASKED)
    else:
        p, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    # the last chunk of a document may hold no token of its own under a mask: then nothing was written for it
    ok = (ok & (e < W - 1) & (i > 0) & (i * (C - W + 1) < length))[:, None] & (d < K)[None, :]
    added = tl.load(overlap + ((c * H + h) * (W - 1) + e)[:, None] * K + d[None, :], mask=ok, other=0.0)
    p = p[:, None] + d[None, :]
    tl.store(p, read(p, ok).to(tl.float32) + added, mask=ok)


@dataclass(frozen=True)
class Shape:
    """How the kernels are cut for a call, by sizes and dtype alone.

    Attributes:
        columns_k, columns_v: columns of keys and of values that a program holds.
    """

    k: int
    v: int
    wide: bool
    columns_k: int
    columns_v: int

    def launch(self) -> dict[str, int]:
        """Warps and pipeline stages."""
        return {"num_warps": 4, "num_stages": 1 if self.wide else 2}


def shape_of(k: Tensor, v: Tensor) -> Shape:
    """The cut for keys `[B, T, H, K]` and values `[B, T, H, V]`."""
    wide, k_size, v_size = k.dtype == torch.float32, k.shape[-1], v.shape[-1]

    def columns(inner: int, outer: int) -> int:
        return min(block(outer), max(16, (4096 if wide else 8192) // block(inner)))

    return Shape(k_size, v_size, wide, columns(v_size, k_size), columns(k_size, v_size))


def segment_length(chunks: int, heads: int, like: Tensor) -> int:
    """Chunks of a segment: as many as leave enough segments to fill a large GPU. float32 keeps every state for its digits."""
    if like.dtype == torch.float32:
        return 1
    length = 1
    while length < 16 and chunks * heads >= 1024 * length:
        length *= 2
    return length


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
        q, k, v: `[B, T, H, .]`, contiguous. head_x, head_v, first: see `falcon.prepass.heads_of`.
        strength, upto, upto_low: gates in chunks, float32 `[M, H, C]`.
        ranks: with overlap W - 1. window: W. shift: 1 when a token's pair has the key before it.
        after: whether a token reads what it has written. ones: whether there is a normaliser z. normalize: whether it divides.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    head_x: Tensor
    head_v: Tensor
    first: Tensor
    strength: Tensor
    upto: Tensor
    upto_low: Tensor
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

    def _common(self) -> dict[str, Any]:
        ranks = self.ranks
        return {
            "docs": ranks.docs,
            "segment_doc": ranks.segment_doc,
            "rows": ranks.rows,
            "T": ranks.tokens,
            "NC": ranks.chunks // ranks.documents,
            "NS": ranks.segments // ranks.documents,
            "SEG": ranks.segment,
            "H": self.heads,
            "W": self.window,
            "SHIFT": self.shift,
            "AFTER": int(self.after),
            "LOW": self.q.dtype == torch.float32,
            "PLAIN": ranks.docs is None,
            "MASKED": ranks.rows is not None,
            "C": CHUNK,
        }

    def _states(
        self, left: Tensor, right: Tensor, total: Tensor, weight: Tensor | None, back: bool
    ) -> tuple[Tensor, Tensor]:
        """What every segment adds to the state, `[Q, H, K, V]`, and to z."""
        shape = shape_of(self.k, self.v)
        k_size, v_size, segments = shape.k, shape.v, self.ranks.segments
        state = self.q.new_empty(segments, self.heads, k_size, v_size, dtype=torch.float32)
        z = self.q.new_empty(segments, self.heads, k_size if self.ones else 0, dtype=torch.float32)
        _segment_states[(segments * self.heads, triton.cdiv(v_size, shape.columns_v))](
            left, self.head_x, right, self.head_v, self.first, self.strength, self.upto, self.upto_low, weight,
            state, z, total, **self._common(), K=k_size, V=v_size, BK=block(k_size), BV=shape.columns_v,
            BACK=back, ONES=self.ones and (weight is not None or not back), **shape.launch(),
        )  # fmt: skip
        if self.ones and back and weight is None:
            z.zero_()
        return state, z

    def _scan(
        self, state: Tensor, total: Tensor, initial: Tensor, other: Tensor | None, other_final: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """States before (with `other`: gradients after) all segments in place; the one at the end, and the products."""
        segments, heads, k_size = state.shape[:3]
        v_size = state.shape[3] if state.ndim == 4 else 1
        final, tiles = torch.empty_like(initial, dtype=torch.float32), triton.cdiv(k_size, 16)
        back = other is not None
        product = state.new_empty(segments, heads, tiles) if back else None
        _scan[(self.ranks.documents * heads, tiles)](
            state, total, initial.contiguous(), final, other, other_final, product, self.ranks.docs,
            NS=segments // self.ranks.documents, H=heads, K=k_size, V=v_size, ROWS=16, BV=block(v_size), BACK=back,
            PRODUCT=back, SINGLE=self.q.dtype == torch.float32, PLAIN=self.ranks.docs is None,
        )  # fmt: skip
        return final, product

    def forward(self, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """Output `[B, T, H, V]`, state and z after the last token, and what backward needs."""
        ranks, shape = self.ranks, shape_of(self.k, self.v)
        plain = torch.empty_like if ranks.rows is None else torch.zeros_like
        o = plain(self.v)
        seen = self.q.new_ones(self.q.shape[:3] if self.normalize else (0,), dtype=torch.float32)
        total = self.q.new_empty(ranks.segments, self.heads, dtype=torch.float32)
        with on_device(self.q):
            states, z_states = self._states(self.k, self.v, total, None, False)
            S, _ = self._scan(states, total, S, None, None)
            if self.ones:
                z, _ = self._scan(z_states, total, z, None, None)
            else:
                z = z.clone()
            self._walk(self.q, states, z_states, None, o, None, None, seen, swap=False)
        return o, S, z, Kept(states, z_states, total, seen)

    def _walk(
        self,
        query: Tensor,
        states: Tensor,
        z: Tensor,
        weight: Tensor | None,
        out: Tensor,
        against: Tensor | None,
        inner: Tensor | None,
        seen: Tensor | None,
        swap: bool,
    ) -> None:
        shape = shape_of(self.k, self.v)
        size, columns = (shape.k, shape.columns_k) if swap else (shape.v, shape.columns_v)
        _walk[(self.ranks.segments * self.heads, triton.cdiv(size, columns))](
            query, self.k, self.head_x, self.v, self.head_v, self.first, self.strength, self.upto, self.upto_low,
            states, z, weight, out, against, inner, seen, **self._common(), eps=self.eps, M=self.ranks.chunks,
            K=shape.k, V=shape.v, BA=block(shape.v if swap else shape.k), BB=columns, SWAP=swap,
            ONES=weight is not None, NORMALIZE=self.normalize and not swap, INNER=inner is not None, **shape.launch(),
        )  # fmt: skip

    def backward(
        self, d_o: Tensor, o: Tensor, d_S: Tensor, d_z: Tensor, S_end: Tensor, z_end: Tensor, kept: Kept, gates: bool
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, head_x, head_v, S, z, and (with `gates`) of strength and log-decay, `[M, H, C]`."""
        ranks, shape, heads = self.ranks, shape_of(self.k, self.v), self.heads
        d_o = d_o.contiguous()
        weight = None
        if self.normalize:
            wide = d_o.float()
            weight = into_chunks(-(wide * o.float()).sum(-1) / kept.seen, ranks)
            d_o = (wide / kept.seen[..., None]).to(d_o.dtype)
        total = torch.empty_like(kept.total)
        make = torch.empty_like if ranks.rows is None else torch.zeros_like
        d_q = make(self.q)
        d_k, d_v = (make(x) if ranks.docs is None else torch.zeros_like(x) for x in (self.k, self.v))
        if self.shift and ranks.docs is None:  # the last key and the first value may belong to no pair
            d_k[:, -1], d_v[:, 0] = 0, 0
        d_head_x, d_head_v = torch.zeros_like(self.head_x), torch.zeros_like(self.head_v)
        parts = triton.cdiv(shape.k, shape.columns_k)
        in_chunks = (parts, ranks.chunks, heads, CHUNK)
        inner, d_strength, d_log_decay = (
            self.q.new_zeros(in_chunks if gates else (0,), dtype=torch.float32) for _ in range(3)
        )
        with on_device(self.q):
            d_states, d_z_states = self._states(self.q, d_o, total, weight, True)
            d_S, product = self._scan(d_states, kept.total, d_S, kept.states, S_end)
            if self.ones:
                d_z, more = self._scan(d_z_states, kept.total, d_z, kept.z, z_end)
                product = product + more
            if gates:  # [Q, H, K / 16] to blocks of columns
                tiles = shape.columns_k // 16
                product = torch.nn.functional.pad(product, (0, parts * tiles - product.shape[2]))
                product = product.view(*product.shape[:2], parts, tiles).sum(-1)
            self._walk(
                d_o, kept.states, kept.z, weight, d_q, self.q if gates else None, inner if gates else None, None, True
            )
            for swap in (False, True):
                self._walk_back(
                    d_o, d_states, d_z_states if self.ones and swap else None, weight if swap else None, inner, product,
                    (d_k, d_head_x) if swap else (d_v, d_head_v), d_strength, d_log_decay, gates and swap, swap,
                )  # fmt: skip
        return d_q, d_k, d_v, d_head_x, d_head_v, d_S, d_z, d_strength.sum(0), d_log_decay.sum(0)

    def _walk_back(
        self,
        d_o: Tensor,
        d_states: Tensor,
        d_z: Tensor | None,
        weight: Tensor | None,
        inner: Tensor,
        product: Tensor | None,
        outs: tuple[Tensor, Tensor],
        d_strength: Tensor,
        d_log_decay: Tensor,
        gates: bool,
        swap: bool,
    ) -> None:
        shape, ranks = shape_of(self.k, self.v), self.ranks
        size, columns = (shape.k, shape.columns_k) if swap else (shape.v, shape.columns_v)
        overlap = self.q.new_empty(ranks.chunks, self.heads, self.window - 1, size, dtype=torch.float32)
        if d_z is not None and weight is None:
            weight = self.q.new_zeros(ranks.chunks, self.heads, CHUNK, dtype=torch.float32)
        _walk_back[(ranks.segments * self.heads, triton.cdiv(size, columns))](
            self.q, self.k, self.head_x, self.v, self.head_v, d_o, self.first, self.strength, self.upto, self.upto_low,
            d_states, d_z, weight, inner, product, *outs, overlap, d_strength, d_log_decay, **self._common(),
            M=ranks.chunks, K=shape.k, V=shape.v, BA=block(shape.v if swap else shape.k), BB=columns, SWAP=swap,
            ONES=d_z is not None, GATES=gates, **shape.launch(),
        )  # fmt: skip
        if self.window > 1:
            _add_overlap[(ranks.chunks * self.heads,)](
                overlap, *outs, **tables(ranks), first=self.first, H=self.heads, K=size, BK=block(size), W=self.window,
                BW=triton.next_power_of_2(self.window), SHIFT=self.shift, VALUES=not swap, num_warps=1,
            )  # fmt: skip
