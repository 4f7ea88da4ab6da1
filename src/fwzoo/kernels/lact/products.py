"""The matrix products of LaCT's forward pass on a GPU, each with what follows it element by element: two launches a chunk.

The first makes the hidden units of all queries and keys, the second the outputs and the new directions; the third launch of a
chunk is `passes.step_weights`. Products are of the inputs' dtype, all else is float32. Rows of tokens are `[R, C, .]` with
R = N * H, at any strides but the last; flat matrices `[R, 3 M D]` hold W0, W2, W1. Imported only by the `triton` level.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import INTERPRET, Prepared, block, parts, roomy

UNITS, SUMS = (128, 128, 64, 4), (128, 256, 64, 3)
"""Rows, columns and inner width of a tile of 16-bit products, and stages, in both kernels."""


def _tile(x: Tensor, most: tuple[int, ...], *sizes: int) -> dict[str, int]:
    """Widths of a tile for sizes, at most `most`; half of it for float32, and on cards with less shared memory."""
    *widths, stages = most
    whole = x.dtype == torch.bfloat16 and roomy(x)
    rows, columns, inner = (
        min(block(n), width if whole else width // 2) for n, width in zip(sizes, widths, strict=True)
    )
    warps = 8 if rows * columns >= 128 * 128 else 4
    return {"BI": rows, "BJ": columns, "BK": inner, "num_warps": warps, "num_stages": stages if roomy(x) else 3}


@triton.jit
def _load(x, rows, columns, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Values `[rows, columns]` at their offsets; EVEN: none is outside."""
    pointers = x + rows[:, None] + columns[None, :]
    if EVEN_ROWS and EVEN_COLUMNS:
        value = tl.load(pointers)
    elif EVEN_ROWS:
        value = tl.load(pointers, mask=column_ok[None, :], other=0.0)
    elif EVEN_COLUMNS:
        value = tl.load(pointers, mask=row_ok[:, None], other=0.0)
    else:
        value = tl.load(pointers, mask=row_ok[:, None] & column_ok[None, :], other=0.0)
    return value.to(tl.float32) if INTERPRET else value


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b; float32 is no tensor core's: sums of thousands of products keep their digits."""
    return tl.dot(a, b, acc, input_precision="ieee")


# --- units of queries and keys ---


