"""Triton kernels of falcon3, whose tokens write the residuals of a whole window of W pairs.

What a chunk does is linear in its values and in what its keys read of the state before it. With the pair keys X, values V of
its slots and the incoming state S_0,

    S_C = e^{u_C} S_0 + X^T (write_v V - write_S X S_0)         O = e^c Q S_0 + read_v V - read_S X S_0

A chunk is four blocks of N slots, the first W - 1 of each again the last pairs before it. Within a block `run_kernel` goes from token to
token with one column for every slot and kind: e holds what is wrong about the window's keys, p what was written to them so far, hat the
weight of every pair as it left the window. Between blocks, with the Gram matrix G of later with earlier blocks and the blocks' own responses,
what keys read as their block begins is Y = e^a X S_0 + G P, so P = write_v V + write_S Y is (I - write_S G)^-1 (write_v V + write_S e^a X S_0): that
is `response_kernel`. The state is then carried by the scans of `kernels/delta.py`. Backward goes through the same two steps in reverse.
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
from ..gpu import block, key_pointers, launch, of_chunk, on_device, parts, row_of, slots_of, value_pointers
from ..ranks import BLOCK, CHUNK, Ranks


@triton.jit
def _products(
    q, k, head, docs, chunk_doc, rows, index, T, NC,
    H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr, W: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gram matrix and scores of a chunk."""
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    gram = tl.zeros([C, C], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
    return gram, scores


@triton.jit
def _prefix_at(upto, upto_low, at, mask, WIDE: tl.constexpr):
    found = tl.load(upto + at, mask=mask, other=0.0)
    if WIDE:
        found = found.to(tl.float64) + tl.load(upto_low + at, mask=mask, other=0.0)
    return found


@triton.jit
def _masked_exp(keep, exponent):
    return tl.exp(tl.where(keep, exponent.to(tl.float32), -float("inf")))


@triton.jit
def _between(
    upto, upto_low, strength, index, WIDE: tl.constexpr, AFTER: tl.constexpr, C: tl.constexpr, N: tl.constexpr
):
    """Decays between blocks: of an earlier block's end until a later block begins, and until one of its tokens reads (`[C, C]`,
    else 0), from the chunk's start to a block's start, and from a block's end to the chunk's."""
    slot = tl.arange(0, C)
    begin = slot // N * N
    _gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
    before = _prefix_at(upto, upto_low, index * C + begin - 1, begin > 0, WIDE)
    behind = _prefix_at(upto, upto_low, index * C + begin + N - 1, begin >= 0, WIDE)
    earlier = slot[:, None] // N > slot[None, :] // N
    blocks = _masked_exp(earlier, before[:, None] - behind[None, :])
    tokens = _masked_exp(earlier, (since if AFTER else until)[:, None] - behind[None, :])
    return blocks, tokens, tl.exp(before.to(tl.float32)), tl.exp((total - behind).to(tl.float32))


@triton.jit
def _block(
    q, k, head, upto, upto_low, coupling, score, steps, final, others, docs, chunk_doc, rows, number, T, NC,
    H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, SHIFT: tl.constexpr, W: tl.constexpr, AFTER: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store, for its run, what the tokens of a block read of its pairs, `[N, N]` each (of those that have left the window, as they
    left it), and numbers of its slots, `[3, N]`: decay, decay from the block's start, decay of a pair until the block's end.
    final, others `[N, 2 N]`: set to 0.

    Returns: Gram matrix and scores, decays of pairs that have left until they are read by a key and by a query (else 0), numbers.
    """
    index, part = number // (C // N), number % (C // N)
    c, h, base = index // H, index % H, number * N
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    place, rank = slots_of(i * (C // N) + part, W, N, N)
    valid = (place >= W - 1) & (rank < length)
    row = row_of(rows, start, rank, valid, MASKED) * H + h
    pairs, paired = key_pointers(k, head, rows, n, start, length, h, rank, H, K, W, SHIFT, MASKED)
    gram = tl.zeros([N, N], tl.float32)
    scores = tl.zeros([N, N], tl.float32)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
    behind, gone = place[:, None] - place[None, :], place + (W - 1) < N
    since = _prefix_at(upto, upto_low, base + place, place >= 0, WIDE)
    until = _prefix_at(upto, upto_low, base + place - 1, part * N + place > 0, WIDE)
    left = _prefix_at(upto, upto_low, base + place + (W - 1), gone, WIDE)
    before = _prefix_at(upto, upto_low, base + place * 0 - 1, place * 0 + part > 0, WIDE)
    last = _prefix_at(upto, upto_low, base + place * 0 + (N - 1), place >= 0, WIDE)
    entering = _masked_exp(behind >= W, until[:, None] - left[None, :])
    read_from: tl.constexpr = W - 1 if AFTER else W
    reading = _masked_exp(behind >= read_from, (since if AFTER else until)[:, None] - left[None, :])
    kept, begun = tl.exp((since - until).to(tl.float32)), tl.exp((until - before).to(tl.float32))
    ending = tl.exp(tl.where(gone, (last - left).to(tl.float32), 0.0))
    at = place[:, None] * N + place[None, :]
    tl.debug_barrier()  # the block before is read no more
    tl.store(coupling + at, tl.where(behind >= W, gram * entering, gram))
    tl.store(score + at, tl.where(behind >= read_from, scores * reading, scores))
    tl.store(steps + place, kept)
    tl.store(steps + N + place, begun)
    tl.store(steps + 2 * N + place, ending)
    wide = place[:, None] * (2 * N) + tl.arange(0, 2 * N)[None, :]
    tl.store(final + wide, tl.zeros([N, 2 * N], tl.float32))
    tl.store(others + wide, tl.zeros([N, 2 * N], tl.float32))
    tl.debug_barrier()
    return gram, scores, entering, reading, kept, begun, ending


@triton.jit
def _written(e, p, gain, kept, W: tl.constexpr):
    """p after a token has written its window's residuals e, and gain * e. Here and below, tuples hold one row for every age."""
    new, weighted = (gain * e[0],), (gain * e[0],)
    for a in tl.static_range(1, W):
        weighted = weighted + (gain * e[a],)
        new = new + (kept * p[a - 1] + weighted[a],)
    return new, weighted


@triton.jit
def _empty_window(near, W: tl.constexpr, N: tl.constexpr):
    """e and p of a block's first token."""
    e, p = (), ()
    for a in tl.static_range(W):
        e = e + (tl.where(near == W - 1 - a, 1.0, 0.0) - tl.where(near == N + W - 1 - a, 1.0, 0.0),)
        p = p + (tl.zeros_like(e[a]),)
    return e, p


@triton.jit
def _older(coupling, final, steps, near, s, e, p, weighted, kept, W: tl.constexpr, N: tl.constexpr):
    """e of the token after the one in slot s. What its key reads of pairs that have left is read from `final`, where others are finite."""
    row = coupling + (s + 1) * N
    entered = tl.where(near == N + s + 1, tl.load(steps + N + s + 1), 0.0)
    for j in tl.static_range(N - W):
        entered += tl.where(j <= s + 1 - W, tl.load(row + j), 0.0) * tl.load(final + j * (2 * N) + near)
    for a in tl.static_range(W - 1):
        entered += tl.load(row + s - a) * p[a]
    new = (tl.where(near == s + 1, 1.0, 0.0) - entered,)
    for a in tl.static_range(1, W):  # of a key that stays, e = value - R, and R is decayed and written to
        moved = kept * e[a - 1] + tl.where(near == s + 1 - a, 1.0 - kept, 0.0)
        for b in tl.static_range(W):
            moved -= tl.load(coupling + (s - min(a - 1, b)) * N + (s - max(a - 1, b))) * weighted[b]
        new = new + (moved,)
    return new


@triton.jit(do_not_specialize=[*FIXED, "total"])
def run_kernel(
    q, k, head, strength, upto, upto_low, scratch, blocks, docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, N: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """blocks: `[M * H, 2, C, 2 N]`, what every block writes and reads by itself, of its values and (with the sign of a write) of what
    its keys read as it begins. A thread has a column of its own. scratch: `[programs, 7, N, N]`."""
    coupling = scratch + tl.program_id(0).to(tl.int64) * (7 * N * N)
    score, steps, final, reads = coupling + N * N, coupling + 2 * N * N, coupling + 3 * N * N, coupling + 5 * N * N
    place, near = tl.arange(0, N), tl.arange(0, 2 * N)
    late: tl.constexpr = 0 if AFTER else 1
    at = place[:, None] * (2 * N) + near[None, :]
    square, behind = place[:, None] * N + place[None, :], place[:, None] - place[None, :]
    for number in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        _block(
            q, k, head, upto, upto_low, coupling, score, steps, final, reads, docs, chunk_doc, rows, number, T, NC,
            H, K, C, BK, N, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
        )  # fmt: skip
        e, p = _empty_window(near, W, N)
        for s in range(W - 1, N):
            gain, keep = tl.load(strength + number * N + s), tl.load(steps + s)
            p, weighted = _written(e, p, gain, keep, W)
            tl.store(final + (s - (W - 1)) * (2 * N) + near, p[W - 1])
            read = tl.zeros_like(p[0])
            for a in tl.static_range(W - 1):
                read += tl.load(score + (s + late) * N + s - a) * p[a]
            tl.store(reads + (s + late) * (2 * N) + near, read, mask=near * 0 + s + late < N)
            e = _older(coupling, final, steps, near, s, e, p, weighted, keep, W, N)
        for a in tl.static_range(W - 1):
            tl.store(final + (N - 1 - a) * (2 * N) + near, p[a])
        tl.debug_barrier()
        hats = tl.load(final + at)
        gone = tl.where(behind >= (W - 1 if AFTER else W), tl.load(score + square), 0.0)
        read = tl.dot(gone, hats, tl.load(reads + at), input_precision=PRECISION)
        out = blocks + (number // (C // N) * (2 * C) + number % (C // N) * N) * (2 * N) + at
        tl.store(out, (hats * tl.load(steps + 2 * N + place)[:, None]).to(WORK))
        tl.store(out + 2 * C * N, read.to(WORK))


@triton.jit(do_not_specialize=FIXED)
def response_kernel(
    q, k, head, strength, upto, upto_low, responses, blocks, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, N: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """responses: `[M * H, 4, C, C]`, write_v, write_S, read_v, read_S, from what the blocks do by themselves."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, C)
    gram, scores = _products(
        q, k, head, docs, chunk_doc, rows, index, T, NC, H, K, C, BK, SHIFT, W, PLAIN, MASKED, WORK, PRECISION
    )
    to_block, to_token, from_start, to_end = _between(upto, upto_low, strength, index, WIDE, AFTER, C, N)
    gram, scores = gram * to_block, scores * to_token
    same = slot[:, None] // N == slot[None, :] // N
    at = blocks + index * (4 * C * N) + slot[:, None] * (2 * N) + (slot % N)[None, :]
    out = responses + index * (4 * C * C) + slot[:, None] * C + slot[None, :]
    solve = _chained(tl.load(at + N, mask=same, other=0.0).to(tl.float32), gram, C, PRECISION).to(WORK)
    read_S = tl.load(at + 2 * C * N + N, mask=same, other=0.0).to(tl.float32)
    scores = tl.dot(read_S.to(WORK), gram.to(WORK), scores, input_precision=PRECISION)
    write = tl.load(at, mask=same, other=0.0).to(tl.float32)
    write = tl.dot(solve, write.to(WORK), input_precision=PRECISION)
    tl.store(out, (write * to_end[:, None]).to(responses.dtype.element_ty))
    read_v = tl.load(at + 2 * C * N, mask=same, other=0.0).to(tl.float32)
    read_v = tl.dot(scores.to(WORK), write.to(WORK), read_v, input_precision=PRECISION)
    tl.store(out + 2 * C * C, read_v.to(responses.dtype.element_ty))
    write = tl.load(at + N, mask=same, other=0.0).to(tl.float32)
    write = tl.dot(solve, write.to(WORK), input_precision=PRECISION)
    read_S = tl.dot(scores.to(WORK), write.to(WORK), read_S, input_precision=PRECISION)
    tl.store(out + C * C, (write * -to_end[:, None] * from_start[None, :]).to(responses.dtype.element_ty))
    tl.store(out + 3 * C * C, (read_S * -from_start[None, :]).to(responses.dtype.element_ty))


@triton.jit
def _chained(write_S, gram, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I - write_S gram)^-1 for four blocks in a row, of which every one reads what those before it have written."""
    slot = tl.arange(0, C)
    passed = tl.dot(write_S, gram, input_precision=PRECISION)
    squared = tl.dot(passed, passed, input_precision=PRECISION)  # its square is 0
    solve = passed + squared + tl.where(slot[:, None] == slot[None, :], 1.0, 0.0)
    return tl.dot(passed, squared, solve, input_precision=PRECISION)


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
    rank = slots_of(i, W, C, 16)[1]
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
    """Slots whose gradients this chunk writes in place; those of a block's first pairs are added later, from `carry`."""
    _n, _start, _length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    slot = tl.arange(0, C)
    return (slot % 16 >= W - 1) | ((slot < 16) & (i == 0))


@triton.jit
def _carried(index, W: tl.constexpr, C: tl.constexpr):
    """Where the others are in `carry`, `[M * H, C / N, W - 1, .]`."""
    slot = tl.arange(0, C)
    return (index * (C // 16) + slot // 16) * (W - 1) + slot % 16


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
    targets = tl.where(own, targets, carry_v + _carried(index, W, C) * V)
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


@triton.jit(do_not_specialize=[*FIXED, "total"])
def between_backward_kernel(
    q, k, head, strength, upto, upto_low, scratch, blocks, responses, d_responses, d_blocks, d_couplings, d_log_decay,
    docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, N: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradients of a chunk's responses those of its blocks', and parts of d_couplings and of the log-decay's.

    scratch: `[programs, 6, C, C]`; transposed matrices are read from there.
    """
    inverse = scratch + tl.program_id(0).to(tl.int64) * (6 * C * C)
    slot = tl.arange(0, C)
    behind, part = slot[:, None] - slot[None, :], slot // N
    same, earlier = part[:, None] == part[None, :], part[:, None] > part[None, :]
    straight, across = slot[:, None] * C + slot[None, :], slot[None, :] * C + slot[:, None]
    small = slot[:, None] * (2 * N) + (slot % N)[None, :]
    small_t = slot[None, :] * (2 * N) + (slot % N)[:, None]
    for index in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        gram, scores = _products(
            q, k, head, docs, chunk_doc, rows, index, T, NC, H, K, C, BK, SHIFT, W, PLAIN, MASKED, WORK, PRECISION
        )
        to_block, to_token, _from_start, _to_end = _between(upto, upto_low, strength, index, WIDE, AFTER, C, N)
        gram, scores = gram * to_block, scores * to_token
        block = blocks + index * (4 * C * N)
        write_v = tl.load(block + small, mask=same, other=0.0)
        write_S = tl.load(block + small + N, mask=same, other=0.0)
        read_S = tl.load(block + small + 2 * C * N + N, mask=same, other=0.0)
        solve = _chained(write_S.to(tl.float32), gram, C, PRECISION).to(WORK)
        gram = gram.to(WORK)
        tl.debug_barrier()  # the chunk before is read no more
        tl.store(inverse + straight, solve)
        tl.store(inverse + C * C + straight, tl.dot(read_S, gram, scores, input_precision=PRECISION).to(WORK))
        tl.store(inverse + 2 * C * C + straight, gram)
        tl.store(inverse + 5 * C * C + straight, scores.to(WORK))
        tl.store(inverse + 3 * C * C + straight, tl.dot(solve, write_v, input_precision=PRECISION).to(WORK))
        tl.store(inverse + 4 * C * C + straight, tl.dot(solve, write_S, input_precision=PRECISION).to(WORK))
        tl.debug_barrier()
        _to_block, _to_token, from_start, to_end = _between(upto, upto_low, strength, index, WIDE, AFTER, C, N)
        theirs, ours = d_responses + index * (4 * C * C), responses + index * (4 * C * C)
        at, out = slot[:, None] * (2 * C) + slot[None, :], d_blocks + index * (4 * C * N) + small
        # decays from the chunk's start and to its end
        moved = tl.load(theirs + C + at).to(tl.float32) * tl.load(ours + C * C + straight).to(tl.float32)
        from_start_sum, to_end_sum = tl.sum(moved, 0), -tl.sum(moved, 1)
        moved = tl.load(theirs + 2 * C * C + C + at).to(tl.float32) * tl.load(ours + 3 * C * C + straight).to(
            tl.float32
        )
        from_start_sum += tl.sum(moved, 0)
        to_end_sum += tl.sum(tl.load(theirs + at).to(tl.float32) * tl.load(ours + straight).to(tl.float32), 1)
        d_step = tl.sum(tl.where(earlier, to_end_sum[None, :], 0.0), 1)
        d_step -= tl.sum(tl.where(part[:, None] < part[None, :], from_start_sum[None, :], 0.0), 1)
        tl.store(d_log_decay + index * C + slot, d_step)
        tl.debug_barrier()  # everything is loaded again where it is used: registers are few
        through, solve_t = tl.load(inverse + C * C + across), tl.load(inverse + across)
        d_read = tl.load(theirs + 2 * C * C + at)
        tl.store(out + 2 * C * N, d_read, mask=same)
        d_write = tl.load(theirs + at).to(tl.float32) * to_end[:, None]
        d_write = tl.dot(through, d_read, d_write, input_precision=PRECISION)
        d_write = tl.dot(solve_t, d_write.to(WORK), input_precision=PRECISION)
        tl.store(out, d_write.to(d_blocks.dtype.element_ty), mask=same)
        written = tl.load(inverse + 3 * C * C + across)
        d_passed = tl.dot(d_write.to(WORK), written, input_precision=PRECISION)
        d_through = tl.dot(d_read, written, input_precision=PRECISION)
        d_read = (tl.load(theirs + 2 * C * C + C + at).to(tl.float32) * from_start[None, :]).to(WORK)
        d_write = tl.load(theirs + C + at).to(tl.float32) * to_end[:, None] * from_start[None, :]
        d_write = tl.dot(through, d_read, d_write, input_precision=PRECISION)
        d_write = tl.dot(solve_t, d_write.to(WORK), input_precision=PRECISION)
        written = tl.load(inverse + 4 * C * C + across)
        d_passed = tl.dot(d_write.to(WORK), written, d_passed, input_precision=PRECISION)
        d_through = tl.dot(d_read, written, d_through, input_precision=PRECISION)
        gram_t = tl.load(inverse + 2 * C * C + across)
        narrow, narrow_through = d_passed.to(WORK), d_through.to(WORK)
        d_write = tl.dot(narrow, gram_t, d_write, input_precision=PRECISION)
        tl.store(out + N, d_write.to(d_blocks.dtype.element_ty), mask=same)
        d_read = tl.dot(narrow_through, gram_t, d_read.to(tl.float32), input_precision=PRECISION)
        tl.store(out + 2 * C * N + N, d_read.to(d_blocks.dtype.element_ty), mask=same)
        across_S = tl.load(block + small_t + N, mask=same, other=0.0)
        d_gram = tl.dot(across_S, narrow, input_precision=PRECISION)
        across_S = tl.load(block + small_t + 2 * C * N + N, mask=same, other=0.0)
        d_gram = tl.dot(across_S, narrow_through, d_gram, input_precision=PRECISION)
        # every pair decays over the blocks, and a read also over the tokens, between: add exactly those
        gram = tl.load(inverse + 2 * C * C + straight).to(tl.float32)
        spans = tl.dot(tl.where(part[:, None] < part[None, :], 1.0, 0.0), d_gram * gram, input_precision=PRECISION)
        crossed = behind <= 0 if AFTER else behind < 0
        scores = tl.load(inverse + 5 * C * C + straight).to(tl.float32)
        spans = tl.dot(tl.where(crossed, 1.0, 0.0), d_through * scores, spans, input_precision=PRECISION)
        d_step += tl.sum(tl.where(earlier, spans, 0.0), 1)
        tl.store(d_log_decay + index * C + slot, d_step)
        to_block, to_token, _from_start, _to_end = _between(upto, upto_low, strength, index, WIDE, AFTER, C, N)
        d_gram *= to_block
        out = d_couplings + index * (2 * C * C)
        tl.store(out + straight, d_gram.to(d_couplings.dtype.element_ty), mask=earlier)
        tl.store(out + across, d_gram.to(d_couplings.dtype.element_ty), mask=earlier)
        tl.store(
            out + C * C + straight,
            (d_through * to_token).to(d_couplings.dtype.element_ty),
            mask=part[:, None] != part[None, :],
        )


@triton.jit
def _rows_of(at, W: tl.constexpr, N: tl.constexpr):
    """A row of `[C, W, 2 N]` for every age."""
    found = ()
    for a in tl.static_range(W):
        found = found + (tl.load(at + a * (2 * N)).to(tl.float32),)
    return found


@triton.jit
def _store_rows(at, x, W: tl.constexpr, N: tl.constexpr, WORK: tl.constexpr):
    for a in tl.static_range(W):
        tl.store(at + a * (2 * N), x[a].to(WORK))


@triton.jit
def _through_write(d_p, entered, done, d_out, coupling, score, s, late: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Gradient of p with what the next key, the reads, and all later keys (done, of the pair that leaves) see of it."""
    new = ()
    for a in tl.static_range(W - 1):
        found = d_p[a] + tl.load(coupling + (s + 1) * N + s - a) * entered
        new = new + (found + tl.load(score + (s + late) * N + s - a) * d_out,)
    return new + (d_p[W - 1] + done,)


@triton.jit
def _through_residuals(d_p, d_R, coupling, s, W: tl.constexpr, N: tl.constexpr):
    """Gradient of e, over the gain."""
    new = ()
    for b in tl.static_range(W):
        d_e = d_p[b]
        for a in tl.static_range(1, W):
            d_e += tl.load(coupling + (s - min(a - 1, b)) * N + (s - max(a - 1, b))) * d_R[a]
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
def within_backward_kernel(
    q, k, head, strength, upto, upto_low, scratch, history, d_blocks, d_couplings, d_strength, d_log_decay,
    docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, N: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The run over the tokens of every block again, then back to front: the rest of d_couplings, d_strength and more of d_log_decay.

    scratch: `[programs, 18, N, N]`, history: `[programs, 3, N, W, 2 N]`, of e, p and the gradient of R.
    """
    coupling = scratch + tl.program_id(0).to(tl.int64) * (18 * N * N)
    score, steps, final, lead = coupling + N * N, coupling + 2 * N * N, coupling + 3 * N * N, coupling + 5 * N * N
    part_gain, part_kept = coupling + 7 * N * N, coupling + 9 * N * N
    d_hats, near_score, near_gram = coupling + 11 * N * N, coupling + 13 * N * N, coupling + 14 * N * N
    shown_e = history + tl.program_id(0).to(tl.int64) * (6 * N * N * W)
    shown_p, shown_R = shown_e + 2 * N * N * W, shown_e + 4 * N * N * W
    late: tl.constexpr = 0 if AFTER else 1
    place, near = tl.arange(0, N), tl.arange(0, 2 * N)
    behind, token = place[:, None] - place[None, :], place >= W - 1
    own_rows = token[:, None] & (near >= 0)[None, :]
    all_rows, each = place[:, None] * (2 * N) + near[None, :], place[:, None] * (W * 2 * N) + near[None, :]
    for number in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        gram, scores, entering, reading, kept, begun, ending = _block(
            q, k, head, upto, upto_low, coupling, score, steps, final, lead, docs, chunk_doc, rows, number, T, NC,
            H, K, C, BK, N, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
        )  # fmt: skip
        index, part = number // (C // N), number % (C // N)
        d_writes = d_blocks + (index * (2 * C) + part * N) * (2 * N)
        d_reads = d_writes + 2 * C * N
        gains, e_at, p_at, R_at = strength + number * N, shown_e + near, shown_p + near, shown_R + near
        # of pairs as they leave the window: what is left of them at the end, and what later tokens read of them
        d_write, d_read = tl.load(d_writes + all_rows).to(tl.float32), tl.load(d_reads + all_rows).to(tl.float32)
        gone = tl.where(behind <= -(W - 1 + late), tl.load(score + place[None, :] * N + place[:, None]), 0.0)
        tl.store(d_hats + all_rows, tl.dot(gone, d_read, d_write * ending[:, None], input_precision=PRECISION))
        e, p = _empty_window(near, W, N)
        for s in range(W - 1, N):
            gain, keep = tl.load(gains + s), tl.load(steps + s)
            _store_rows(e_at + s * (W * 2 * N), e, W, N, WORK)
            p, weighted = _written(e, p, gain, keep, W)
            _store_rows(p_at + s * (W * 2 * N), p, W, N, WORK)
            tl.store(final + (s - (W - 1)) * (2 * N) + near, p[W - 1])
            e = _older(coupling, final, steps, near, s, e, p, weighted, keep, W, N)
        d_p, d_R = (), ()
        for a in tl.static_range(W - 1):
            d_R = d_R + (tl.zeros_like(e[0]),)
            d_p = d_p + (tl.load(d_writes + (N - 1 - a) * (2 * N) + near).to(tl.float32),)
        d_p, d_R = d_p + (tl.zeros_like(e[0]),), d_R + (tl.zeros_like(e[0]),)
        tl.debug_barrier()
        for back in range(0, N - W + 1):
            s = N - 1 - back
            gain, keep = tl.load(gains + s), tl.load(steps + s)
            e = _rows_of(e_at + s * (W * 2 * N), W, N)
            d_out = tl.load(d_reads + (s + late) * (2 * N) + near, mask=near * 0 + s + late < N, other=0.0)
            done = tl.load(d_hats + (s - (W - 1)) * (2 * N) + near)
            for t in tl.static_range(W, N):
                weight = tl.where(t > s, tl.load(coupling + t * N + s - (W - 1)), 0.0)
                done += weight * tl.load(lead + t * (2 * N) + near)
            _store_rows(R_at + s * (W * 2 * N), d_R, W, N, WORK)
            d_p = _through_write(d_p, d_R[0], done, d_out.to(tl.float32), coupling, score, s, late, W, N)
            d_e = _through_residuals(d_p, d_R, coupling, s, W, N)
            to_gain, to_kept = d_e[0] * e[0], tl.zeros_like(e[0])
            for a in tl.static_range(1, W):
                to_gain += d_e[a] * e[a]
                to_kept += d_R[a] * (tl.where(near == s - (a - 1), 1.0, 0.0) - e[a - 1])
                before = p_at + (s - 1) * (W * 2 * N) + (a - 1) * (2 * N)
                to_kept += d_p[a] * tl.load(before, mask=near * 0 + s > W - 1, other=0.0).to(tl.float32)
            tl.store(part_gain + s * (2 * N) + near, to_gain)
            tl.store(part_kept + s * (2 * N) + near, to_kept)
            d_R = _less(_younger(d_R, keep, W), d_e, gain, W)
            d_p = _younger(d_p, keep, W)
            # d_R[0] is of what this token's key reads, as far as it is later written; its own entry is in R
            tl.store(lead + s * (2 * N) + near, d_R[0], mask=near * 0 + s > W - 1)
        tl.debug_barrier()
        d_gain = tl.sum(tl.load(part_gain + all_rows, mask=own_rows, other=0.0), 1)
        tl.store(d_strength + number * N + place, d_gain)
        d_step = tl.sum(tl.load(part_kept + all_rows, mask=own_rows, other=0.0), 1) * kept
        # within the window
        d_out = tl.load(d_reads + all_rows + late * (2 * N), mask=own_rows & (place + late < N)[:, None], other=0.0)
        d_first = tl.load(shown_R + each, mask=own_rows, other=0.0).to(tl.float32)
        gain = tl.load(gains + place)
        for b in tl.static_range(W - 1):
            ours = tl.load(shown_p + each + b * (2 * N), mask=own_rows, other=0.0).to(tl.float32)
            tl.store(near_gram + place * (W * W) + b, tl.sum(d_first * ours, 1))
            tl.store(near_score + place * W + b, tl.sum(d_out.to(tl.float32) * ours, 1))
        for b in tl.static_range(W):
            ours = tl.load(shown_e + each + b * (2 * N), mask=own_rows, other=0.0).to(tl.float32) * gain[:, None]
            for a in tl.static_range(1, W):
                theirs = tl.load(shown_R + each + a * (2 * N), mask=own_rows, other=0.0).to(tl.float32)
                tl.store(near_gram + place * (W * W) + a * W + b, tl.sum(theirs * ours, 1))
        # out of the window
        hat, leads = tl.load(final + all_rows), tl.load(lead + all_rows)
        d_gram = tl.dot(leads, tl.trans(hat), input_precision=PRECISION) * entering
        d_score = tl.dot(d_read, tl.trans(hat), input_precision=PRECISION) * reading
        spans = tl.dot(tl.where(behind < 0, 1.0, 0.0), d_gram * gram, input_precision=PRECISION)
        crossed = behind <= 0 if AFTER else behind < 0
        spans = tl.dot(tl.where(crossed, 1.0, 0.0), d_score * scores, spans, input_precision=PRECISION)
        d_ending = tl.where(place + (W - 1) < N, tl.sum(d_write * hat, 1) * ending, 0.0)
        d_step += tl.sum(tl.where(behind >= W, spans + d_ending[None, :], 0.0), 1)
        fresh = tl.sum(tl.where(near[None, :] == N + place[:, None], leads, 0.0), 1) * begun
        d_step += tl.sum(tl.where(behind < 0, fresh[None, :], 0.0), 1)
        d_step += tl.load(d_log_decay + number * N + place)
        tl.store(d_log_decay + number * N + place, tl.where(token, d_step, 0.0))
        tl.debug_barrier()
        for apart in tl.static_range(W):
            both = tl.zeros([N], tl.float32)
            for a in tl.static_range(W):
                for b in tl.static_range(W):
                    # slots s + 1 - a and s - b; the older one is `place`
                    if (b + 1 - a == apart or a - b - 1 == apart) and (a > 0 or b < W - 1):
                        s = place + max(a - 1, b)
                        both += tl.load(near_gram + s * (W * W) + a * W + b, mask=(s < N) & (s >= W - 1), other=0.0)
            d_gram += tl.where(behind == apart, both[None, :], 0.0)
        for a in tl.static_range(W - 1):
            s = place + a
            found = tl.load(near_score + s * W + a, mask=(s < N) & (s >= W - 1), other=0.0)
            d_score += tl.where(behind == (a if AFTER else a + 1), found[None, :], 0.0)
        # both orders of a pair
        at = d_couplings + index * (2 * C * C) + part * (N * C + N) + place[:, None] * C + place[None, :]
        d_gram = tl.where(behind == 0, 2.0 * d_gram, d_gram).to(WORK)
        tl.store(at, d_gram, mask=behind >= 0)
        across = d_couplings + index * (2 * C * C) + part * (N * C + N) + place[None, :] * C + place[:, None]
        tl.store(across, d_gram, mask=behind > 0)
        tl.store(at + C * C, d_score.to(WORK))


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
    targets = tl.where(own, targets, carry_k + _carried(index, W, C) * K)
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
    tl.store(d_log_decay + index * C + slot, tl.where(slot % 16 >= W - 1, d_step, 0.0))


@triton.jit(do_not_specialize=FIXED)
def carry_kernel(
    d_k, d_head, d_v, d_head_v, first, carry_k, carry_v, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a block found for the last pairs of the block before it."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    place, rank = slots_of(i, W, C, 16)
    shared, at = (place < W - 1) & (i * C + tl.arange(0, C) >= 16), _carried(index, W, C)
    to, ok = key_pointers(d_k, d_head, rows, n, start, length, h, rank, H, K, W, SHIFT, MASKED)
    column = tl.arange(0, BK)
    where = (shared & ok)[:, None] & (column < K)[None, :]
    extra = tl.load(carry_k + (at * K)[:, None] + column[None, :], mask=where, other=0.0)
    total = tl.load(to[:, None] + column[None, :], mask=where, other=0.0).to(tl.float32) + extra.to(tl.float32)
    tl.store(to[:, None] + column[None, :], total.to(d_k.dtype.element_ty), mask=where)
    to, ok = value_pointers(d_v, d_head_v, rows, n, start, length, tl.load(first + n), h, rank, H, V, W, SHIFT, MASKED)
    column = tl.arange(0, BV)
    where = (shared & ok)[:, None] & (column < V)[None, :]
    extra = tl.load(carry_v + (at * V)[:, None] + column[None, :], mask=where, other=0.0)
    total = tl.load(to[:, None] + column[None, :], mask=where, other=0.0).to(tl.float32) + extra.to(tl.float32)
    tl.store(to[:, None] + column[None, :], total.to(d_v.dtype.element_ty), mask=where)


PROGRAMS = 264  # two for each multiprocessor of an H200; each goes over many chunks with the same scratch


RUNS, RUNS_BACK = 2112, 1056  # sixteen and eight; of one warp


def blocks_of(tiles: int) -> int:
    return tiles * (CHUNK // BLOCK)


def blocks_like(q: Tensor, chunks: int) -> Tensor:
    """An empty tensor for what `response_kernel` finds of blocks."""
    return q.new_empty(chunks * q.shape[2], 2, CHUNK, 2 * BLOCK, dtype=work_dtype(q))


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, new state, the responses of every chunk `[M * H, 4, C, C]`, those of its blocks, residual_t and borders_t; arguments as in
    `delta.delta_forward`."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    V, C, (responses, residual_t, borders_t) = v.shape[3], CHUNK, kept_like(q, v, ranks.chunks, (4,))
    blocks = blocks_like(q, ranks.chunks)
    from_S = q.new_empty(M, C, q.shape[3], dtype=responses.dtype)
    programs = min(RUNS, blocks_of(M))
    scratch = q.new_empty(programs, 7, BLOCK, BLOCK, dtype=torch.float32)
    o, S_out = ranks.new_like(v), torch.empty_like(S)
    given = {
        "q": q,
        "k": k,
        "head": head_x,
        "v": v,
        "head_v": head_v,
        "first": first,
        "o": o,
        "scratch": scratch,
        "blocks": blocks,
        "total": blocks_of(M),
    }
    given |= {"strength": strength, "upto": upto, "upto_low": upto_low, "responses": responses, "from_S": from_S}
    given |= {"from_v_t": residual_t, "residual_t": residual_t, "borders_t": borders_t, "S_in": S, "S_out": S_out}
    with on_device(q):
        settings = {"N": BLOCK, **_settings("response", q, v, ranks, form)}
        launch(run_kernel, (programs,), **given, **{**settings, "num_warps": 1})
        launch(response_kernel, (M,), **given, **settings)
        launch(apply_kernel, (M,), **given, **_settings("apply", q, v, ranks, form))
        settings = _settings("scan", q, v, ranks, form)
        launch(scan_kernel, (parts(V, settings["BV"]), ranks.documents * heads), **given, **settings)
        settings = _settings("window_read", q, v, ranks, form)
        launch(window_read_kernel, (M, parts(V, settings["BV"])), **given, **settings)
    return o, S_out, responses, blocks, residual_t, borders_t


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
    blocks: Tensor,
    residual_t: Tensor,
    borders_t: Tensor,
    d_o: Tensor,
    d_S_out: Tensor | None,
    ranks: Ranks,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, head_x, v, head_v, strength, the log-decay of every token (`[M, H, C]`), and S."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    (K, V), C, work, shared = (q.shape[3], v.shape[3]), CHUNK, work_dtype(q), CHUNK // BLOCK * (form.window - 1)
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
        "blocks": blocks,
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
    d_S = q.new_empty(ranks.documents, heads, K, V, dtype=torch.float32)
    programs, runs = min(PROGRAMS, M), min(RUNS_BACK, blocks_of(M))
    with on_device(q):
        launch(window_transposed_kernel, (M,), **given, **passed, **_settings("apply", q, v, ranks, form))
        settings = _settings("scan_backward", q, v, ranks, form)
        grid = (parts(V, settings["BV"]), ranks.documents * heads)
        launch(scan_backward_kernel, grid, **given, **passed, dS_in=d_S_out, dS_out=d_S, **settings)
        del to_r, d_o_t, passed  # their memory is that of what follows
        d_responses, d_couplings = (q.new_empty(M, n, C, C, dtype=work) for n in (4, 2))
        d_v, d_head_v, carry_v = ranks.new_pairs_like(v, 0), torch.zeros_like(head_v), v.new_empty(M, shared, V)
        given |= {
            "d_v": d_v,
            "d_head_v": d_head_v,
            "carry_v": carry_v,
            "d_responses": d_responses,
            "d_couplings": d_couplings,
        }
        launch(window_product_kernel, (M,), **given, **_settings("window_product", q, v, ranks, form))
        d_strength, d_log_decay = torch.empty_like(strength), torch.empty_like(upto)
        given |= {"d_strength": d_strength, "d_log_decay": d_log_decay, "d_blocks": torch.empty_like(blocks)}
        settings = {"N": BLOCK, **_settings("response", q, v, ranks, form)}
        scratch = q.new_empty(programs, 6, C, C, dtype=work)
        launch(between_backward_kernel, (programs,), **given, scratch=scratch, total=M, **settings)
        del given["d_responses"], d_responses
        scratch = q.new_empty(runs, 18, BLOCK, BLOCK, dtype=torch.float32)
        history = q.new_empty(runs, 3, BLOCK, form.window, 2 * BLOCK, dtype=work)
        settings |= {"total": blocks_of(M), "num_warps": 1}
        launch(within_backward_kernel, (runs,), **given, scratch=scratch, history=history, **settings)
        del scratch, history, given["d_blocks"]
        d_q = ranks.new_like(q)
        d_k, d_head_x, carry_k = ranks.new_pairs_like(k, -1), torch.zeros_like(head_x), q.new_empty(M, shared, K)
        given |= {"d_q": d_q, "d_k": d_k, "d_head": d_head_x, "carry_k": carry_k}
        launch(window_gradient_kernel, (M,), **given, **_settings("window_gradient", q, v, ranks, form))
        settings = {**_settings("apply", q, v, ranks, form), "BK": block(K), "BV": block(V)}
        launch(carry_kernel, (M,), **given, **settings)
    return d_q, d_k, d_head_x, d_v, d_head_v, d_strength, d_log_decay, d_S
