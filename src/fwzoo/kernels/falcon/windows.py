"""Triton kernels of falcon3, whose tokens write the residuals of a whole window of W pairs.

What a chunk does is linear in its values and in what its keys read of the state before it. With the pair keys X, values V of
its slots (the first W - 1 are the last pairs of the chunk before) and the incoming state S_0,

    S_C = e^{u_C} S_0 + X^T (write_v V - write_S X S_0)         O = e^c Q S_0 + read_v V - read_S X S_0

`response_kernel` finds the four `[C, C]` matrices by running over the tokens with one column for every slot: R holds what the
window's keys read of the current state, p what was written to them so far, hat the final weight of every pair that has left
the window, as of the token it was last written by. The state is then carried by the scans of `kernels/delta.py`.
"""
# mypy: disable-error-code="assignment, misc, var-annotated"
# (in a kernel, a tuple grows)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta import (
    FIXED,
    Form,
    _gates,
    _load_rows,
    _load_tile,
    _rows,
    _settings,
    _store_tile,
    kept_like,
    scan_backward_kernel,
    scan_kernel,
    work_dtype,
)
from ..gpu import block, key_pointers, launch, of_chunk, on_device, parts, value_pointers
from ..ranks import CHUNK, Ranks
from .apart import eight_of, sixteen_of


