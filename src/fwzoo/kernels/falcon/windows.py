"""Triton kernels of falcon3, whose tokens write the residuals of a whole window of W pairs.

What a chunk does is linear in its values and in what its keys read of the state before it. With the pair keys X, values V of
its slots (the first W - 1 are the last pairs of the chunk before) and the incoming state S_0,

    S_C = e^{u_C} S_0 + X^T (write_v V - write_S X S_0)         O = e^c Q S_0 + read_v V - read_S X S_0

`response_kernel` finds the four `[C, C]` matrices by running over the tokens with one column for every slot: R holds what the
window's keys read of the current state, p what was written to them so far, hat the final weight of every pair that has left
the window, as of the token it was last written by. The state is then carried by the scans of `kernels/delta.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta import FIXED, Form, _gates, _load_rows, _load_tile, _rows, _settings, _store_tile, scan_kernel, work_dtype
from ..gpu import block, of_chunk, on_device, value_pointers
from ..ranks import CHUNK, Ranks


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
def _token(upto, upto_low, strength, at, s, WIDE: tl.constexpr):
    """Strength of the token in slot s, its decay, and the decay from the chunk's start up to it."""
    to, before = tl.load(upto + at + s), tl.load(upto + at + s - 1, mask=s > 0, other=0.0)
    if WIDE:
        to = to.to(tl.float64) + tl.load(upto_low + at + s)
        before = before.to(tl.float64) + tl.load(upto_low + at + s - 1, mask=s > 0, other=0.0)
    return tl.load(strength + at + s), tl.exp((to - before).to(tl.float32)), tl.exp(to.to(tl.float32))


@triton.jit
def _window_gram(coupling, s, C: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """x_{s-a+1} . x_{s-b} for ages a of the next token's window and b of this one's; 0 for a = 0."""
    a, b = tl.arange(0, BW)[:, None], tl.arange(0, BW)[None, :]
    return tl.load(coupling + (s - a + 1) * C + s - b, mask=(a > 0) & (a < W) & (b < W), other=0.0)


@triton.jit(do_not_specialize=[*FIXED, "total"])
def response_kernel(
    q, k, head, strength, upto, upto_low, scratch, responses, docs, chunk_doc, rows, total, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """responses: `[M * H, 4, C, C]`, write_v, write_S, read_v, read_S. scratch: `[programs, 4, C, C]`."""
    coupling = scratch + tl.program_id(0).to(tl.int64) * (4 * C * C)
    score, band = coupling + C * C, coupling + 2 * C * C
    slot, column, age = tl.arange(0, C), tl.arange(0, 2 * C), tl.arange(0, BW)
    next_age = age[:, None] == age[None, :] + 1
    row_at = slot[:, None] * C + slot[None, :]
    for index in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        gram, scores, entering, reading, ending = _couplings(
            q, k, head, strength, upto, upto_low, docs, chunk_doc, rows, index, T, NC,
            H, K, C, BK, SHIFT, W, AFTER, PLAIN, MASKED, WORK, WIDE, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # the chunk before is read no more
        tl.store(coupling + row_at, tl.where(entering > 0, gram * entering, tl.where(slot[:, None] - slot[None, :] < W, gram, 0.0)))
        tl.store(score + row_at, scores)
        tl.store(band + slot[:, None] * (2 * C) + column[None, :], tl.zeros([C, 2 * C], tl.float32))
        tl.debug_barrier()
        hat = tl.zeros([C, 2 * C], tl.float32)
        p = tl.zeros([BW, 2 * C], tl.float32)
        R = tl.where((column[None, :] == C + W - 1 - age[:, None]) & (age < W)[:, None], 1.0, 0.0)
        for s in range(W - 1, C):
            gain, kept, upto_s = _token(upto, upto_low, strength, index * C, s, WIDE)
            e = tl.where((column[None, :] == s - age[:, None]) & (age < W)[:, None], 1.0, 0.0) - R
            move = tl.where(next_age & (age < W)[:, None], kept, 0.0)[:, :, None]
            p = tl.sum(move * p[None, :, :], 1) + gain * e
            partial = (age < W - 1)[:, None]
            shown = s if AFTER else s + 1
            weight = tl.load(score + shown * C + s - age, mask=(age < W - 1) & (shown < C), other=0.0)
            read = tl.sum(weight[:, None] * p, 0)
            tl.store(band + shown * (2 * C) + column, read, mask=(column >= 0) & (shown < C))
            done = tl.sum(tl.where((age == W - 1)[:, None], p, 0.0), 0)
            hat = tl.where((slot == s - (W - 1))[:, None], done[None, :], hat)
            # what the next token's window reads
            inner = _window_gram(coupling, s, C, W, BW) * gain
            R = tl.sum(move * R[None, :, :], 1) + tl.sum(inner[:, :, None] * e[None, :, :], 1)
            inside = s + 1 < C
            past = tl.load(coupling + (s + 1) * C + slot, mask=(slot <= s + 1 - W) & inside, other=0.0)
            near = tl.load(coupling + (s + 1) * C + s - age, mask=(age < W - 1) & inside, other=0.0)
            enter = tl.where(column == C + s + 1, upto_s, 0.0) + tl.sum(past[:, None] * hat, 0)
            enter += tl.sum(tl.where(partial, near[:, None] * p, 0.0), 0)
            R = tl.where((age == 0)[:, None], enter[None, :], R)
        tl.debug_barrier()
        read = tl.load(band + slot[:, None] * (2 * C) + column[None, :])
        read = tl.dot(scores * reading, hat, read, input_precision=PRECISION)
        for a in tl.static_range(W - 1):
            still = tl.sum(tl.where((age == a)[:, None], p, 0.0), 0)
            hat = tl.where((slot == C - 1 - a)[:, None], still[None, :], hat)
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


PROGRAMS = 528  # four for each multiprocessor of an H200; each goes over many chunks with the same scratch


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, new state, and the responses of every chunk `[M * H, 4, C, C]`; arguments as in `delta.delta_forward`."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    (K, V), C, work = (q.shape[3], v.shape[3]), CHUNK, work_dtype(q)
    responses, from_S, residual_t, borders_t = (
        q.new_empty(M, *size, dtype=work) for size in ((4, C, C), (C, K), (V, C), (V, K))
    )
    programs = min(PROGRAMS, M)
    scratch = q.new_empty(programs, 4, C, C, dtype=torch.float32)
    o, S_out = (torch.empty_like if ranks.rows is None else torch.zeros_like)(v), torch.empty_like(S)
    gates = (strength, upto, upto_low)
    with on_device(q):
        settings = _settings("response", q, v, ranks, form)
        response_kernel[(programs,)](
            q, k, head_x, *gates, scratch=scratch, responses=responses, total=M, BW=triton.next_power_of_2(form.window), **settings
        )
        settings = _settings("apply", q, v, ranks, form)
        apply_kernel[(M,)](
            k, head_x, v, head_v, first, responses=responses, from_S=from_S, from_v_t=residual_t, **settings
        )
        settings = _settings("scan", q, v, ranks, form)
        scan_kernel[(triton.cdiv(V, settings["BV"]), ranks.documents * heads)](
            k, head_x, S, S_out, *gates, from_S=from_S, residual_t=residual_t, borders_t=borders_t, **settings
        )
        settings = _settings("window_read", q, v, ranks, form)
        window_read_kernel[(M, triton.cdiv(V, settings["BV"]))](
            q, k, head_x, v, head_v, first, *gates, responses=responses, borders_t=borders_t, o=o, **settings
        )
    return o, S_out, responses
