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

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- where a tile's tokens are ---


@triton.jit
def _tile_rows(tile, table, rows, tokens, tiles, DENSE: tl.constexpr, C: tl.constexpr):
    """Document of a tile, whether it is the document's first, and for each slot: its token row, the row of the token
    before it in the document, and whether it holds a token."""
    slot = tl.arange(0, C)
    if DENSE:
        document = tile // tiles
        position = (tile - document * tiles) * C
        row = document * tokens + position + slot
        valid = position + slot < tokens
        return document, position == 0, row, row - 1, valid
    else:
        document = tl.load(table + tile * 4)
        start = tl.load(table + tile * 4 + 1)
        valid = slot < tl.load(table + tile * 4 + 2)
        first = tl.load(table + tile * 4 + 3) != 0
        row = tl.load(rows + start + slot, mask=valid, other=0)
        inner = (slot > 0) | (first == 0)
        before = tl.load(rows + start + slot - 1, mask=valid & inner, other=0)
        return document, first, row, before, valid


@triton.jit
def _pair_keys(k, key, has_key, document, first, row, before, valid, h, H: tl.constexpr, K: tl.constexpr, SHIFTED: tl.constexpr, C: tl.constexpr):
    """Pointers to the pair key of every slot, and whether it has one."""
    if SHIFTED:
        opening = (tl.arange(0, C) == 0) & first
        known = tl.load(has_key + document).to(tl.int1)
        pointers = tl.where(opening, key + (document * H + h) * K, k + (before * H + h) * K)
        return pointers, valid & (known | (opening == 0))
    else:
        return k + (row * H + h) * K, valid


@triton.jit
def _load_rows(pointers, valid, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORK: tl.constexpr):
    """Columns `offset ... offset + BLOCK` of rows of SIZE elements."""
    column = offset + tl.arange(0, BLOCK)
    return tl.load(pointers[:, None] + column[None, :], mask=valid[:, None] & (column < SIZE)[None, :], other=0.0).to(WORK)