@triton.jit
def _couplings(
    q, k, head, strength, upto, upto_low, docs, chunk_doc, rows, index, T, NC,
    H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr, W: tl.constexpr, AFTER: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gram matrix and scores of a chunk, and the factors with which a pair that has left the window enters them (0 where it
    is still in it): its decay from the token that last wrote it."""
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    gram = tl.zeros([C, C], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
    slot = tl.arange(0, C)
    _gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
    last = index * C + slot + (W - 1)
    left = tl.load(upto + last, mask=slot + (W - 1) < C, other=0.0)
    if WIDE:
        left = left.to(tl.float64) + tl.load(upto_low + last, mask=slot + (W - 1) < C, other=0.0)
    behind = slot[:, None] - slot[None, :]
    entering = tl.exp(tl.where(behind >= W, (until[:, None] - left[None, :]).to(tl.float32), -float("inf")))
    to = since if AFTER else until
    gone = behind >= (W - 1 if AFTER else W)
    reading = tl.exp(tl.where(gone, (to[:, None] - left[None, :]).to(tl.float32), -float("inf")))
    ending = tl.exp(tl.where(slot + (W - 1) < C, (total - left).to(tl.float32), 0.0))
    return gram, scores, entering, reading, ending


@triton.jit
def _tokens(upto, upto_low, strength, at, start, WIDE: tl.constexpr, C: tl.constexpr):
    """Strengths of the tokens from slot start on, their decays, and those from the chunk's start up to them, 8 numbers each."""
    slot = start + tl.arange(0, 8)
    inside = slot < C
    to = tl.load(upto + at + slot, mask=inside, other=0.0)
    before = tl.load(upto + at + slot - 1, mask=inside & (slot > 0), other=0.0)
    if WIDE:
        to = to.to(tl.float64) + tl.load(upto_low + at + slot, mask=inside, other=0.0)
        before = before.to(tl.float64) + tl.load(upto_low + at + slot - 1, mask=inside & (slot > 0), other=0.0)
    gain = tl.load(strength + at + slot, mask=inside, other=0.0)
    return eight_of(gain), eight_of(tl.exp((to - before).to(tl.float32))), eight_of(tl.exp(to.to(tl.float32)))


@triton.jit
def _rows_near(square, start, W: tl.constexpr, PITCH: tl.constexpr, COUNT: tl.constexpr):
    """Rows of a matrix in scratch memory (see `_keep`) from slot start - (W - 1) on, as numbers, columns from the same slot on."""
    rows = ()
    for r in tl.static_range(COUNT):
        s = start + (r - (W - 1))
        if COUNT <= 8:
            near = tl.arange(0, 8)
            x = eight_of(tl.load(square + s * PITCH + start + near, mask=near * 0 + s >= 0, other=0.0))
        else:
            near = tl.arange(0, 16)
            x = sixteen_of(tl.load(square + s * PITCH + start + near, mask=near * 0 + s >= 0, other=0.0))
        rows = rows + (x,)
    return rows


@triton.jit
def _keep(square, x, W: tl.constexpr, C: tl.constexpr, PITCH: tl.constexpr):
    """Store a matrix `[C, C]` with W - 1 numbers before and some behind every row, which stay 0."""
    slot = tl.arange(0, C)
    tl.store(square + slot[:, None] * PITCH + (W - 1) + slot[None, :], x)


@triton.jit
def _written(e, p, gain, kept, W: tl.constexpr):
    """p after a token has written its window's residuals e, and gain * e. Here and below, tuples hold one row for every age."""
    new, weighted = (gain * e[0],), (gain * e[0],)
    for a in tl.static_range(1, W):
        weighted = weighted + (gain * e[a],)
        new = new + (kept * p[a - 1] + weighted[a],)
    return new, weighted


@triton.jit
def _older(e, weighted, own, entered, close, kept, t: tl.constexpr, W: tl.constexpr):
    """e of the next token, whose key reads `entered`: of a key that stays, e = own - R and R is decayed and written to."""
    new = (own[0] - entered,)
    for a in tl.static_range(1, W):
        moved = kept * e[a - 1] + (1.0 - kept) * own[a]
        for b in tl.static_range(W):
            moved -= close[t - min(a - 1, b)][t - max(a - 1, b)] * weighted[b]
        new = new + (moved,)
    return new


@triton.jit
def _own(own, column, s, W: tl.constexpr):
    """1 in the column of each value in the window of slot s, given those of the slot before."""
    new = (tl.where(column == s, 1.0, 0.0),)
    for a in tl.static_range(1, W):
        new = new + (own[a - 1],)
    return new


@triton.jit
def _advance(
    close, past, gain, kept, upto_s, start, i: tl.constexpr, column, e, p, own, left, W: tl.constexpr, C: tl.constexpr
):
    """The token in slot start + i writes. left: final weights of the pairs that left the window in this block of tokens."""
    s = start + i
    t: tl.constexpr = i + W - 1
    p, weighted = _written(e, p, gain, kept, W)
    left = left + (p[W - 1],)
    entered = tl.where(column == C + s + 1, upto_s, 0.0)
    entered += tl.load(past + (s + 1) * (2 * C) + column, mask=column * 0 + s + 1 < C, other=0.0)
    for j in tl.static_range(i + 1):
        entered += close[t + 1][j] * left[j]
    for a in tl.static_range(W - 1):
        entered += close[t + 1][t - a] * p[a]
    own = _own(own, column, s + 1, W)
    return p, left, own, _older(e, weighted, own, entered, close, kept, t, W)


@triton.jit
def _behind(
    coupling,
    final,
    past,
    start,
    added,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PITCH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the block's pairs that have left let later keys read, and show it to the next block."""
    slot, column, near = tl.arange(0, C), tl.arange(0, 2 * C), tl.arange(0, 16)
    tl.debug_barrier()
    at = start - (W - 1) + near
    new = (at >= 0) & (near < BLOCK)
    weight = tl.load(
        coupling + slot[:, None] * PITCH + (W - 1) + at[None, :], mask=new[None, :] & (slot >= 0)[:, None], other=0.0
    )
    done = tl.load(
        final + at[:, None] * (2 * C) + column[None, :], mask=new[:, None] & (column >= 0)[None, :], other=0.0
    )
    added = tl.dot(weight, done, added, input_precision=PRECISION)
    following = (slot > start + BLOCK) & (slot <= start + 2 * BLOCK)
    tl.store(past + slot[:, None] * (2 * C) + column[None, :], added, mask=following[:, None] & (column >= 0)[None, :])
    tl.debug_barrier()
    return added


@triton.jit
def _empty_window(past, W: tl.constexpr, C: tl.constexpr):
    """e, p and own before the first slot, and sums of nothing."""
    slot, column = tl.arange(0, C), tl.arange(0, 2 * C)
    added, nothing = tl.zeros([C, 2 * C], tl.float32), tl.zeros([2 * C], tl.float32)
    tl.store(past + slot[:, None] * (2 * C) + column[None, :], added)
    own, p = (tl.where(column == 0, 1.0, 0.0),), (nothing,)
    e = (own[0] - tl.where(column == C, 1.0, 0.0),)
    for _ in tl.static_range(1, W):
        e, p, own = e + (nothing,), p + (nothing,), own + (nothing,)
    tl.debug_barrier()
    return e, p, own, added


@triton.jit(do_not_specialize=[*FIXED, "total"])
def response_kernel(
    q, k, head, strength, upto, upto_low, scratch, responses, docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, PITCH: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """responses: `[M * H, 4, C, C]`, write_v, write_S, read_v, read_S. scratch: `[programs, 12, C, C]`.

    A thread runs over the tokens with a column of its own; what pairs that left the window in an earlier block of tokens add is
    one product a block. Slots before the first token write nothing, so that they only fill the window.
    """
    band = scratch + tl.program_id(0).to(tl.int64) * (12 * C * C)
    final, coupling, score = band + 2 * C * C, band + 4 * C * C, band + 6 * C * C
    past, seen = band + 8 * C * C, band + 10 * C * C
    slot, column = tl.arange(0, C), tl.arange(0, 2 * C)
    row_at, wide = slot[:, None] * C + slot[None, :], slot[:, None] * (2 * C) + column[None, :]
    for index in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        gram, scores, entering, reading, ending = _couplings(
            q, k, head, strength, upto, upto_low, docs, chunk_doc, rows, index, T, NC,
            H, K, C, BK, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the chunk before is read no more
        held = tl.where(entering > 0, gram * entering, tl.where(slot[:, None] - slot[None, :] < W, gram, 0.0))
        _keep(coupling, held, W, C, PITCH)
        _keep(score, scores, W, C, PITCH)
        tl.store(seen + row_at, scores * reading)
        if not AFTER:
            tl.store(band + column, tl.zeros([2 * C], tl.float32))
        e, p, own, added = _empty_window(past, W, C)
        for start in range(0, C, BLOCK):
            left, reads = (), ()  # stored after the block: no store holds up a load
            gains, keeps, uptos = _tokens(upto, upto_low, strength, index * C, start, WIDE, C)
            close, close_scores = (
                _rows_near(coupling, start, W, PITCH, BLOCK + W),
                _rows_near(score, start, W, PITCH, BLOCK + W),
            )
            for i in tl.static_range(BLOCK):
                p, left, own, e = _advance(
                    close, past, gains[i], keeps[i], uptos[i], start, i, column, e, p, own, left, W, C
                )
                read = tl.zeros([2 * C], tl.float32)
                for a in tl.static_range(W - 1):
                    read += close_scores[i + W - 1 + (0 if AFTER else 1)][i + W - 1 - a] * p[a]
                reads = reads + (read,)
            for i in tl.static_range(BLOCK):
                s = start + i
                tl.store(final + (s - (W - 1)) * (2 * C) + column, left[i], mask=column * 0 + s >= W - 1)
                shown = s if AFTER else s + 1
                tl.store(band + shown * (2 * C) + column, reads[i], mask=column * 0 + shown < C)
            added = _behind(coupling, final, past, start, added, W, C, BLOCK, PITCH, PRECISION)
        for a in tl.static_range(W - 1):
            tl.store(final + (C - 1 - a) * (2 * C) + column, p[a])
        tl.debug_barrier()
        hat, read = tl.load(final + wide), tl.load(band + wide)
        read = tl.dot(tl.load(seen + row_at), hat, read, input_precision=PRECISION)
        hat *= ending[:, None]
        sign = tl.where(column < C, 1.0, -1.0)[None, :]  # columns of values, then columns of the state
        at = responses + index * (4 * C * C) + (column // C * (C * C) + column % C)[None, :] + slot[:, None] * C
        tl.store(at, (hat * sign).to(responses.dtype.element_ty))
        tl.store(at + 2 * C * C, (read * sign).to(responses.dtype.element_ty))


@triton.jit(do_not_specialize=FIXED)
def apply_kernel(
    k, head, v, head_v, first, responses, from_S, from_v_t, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """from_S = write_S X and from_v_t = (write_v V)^T of every tile."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    values, present = _values(v, head_v, first, docs, chunk_doc, rows, c, h, T, NC, H, V, SHIFT, W, PLAIN, MASKED, C)
    write = _load_tile(responses, index * 4 + 1, 0, 0, C, C, C, C)
    for k0 in range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        _store_tile(from_S, index, 0, k0, tl.dot(write, x, input_precision=PRECISION), C, K, C, BK)
    write = _load_tile(responses, index * 4, 0, 0, C, C, C, C)
    for v0 in range(0, V, BV):
        value = _load_rows(values, present, v0, V, BV, WORK)
        from_v = tl.dot(write, value, input_precision=PRECISION)
        _store_tile(from_v_t, index, v0, 0, tl.trans(from_v), V, C, BV, C)


@triton.jit
def _values(
    v, head_v, first, docs, chunk_doc, rows, c, h, T, NC, H, V: tl.constexpr, SHIFT: tl.constexpr, W: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Where the value of every slot's pair is, and whether there is one."""
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    rank = i * (C - W + 1) - (W - 1) + tl.arange(0, C)
    return value_pointers(v, head_v, rows, n, start, length, tl.load(first + n), h, rank, H, V, W, SHIFT, MASKED)


@triton.jit(do_not_specialize=FIXED)
def window_read_kernel(
    q, k, head, v, head_v, first, strength, upto, upto_low, responses, borders_t, o, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile from its values, the state before it and its responses."""
    index = tl.program_id(0).to(tl.int64)
    c, h, v0 = index // H, index % H, tl.program_id(1) * BV
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    values, present = _values(v, head_v, first, docs, chunk_doc, rows, c, h, T, NC, H, V, SHIFT, W, PLAIN, MASKED, C)
    _gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    to = since if AFTER else until
    seen = tl.zeros([C, BV], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
        seen = tl.dot(x, tl.trans(S_t), seen, input_precision=PRECISION)
        out = tl.dot(query, tl.trans(S_t), out, input_precision=PRECISION)
    out *= tl.exp(to.to(tl.float32))[:, None]
    value = _load_rows(values, present, v0, V, BV, WORK)
    out = tl.dot(_load_tile(responses, index * 4 + 2, 0, 0, C, C, C, C), value, out, input_precision=PRECISION)
    out -= tl.dot(_load_tile(responses, index * 4 + 3, 0, 0, C, C, C, C), seen.to(WORK), input_precision=PRECISION)
    column = v0 + tl.arange(0, BV)
    pointers = o + row[:, None] * V + column[None, :]
    tl.store(pointers, out.to(o.dtype.element_ty), mask=valid[:, None] & (column < V)[None, :])


# --- backward ---


@triton.jit(do_not_specialize=FIXED)
def window_transposed_kernel(
    k, head, d_o, strength, upto, upto_low, responses, to_r, from_o_t, d_o_t, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the scan of the backward pass reads, as `delta.transposed_solve_kernel`."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    _gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    outs = tl.exp((since if AFTER else until).to(tl.float32))
    slot = tl.arange(0, C)
    across = responses + index * (4 * C * C) + slot[None, :] * C + slot[:, None]
    write_t = tl.load(across + C * C)
    for k0 in range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        _store_tile(to_r, index, 0, k0, tl.dot(write_t, x, input_precision=PRECISION), C, K, C, BK)
    read_t = tl.load(across + 3 * C * C)
    for v0 in range(0, V, BV):
        d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
        _store_tile(from_o_t, index, v0, 0, tl.trans(tl.dot(read_t, d_out, input_precision=PRECISION)), V, C, BV, C)
        _store_tile(d_o_t, index, v0, 0, tl.trans(d_out * outs[:, None]), V, C, BV, C)


@triton.jit
def _own_slots(docs, chunk_doc, c, T, NC, W: tl.constexpr, PLAIN: tl.constexpr, C: tl.constexpr):
    """Slots whose gradients this chunk writes in place; the others are added later, from `carry`."""
    _n, _start, _length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    return (tl.arange(0, C) >= W - 1) | (i == 0)


@triton.jit(do_not_specialize=FIXED)
def window_product_kernel(
    k, head, v, head_v, first, d_o, responses, d_responses, borders_t, d_borders_t, d_v, d_head_v, carry_v, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's values and of the columns of its responses: d_responses `[M * H, 2, C, 2 C]`, writes then reads."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    values, present = _values(v, head_v, first, docs, chunk_doc, rows, c, h, T, NC, H, V, SHIFT, W, PLAIN, MASKED, C)
    targets, _ok = _values(d_v, d_head_v, first, docs, chunk_doc, rows, c, h, T, NC, H, V, SHIFT, W, PLAIN, MASKED, C)
    own = _own_slots(docs, chunk_doc, c, T, NC, W, PLAIN, C)
    slot = tl.arange(0, C)
    targets = tl.where(own, targets, carry_v + (index * (W - 1) + slot) * V)
    across = responses + index * (4 * C * C) + slot[None, :] * C + slot[:, None]
    write_t, read_t = tl.load(across), tl.load(across + 2 * C * C)
    write_v = tl.zeros([C, C], tl.float32)
    write_S = tl.zeros([C, C], tl.float32)
    read_v = tl.zeros([C, C], tl.float32)
    read_S = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        seen_t = tl.zeros([BV, C], tl.float32)
        d_written = tl.zeros([C, BV], tl.float32)
        for k0 in range(0, K, BK):
            x = _load_rows(pairs, paired, k0, K, BK, WORK)
            seen_t = tl.dot(
                _load_tile(borders_t, index, v0, k0, V, K, BV, BK), tl.trans(x), seen_t, input_precision=PRECISION
            )
            dS_t = _load_tile(d_borders_t, index, v0, k0, V, K, BV, BK)
            d_written = tl.dot(x, tl.trans(dS_t), d_written, input_precision=PRECISION)
        narrow, seen = d_written.to(WORK), seen_t.to(WORK)
        value = _load_rows(values, present, v0, V, BV, WORK)
        d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
        write_v = tl.dot(narrow, tl.trans(value), write_v, input_precision=PRECISION)
        write_S = tl.dot(narrow, seen, write_S, input_precision=PRECISION)
        read_v = tl.dot(d_out, tl.trans(value), read_v, input_precision=PRECISION)
        read_S = tl.dot(d_out, seen, read_S, input_precision=PRECISION)
        d_value = tl.dot(write_t, narrow, input_precision=PRECISION)
        d_value = tl.dot(read_t, d_out, d_value, input_precision=PRECISION)
        column = v0 + tl.arange(0, BV)
        tl.store(
            targets[:, None] + column[None, :],
            d_value.to(d_v.dtype.element_ty),
            mask=present[:, None] & (column < V)[None, :],
        )
    at = d_responses + index * (4 * C * C) + slot[:, None] * (2 * C) + slot[None, :]
    tl.store(at, write_v.to(d_responses.dtype.element_ty))
    tl.store(at + C, write_S.to(d_responses.dtype.element_ty))
    tl.store(at + 2 * C * C, read_v.to(d_responses.dtype.element_ty))
    tl.store(at + 2 * C * C + C, read_S.to(d_responses.dtype.element_ty))


@triton.jit
def _rows_of(at, column, W: tl.constexpr, C: tl.constexpr):
    """A row of `[C, W, 2 C]` for every age."""
    found = ()
    for a in tl.static_range(W):
        found = found + (tl.load(at + a * (2 * C) + column).to(tl.float32),)
    return found


@triton.jit
def _through_write(d_p, first, done, d_out, close, close_scores, t: tl.constexpr, AFTER: tl.constexpr, W: tl.constexpr):
    """Gradient of p with what the next key, the reads, and all later keys (done, of the pair that leaves) see of it."""
    new = ()
    for a in tl.static_range(W - 1):
        new = new + (d_p[a] + close[t + 1][t - a] * first + close_scores[t + (0 if AFTER else 1)][t - a] * d_out,)
    return new + (d_p[W - 1] + done,)


@triton.jit
def _through_residuals(d_p, d_R, close, t: tl.constexpr, W: tl.constexpr):
    """Gradient of e, over the gain."""
    new = ()
    for b in tl.static_range(W):
        d_e = d_p[b]
        for a in tl.static_range(1, W):
            d_e += close[t - min(a - 1, b)][t - max(a - 1, b)] * d_R[a]
        new = new + (d_e,)
    return new


@triton.jit
def _younger(rows, kept, W: tl.constexpr):
    """Every row one age younger, decayed."""
    new = ()
    for a in tl.static_range(1, W):
        new = new + (kept * rows[a],)
    return new + (tl.zeros_like(rows[0]),)


@triton.jit
def _less(rows, others, gain, W: tl.constexpr):
    new = ()
    for a in tl.static_range(W):
        new = new + (rows[a] - gain * others[a],)
    return new


@triton.jit(do_not_specialize=[*FIXED, "total"])
def response_backward_kernel(
    q, k, head, strength, upto, upto_low, scratch, history, d_responses, final, lead, near_gram, near_score, d_strength, d_log_decay,
    docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, PITCH: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The run over the tokens again, then back to front. scratch: `[programs, 15, C, C]`, history: `[programs, 3, C, W, 2 C]`.

    Left for `coupling_kernel`, a tile each: `final` is hat at the end, `lead` the gradient of what a key reads as it enters
    (both `[C, 2 C]`), near_gram `[C, W, W]` and near_score `[C, W]` the gradients of products within a window. d_strength is
    whole, d_log_decay holds what R and p see of each token's decay.
    """
    hats = scratch + tl.program_id(0).to(tl.int64) * (15 * C * C)
    coupling, score, past, seen = hats + 2 * C * C, hats + 4 * C * C, hats + 6 * C * C, hats + 8 * C * C
    d_hats, part_gain, part_kept = hats + 9 * C * C, hats + 11 * C * C, hats + 13 * C * C
    shown_e = history + tl.program_id(0).to(tl.int64) * (6 * C * C * W)
    shown_p, shown_R = shown_e + 2 * C * C * W, shown_e + 4 * C * C * W
    slot, column, near = tl.arange(0, C), tl.arange(0, 2 * C), tl.arange(0, 16)
    wide = slot[:, None] * (2 * C) + column[None, :]
    behind = slot[:, None] - slot[None, :]
    row_at, across = slot[:, None] * C + slot[None, :], slot[None, :] * C + slot[:, None]
    for index in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        gram, scores, entering, reading, ending = _couplings(
            q, k, head, strength, upto, upto_low, docs, chunk_doc, rows, index, T, NC,
            H, K, C, BK, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the chunk before is read no more
        _keep(coupling, tl.where(entering > 0, gram * entering, tl.where(behind < W, gram, 0.0)), W, C, PITCH)
        _keep(score, scores, W, C, PITCH)
        tl.store(seen + row_at, tl.where(reading > 0, scores * reading, 0.0))
        e, p, own, added = _empty_window(past, W, C)
        for start in range(0, C, BLOCK):
            left, all_e, all_p = (), (), ()
            gains, keeps, uptos = _tokens(upto, upto_low, strength, index * C, start, WIDE, C)
            close = _rows_near(coupling, start, W, PITCH, BLOCK + W)
            for i in tl.static_range(BLOCK):
                all_e = all_e + (e,)
                p, left, own, e = _advance(
                    close, past, gains[i], keeps[i], uptos[i], start, i, column, e, p, own, left, W, C
                )
                all_p = all_p + (p,)
            for i in tl.static_range(BLOCK):
                s = start + i
                tl.store(hats + (s - (W - 1)) * (2 * C) + column, left[i], mask=column * 0 + s >= W - 1)
                for a in tl.static_range(W):
                    at = (s * W + a) * (2 * C) + column
                    tl.store(shown_e + at, all_e[i][a].to(history.dtype.element_ty))
                    tl.store(shown_p + at, all_p[i][a].to(history.dtype.element_ty))
            added = _behind(coupling, hats, past, start, added, W, C, BLOCK, PITCH, PRECISION)
        d_write, d_read = d_responses + index * (4 * C * C), d_responses + index * (4 * C * C) + 2 * C * C
        d_p, d_R = (), ()
        for a in tl.static_range(W - 1):
            tl.store(hats + (C - 1 - a) * (2 * C) + column, tl.zeros([2 * C], tl.float32))
            d_p = d_p + (tl.load(d_write + (C - 1 - a) * (2 * C) + column).to(tl.float32),)
            d_R = d_R + (tl.zeros([2 * C], tl.float32),)
        d_p, d_R = d_p + (tl.zeros([2 * C], tl.float32),), d_R + (tl.zeros([2 * C], tl.float32),)
        tl.debug_barrier()
        tl.store(final + index * (2 * C * C) + wide, tl.load(hats + wide).to(final.dtype.element_ty))
        tl.store(lead + index * (2 * C * C) + column, tl.zeros([2 * C], lead.dtype.element_ty))
        added = tl.where(
            (slot + W - 1 < C)[:, None], tl.load(d_write + wide).to(tl.float32) * ending[:, None], 0.0
        )  # of hat
        added = tl.dot(tl.load(seen + across).to(WORK), tl.load(d_read + wide), added, input_precision=PRECISION)
        tl.store(d_hats + wide, added)
        tl.debug_barrier()
        for done_before in range(0, C, BLOCK):
            start = C - BLOCK - done_before
            firsts, all_R, to_gains, to_keeps = (), (), (), ()
            gains, keeps, _uptos = _tokens(upto, upto_low, strength, index * C, start, WIDE, C)
            close, close_scores = (
                _rows_near(coupling, start, W, PITCH, BLOCK + W),
                _rows_near(score, start, W, PITCH, BLOCK + W),
            )
            for back in tl.static_range(BLOCK):
                s = start + (BLOCK - 1 - back)
                shown = s if AFTER else s + 1
                gain, kept = gains[BLOCK - 1 - back], keeps[BLOCK - 1 - back]
                e = _rows_of(shown_e + s * (W * 2 * C), column, W, C)
                before = _rows_of(shown_p + tl.maximum(s - 1, 0) * (W * 2 * C), column, W, C)
                d_out = tl.load(d_read + shown * (2 * C) + column, mask=column * 0 + shown < C, other=0.0).to(
                    tl.float32
                )
                leaving = s - (W - 1)
                done = tl.load(d_hats + leaving * (2 * C) + column, mask=column * 0 + leaving >= 0, other=0.0)
                firsts, all_R = firsts + (d_R[0],), all_R + (d_R,)
                for j in tl.static_range(back + 1):
                    done += close[BLOCK - j + W - 1][BLOCK - 1 - back] * firsts[j]
                d_p = _through_write(d_p, d_R[0], done, d_out, close, close_scores, BLOCK - 1 - back + W - 1, AFTER, W)
                d_e = _through_residuals(d_p, d_R, close, BLOCK - 1 - back + W - 1, W)
                to_gain, to_kept = d_e[0] * e[0], tl.zeros([2 * C], tl.float32)
                for a in tl.static_range(1, W):
                    to_gain += d_e[a] * e[a]
                    R_before = tl.where(column == s - (a - 1), 1.0, 0.0) - e[a - 1]
                    to_kept += d_p[a] * before[a - 1] + d_R[a] * R_before
                to_gains, to_keeps = to_gains + (to_gain,), to_keeps + (to_kept,)
                d_R = _less(_younger(d_R, kept, W), d_e, gain, W)
                d_p = _younger(d_p, kept, W)
            for back in tl.static_range(BLOCK):
                s = start + (BLOCK - 1 - back)
                tl.store(part_gain + s * (2 * C) + column, to_gains[back])
                tl.store(part_kept + s * (2 * C) + column, to_keeps[back])
                entered = column * 0 + s + 1 < C
                tl.store(past + (s + 1) * (2 * C) + column, firsts[back], mask=entered)
                at = lead + index * (2 * C * C) + (s + 1) * (2 * C) + column
                tl.store(at, firsts[back].to(lead.dtype.element_ty), mask=entered)
                for a in tl.static_range(W):
                    at = shown_R + (s * W + a) * (2 * C) + column
                    tl.store(at, all_R[back][a].to(history.dtype.element_ty))
            tl.debug_barrier()
            at = start + 1 + near
            new = (at < C) & (near < BLOCK)
            weight = tl.load(
                coupling + (W - 1) + slot[:, None] + (at * PITCH)[None, :],
                mask=new[None, :] & (slot >= 0)[:, None],
                other=0.0,
            )
            entered = tl.load(
                past + at[:, None] * (2 * C) + column[None, :], mask=new[:, None] & (column >= 0)[None, :], other=0.0
            )
            added = tl.dot(weight, entered, added, input_precision=PRECISION)
            following = (slot >= start - BLOCK - (W - 1)) & (slot < start - (W - 1))
            tl.store(d_hats + wide, added, mask=following[:, None] & (column >= 0)[None, :])
            tl.debug_barrier()
        token = slot >= W - 1
        gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
        tl.store(d_strength + index * C + slot, tl.where(token, tl.sum(tl.load(part_gain + wide), 1), 0.0))
        d_step = tl.sum(tl.load(part_kept + wide), 1) * tl.exp((since - until).to(tl.float32))
        tl.store(d_log_decay + index * C + slot, tl.where(token, d_step, 0.0))
        for begin in range(0, C, 16):  # so many rows that each is loaded once
            rows_, shown = begin + near, begin + near + (0 if AFTER else 1)
            each = rows_[:, None] * (W * 2 * C) + column[None, :]
            wide_d = shown[:, None] * (2 * C) + column[None, :]
            d_out = tl.load(d_read + wide_d, mask=(shown < C)[:, None] & (column >= 0)[None, :], other=0.0).to(
                tl.float32
            )
            d_first = tl.load(shown_R + each).to(tl.float32)
            near_at = near_gram + (index * C + rows_) * (W * W)
            for b in tl.static_range(W - 1):
                ours = tl.load(shown_p + each + b * (2 * C)).to(tl.float32)
                tl.store(near_at + b, tl.sum(d_first * ours, 1))
                tl.store(near_score + (index * C + rows_) * W + b, tl.sum(d_out * ours, 1))
            theirs = ()
            for a in tl.static_range(1, W):
                theirs = theirs + (tl.load(shown_R + each + a * (2 * C)).to(tl.float32),)
            for b in tl.static_range(W):
                ours = (
                    tl.load(shown_e + each + b * (2 * C)).to(tl.float32)
                    * tl.load(strength + index * C + rows_)[:, None]
                )
                for a in tl.static_range(1, W):
                    tl.store(near_at + a * W + b, tl.sum(theirs[a - 1] * ours, 1))


@triton.jit(do_not_specialize=FIXED)
def coupling_kernel(
    q, k, head, strength, upto, upto_low, d_responses, final, lead, near_gram, near_score, d_couplings, d_log_decay,
    docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_couplings `[M * H, 2, C, C]`: gradients of the Gram matrix, both orders of a pair added up, and of the scores."""
    index = tl.program_id(0).to(tl.int64)
    gram, scores, entering, reading, ending = _couplings(
        q, k, head, strength, upto, upto_low, docs, chunk_doc, rows, index, T, NC,
        H, K, C, BK, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
    )  # fmt: skip
    slot, column = tl.arange(0, C), tl.arange(0, 2 * C)
    wide = slot[:, None] * (2 * C) + column[None, :]
    behind = slot[:, None] - slot[None, :]
    hat = tl.load(final + index * (2 * C * C) + wide)
    first_rows = tl.load(lead + index * (2 * C * C) + wide)
    d_write, d_read = d_responses + index * (4 * C * C), d_responses + index * (4 * C * C) + 2 * C * C
    d_far = tl.where(behind >= W, tl.dot(first_rows, tl.trans(hat), input_precision=PRECISION), 0.0) * entering
    d_far_t = tl.where(behind <= -W, tl.dot(hat, tl.trans(first_rows), input_precision=PRECISION), 0.0)
    d_score = tl.dot(tl.load(d_read + wide), tl.trans(hat), input_precision=PRECISION) * reading
    # every pair decays over the steps between: add exactly those
    spans = tl.dot(tl.where(behind < 0, 1.0, 0.0), d_far * gram, input_precision=PRECISION)
    crossed = behind <= 0 if AFTER else behind < 0
    spans = tl.dot(tl.where(crossed, 1.0, 0.0), d_score * scores, spans, input_precision=PRECISION)
    d_ending = tl.sum(tl.load(d_write + wide).to(tl.float32) * hat.to(tl.float32), 1) * ending
    d_ending = tl.where(slot + W - 1 < C, d_ending, 0.0)
    d_step = tl.sum(tl.where(behind >= W, spans + d_ending[None, :], 0.0), 1)
    _gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    fresh = tl.sum(tl.where(column[None, :] == C + slot[:, None], first_rows.to(tl.float32), 0.0), 1) * tl.exp(
        until.to(tl.float32)
    )
    d_step += tl.cumsum(fresh, 0, reverse=True) - fresh
    d_step += tl.load(d_log_decay + index * C + slot)
    tl.store(d_log_decay + index * C + slot, tl.where(slot >= W - 1, d_step, 0.0))

    d_gram = d_far + d_far_t * tl.trans(entering)
    near_gram, near_score = near_gram + index * (C * W * W), near_score + index * (C * W)
    for apart in tl.static_range(W):
        both = tl.zeros([C], tl.float32)
        for a in tl.static_range(W):
            for b in tl.static_range(W):
                # slots s + 1 - a and s - b; the older one is `slot`
                if (b + 1 - a == apart or a - b - 1 == apart) and (a > 0 or b < W - 1):
                    s = slot + max(a - 1, b)
                    both += tl.load(near_gram + s * (W * W) + a * W + b, mask=(s < C) & (s >= W - 1), other=0.0)
        d_gram += tl.where(behind == apart, both[None, :], 0.0) + tl.where(behind == -apart, both[:, None], 0.0)
    for a in tl.static_range(W - 1):
        s = slot + a
        own = tl.load(near_score + s * W + a, mask=(s < C) & (s >= W - 1), other=0.0)
        d_score += tl.where(behind == (a if AFTER else a + 1), own[None, :], 0.0)
    at = d_couplings + index * (2 * C * C) + slot[:, None] * C + slot[None, :]
    tl.store(at, d_gram.to(d_couplings.dtype.element_ty))
    tl.store(at + C * C, d_score.to(d_couplings.dtype.element_ty))


@triton.jit(do_not_specialize=FIXED)
def window_gradient_kernel(
    q, k, head, d_o, strength, upto, upto_low, residual_t, d_residual_t, borders_t, d_borders_t, d_couplings,
    d_q, d_k, d_head, carry_k, d_log_decay, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's queries and pair keys, and the rest of the log-decay's."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    _row, _valid, targets, _paired = _rows(
        d_k, d_head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C
    )
    slot = tl.arange(0, C)
    own = _own_slots(docs, chunk_doc, c, T, NC, W, PLAIN, C)
    targets = tl.where(own, targets, carry_k + (index * (W - 1) + slot) * K)
    _gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
    outs = tl.exp((since if AFTER else until).to(tl.float32))
    square = d_couplings + index * (2 * C * C)
    d_gram = tl.load(square + slot[:, None] * C + slot[None, :])
    d_score = tl.load(square + C * C + slot[:, None] * C + slot[None, :])
    d_score_t = tl.load(square + C * C + slot[None, :] * C + slot[:, None])
    d_read = tl.zeros([C], tl.float32)
    d_kept = 0.0
    for k0 in range(0, K, BK):
        column = k0 + tl.arange(0, BK)
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        from_o = tl.zeros([C, BK], tl.float32)
        d_x = tl.zeros([C, BK], tl.float32)
        for v0 in range(0, V, BV):
            S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
            dS_t = _load_tile(d_borders_t, index, v0, k0, V, K, BV, BK)
            d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
            r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
            d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
            from_o = tl.dot(d_out, S_t, from_o, input_precision=PRECISION)
            d_x = tl.dot(tl.trans(-d_r_t), S_t, d_x, input_precision=PRECISION)
            d_x = tl.dot(tl.trans(r_t), dS_t, d_x, input_precision=PRECISION)
            d_kept += tl.sum(S_t.to(tl.float32) * dS_t.to(tl.float32))
        from_o = from_o * outs[:, None]
        d_read += tl.sum(query.to(tl.float32) * from_o, 1)
        from_o = tl.dot(d_score, x, from_o, input_precision=PRECISION)
        tl.store(
            d_q + row[:, None] * K + column[None, :],
            from_o.to(d_q.dtype.element_ty),
            mask=valid[:, None] & (column < K)[None, :],
        )
        d_x = tl.dot(d_score_t, query, d_x, input_precision=PRECISION)
        d_x = tl.dot(d_gram, x, d_x, input_precision=PRECISION)
        tl.store(
            targets[:, None] + column[None, :],
            d_x.to(d_k.dtype.element_ty),
            mask=paired[:, None] & (column < K)[None, :],
        )
    d_step = tl.load(d_log_decay + index * C + slot) + d_kept * tl.exp(total.to(tl.float32))
    d_step += tl.cumsum(d_read, 0, reverse=True) - (0.0 if AFTER else d_read)
    tl.store(d_log_decay + index * C + slot, tl.where(slot >= W - 1, d_step, 0.0))


@triton.jit(do_not_specialize=FIXED)
def carry_kernel(
    d_k, d_head, d_v, d_head_v, first, carry_k, carry_v, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a chunk found for the last pairs of the chunk before it."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    slot = tl.arange(0, BW)
    rank = i * (C - W + 1) - (W - 1) + slot
    shared = (slot < W - 1) & (slot * 0 + i > 0)
    to, ok = key_pointers(d_k, d_head, rows, n, start, length, h, rank, H, K, W, SHIFT, MASKED)
    column = tl.arange(0, BK)
    where = (shared & ok)[:, None] & (column < K)[None, :]
    extra = tl.load(carry_k + ((index * (W - 1) + slot) * K)[:, None] + column[None, :], mask=where, other=0.0)
    total = tl.load(to[:, None] + column[None, :], mask=where, other=0.0).to(tl.float32) + extra.to(tl.float32)
    tl.store(to[:, None] + column[None, :], total.to(d_k.dtype.element_ty), mask=where)
    to, ok = value_pointers(d_v, d_head_v, rows, n, start, length, tl.load(first + n), h, rank, H, V, W, SHIFT, MASKED)
    column = tl.arange(0, BV)
    where = (shared & ok)[:, None] & (column < V)[None, :]
    extra = tl.load(carry_v + ((index * (W - 1) + slot) * V)[:, None] + column[None, :], mask=where, other=0.0)
    total = tl.load(to[:, None] + column[None, :], mask=where, other=0.0).to(tl.float32) + extra.to(tl.float32)
    tl.store(to[:, None] + column[None, :], total.to(d_v.dtype.element_ty), mask=where)


PROGRAMS = 264  # two for each multiprocessor of an H200; each goes over many chunks with the same scratch


def _rows_a_block(q: Tensor, form: Form) -> int:
    """Tokens that the run over them unrolls: more are faster, and take longer to compile."""
    return (8 if q.dtype == torch.bfloat16 else 4) // (1 if form.window <= 4 else 2)


def window_forward(
    q: Tensor,
    k: Tensor,
    head_x: Tensor,
    v: Tensor,
    head_v: Tensor,
    first: Tensor,
    strength: Tensor,
    upto: Tensor,
    upto_low: Tensor,
    S: Tensor,
    ranks: Ranks,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, new state, the responses of every chunk `[M * H, 4, C, C]`, residual_t and borders_t; arguments as in
    `delta.delta_forward`."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    V, C, (responses, residual_t, borders_t) = v.shape[3], CHUNK, kept_like(q, v, ranks.chunks, (4,))
    from_S = q.new_empty(M, C, q.shape[3], dtype=responses.dtype)
    programs = min(PROGRAMS, M)
    scratch = q.new_zeros(programs, 12, C, C, dtype=torch.float32)  # finite: rows beside a matrix are read, and times 0
    o, S_out = (torch.empty_like if ranks.rows is None else torch.zeros_like)(v), torch.empty_like(S)
    given = {
        "q": q,
        "k": k,
        "head": head_x,
        "v": v,
        "head_v": head_v,
        "first": first,
        "o": o,
        "scratch": scratch,
        "total": M,
    }
    given |= {"strength": strength, "upto": upto, "upto_low": upto_low, "responses": responses, "from_S": from_S}
    given |= {"from_v_t": residual_t, "residual_t": residual_t, "borders_t": borders_t, "S_in": S, "S_out": S_out}
    with on_device(q):
        settings = {"BLOCK": _rows_a_block(q, form), "PITCH": CHUNK + 16, **_settings("response", q, v, ranks, form)}
        launch(response_kernel, (programs,), **given, **settings)
        launch(apply_kernel, (M,), **given, **_settings("apply", q, v, ranks, form))
        settings = _settings("scan", q, v, ranks, form)
        launch(scan_kernel, (parts(V, settings["BV"]), ranks.documents * heads), **given, **settings)
        settings = _settings("window_read", q, v, ranks, form)
        launch(window_read_kernel, (M, parts(V, settings["BV"])), **given, **settings)
    return o, S_out, responses, residual_t, borders_t


def window_backward(
    q: Tensor,
    k: Tensor,
    head_x: Tensor,
    v: Tensor,
    head_v: Tensor,
    first: Tensor,
    strength: Tensor,
    upto: Tensor,
    upto_low: Tensor,
    responses: Tensor,
    residual_t: Tensor,
    borders_t: Tensor,
    d_o: Tensor,
    d_S_out: Tensor,
    ranks: Ranks,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, head_x, v, head_v, strength, the log-decay of every token (`[M, H, C]`), and S."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    (K, V), C, work, shared = (q.shape[3], v.shape[3]), CHUNK, work_dtype(q), form.window - 1
    to_r, d_residual_t, d_o_t, d_borders_t = (
        q.new_empty(M, *size, dtype=work) for size in ((C, K), (V, C), (V, C), (V, K))
    )
    given = {
        "q": q,
        "k": k,
        "head": head_x,
        "v": v,
        "head_v": head_v,
        "first": first,
        "d_o": d_o,
        "responses": responses,
    }
    given |= {
        "strength": strength,
        "upto": upto,
        "upto_low": upto_low,
        "residual_t": residual_t,
        "borders_t": borders_t,
    }
    given |= {"d_residual_t": d_residual_t, "d_borders_t": d_borders_t}
    passed = {"to_r": to_r, "from_o_t": d_residual_t, "d_o_t": d_o_t}
    d_S, programs = torch.empty_like(d_S_out), min(PROGRAMS, M)
    with on_device(q):
        launch(window_transposed_kernel, (M,), **given, **passed, **_settings("apply", q, v, ranks, form))
        settings = _settings("scan_backward", q, v, ranks, form)
        grid = (parts(V, settings["BV"]), ranks.documents * heads)
        launch(scan_backward_kernel, grid, **given, **passed, dS_in=d_S_out, dS_out=d_S, **settings)
        del to_r, d_o_t, passed  # their memory is that of what follows
        d_responses, d_couplings = (q.new_empty(M, n, C, C, dtype=work) for n in (4, 2))
        d_v, d_head_v, carry_v = torch.zeros_like(v), torch.zeros_like(head_v), v.new_empty(M, shared, V)
        given |= {
            "d_v": d_v,
            "d_head_v": d_head_v,
            "carry_v": carry_v,
            "d_responses": d_responses,
            "d_couplings": d_couplings,
        }
        launch(window_product_kernel, (M,), **given, **_settings("window_product", q, v, ranks, form))
        d_strength, d_log_decay = torch.empty_like(strength), torch.empty_like(upto)
        final, lead = q.new_empty(M, C, 2 * C, dtype=work), q.new_empty(M, C, 2 * C, dtype=work)
        near_gram, near_score = (
            strength.new_empty(M, C, form.window, form.window),
            strength.new_empty(M, C, form.window),
        )
        given |= {"d_strength": d_strength, "d_log_decay": d_log_decay, "final": final, "lead": lead}
        given |= {"near_gram": near_gram, "near_score": near_score}
        scratch = q.new_zeros(programs, 15, C, C, dtype=torch.float32)
        history = q.new_empty(programs, 3, C, form.window, 2 * C, dtype=work)
        settings = {
            "BLOCK": _rows_a_block(q, form) // 2,
            "PITCH": CHUNK + 16,
            **_settings("response", q, v, ranks, form),
        }
        launch(response_backward_kernel, (programs,), **given, scratch=scratch, history=history, total=M, **settings)
        del scratch, history
        launch(coupling_kernel, (M,), **given, **_settings("coupling", q, v, ranks, form))
        d_q = (torch.empty_like if ranks.rows is None else torch.zeros_like)(q)
        d_k, d_head_x, carry_k = torch.zeros_like(k), torch.zeros_like(head_x), q.new_empty(M, shared, K)
        given |= {"d_q": d_q, "d_k": d_k, "d_head": d_head_x, "carry_k": carry_k}
        launch(window_gradient_kernel, (M,), **given, **_settings("window_gradient", q, v, ranks, form))
        settings = {**_settings("apply", q, v, ranks, form), "BK": block(K), "BV": block(V)}
        launch(carry_kernel, (M,), **given, BW=1 << (form.window - 1).bit_length(), **settings)
    return d_q, d_k, d_head_x, d_v, d_head_v, d_strength, d_log_decay, d_S