@triton.jit(do_not_specialize=["writes", "first", "plane", "chunk"])
def _units_kernel(
    q, k, v, weights, rates, units, pairs, ones, writes, first, plane, chunk, q_row, q_token, k_row, k_token, v_row, v_token,
    D: tl.constexpr, M: tl.constexpr, PER_CHANNEL: tl.constexpr, WRITES: tl.constexpr, EVEN: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    kind: tl.constexpr = weights.dtype.element_ty
    x, row, token = q, q_row, q_token
    if WRITES:  # by the first half of the programs
        wrote = number < writes
        x, row, token = tl.where(wrote, k, q), tl.where(wrote, k_row, q_row), tl.where(wrote, k_token, q_token)
        number = tl.where(wrote, number, number - writes)
    tiles: tl.constexpr = (M + BJ - 1) // BJ
    of_row = tl.cdiv(chunk, BI) * tiles
    b, c0, m0 = (number // of_row).to(tl.int64), number % of_row // tiles * BI, number % tiles * BJ
    c, m, f = tl.arange(0, BI), m0 + tl.arange(0, BJ), tl.arange(0, BK)
    c_ok, m_ok = c0 + c < chunk, m < M
    EVEN_M: tl.constexpr = M % BJ == 0
    EVEN_D: tl.constexpr = D % BK == 0
    w0 = weights + b * 3 * M * D
    gate, up = tl.zeros([BI, BJ], tl.float32), tl.zeros([BI, BJ], tl.float32)
    x += b * row + c0.to(tl.int64) * token
    for d0 in range(0, D, BK):
        d_ok = d0 + f < D
        tile = _load(x + d0, c * token, f, c_ok, d_ok, EVEN, EVEN_D)
        gate = _dot(tile, tl.trans(_load(w0 + d0, m * D, f, m_ok, d_ok, EVEN_M, EVEN_D)), gate)
        up = _dot(tile, tl.trans(_load(w0 + M * D + d0, m * D, f, m_ok, d_ok, EVEN_M, EVEN_D)), up)
    at = b * chunk + c0
    offsets = c[:, None] * M + m[None, :]
    ok = c_ok[:, None] & m_ok[None, :]
    if wrote if WRITES else False:
        narrow_gate, narrow_up = gate.to(kind), up.to(kind)  # which leaves registers for the error
        error = tl.zeros([BI, BJ], tl.float32)
        v += b * v_row + c0.to(tl.int64) * v_token
        for d0 in range(0, D, BK):
            d_ok = d0 + f < D
            tile = _load(v + d0, c * v_token, f, c_ok, d_ok, EVEN, EVEN_D)
            error = _dot(tile, _load(w0 + 2 * M * D + d0 * M, f * M, m, d_ok, m_ok, EVEN_D, EVEN_M), error)
        wide, high = narrow_gate.to(tl.float32), narrow_up.to(tl.float32)
        sigmoid = tl.sigmoid(wide)
        active = wide * sigmoid
        zero, one, two = (sigmoid + active * (1.0 - sigmoid)) * error * high, active * high, error * active
        if PER_CHANNEL:  # the rates of W0 and W2 are with the keys
            one *= tl.load(rates + plane + (first * chunk + at) * M + offsets, mask=ok, other=0.0)
        else:
            own = rates + first * chunk + at + c[:, None]
            zero *= tl.load(own, mask=c_ok[:, None], other=0.0)
            one *= tl.load(own + plane, mask=c_ok[:, None], other=0.0)
            two *= tl.load(own + 2 * plane, mask=c_ok[:, None], other=0.0)
        both = pairs + at * 2 * M + c[:, None] * M  # whose rows are twice as long
        tl.store(both + offsets, zero.to(kind), mask=ok)
        tl.store(both + M + offsets, two.to(kind), mask=ok)
        tl.store(ones + at * M + offsets, one.to(kind), mask=ok)
    else:
        tl.store(units + at * M + offsets, (gate * tl.sigmoid(gate) * up).to(kind), mask=ok)


# --- outputs, and directions with their momentum ---


@triton.jit(do_not_specialize=["grads", "first", "full_at", "plane", "chunk", "heads"])
def _sums_kernel(
    o, k, v, weights, rates, units, pairs, ones, step, last, kept, full, direction, grads, first, full_at, plane, chunk, heads,
    k_row, k_token, v_row, v_token, o_row, o_token,
    D: tl.constexpr, M: tl.constexpr, PER_CHANNEL: tl.constexpr, WRITES: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    kind: tl.constexpr = weights.dtype.element_ty
    i, j, f = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, BK)
    acc = tl.zeros([BI, BJ], tl.float32)
    if number < grads if WRITES else False:
        tiles_d: tl.constexpr = (D + BJ - 1) // BJ
        tiles_m: tl.constexpr = (M + BJ - 1) // BJ
        of_one: tl.constexpr = (M + BI - 1) // BI * tiles_d
        of_row: tl.constexpr = 2 * of_one + (D + BI - 1) // BI * tiles_m
        b, own = (number // of_row).to(tl.int64), number % of_row
        lower = (
            own < 2 * of_one
        )  # [M, D] of W0 or W2, from pairs and keys; otherwise [D, M] of W1, from values and ones
        second = own // of_one
        own = tl.where(lower, own % of_one, own - 2 * of_one)
        tiles = tl.where(lower, tiles_d, tiles_m)
        height, width = tl.where(lower, M, D), tl.where(lower, D, M)
        i, j = own // tiles * BI + i, own % tiles * BJ + j
        a = tl.where(lower, pairs + b * chunk * 2 * M + second * M, v + b * v_row)
        x = tl.where(lower, k + b * k_row, ones + b * chunk * M)
        a_token, x_token = tl.where(lower, 2 * M, v_token), tl.where(lower, k_token, M)
        i_ok, j_ok = i < height, j < width
        EVEN_I: tl.constexpr = M % BI == 0 and D % BI == 0
        EVEN_J: tl.constexpr = M % BJ == 0 and D % BJ == 0
        own_rates = rates + tl.where(second == 0, 0, 2) * plane.to(tl.int64) + (first + b) * chunk * D
        for c0 in range(0, chunk, BK):
            c_ok = c0 + f < chunk
            left = _load(a, f * a_token, i, c_ok, i_ok, EVEN, EVEN_I)
            right = _load(x, f * x_token, j, c_ok, j_ok, EVEN, EVEN_J)
            if PER_CHANNEL:  # then M is D
                ok = c_ok[:, None] & j_ok[None, :]
                rate = tl.load(own_rates + (c0 + f)[:, None] * D + j[None, :], mask=ok, other=0.0)
                right = (right * tl.where(lower, rate, 1.0)).to(right.dtype)
            acc = _dot(tl.trans(left), right, acc)
            a += BK * a_token
            x += BK * x_token
        begin, at = (3 * b + tl.where(lower, second, 2)) * M * D, i[:, None] * width + j[None, :]
        ok = i_ok[:, None] & j_ok[None, :]
        if last is not None:
            old = tl.load(last + begin + at, mask=ok, other=0.0)
            acc += tl.load(kept + first + b) * old
            if MASKED:
                acc = tl.where(tl.load(full + full_at + b // heads) != 0, acc, old)
            tl.store(last + begin + at, acc, mask=ok)
        if step is not None:
            tl.store(step + begin + at, acc, mask=ok)
        if direction is not None:
            tl.store(direction + begin + at, acc.to(kind), mask=ok)
    else:
        if WRITES:
            number -= grads
        tiles_o: tl.constexpr = (D + BJ - 1) // BJ
        of_tokens = tl.cdiv(chunk, BI) * tiles_o
        b, c0 = (number // of_tokens).to(tl.int64), number % of_tokens // tiles_o * BI
        j += number % tiles_o * BJ
        i_ok, j_ok = c0 + i < chunk, j < D
        EVEN_M: tl.constexpr = M % BK == 0
        EVEN_D: tl.constexpr = D % BJ == 0
        units += (b * chunk + c0) * M
        w1 = weights + b * 3 * M * D + 2 * M * D
        for m0 in range(0, M, BK):
            m_ok = m0 + f < M
            left = _load(units + m0, i * M, f, i_ok, m_ok, EVEN, EVEN_M)
            acc = _dot(left, tl.trans(_load(w1 + m0, j * M, f, j_ok, m_ok, EVEN_D, EVEN_M)), acc)
        o += b * o_row + c0.to(tl.int64) * o_token
        tl.store(o + i[:, None] * o_token + j[None, :], acc.to(kind), mask=i_ok[:, None] & j_ok[None, :])


class Products:
    """Both launches for chunks of `rows` rows, on the current device.

    Args:
        q, k, v, o: a chunk `[rows, C, D]`; all others have their strides. k and v are None where nothing is written.
        rates: `[3, all rows C, 1 or D]`; None where nothing is written.
        units, pairs, ones: `[rows, C, M]`, `[rows, C, 2 M]` and `[rows, C, M]`, for one chunk after the other.
        last: float32 flat, the direction before, replaced by the new one; None: no momentum.
        step: float32 flat, filled with a direction without momentum, or None. directed: whether a narrow one is filled too.
        kept: float32 `[all rows]`, the share of the last direction that is kept.
        full, heads: int32, which documents' chunks are full, chunk after chunk; None: all. H.
    """

    def __init__(
        self, q: Tensor, o: Tensor, units: Tensor, hidden: int, *, k: Tensor | None = None,
        v: Tensor | None = None, rates: Tensor | None = None, pairs: Tensor | None = None, ones: Tensor | None = None,
        last: Tensor | None = None, step: Tensor | None = None, directed: bool = False, kept: Tensor | None = None,
        full: Tensor | None = None, heads: int = 1,
    ) -> None:  # fmt: skip
        rows, chunk, size = q.shape
        writes = k is not None
        strides = {
            f"{name}_{axis}": 0 if x is None else x.stride(place)
            for name, x in (("q", q), ("k", k), ("v", v), ("o", o))
            for place, axis in enumerate(("row", "token"))
        }
        shared: dict[str, Any] = {
            "rates": rates, "units": units, "pairs": pairs, "ones": ones, "plane": 0 if rates is None else rates.stride(0),
            "chunk": chunk, "D": size, "M": hidden, "PER_CHANNEL": rates is not None and rates.shape[2] > 1,
            "WRITES": writes, **strides,
        }  # fmt: skip
        tile = _tile(q, UNITS, chunk, hidden, size)
        reads = rows * parts(chunk, tile["BI"]) * parts(hidden, tile["BJ"])
        varying = ("q", "weights", "first", *(("k", "v") if writes else ()))
        self._units = Prepared(
            _units_kernel,
            (reads * (1 + writes),),
            varying,
            **shared,
            writes=reads,
            EVEN=chunk % tile["BI"] == 0,
            **tile,
        )
        rows_most, columns_most, *others = SUMS
        columns_most = 128 if shared["PER_CHANNEL"] else columns_most  # scaled keys go through shared memory once more
        longest = max(size, hidden)
        tile = _tile(q, (rows_most, columns_most, *others), longest, longest, max(chunk, hidden))
        of_weights = (
            parts(x, tile["BI"]) * parts(y, tile["BJ"]) for x, y in ((hidden, size), (hidden, size), (size, hidden))
        )
        grads = rows * sum(of_weights) if writes else 0
        reads = rows * parts(chunk, tile["BI"]) * parts(size, tile["BJ"])
        varying = (
            "o",
            "weights",
            "first",
            "full_at",
            *(("k", "v") if writes else ()),
            *(("direction",) if directed else ()),
        )
        self._sums = Prepared(
            _sums_kernel, (grads + reads,), varying, **shared, grads=grads, last=last, step=step, kept=kept, full=full,
            heads=heads, MASKED=full is not None, EVEN=chunk % tile["BI"] == 0 and chunk % tile["BK"] == 0, **tile,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, o: Tensor, weights: Tensor, first: int = 0, full_at: int = 0, *written: Tensor
    ) -> None:
        """Read a chunk into `o`, from flat weights of its dtype; written: its keys and values, and what is filled with the direction.

        first: rows of all chunk numbers before this one. full_at: where its part of `full` begins.
        """
        self._units(q, weights, first, *written[:2])
        self._sums(o, weights, first, full_at, *written)