@triton.jit
def _load_tile(base, index, row0, column0, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Block of scratch tile number `index`, a `[ROWS, COLUMNS]` matrix."""
    r, c = row0 + tl.arange(0, BR), column0 + tl.arange(0, BC)
    pointers = base + index * (ROWS * COLUMNS) + r[:, None] * COLUMNS + c[None, :]
    return tl.load(pointers, mask=(r < ROWS)[:, None] & (c < COLUMNS)[None, :], other=0.0)


@triton.jit
def _store_tile(base, index, row0, column0, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    r, c = row0 + tl.arange(0, BR), column0 + tl.arange(0, BC)
    pointers = base + index * (ROWS * COLUMNS) + r[:, None] * COLUMNS + c[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(r < ROWS)[:, None] & (c < COLUMNS)[None, :])


# --- gains and decays ---


@triton.jit
def _gains(eta, row, valid, h, H: tl.constexpr):
    """eta of every slot. An exact 0 becomes 1e-20: too small to write anything, and eta's own gradient stays defined."""
    gain = tl.load(eta + row * H + h, mask=valid, other=0.0)
    return tl.where(tl.abs(gain) < 1e-20, 1e-20, gain)


@triton.jit
def _prefixes(log_decay, row, valid, h, H: tl.constexpr, WIDE: tl.constexpr):
    """Log-decay of every slot, and its prefix sums (float64 where differences must keep float32's digits)."""
    step = tl.load(log_decay + row * H + h, mask=valid, other=0.0)
    if WIDE:
        step = step.to(tl.float64)
    return step, tl.cumsum(step, 0)


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
def _unit_lower_inverse(M, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)^-1 for strictly lower triangular M `[C, C]`: substitution in 16-row blocks, then the blocks are merged."""
    BLOCKS: tl.constexpr = C // 16
    block, row = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(M, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    inverse = tl.zeros([BLOCKS, 16, 16], tl.float32) + tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    for i in range(1, 16):
        here = row[None, :, None] == i
        weights = tl.sum(tl.where(here, diagonal, 0.0), 1)
        earlier = tl.sum(weights[:, :, None] * inverse, 1)
        inverse = tl.where(here, inverse - earlier[:, None, :], inverse)
    if BLOCKS == 1:
        return tl.reshape(inverse, [C, C])
    wide = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [C, C])
    slot = tl.arange(0, C) // 16
    below = tl.where(slot[:, None] > slot[None, :], M, 0.0)
    coupling = tl.dot(wide, below, input_precision=PRECISION)  # nilpotent: coupling^BLOCKS = 0
    if BLOCKS > 2:
        squared = tl.dot(coupling, coupling, input_precision=PRECISION)
        wide += tl.dot(squared, wide, input_precision=PRECISION)
    return wide - tl.dot(coupling, wide, input_precision=PRECISION)


# --- forward ---


@triton.jit(do_not_specialize=["tokens", "tiles"])
def solve_kernel(
    k, key, has_key, v, eta, log_decay, table, rows, solve, from_S, from_v_t, to_end, kept, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DECAYED: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """solve `[C, C]`, from_S `[C, K]`, from_v_t `[V, C]`, to_end = eta e^{u_C - u} `[C]`, kept = e^{u_C} of every tile."""
    index = tl.program_id(0).to(tl.int64)
    tile, h = index // H, index % H
    document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
    pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
    gain = _gains(eta, row, valid, h, H)
    step, upto = _prefixes(log_decay, row, valid, h, H, WIDE)
    seen = upto if DECAYED else upto - step
    gram = tl.zeros([C, C], tl.float32)
    for k0 in tl.static_range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
    inverse = _unit_lower_inverse(gram * _lower(seen, upto, True, C) * gain[None, :], C, PRECISION)
    _store_tile(solve, index, 0, 0, inverse, C, C, C, C)
    total = tl.sum(step, 0)
    slot = tl.arange(0, C)
    tl.store(to_end + index * C + slot, gain * tl.exp((total - upto).to(tl.float32)))
    tl.store(kept + index, tl.exp(total.to(tl.float32)))
    reading = (inverse * tl.exp(seen.to(tl.float32))[None, :]).to(WORK)
    for k0 in tl.static_range(0, K, BK):
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        _store_tile(from_S, index, 0, k0, tl.dot(reading, x, input_precision=PRECISION), C, K, C, BK)
    inverse = inverse.to(WORK)
    for v0 in tl.static_range(0, V, BV):
        value = _load_rows(v + (row * H + h) * V, valid, v0, V, BV, WORK)
        from_v = tl.dot(inverse, value, input_precision=PRECISION)
        _store_tile(from_v_t, index, v0, 0, tl.trans(from_v), V, C, BV, C)


@triton.jit
def _scan_forward(
    k, key, has_key, S_in, S_out, table, rows, offsets, from_S, residual_t, to_end, kept, borders_t, tokens, tiles, n, h, v0,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry S^T `[BV, K]` over the chunks of document n: writes the residuals and the state before every chunk."""
    begin, end = n * tiles, (n + 1) * tiles
    if not DENSE:
        begin, end = tl.load(offsets + n), tl.load(offsets + n + 1)
    column, value, slot = tl.arange(0, KP), v0 + tl.arange(0, BV), tl.arange(0, C)
    inside = (value < V)[:, None] & (column < K)[None, :]
    place = (n * H + h) * (K * V) + column[None, :] * V + value[:, None]
    S = tl.load(S_in + place, mask=inside, other=0.0)
    for tile in range(begin, end):
        index = tile * H + h
        document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
        pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
        reading = _load_tile(from_S, index, 0, 0, C, K, C, KP)
        r = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        x = _load_rows(pairs, paired, 0, K, KP, WORK)
        gain = tl.load(to_end + index * C + slot)
        keep = tl.load(kept + index)
        narrow = S.to(WORK)
        _store_tile(borders_t, index, v0, 0, narrow, V, K, BV, KP)
        r = r.to(tl.float32) - tl.dot(narrow, tl.trans(reading), input_precision=PRECISION)
        _store_tile(residual_t, index, v0, 0, r, V, C, BV, C)
        S = tl.dot((r * gain[None, :]).to(WORK), x, S * keep, input_precision=PRECISION)
    tl.store(S_out + place, S, mask=inside)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def scan_kernel(
    k, key, has_key, S_in, S_out, table, rows, offsets, from_S, residual_t, to_end, kept, borders_t, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """residual_t holds from_v_t and is overwritten with the residuals."""
    lane = tl.program_id(1).to(tl.int64)
    _scan_forward(
        k, key, has_key, S_in, S_out, table, rows, offsets, from_S, residual_t, to_end, kept, borders_t, tokens, tiles,
        lane // H, lane % H, tl.program_id(0) * BV, H, K, V, C, KP, BV, SHIFTED, DENSE, WORK, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "tiles"])
def read_kernel(
    q, k, key, has_key, eta, log_decay, table, rows, residual_t, borders_t, o, scale, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, AFTER: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile from its residuals and the state before it."""
    index = tl.program_id(0).to(tl.int64)
    tile, h, v0 = index // H, index % H, tl.program_id(1) * BV
    document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
    pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
    gain = _gains(eta, row, valid, h, H)
    step, upto = _prefixes(log_decay, row, valid, h, H, WIDE)
    to = upto if AFTER else upto - step
    scores = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    for k0 in tl.static_range(0, K, BK):
        query = _load_rows(q + (row * H + h) * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
        scores = tl.dot(query, tl.trans(x), scores, input_precision=PRECISION)
        out = tl.dot(query, tl.trans(S_t), out, input_precision=PRECISION)
    out *= tl.exp(to.to(tl.float32))[:, None]
    scores = (scores * _lower(to, upto, not AFTER, C) * gain[None, :]).to(WORK)
    r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
    out = tl.dot(scores, tl.trans(r_t), out, input_precision=PRECISION) * scale
    column = v0 + tl.arange(0, BV)
    pointers = o + (row * H + h)[:, None] * V + column[None, :]
    tl.store(pointers, out.to(o.dtype.element_ty), mask=valid[:, None] & (column < V)[None, :])


# --- backward ---


@triton.jit(do_not_specialize=["tokens", "tiles"])
def transposed_solve_kernel(
    q, k, key, has_key, v, d_o, eta, log_decay, table, rows, solve, from_S, from_v_t, to_r, from_o_t, d_o_t,
    to_end, kept, since, scale, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What both scans of the backward pass read. With the gradient dS of the state behind a chunk, the residuals' gradient is
    dr = from_o + to_r dS, and dS_0 = e^{u_C} dS + (e^c q)^T d_o - (e^a x)^T dr."""
    index = tl.program_id(0).to(tl.int64)
    tile, h = index // H, index % H
    document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
    pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
    gain = _gains(eta, row, valid, h, H)
    step, upto = _prefixes(log_decay, row, valid, h, H, WIDE)
    seen = upto if DECAYED else upto - step
    to = upto if AFTER else upto - step
    total = tl.sum(step, 0)
    reads, leaves = tl.exp(seen.to(tl.float32)), gain * tl.exp((total - upto).to(tl.float32))
    slot = tl.arange(0, C)
    tl.store(to_end + index * C + slot, leaves)
    tl.store(since + index * C + slot, reads)
    tl.store(kept + index, tl.exp(total.to(tl.float32)))
    inverse = tl.load(solve + index * (C * C) + slot[:, None] * C + slot[None, :])
    inverse_t = tl.load(solve + index * (C * C) + slot[None, :] * C + slot[:, None])
    scores_t = tl.zeros([C, C], tl.float32)
    reading, leaving = (inverse * reads[None, :]).to(WORK), (inverse_t * leaves[None, :]).to(WORK)
    for k0 in tl.static_range(0, K, BK):
        query = _load_rows(q + (row * H + h) * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        scores_t = tl.dot(x, tl.trans(query), scores_t, input_precision=PRECISION)
        _store_tile(from_S, index, 0, k0, tl.dot(reading, x, input_precision=PRECISION), C, K, C, BK)
        _store_tile(to_r, index, 0, k0, tl.dot(leaving, x, input_precision=PRECISION), C, K, C, BK)
    scores_t = (scores_t * _upper(to, upto, not AFTER, C) * (gain * scale)[:, None]).to(WORK)
    for v0 in tl.static_range(0, V, BV):
        value = _load_rows(v + (row * H + h) * V, valid, v0, V, BV, WORK)
        from_v = tl.dot(inverse, value, input_precision=PRECISION)
        _store_tile(from_v_t, index, v0, 0, tl.trans(from_v), V, C, BV, C)
        d_out = _load_rows(d_o + (row * H + h) * V, valid, v0, V, BV, WORK)
        d_written = tl.dot(scores_t, d_out, input_precision=PRECISION).to(WORK)
        d_r = tl.dot(inverse_t, d_written, input_precision=PRECISION)
        _store_tile(from_o_t, index, v0, 0, tl.trans(d_r), V, C, BV, C)
        d_out = d_out * (tl.exp(to.to(tl.float32)) * scale)[:, None]
        _store_tile(d_o_t, index, v0, 0, tl.trans(d_out), V, C, BV, C)


@triton.jit
def _scan_backward(
    q, k, key, has_key, dS_in, dS_out, table, rows, offsets, to_S, d_residual_t, d_o_t, since, kept, d_borders_t, tokens, tiles, n, h, v0,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry dS^T `[BV, K]` back over the chunks of document n: writes the residuals' gradients and dS behind every chunk."""
    begin, end = n * tiles, (n + 1) * tiles
    if not DENSE:
        begin, end = tl.load(offsets + n), tl.load(offsets + n + 1)
    column, value, slot = tl.arange(0, KP), v0 + tl.arange(0, BV), tl.arange(0, C)
    inside = (value < V)[:, None] & (column < K)[None, :]
    place = (n * H + h) * (K * V) + column[None, :] * V + value[:, None]
    dS = tl.load(dS_in + place, mask=inside, other=0.0)
    for back in range(0, end - begin):
        tile = end - 1 - back
        index = tile * H + h
        document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
        pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
        leaving = _load_tile(to_S, index, 0, 0, C, K, C, KP)
        d_r = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
        d_out = _load_tile(d_o_t, index, v0, 0, V, C, BV, C)
        query = _load_rows(q + (row * H + h) * K, valid, 0, K, KP, WORK)
        x = _load_rows(pairs, paired, 0, K, KP, WORK)
        reads = tl.load(since + index * C + slot)
        keep = tl.load(kept + index)
        narrow = dS.to(WORK)
        _store_tile(d_borders_t, index, v0, 0, narrow, V, K, BV, KP)
        d_r = d_r.to(tl.float32) + tl.dot(narrow, tl.trans(leaving), input_precision=PRECISION)
        _store_tile(d_residual_t, index, v0, 0, d_r, V, C, BV, C)
        dS = tl.dot(d_out, query, dS * keep, input_precision=PRECISION)
        dS = tl.dot((d_r * -reads[None, :]).to(WORK), x, dS, input_precision=PRECISION)
    tl.store(dS_out + place, dS, mask=inside)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def scans_kernel(
    q, k, key, has_key, S_in, S_out, dS_in, dS_out, table, rows, offsets, from_S, residual_t, to_S, d_residual_t, d_o_t,
    to_end, since, kept, borders_t, d_borders_t, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both scans of the backward pass side by side: states forward again, their gradients backward."""
    lane = tl.program_id(1).to(tl.int64)
    n, h, v0 = lane // H, lane % H, (tl.program_id(0) // 2) * BV
    if tl.program_id(0) % 2 == 0:
        _scan_forward(
            k, key, has_key, S_in, S_out, table, rows, offsets, from_S, residual_t, to_end, kept, borders_t, tokens, tiles,
            n, h, v0, H, K, V, C, KP, BV, SHIFTED, DENSE, WORK, PRECISION,
        )  # fmt: skip
    else:
        _scan_backward(
            q, k, key, has_key, dS_in, dS_out, table, rows, offsets, to_S, d_residual_t, d_o_t, since, kept, d_borders_t, tokens, tiles,
            n, h, v0, H, K, V, C, KP, BV, SHIFTED, DENSE, WORK, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "tiles"])
def gradient_kernel(
    q, k, key, has_key, d_o, eta, log_decay, table, rows, residual_t, d_residual_t, borders_t, d_borders_t,
    d_q, d_k, d_key, d_v, d_eta, d_log_decay, scale, tokens, tiles,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFTED: tl.constexpr, DECAYED: tl.constexpr, AFTER: tl.constexpr, DENSE: tl.constexpr, WORK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's inputs. Transposed products are formed anew from their operands, never by transposing a result."""
    index = tl.program_id(0).to(tl.int64)
    tile, h = index // H, index % H
    document, first, row, before, valid = _tile_rows(tile, table, rows, tokens, tiles, DENSE, C)
    pairs, paired = _pair_keys(k, key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
    gain = _gains(eta, row, valid, h, H)
    step, upto = _prefixes(log_decay, row, valid, h, H, WIDE)
    seen = upto if DECAYED else upto - step
    to = upto if AFTER else upto - step
    total = tl.sum(step, 0)
    reads, outs = tl.exp(seen.to(tl.float32)), tl.exp(to.to(tl.float32)) * scale
    leaves = gain * tl.exp((total - upto).to(tl.float32))
    slot = tl.arange(0, C)

    s1 = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        d_out = _load_rows(d_o + (row * H + h) * V, valid, v0, V, BV, WORK)
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        s1 = tl.dot(d_out, r_t, s1, input_precision=PRECISION)
    s1 = s1 * _lower(to, upto, not AFTER, C) * (gain * scale)[None, :]
    s1_t = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        d_out = _load_rows(d_o + (row * H + h) * V, valid, v0, V, BV, WORK)
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        s1_t = tl.dot(tl.trans(r_t), tl.trans(d_out), s1_t, input_precision=PRECISION)
    s1_t = (s1_t * _upper(to, upto, not AFTER, C) * (gain * scale)[:, None]).to(WORK)
    s2 = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
        s2 = tl.dot(tl.trans(d_r_t), r_t, s2, input_precision=PRECISION)
        column = v0 + tl.arange(0, BV)
        pointers = d_v + (row * H + h)[None, :] * V + column[:, None]
        tl.store(pointers, d_r_t.to(d_v.dtype.element_ty), mask=valid[None, :] & (column < V)[:, None])
    # dr = eta times the gradient of what is written, so eta's own gradient is r . dr / eta
    d_gain = tl.sum(tl.where(slot[:, None] == slot[None, :], s2, 0.0), 1) / gain
    tl.store(d_eta + row * H + h, d_gain, mask=valid)
    s2 = s2 * _lower(seen, upto, True, C) * -gain[None, :]
    s2_t = tl.zeros([C, C], tl.float32)
    for v0 in tl.static_range(0, V, BV):
        r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
        d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
        s2_t = tl.dot(tl.trans(r_t), d_r_t, s2_t, input_precision=PRECISION)
    s2_t = (s2_t * _upper(seen, upto, True, C) * -gain[:, None]).to(WORK)

    d_step = tl.zeros([C], tl.float32)
    if WIDE:
        # every pair (i, j) decays over the steps between its tokens: add exactly those, so that nothing has to cancel
        read = tl.zeros([C, C], tl.float32)
        wrote = tl.zeros([C, C], tl.float32)
        for k0 in tl.static_range(0, K, BK):
            query = _load_rows(q + (row * H + h) * K, valid, k0, K, BK, WORK)
            x = _load_rows(pairs, paired, k0, K, BK, WORK)
            read = tl.dot(query, tl.trans(x), read, input_precision=PRECISION)
            wrote = tl.dot(x, tl.trans(x), wrote, input_precision=PRECISION)
        read, wrote = read * s1, wrote * s2
        spans = tl.cumsum(read, 0, reverse=True) - (tl.zeros_like(read) if AFTER else read)
        spans += tl.cumsum(wrote, 0, reverse=True) - (tl.zeros_like(wrote) if DECAYED else wrote)
        d_step = tl.sum(tl.where(slot[:, None] > slot[None, :], spans, 0.0), 1)
    s1, s2 = s1.to(WORK), s2.to(WORK)

    d_read = tl.zeros([C], tl.float32)
    d_seen = tl.zeros([C], tl.float32)
    d_since = tl.zeros([C], tl.float32)
    d_left = tl.zeros([C], tl.float32)
    d_kept = 0.0
    for k0 in tl.static_range(0, K, BK):
        column = k0 + tl.arange(0, BK)
        query = _load_rows(q + (row * H + h) * K, valid, k0, K, BK, WORK)
        x = _load_rows(pairs, paired, k0, K, BK, WORK)
        from_o = tl.zeros([C, BK], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
            d_out = _load_rows(d_o + (row * H + h) * V, valid, v0, V, BV, WORK)
            from_o = tl.dot(d_out, S_t, from_o, input_precision=PRECISION)
        from_o = from_o * outs[:, None]
        if WIDE:
            d_read += tl.sum(query.to(tl.float32) * from_o, 1)
        from_o = tl.dot(s1, x, from_o, input_precision=PRECISION)
        if not WIDE:
            d_read += tl.sum(query.to(tl.float32) * from_o, 1)
        pointers = d_q + (row * H + h)[:, None] * K + column[None, :]
        tl.store(pointers, from_o.to(d_q.dtype.element_ty), mask=valid[:, None] & (column < K)[None, :])
        from_r = tl.zeros([C, BK], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            S_t = _load_tile(borders_t, index, v0, k0, V, K, BV, BK)
            d_r_t = _load_tile(d_residual_t, index, v0, 0, V, C, BV, C)
            from_r = tl.dot(tl.trans(d_r_t), S_t, from_r, input_precision=PRECISION)
        from_r = from_r * -reads[:, None]
        if WIDE:
            d_seen += tl.sum(x.to(tl.float32) * from_r, 1)
        from_r = tl.dot(s2, x, from_r, input_precision=PRECISION)
        if not WIDE:
            d_seen += tl.sum(x.to(tl.float32) * from_r, 1)
        from_S = tl.zeros([C, BK], tl.float32)
        for v0 in tl.static_range(0, V, BV):
            dS_t = _load_tile(d_borders_t, index, v0, k0, V, K, BV, BK)
            r_t = _load_tile(residual_t, index, v0, 0, V, C, BV, C)
            from_S = tl.dot(tl.trans(r_t), dS_t, from_S, input_precision=PRECISION)
            d_kept += tl.sum(dS_t.to(tl.float32) * _load_tile(borders_t, index, v0, k0, V, K, BV, BK).to(tl.float32))
        from_S = from_S * leaves[:, None]
        d_left += tl.sum(x.to(tl.float32) * from_S, 1)
        written = tl.dot(s1_t, query, input_precision=PRECISION)
        written = tl.dot(s2_t, x, written, input_precision=PRECISION)
        if not WIDE:
            d_since += tl.sum(x.to(tl.float32) * written, 1)
        targets, present = _pair_keys(d_k, d_key, has_key, document, first, row, before, valid, h, H, K, SHIFTED, C)
        d_x = from_r + from_S + written
        tl.store(targets[:, None] + column[None, :], d_x.to(d_k.dtype.element_ty), mask=present[:, None] & (column < K)[None, :])

    d_step += tl.cumsum(d_read - d_since, 0, reverse=True) - (0.0 if AFTER else d_read)
    d_step += tl.cumsum(d_seen, 0, reverse=True) - (0.0 if DECAYED else d_seen)
    d_step += tl.cumsum(d_left, 0) - d_left + d_kept * tl.exp(total.to(tl.float32))
    tl.store(d_log_decay + row * H + h, d_step, mask=valid)


# --- launches ---


@dataclass(frozen=True)
class Tiles:
    """The chunk table: where every chunk's tokens are. `table`, `rows` and `offsets` are None without mask and packing."""

    documents: int
    tokens: int
    chunk: int
    table: Tensor | None = None  # int64 [M, 4]: document, start in rows, length, whether it is the document's first chunk
    rows: Tensor | None = None  # int64 [R]: token row of every real token, documents one after another
    offsets: Tensor | None = None  # int64 [N + 1]: first chunk of every document

    @property
    def per_document(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def count(self) -> int:
        return self.documents * self.per_document if self.table is None else self.table.shape[0]


@dataclass(frozen=True)
class Form:
    """What distinguishes the members of the family."""

    shifted: bool  # a value's pair key is the key before it
    decayed: bool  # the residual sees the state after this token's decay
    after: bool  # reads see this token's write


class DeltaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, key, has_key, v, eta, log_decay, S, tiles, form, scale):
        q, k, key, v, eta, log_decay, S = (x.contiguous() for x in (q, k, key, v, eta, log_decay, S))
        ctx.tiles, ctx.form, ctx.scale = tiles, form, scale
        o, S_out, solve = forward(q, k, key, has_key, v, eta, log_decay, S, tiles, form, scale)
        ctx.save_for_backward(q, k, key, has_key, v, eta, log_decay, S, solve)
        return o, S_out

    @staticmethod
    def backward(ctx: Any, d_o, dS):
        d_q, d_k, d_key, d_v, d_eta, d_log_decay, d_S = backward(*ctx.saved_tensors, d_o.contiguous(), dS.contiguous(), ctx.tiles, ctx.form, ctx.scale)
        return d_q, d_k, d_key, None, d_v, d_eta, d_log_decay, d_S, None, None, None


def work_dtype(x: Tensor) -> torch.dtype:
    """bf16 inputs are multiplied as bf16; float16 ones as tf32, whose range holds every step size."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRET else torch.float32


INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
CONFIG: dict[str, dict[str, int]] = {
    "solve": {"num_warps": 4, "num_stages": 1},
    "scan": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "read": {"BV": 128, "num_warps": 4, "num_stages": 1},
    "transposed_solve": {"num_warps": 4, "num_stages": 1},
    "scans": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "gradient": {"num_warps": 4, "num_stages": 1, "BK": 64, "BV": 128},
}


def _pad(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _options(q: Tensor, tiles: Tiles, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    work = work_dtype(q)
    common = {"H": q.shape[2], "K": q.shape[3], "C": tiles.chunk, "SHIFTED": form.shifted, "DENSE": tiles.table is None}
    common |= {"WORK": _TL[work], "PRECISION": "ieee" if INTERPRET else "tf32x3" if q.dtype == torch.float32 else "tf32"}
    decays = {"WIDE": q.dtype == torch.float32}
    return common, decays


def _config(name: str, K: int, V: int) -> dict[str, int]:
    config = dict(CONFIG[name])
    config["BV"] = min(config.get("BV", 64), _pad(V))
    if name not in ("scan", "scans"):
        config["BK"] = min(config.get("BK", 128), _pad(K))
    return config


def forward(q, k, key, has_key, v, eta, log_decay, S, tiles, form, scale):
    (_, _, H, K), V, C = q.shape, v.shape[3], tiles.chunk
    M, work = tiles.count * H, work_dtype(q)
    new = functools.partial(torch.empty, device=q.device)
    solve, from_S, residual_t = new(M, C, C, dtype=work), new(M, C, K, dtype=work), new(M, V, C, dtype=work)
    to_end, kept, borders_t = new(M, C), new(M), new(M, V, K, dtype=work)
    o, S_out = (torch.empty_like if tiles.table is None else torch.zeros_like)(v), torch.empty_like(S)
    common, decays = _options(q, tiles, form)
    place = (tiles.table, tiles.rows)
    length = (tiles.tokens, tiles.per_document)
    solve_kernel[(M,)](
        k, key, has_key, v, eta, log_decay, *place, solve, from_S, residual_t, to_end, kept, *length,
        V=V, DECAYED=form.decayed, **common, **decays, **_config("solve", K, V),
    )  # fmt: skip
    config = _config("scan", K, V)
    scan_kernel[(triton.cdiv(V, config["BV"]), tiles.documents * H)](
        k, key, has_key, S, S_out, *place, tiles.offsets, from_S, residual_t, to_end, kept, borders_t, *length,
        V=V, KP=_pad(K), **common, **config,
    )  # fmt: skip
    config = _config("read", K, V)
    read_kernel[(M, triton.cdiv(V, config["BV"]))](
        q, k, key, has_key, eta, log_decay, *place, residual_t, borders_t, o, scale, *length,
        V=V, AFTER=form.after, **common, **decays, **config,
    )  # fmt: skip
    return o, S_out, solve


def backward(q, k, key, has_key, v, eta, log_decay, S, solve, d_o, dS, tiles, form, scale):
    (_, _, H, K), V, C = q.shape, v.shape[3], tiles.chunk
    M, work = tiles.count * H, work_dtype(q)
    new = functools.partial(torch.empty, device=q.device)
    from_S, to_S = new(M, C, K, dtype=work), new(M, C, K, dtype=work)
    residual_t, d_residual_t, d_o_t = (new(M, V, C, dtype=work) for _ in range(3))
    to_end, since, kept = new(M, C), new(M, C), new(M)
    borders_t, d_borders_t = new(M, V, K, dtype=work), new(M, V, K, dtype=work)
    empty = torch.empty_like if tiles.table is None else torch.zeros_like
    d_q, d_v, d_eta, d_log_decay = empty(q), empty(v), empty(eta), empty(log_decay)
    # with shifted pairs a document's last key is nobody's pair key, and only some documents have a carried one
    d_k, d_key = (torch.zeros_like if form.shifted else empty)(k), torch.zeros_like(key)
    S_out, d_S = torch.empty_like(S), torch.empty_like(S)
    common, decays = _options(q, tiles, form)
    place = (tiles.table, tiles.rows)
    length = (tiles.tokens, tiles.per_document)
    transposed_solve_kernel[(M,)](
        q, k, key, has_key, v, d_o, eta, log_decay, *place, solve, from_S, residual_t, to_S, d_residual_t, d_o_t,
        to_end, kept, since, scale, *length,
        V=V, DECAYED=form.decayed, AFTER=form.after, **common, **decays, **_config("transposed_solve", K, V),
    )  # fmt: skip
    config = _config("scans", K, V)
    scans_kernel[(2 * triton.cdiv(V, config["BV"]), tiles.documents * H)](
        q, k, key, has_key, S, S_out, dS, d_S, *place, tiles.offsets, from_S, residual_t, to_S, d_residual_t, d_o_t,
        to_end, since, kept, borders_t, d_borders_t, *length,
        V=V, KP=_pad(K), **common, **config,
    )  # fmt: skip
    gradient_kernel[(M,)](
        q, k, key, has_key, d_o, eta, log_decay, *place, residual_t, d_residual_t, borders_t, d_borders_t,
        d_q, d_k, d_key, d_v, d_eta, d_log_decay, scale, *length,
        V=V, DECAYED=form.decayed, AFTER=form.after, **common, **decays, **_config("gradient", K, V),
    )  # fmt: skip
    return d_q, d_k, d_key, d_v, d_eta, d_log_decay, d_S
