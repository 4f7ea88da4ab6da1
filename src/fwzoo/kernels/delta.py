"""Triton kernels of the delta family: regressions that write what the fast weights got wrong about a key.

One chunk holds C consecutive real tokens of one document. With log-decay prefixes u (u_0 = 0) and incoming state S_0:

    r_i = v_i - e^{a_i} S_0^T x_i - sum_{j < i} (x_i . x_j) e^{a_i - u_j} eta_j r_j      a_i = u_{i-1}, or u_i (gated delta)
    o_i = e^{c_i} S_0^T q_i + sum_{j <= i} (q_i . x_j) e^{c_i - u_j} eta_j r_j           c_i = u_i, or u_{i-1} and j < i
    S_C = e^{u_C} S_0 + sum_j e^{u_C - u_j} eta_j x_j r_j^T

The residuals solve a unit lower triangular system whose inverse is called solve below: r = from_v - from_S S_0 with
from_v = solve v and from_S = solve (e^a x). Work inside chunks runs in parallel over chunks; one short scan carries the state.
Tiles of scratch tensors are `[M * H, ...]`, tile M of head H at `tile * H + h`; those named `_t` are stored transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import INTERPRETING
from .gpu import block, key_pointers, launch, missing_pairs, of_chunk, on_device, parts, read, row_of, slots_of, tables
from .ranks import CHUNK, Ranks

FIXED = ["T", "NC", "H"]  # no recompilation for another length or number of heads


# --- loads and stores ---


@triton.jit
def _rows(
    k,
    head,
    docs,
    chunk_doc,
    rows,
    c,
    h,
    T,
    NC,
    H,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    W: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """For every slot of chunk c: index of its token and head in the flattened inputs, whether it holds a token of its own,
    where its pair key is, and whether there is one."""
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    place, rank = slots_of(i, W, C, 16)  # without a window, of any size
    valid = (place >= W - 1) & (rank < length)
    row = row_of(rows, start, rank, valid, MASKED) * H + h
    pairs, paired = key_pointers(k, head, rows, n, start, length, h, rank, H, K, W, SHIFT, MASKED)
    return row, valid, pairs, paired


@triton.jit
def _load_rows(pointers, valid, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr):
    """Columns `offset ... offset + BLOCK` of rows of SIZE elements."""
    column = offset + tl.arange(0, BLOCK)
    return tl.load(pointers[:, None] + column[None, :], mask=valid[:, None] & (column < SIZE)[None, :], other=0.0).to(
        WORK
    )


@triton.jit
def _load_tile(
    base, index, row0, column0, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Block of scratch tile number `index`, a `[ROWS, COLUMNS]` matrix."""
    r, c = row0 + tl.arange(0, BR), column0 + tl.arange(0, BC)
    pointers = base + index * (ROWS * COLUMNS) + r[:, None] * COLUMNS + c[None, :]
    return tl.load(pointers, mask=(r < ROWS)[:, None] & (c < COLUMNS)[None, :], other=0.0)


@triton.jit
def _store_tile(
    base, index, row0, column0, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    r, c = row0 + tl.arange(0, BR), column0 + tl.arange(0, BC)
    pointers = base + index * (ROWS * COLUMNS) + r[:, None] * COLUMNS + c[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(r < ROWS)[:, None] & (c < COLUMNS)[None, :])


# --- gains and decays ---


@triton.jit
def _gates(strength, upto, upto_low, index, WIDE: tl.constexpr, C: tl.constexpr):
    """eta of every slot, log-decay from the chunk's start up to and until every slot, and of the whole chunk.

    An exact eta of 0 becomes 1e-20: too small to write anything, and eta's own gradient stays defined. WIDE: float64, so that
    differences keep float32's digits.
    """
    slot = tl.arange(0, C)
    at = index * C + slot
    gain = tl.load(strength + at)
    gain = tl.where(tl.abs(gain) < 1e-20, 1e-20, gain)
    to = tl.load(upto + at)
    until = tl.load(upto + at - 1, mask=slot > 0, other=0.0)
    total = tl.load(upto + index * C + C - 1)
    if WIDE:
        to = to.to(tl.float64) + tl.load(upto_low + at)
        until = until.to(tl.float64) + tl.load(upto_low + at - 1, mask=slot > 0, other=0.0)
        total = total.to(tl.float64) + tl.load(upto_low + index * C + C - 1)
    return gain, to, until, total


@triton.jit
def _falcon_gates(
    gram, beta, ridge, writes, valid, strength, upto, energy, index, eps, decay_floor, DIVIDE: tl.constexpr, COUPLED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """What `falcon/prepass.py` finds for a window of one pair and 16-bit inputs, with energies from the Gram matrix."""
    slot = tl.arange(0, C)
    at = index * C + slot
    E = tl.where(writes, tl.sum(tl.where(slot[:, None] == slot[None, :], gram, 0.0), 1), 0.0)
    tl.store(energy + at, E)
    lam, gain = read(ridge, valid).to(tl.float32), read(beta, valid).to(tl.float32)
    if COUPLED:
        lam *= E
    inverse = tl.where(writes, 1.0, 0.0)
    gamma = 1.0 - gain * lam * inverse
    if DIVIDE:
        under = E + lam + eps
        writes = writes & (under != 0)
        inverse = tl.where(writes, 1.0 / tl.where(writes, under, 1.0), 0.0)
        gamma = tl.where(writes, (E + eps + (1.0 - gain) * lam) * inverse, 1.0)
    gain *= inverse
    log_decay = tl.log(tl.maximum(gamma, decay_floor))
    since = tl.cumsum(log_decay, 0)
    tl.store(strength + at, gain)
    tl.store(upto + at, since)
    return tl.where(tl.abs(gain) < 1e-20, 1e-20, gain), since, since - log_decay


@triton.jit
def _lower(to, since, STRICT: tl.constexpr, C: tl.constexpr):
    """exp(to_i - since_j) for i >= j (i > j when strict), else 0."""
    slot = tl.arange(0, C)
    keep = slot[:, None] > slot[None, :] if STRICT else slot[:, None] >= slot[None, :]
    return tl.where(keep, tl.exp(tl.where(keep, (to[:, None] - since[None, :]).to(tl.float32), 0.0)), 0.0)


@triton.jit
def _upper(to, since, STRICT: tl.constexpr, C: tl.constexpr):
    """Transpose of `_lower`."""
    slot = tl.arange(0, C)
    keep = slot[:, None] < slot[None, :] if STRICT else slot[:, None] <= slot[None, :]
    return tl.where(keep, tl.exp(tl.where(keep, (to[None, :] - since[:, None]).to(tl.float32), 0.0)), 0.0)


@triton.jit
def _merged(inverse, below, PRECISION: tl.constexpr):
    """(I + M)^-1 of four times as many rows, from that of its diagonal blocks and the blocks of M below them."""
    coupling = tl.dot(inverse, below, input_precision=PRECISION)
    squared = tl.dot(coupling, coupling, input_precision=PRECISION)  # the fourth power of coupling is 0
    inverse = inverse - tl.dot(coupling, inverse, input_precision=PRECISION)
    return inverse + tl.dot(squared, inverse, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(M, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)^-1 for strictly lower triangular M `[64, 64]`, by blocks of 4, 16 and 64 rows: no long alternating sums."""
    block, row, slot = tl.arange(0, C // 16), tl.arange(0, 16), tl.arange(0, C)
    same = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(M, [C // 16, 16, C // 16, 16]), 0.0), 2)
    apart = (row[:, None] // 4 - row[None, :] // 4)[None, :, :]
    near = tl.where(apart == 0, own, 0.0)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :] - near
    inverse += tl.dot(tl.dot(near, near, input_precision=PRECISION), inverse, input_precision=PRECISION)
    inverse = _merged(inverse, tl.where(apart > 0, own, 0.0), PRECISION)
    wide = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [C, C])
    return _merged(wide, tl.where(slot[:, None] // 16 > slot[None, :] // 16, M, 0.0), PRECISION)


# --- forward ---


@triton.jit(do_not_specialize=FIXED)
def solve_kernel(
    k, head, v, strength, upto, upto_low, solve, from_S, from_v_t, beta, ridge, first, energy, eps, decay_floor, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr, DIVIDE: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """solve `[C, C]`, from_S `[C, K]` and from_v_t `[V, C]` of every tile. GATED: falcon1's gates too, which are then results."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    gram = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
    if GATED:
        n, _start, _length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
        writes = valid & (i * C + tl.arange(0, C) >= missing_pairs(first, n, SHIFT))
        gain, since, until = _falcon_gates(
            gram,
            beta + row,
            ridge + row,
            writes,
            valid,
            strength,
            upto,
            energy,
            index,
            eps,
            decay_floor,
            DIVIDE,
            COUPLED,
            C,
        )
    else:
        gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    seen = since if DECAYED else until
    inverse = _unit_lower_inverse(gram * _lower(seen, since, True, C) * gain[None, :], C, PRECISION)
    _store_tile(solve, index, 0, 0, inverse, C, C, C, C)
    reading = (inverse * tl.exp(seen.to(tl.float32))[None, :]).to(WORK)
    for k0 in range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        _store_tile(from_S, index, 0, k0, tl.dot(reading, x, input_precision=PRECISION), C, K, C, BK)
    inverse = inverse.to(WORK)
    for v0 in range(0, V, BV):
        value = _load_rows(v + row * V, valid, v0, V, BV, WORK)
        from_v = tl.dot(inverse, value, input_precision=PRECISION)
        _store_tile(from_v_t, index, v0, 0, tl.trans(from_v), V, C, BV, C)


@triton.jit(do_not_specialize=FIXED)
def scan_kernel(
    k, head, S_in, S_out, strength, upto, upto_low, from_S, residual_t, borders_t, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry S^T `[BV, K]` over the chunks of a document: writes the state before every chunk, and the residuals over from_v_t."""
    lane = tl.program_id(1).to(tl.int64)
    n, h, v0 = lane // H, lane % H, tl.program_id(0) * BV
    begin, end = n * NC, (n + 1) * NC
    if not PLAIN:
        begin, end = tl.load(docs + 4 * n + 2), tl.load(docs + 4 * n + 6)
    column, value = tl.arange(0, BK), v0 + tl.arange(0, BV)
    inside = (value < V)[:, None] & (column < K)[None, :]
    place = (n * H + h) * (K * V) + column[None, :] * V + value[:, None]
    S = tl.zeros([BV, BK], tl.float32)
    if S_in is not None:
        S = tl.load(S_in + place, mask=inside, other=0.0)
    for c in range(begin, end):
        index = c * H + h
        row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
        reading = _load_tile(from_S, index, 0, 0, C, K, C, BK)
        r = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        x = _load_rows(pairs, paired, 0, K, BK, WORK)
        gain, since, _until, total = _gates(strength, upto, upto_low, index, WIDE, C)
        leaves, keep = gain * tl.exp((total - since).to(tl.float32)), tl.exp(total.to(tl.float32))
        if W > 1:  # what is written is already weighted
            leaves = tl.full([C], 1.0, tl.float32)
        narrow = S.to(WORK)
        _store_tile(borders_t, index, v0, 0, narrow, V, K, BV, BK)
        r = r.to(tl.float32) - tl.dot(narrow, tl.trans(reading), input_precision=PRECISION)
        _store_tile(residual_t, index, v0, 0, r, V, C, BV, C)
        S = tl.dot((r * leaves[None, :]).to(WORK), x, S * keep, input_precision=PRECISION)
    tl.store(S_out + place, S, mask=inside)


@triton.jit(do_not_specialize=FIXED)
def read_kernel(
    q, k, head, strength, upto, upto_low, residual_t, borders_t, o, scale, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile from its residuals and the state before it."""
    index = tl.program_id(0).to(tl.int64)
    c, h, v0 = index // H, index % H, tl.program_id(1) * BV
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    to = since if AFTER else until
    scores = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
        scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
        out = tl.dot(query, tl.trans(S_t), out, input_precision=PRECISION)
    out *= tl.exp(to.to(tl.float32))[:, None]
    scores = (scores * _lower(to, since, not AFTER, C) * gain[None, :]).to(WORK)
    r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
    out = tl.dot(scores, tl.trans(r_t), out, input_precision=PRECISION) * scale
    column = v0 + tl.arange(0, BV)
    pointers = o + row[:, None] * V + column[None, :]
    tl.store(pointers, out.to(o.dtype.element_ty), mask=valid[:, None] & (column < V)[None, :])


# --- backward ---


@triton.jit(do_not_specialize=FIXED)
def transposed_solve_kernel(
    q, k, head, d_o, strength, upto, upto_low, solve, to_r, from_o_t, d_o_t, scale, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the scan of the backward pass reads. With the gradient dS of the state behind a chunk, the residuals' gradient is
    dr = from_o + to_r dS, and dS_0 = e^{u_C} dS + (e^c q)^T d_o - (e^a x)^T dr."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
    to = since if AFTER else until
    slot = tl.arange(0, C)
    inverse_t = tl.load(solve + index * (C * C) + slot[None, :] * C + slot[:, None])
    scores_t = tl.zeros([C, C], tl.float32)
    leaving = (inverse_t * (gain * tl.exp((total - since).to(tl.float32)))[None, :]).to(WORK)
    for k0 in range(0, K, BK):
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        scores_t = tl.dot(x, tl.trans(query), scores_t, input_precision=PRECISION)
        _store_tile(to_r, index, 0, k0, tl.dot(leaving, x, input_precision=PRECISION), C, K, C, BK)
    scores_t = (scores_t * _upper(to, since, not AFTER, C) * (gain * scale)[:, None]).to(WORK)
    for v0 in range(0, V, BV):
        d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
        d_written = tl.dot(scores_t, d_out, input_precision=PRECISION).to(WORK)
        d_r = tl.dot(inverse_t, d_written, input_precision=PRECISION)
        _store_tile(from_o_t, index, v0, 0, tl.trans(d_r), V, C, BV, C)
        d_out = d_out * (tl.exp(to.to(tl.float32)) * scale)[:, None]
        _store_tile(d_o_t, index, v0, 0, tl.trans(d_out), V, C, BV, C)


@triton.jit(do_not_specialize=FIXED)
def scan_backward_kernel(
    q, k, head, dS_in, dS_out, strength, upto, upto_low, to_r, d_residual_t, d_o_t, d_borders_t, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry dS^T `[BV, K]` back over the chunks of a document: writes dS behind every chunk, and the residuals' gradients over from_o."""
    lane = tl.program_id(1).to(tl.int64)
    n, h, v0 = lane // H, lane % H, tl.program_id(0) * BV
    begin, end = n * NC, (n + 1) * NC
    if not PLAIN:
        begin, end = tl.load(docs + 4 * n + 2), tl.load(docs + 4 * n + 6)
    column, value = tl.arange(0, BK), v0 + tl.arange(0, BV)
    inside = (value < V)[:, None] & (column < K)[None, :]
    place = (n * H + h) * (K * V) + column[None, :] * V + value[:, None]
    dS = tl.zeros([BV, BK], tl.float32)
    if dS_in is not None:
        dS = tl.load(dS_in + place, mask=inside, other=0.0)
    for back in range(0, end - begin):
        c = end - 1 - back
        index = c * H + h
        row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
        leaving = _load_tile(to_r, index, 0, 0, C, K, C, BK)
        d_r = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
        d_out = _load_tile(d_o_t, index, v0, 0, V, C, BV, C)
        query = _load_rows(q + row * K, valid, 0, K, BK, WORK)
        x = _load_rows(pairs, paired, 0, K, BK, WORK)
        _gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
        reads, keep = tl.exp((since if DECAYED else until).to(tl.float32)), tl.exp(total.to(tl.float32))
        if W > 1:
            reads = tl.full([C], 1.0, tl.float32)
        narrow = dS.to(WORK)
        _store_tile(d_borders_t, index, v0, 0, narrow, V, K, BV, BK)
        d_r = d_r.to(tl.float32) + tl.dot(narrow, tl.trans(leaving), input_precision=PRECISION)
        _store_tile(d_residual_t, index, v0, 0, d_r, V, C, BV, C)
        dS = tl.dot(d_out, query, dS * keep, input_precision=PRECISION)
        dS = tl.dot((d_r * -reads[None, :]).to(WORK), x, dS, input_precision=PRECISION)
    tl.store(dS_out + place, dS, mask=inside)


@triton.jit
def _spans(products, INCLUSIVE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of the log-decay of every token from those of the pairs (i, j) whose decay runs over it, added exactly."""
    slot = tl.arange(0, C)
    behind = slot[:, None] - slot[None, :]
    crossed = behind <= 0 if INCLUSIVE else behind < 0
    sums = tl.dot(tl.where(crossed, 1.0, 0.0), products, input_precision=PRECISION)
    return tl.sum(tl.where(behind > 0, sums, 0.0), 1)


@triton.jit(do_not_specialize=FIXED)
def query_gradient_kernel(
    q, k, head, d_o, strength, upto, upto_low, residual_t, borders_t, d_q, d_k, d_head, d_log_decay, scale, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through the reads of a tile: of its queries, and first parts of those of its keys and log-decays.

    Transposed products are formed anew from their operands, never by transposing a result.
    """
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    _row, _valid, targets, there = _rows(
        d_k, d_head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C
    )
    gain, since, until, _total = _gates(strength, upto, upto_low, index, WIDE, C)
    to = since if AFTER else until
    s = tl.zeros([C, C], tl.float32)
    s_t = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        s = tl.dot(d_out, r_t, s, input_precision=PRECISION)
        s_t = tl.dot(tl.trans(r_t), tl.trans(d_out), s_t, input_precision=PRECISION)
    s = s * _lower(to, since, not AFTER, C) * (gain * scale)[None, :]
    s_t = (s_t * _upper(to, since, not AFTER, C) * (gain * scale)[:, None]).to(WORK)
    d_step = tl.zeros([C], tl.float32)
    if WIDE:
        scores = tl.zeros([C, C], tl.float32)
        for k0 in range(0, K, BK):
            query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
            x = _load_rows(pairs, paired, k0, K, BK, WORK)
            scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
        d_step = _spans(scores * s, AFTER, C, PRECISION)
    s, outs = s.to(WORK), tl.exp(to.to(tl.float32)) * scale
    d_read = tl.zeros([C], tl.float32)
    d_since = tl.zeros([C], tl.float32)
    for k0 in range(0, K, BK):
        column = k0 + tl.arange(0, BK)
        query = _load_rows(q + row * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        from_o = tl.zeros([C, BK], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            if V > BV:
                d_out = _load_rows(d_o + row * V, valid, v0, V, BV, WORK)
            S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
            from_o = tl.dot(d_out, S_t, from_o, input_precision=PRECISION)
        from_o = from_o * outs[:, None]
        if WIDE:
            d_read += tl.sum(query.to(tl.float32) * from_o, 1)
        from_o = tl.dot(s, x, from_o, input_precision=PRECISION)
        d_x = tl.dot(s_t, query, input_precision=PRECISION)
        if not WIDE:
            d_read += tl.sum(query.to(tl.float32) * from_o, 1)
            d_since += tl.sum(x.to(tl.float32) * d_x, 1)
        where = valid[:, None] & (column < K)[None, :]
        tl.store(d_q + row[:, None] * K + column[None, :], from_o.to(d_q.dtype.element_ty), mask=where)
        where = where & there[:, None]
        tl.store(targets[:, None] + column[None, :], d_x.to(d_k.dtype.element_ty), mask=where)
    d_step += tl.cumsum(d_read - d_since, 0, reverse=True) - (0.0 if AFTER else d_read)
    tl.store(d_log_decay + index * C + tl.arange(0, C), d_step)


@triton.jit(do_not_specialize=FIXED)
def key_gradient_kernel(
    k, head, strength, upto, upto_low, residual_t, d_residual_t, borders_t, d_borders_t,
    d_k, d_head, d_v, d_strength, d_log_decay, docs, chunk_doc, rows, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, W: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's values and step sizes, and the rest of those of its keys and log-decays."""
    index = tl.program_id(0).to(tl.int64)
    c, h = index // H, index % H
    row, valid, pairs, paired = _rows(k, head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C)
    _row, _valid, targets, there = _rows(
        d_k, d_head, docs, chunk_doc, rows, c, h, T, NC, H, K, SHIFT, W, PLAIN, MASKED, C
    )
    gain, since, until, total = _gates(strength, upto, upto_low, index, WIDE, C)
    seen = since if DECAYED else until
    slot = tl.arange(0, C)
    s = tl.zeros([C, C], tl.float32)
    s_t = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
        s = tl.dot(tl.trans(d_r_t), r_t, s, input_precision=PRECISION)
        s_t = tl.dot(tl.trans(r_t), d_r_t, s_t, input_precision=PRECISION)
        value = v0 + tl.arange(0, BV)
        across = d_v + row[None, :] * V + value[:, None]
        tl.store(across, d_r_t.to(d_v.dtype.element_ty), mask=valid[None, :] & (value < V)[:, None])
    # dr = eta times the gradient of what is written, so eta's own gradient is r . dr / eta
    d_gain = tl.sum(tl.where(slot[:, None] == slot[None, :], s, 0.0), 1) / gain
    tl.store(d_strength + index * C + slot, d_gain)
    s = s * _lower(seen, since, True, C) * -gain[None, :]
    s_t = (s_t * _upper(seen, since, True, C) * -gain[:, None]).to(WORK)
    d_step = tl.load(d_log_decay + index * C + slot)
    if WIDE:
        gram = tl.zeros([C, C], tl.float32)
        for k0 in range(0, K, BK):
            x = _load_rows(pairs, paired, k0, K, BK, WORK)
            gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        d_step += _spans(gram * s, DECAYED, C, PRECISION)
    s, reads, leaves = s.to(WORK), tl.exp(seen.to(tl.float32)), gain * tl.exp((total - since).to(tl.float32))
    d_seen = tl.zeros([C], tl.float32)
    d_since = tl.zeros([C], tl.float32)
    d_left = tl.zeros([C], tl.float32)
    d_kept = 0.0
    for k0 in range(0, K, BK):
        column = k0 + tl.arange(0, BK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        d_x = tl.zeros([C, BK], tl.float32)
        from_r = tl.zeros([C, BK], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            if V > BV:
                r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
                d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
            S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
            dS_t = _load_tile(d_borders_t, index, v0, k0, V, K, BV, BK)
            d_kept += tl.sum(dS_t.to(tl.float32) * S_t.to(tl.float32))
            d_x = tl.dot(tl.trans(r_t), dS_t, d_x, input_precision=PRECISION)
            from_r = tl.dot(tl.trans(d_r_t), S_t, from_r, input_precision=PRECISION)
        d_x = d_x * leaves[:, None]
        d_left += tl.sum(x.to(tl.float32) * d_x, 1)
        from_r = from_r * -reads[:, None]
        if WIDE:
            d_seen += tl.sum(x.to(tl.float32) * from_r, 1)
        from_r = tl.dot(s, x, from_r, input_precision=PRECISION)
        if not WIDE:
            d_seen += tl.sum(x.to(tl.float32) * from_r, 1)
        d_x += from_r
        written = tl.dot(s_t, x, input_precision=PRECISION)
        if not WIDE:
            d_since += tl.sum(x.to(tl.float32) * written, 1)
        where = (valid & there)[:, None] & (column < K)[None, :]
        to = targets[:, None] + column[None, :]
        d_x += written + tl.load(to, mask=where, other=0.0).to(tl.float32)
        tl.store(to, d_x.to(d_k.dtype.element_ty), mask=where)
    d_step += tl.cumsum(d_seen - d_since, 0, reverse=True) - (0.0 if DECAYED else d_seen)
    d_step += tl.cumsum(d_left, 0) - d_left + d_kept * tl.exp(total.to(tl.float32))
    tl.store(d_log_decay + index * C + slot, d_step)
    if SHIFT:  # the document's last key is nobody's pair key
        n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
        ends = (i * C < length) & (i * C + C >= length)
        last = d_k + (row_of(rows, start, length - 1, ends, MASKED) * H + h) * K
        for k0 in range(0, K, BK):
            column = k0 + tl.arange(0, BK)
            tl.store(last + column, tl.zeros([BK], d_k.dtype.element_ty), mask=(column < K) & (column * 0 + ends > 0))


# --- launches ---


@dataclass(frozen=True)
class Form:
    """What distinguishes the members of the family.

    Attributes:
        shifted: a value's pair key is the key before it.
        decayed: the residual sees the state after this token's decay.
        after: a read sees this token's write.
        scale: of the read.
        window: pairs that a token writes.
    """

    shifted: bool
    decayed: bool = False
    after: bool = True
    scale: float = 1.0
    window: int = 1


# One configuration a kernel for operands of 16 bits, one for float32. Outside the scans dots are never narrower than 64: on an
# H200 with Triton 3.6, gradient_kernel at width 32 with 4 warps was wrong, and at width 16 read out of bounds.
SETTINGS: dict[str, dict[str, int]] = {
    "solve": {"BK": 128, "BV": 128, "num_warps": 4, "num_stages": 1},
    "scan": {"BV": 64, "num_warps": 4, "num_stages": 3},
    "read": {"BK": 128, "BV": 128, "num_warps": 4, "num_stages": 1},
    "transposed_solve": {"BK": 128, "BV": 128, "num_warps": 4, "num_stages": 1},
    "scan_backward": {"BV": 64, "num_warps": 4, "num_stages": 3},
    "query_gradient": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 1},
    "key_gradient": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 1},
    "window_product": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 1},
    "window_gradient": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
    "response": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
    "apply": {"BK": 128, "BV": 128, "num_warps": 4, "num_stages": 1},
    "window_read": {"BK": 128, "BV": 128, "num_warps": 4, "num_stages": 1},
}
SETTINGS_WIDE: dict[str, dict[str, int]] = {
    "solve": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "scan": {"BV": 16, "num_warps": 8, "num_stages": 1},
    "read": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "transposed_solve": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "scan_backward": {"BV": 16, "num_warps": 8, "num_stages": 1},
    "query_gradient": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "key_gradient": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "window_product": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "window_gradient": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "response": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
    "apply": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
    "window_read": {"BK": 64, "BV": 64, "num_warps": 8, "num_stages": 1},
}


def work_dtype(x: Tensor) -> torch.dtype:
    """bf16 inputs are multiplied as bf16; float16 ones as tf32, whose range holds every step size."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRETING else torch.float32


def _settings(name: str, q: Tensor, v: Tensor, ranks: Ranks, form: Form) -> dict[str, Any]:
    K, V = q.shape[3], v.shape[3]
    own = dict((SETTINGS if q.dtype == torch.bfloat16 else SETTINGS_WIDE)[name])
    own["BV"] = min(own["BV"], max(64, block(V)))
    own["BK"] = min(own["BK"], max(64, block(K))) if "BK" in own else max(64, block(K))
    if name in ("scan", "scan_backward") and q.dtype == torch.bfloat16:
        few = ranks.documents * q.shape[2] * parts(V, own["BV"]) < 64  # states: cut them finer
        if K > 128:
            own |= {"BV": 32, "num_stages": 2}
        elif few:
            own |= {"BV": 32 if name == "scan" else 16, "num_stages": 3}
    flags = {"SHIFT": int(form.shifted), "DECAYED": form.decayed, "AFTER": form.after, "W": form.window}
    flags |= {"WORK": tl.bfloat16 if work_dtype(q) == torch.bfloat16 else tl.float32, "WIDE": q.dtype == torch.float32}
    return {
        **tables(ranks),
        **flags,
        **own,
        "H": q.shape[2],
        "K": K,
        "V": V,
        "PRECISION": "ieee" if INTERPRETING else "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def kept_like(q: Tensor, v: Tensor, chunks: int, squares: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors in the shapes of what the forward pass keeps: `[M * H, *squares, C, C]`, residual_t and borders_t."""
    M, K, V, work = chunks * q.shape[2], q.shape[3], v.shape[3], work_dtype(q)
    sizes = (*squares, CHUNK, CHUNK), (V, CHUNK), (V, K)
    square, residual_t, borders_t = (q.new_empty(M, *size, dtype=work) for size in sizes)
    return square, residual_t, borders_t


def delta_forward(
    q: Tensor,
    k: Tensor,
    head: Tensor | None,
    v: Tensor,
    strength: Tensor,
    upto: Tensor,
    upto_low: Tensor,
    S: Tensor | None,
    ranks: Ranks,
    form: Form,
    falcon: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, new state, and what the backward pass takes: the inverse of every chunk's system, residual_t and borders_t.

    Args:
        q, k: `[B, T, H, K]`. head: pair key of each document's first token `[N, H, 1, K]` (read when pairs are shifted; None: it has none).
        v: `[B, T, H, V]`. strength, upto, upto_low: eta and the two halves of the log-decay's prefix, `[M, H, C]`.
        S: `[N, H, K, V]`, None for zeros. Everything is contiguous.
        falcon: what `solve_kernel` makes falcon1's gates of: then strength and upto are filled here.
    """
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    V, (solve, residual_t, borders_t) = v.shape[3], kept_like(q, v, ranks.chunks)
    from_S = q.new_empty(M, CHUNK, q.shape[3], dtype=solve.dtype)
    o = ranks.new_like(v)
    S_out = q.new_empty(ranks.documents, heads, q.shape[3], V, dtype=torch.float32)
    given = {"q": q, "k": k, "head": head, "v": v, "strength": strength, "upto": upto, "upto_low": upto_low, "o": o}
    given |= {
        "solve": solve,
        "from_S": from_S,
        "from_v_t": residual_t,
        "residual_t": residual_t,
        "borders_t": borders_t,
    }
    with on_device(q):
        settings = _settings("solve", q, v, ranks, form)
        launch(solve_kernel, (M,), **given, **(falcon or {}), GATED=falcon is not None, **settings)
        settings = _settings("scan", q, v, ranks, form)
        launch(
            scan_kernel, (parts(V, settings["BV"]), ranks.documents * heads), **given, S_in=S, S_out=S_out, **settings
        )
        settings = _settings("read", q, v, ranks, form)
        launch(read_kernel, (M, parts(V, settings["BV"])), **given, scale=form.scale, **settings)
    return o, S_out, solve, residual_t, borders_t


def delta_backward(
    q: Tensor,
    k: Tensor,
    head: Tensor | None,
    v: Tensor,
    strength: Tensor,
    upto: Tensor,
    upto_low: Tensor,
    solve: Tensor,
    residual_t: Tensor,
    borders_t: Tensor,
    d_o: Tensor,
    d_S_out: Tensor | None,
    ranks: Ranks,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, head, v, strength, the log-decay of every token (`[M, H, C]`), and S. d_S_out: None for zeros."""
    heads, M = q.shape[2], ranks.chunks * q.shape[2]
    (K, V), C, work = (q.shape[3], v.shape[3]), CHUNK, work_dtype(q)
    to_r, d_residual_t, d_o_t, d_borders_t = (
        q.new_empty(M, *size, dtype=work) for size in ((C, K), (V, C), (V, C), (V, K))
    )
    given = {"q": q, "k": k, "head": head, "d_o": d_o, "strength": strength, "upto": upto, "upto_low": upto_low}
    given |= {"solve": solve, "scale": form.scale, "residual_t": residual_t, "d_residual_t": d_residual_t}
    given |= {"borders_t": borders_t, "d_borders_t": d_borders_t}
    passed = {"to_r": to_r, "from_o_t": d_residual_t, "d_o_t": d_o_t}
    d_S = q.new_empty(ranks.documents, heads, K, V, dtype=torch.float32)
    with on_device(q):
        launch(transposed_solve_kernel, (M,), **given, **passed, **_settings("transposed_solve", q, v, ranks, form))
        settings = _settings("scan_backward", q, v, ranks, form)
        grid = (parts(V, settings["BV"]), ranks.documents * heads)
        launch(scan_backward_kernel, grid, **given, **passed, dS_in=d_S_out, dS_out=d_S, **settings)
        del to_r, d_o_t, passed  # their memory is that of the gradients
        d_q, d_k, d_v = (ranks.new_like(x) for x in (q, k, v))
        d_head = q.new_empty(0) if head is None else torch.zeros_like(head)
        d_strength, d_log_decay = torch.empty_like(strength), torch.empty_like(upto)
        given |= {
            "d_q": d_q,
            "d_k": d_k,
            "d_head": None if head is None else d_head,
            "d_v": d_v,
            "d_strength": d_strength,
            "d_log_decay": d_log_decay,
        }
        launch(query_gradient_kernel, (M,), **given, **_settings("query_gradient", q, v, ranks, form))
        launch(key_gradient_kernel, (M,), **given, **_settings("key_gradient", q, v, ranks, form))
    return d_q, d_k, d_head, d_v, d_strength, d_log_decay, d_S
