"""What lies between the matrix products of LaCT on a GPU: element by element and row by row, each in one Triton kernel.

Rows of tokens are `[R, C, .]` with R = N * H; every kernel writes over what it reads, so that a chunk stays in the cache.
Arithmetic is float32, whatever the buffers hold. The device of the tensors is the current one.

The functions prepare launches, which find their place by `first`, the rows of all chunk numbers before a chunk, and `full_at`,
where its part of `full` begins. Imported only by the `triton` level.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import Prepared, parts, power, read
from .rules import NORM_EPS, WIDEST

ELEMENTS = 2048  # of every operand a program holds


def _blocks(size: int, most: int = ELEMENTS) -> tuple[int, int]:
    """Columns and rows of a program's tile."""
    columns = min(power(size), most)
    return columns, max(1, ELEMENTS // columns)


@triton.jit
def _at(x, rows, columns, ok):
    """Values at `rows`, where each begins, and columns, float32 `[R, F]`."""
    return read(x + rows[:, None] + columns[None, :], ok).to(tl.float32)


@triton.jit
def _put(x, rows, columns, value, ok):
    tl.store(x + rows[:, None] + columns[None, :], value.to(x.dtype.element_ty), mask=ok)


def _flat(
    kernel: Any,
    varying: tuple[str, ...],
    rows: int,
    full: Tensor | None,
    heads: int,
    size: int,
    hidden: int,
    **others: Any,
) -> Prepared:
    """Launches of a kernel over rows of flat matrices `[rows, 3 M D]`.

    full: int32, which documents' chunks are full, chunk after chunk; None: all. heads: H. size, hidden: D and M.
    """
    columns, lines = _blocks(max(size, hidden), WIDEST)
    total, masked = rows * (2 * hidden + size), full is not None
    constants = {"heads": heads, "total": total, "D": size, "M": hidden, "ROWS": lines, "BF": columns, "EPS": NORM_EPS}
    names = "first", "full_at", *varying
    return Prepared(kernel, (parts(total, lines),), names, full=full, MASKED=masked, **constants, **others)


# --- reading, backward: h = silu(gate) * up ---


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward_kernel(both, d_hidden, rows, M: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    ok = (r < rows)[:, None] & (m < M)[None, :]
    gate, up = _at(both, r * 2 * M, m, ok), _at(both, r * 2 * M + M, m, ok)
    grad = _at(d_hidden, r * M, m, ok)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    _put(both, r * 2 * M, m, grad * up * (sigmoid + active * (1.0 - sigmoid)), ok)
    _put(both, r * 2 * M + M, m, grad * active, ok)
    _put(d_hidden, r * M, m, active * up, ok)


def swiglu_backward(both: Tensor, d_hidden: Tensor) -> Prepared:
    """The gradients of gates and ups in their place, and the hidden units in the place of their gradient."""
    rows, hidden = both.shape[0] * both.shape[1], d_hidden.shape[2]
    columns, lines = _blocks(hidden, 512)
    others = {"both": both, "d_hidden": d_hidden, "rows": rows, "M": hidden, "ROWS": lines, "BM": columns}
    return Prepared(_swiglu_backward_kernel, (parts(rows, lines), parts(hidden, columns)), (), **others)


# --- what a chunk writes: rows whose products with k and v are the three directions ---


@triton.jit(do_not_specialize=["rows", "first", "plane"])
def _written_backward_kernel(
    four, two, rates, d_rates, rows, first, plane,
    M: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    at = first + r
    if not PER_CHANNEL:
        lr0, lr1, lr2 = (
            tl.load(rates + at, mask=inside, other=0.0)[:, None],
            tl.load(rates + plane + at, mask=inside, other=0.0)[:, None],
            tl.load(rates + 2 * plane + at, mask=inside, other=0.0)[:, None],
        )
    sum0, sum1, sum2 = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for begin in range(0, M, BM):
        m = begin + tl.arange(0, BM)
        ok = inside[:, None] & (m < M)[None, :]
        grad0, grad2 = _at(four, r * 4 * M, m, ok), _at(four, r * 4 * M + M, m, ok)
        gate, up = _at(four, r * 4 * M + 2 * M, m, ok), _at(four, r * 4 * M + 3 * M, m, ok)
        grad1, e = _at(two, r * 2 * M, m, ok), _at(two, r * 2 * M + M, m, ok)
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        slope = sigmoid + active * (1.0 - sigmoid)
        curve = sigmoid * (1.0 - sigmoid) * (2.0 + gate * (1.0 - 2.0 * sigmoid))
        zero, one, second = slope * e * up, active * up, e * active
        if PER_CHANNEL:
            lr1 = _at(rates + plane, at * M, m, ok)
            _put(d_rates + plane, at * M, m, grad1 * one, ok)
            one, grad1 = one * lr1, grad1 * lr1
        else:
            sum0 += tl.sum(grad0 * zero, 1)
            sum1 += tl.sum(grad1 * one, 1)
            sum2 += tl.sum(grad2 * second, 1)
            zero, one, second = zero * lr0, one * lr1, second * lr2
            grad0, grad1, grad2 = grad0 * lr0, grad1 * lr1, grad2 * lr2
        _put(four, r * 4 * M, m, zero, ok)
        _put(four, r * 4 * M + M, m, second, ok)
        _put(four, r * 4 * M + 2 * M, m, grad0 * curve * e * up + grad2 * e * slope + grad1 * up * slope, ok)
        _put(four, r * 4 * M + 3 * M, m, grad0 * slope * e + grad1 * active, ok)
        _put(two, r * 2 * M, m, one, ok)
        _put(two, r * 2 * M + M, m, grad0 * slope * up + grad2 * active, ok)
    if not PER_CHANNEL:
        tl.store(d_rates + at, sum0, mask=inside)
        tl.store(d_rates + plane + at, sum1, mask=inside)
        tl.store(d_rates + 2 * plane + at, sum2, mask=inside)


def written_backward(four: Tensor, two: Tensor, rates: Tensor, d_rates: Tensor) -> Prepared:
    """The backward pass of `written`, all in place; the launch takes the same.

    Args:
        four: `[R, C, 4 M]`, gradients of the rows of W0 and W2, gates, ups; becomes the rows and the gradients of gates, ups.
        two: `[R, C, 2 M]`, gradients of the rows of W1, errors; becomes the rows and the gradients of the errors.
        rates, d_rates: as in `written`; with a rate a channel, only the middle one is done here.
    """
    rows, hidden = two.shape[0] * two.shape[1], two.shape[2] // 2
    columns, lines = _blocks(hidden, 1024)
    return Prepared(
        _written_backward_kernel, (parts(rows, lines),), ("first",), four=four, two=two, rates=rates, d_rates=d_rates,
        rows=rows, plane=rates.stride(0), M=hidden, PER_CHANNEL=rates.shape[2] > 1, ROWS=lines, BM=columns, num_warps=8,
    )  # fmt: skip


# --- the step of the weights: momentum, sum, and rows with the norms of the beginning ---
# Matrices are flat `[R, 3 M D]`: rows of D numbers of W0 and of W2, then rows of M numbers of W1.


@triton.jit
def _flat_rows(total, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr):
    """Sequence and head, where it begins in a flat matrix, number and width of the rows of this program."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, row = r // (2 * M + D), r % (2 * M + D)
    lower = row < 2 * M
    start = b * 3 * M * D + tl.where(lower, row * D, 2 * M * D + (row - 2 * M) * M)
    return r, b, row, start, tl.where(lower, D, M)


@triton.jit
def _moving(full, full_at, b, heads, inside, MASKED: tl.constexpr):
    """Which of the rows belong to a chunk that is full."""
    moves = inside
    if MASKED:
        moves = inside & (tl.load(full + full_at + b // heads, mask=inside, other=0) != 0)
    return moves


@triton.jit(do_not_specialize=["first", "full_at", "total", "heads"])
def _step_kernel(
    step, full, sums, weights, norms, saved, lengths, first, full_at, total, heads,
    D: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    r, b, _row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    before = _at(sums, at, f, ok)
    after = before + _at(step, at, f, ok)
    length = tl.sqrt(tl.sum(after * after, 1))
    n = tl.load(norms + r, mask=inside, other=0.0)
    w = after * (n / (length + EPS))[:, None]
    if MASKED:
        moves = _moving(full, full_at, b, heads, inside, MASKED)
        w = tl.where(moves[:, None], w, _at(weights, at, f, ok))
        after = tl.where(moves[:, None], after, before)
    if PRENORM:
        _put(sums, at, f, after, ok)
    _put(weights, at, f, w, ok)
    _put(saved, at, f, w, ok)
    if lengths is not None:
        tl.store(lengths + first.to(tl.int64) * (2 * M + D) + r, length, mask=inside)


def step_weights(
    rows: int, full: Tensor | None, heads: int, sums: Tensor, weights: Tensor, norms: Tensor, lengths: Tensor | None,
    size: int, hidden: int,
) -> Prepared:  # fmt: skip
    """Add a step to the first `rows` rows of the weights, and give them the norms of the beginning.

    The launch takes, behind `first` and `full_at`, the step and what is filled with the new weights.

    Args:
        rows: R. full, heads: as in `_flat`.
        sums: float32, advanced in place; the weights themselves unless the sums are kept un-normalised.
        weights: float32, replaced.
        norms: float32 `[R, 2 M + D]`, of the rows of the initial weights.
        lengths: `[all rows, 2 M + D]`, filled with the norms of the rows before they are rescaled; None: nothing is kept.
        size, hidden: D and M.
    """
    return _flat(
        _step_kernel, ("step", "saved"), rows, full, heads, size, hidden, sums=sums, weights=weights, norms=norms,
        lengths=lengths, PRENORM=sums is not weights,
    )  # fmt: skip


@triton.jit
def _put_beside(beside, b, row, f, value, ok, half: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Into a half of `[dG02; W02]` and `[dG1 | W1]`, which lie one after the other."""
    lower = row < 2 * M
    put = b * 6 * M * D + tl.where(lower, row * D, 4 * M * D + (row - 2 * M) * 2 * M)
    _put(beside, put + half * tl.where(lower, 2 * M * D, M), f, value, ok)


@triton.jit
def _direction_backward(
    d, d_last, last, kept, d_kept, first, r, b, at, f, moves, inside, ok,
    D: tl.constexpr, M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradient of a chunk's direction with its momentum, from what reaches it by the step; and that of the one before."""
    later = _at(d_last, at, f, ok)
    d += later
    products = tl.sum(d * _at(last, at, f, ok), 1)
    earlier = tl.load(kept + first + b, mask=inside, other=0.0)[:, None] * d
    if MASKED:
        earlier, products = tl.where(moves[:, None], earlier, later), tl.where(moves, products, 0.0)
    _put(d_last, at, f, earlier, ok)
    tl.store(d_kept + first.to(tl.int64) * (2 * M + D) + r, products, mask=inside)
    return d


@triton.jit(do_not_specialize=["some_read", "some_written", "first", "full_at", "total", "heads"])
def _step_backward_kernel(
    d_weights, d_sums, read_grad, write_grad, some_read, some_written, d_last, last, kept, full, after, before, lengths,
    norms, d_norms, d_step, beside, d_kept, first, full_at, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr,
    EPS: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r, b, row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    grad = _at(d_weights, at, f, ok)
    grad += _at(read_grad, at, f, ok & (b < some_read)[:, None]) + _at(
        write_grad, at, f, ok & (b < some_written)[:, None]
    )
    moves = _moving(full, full_at, b, heads, inside, MASKED)
    w = _at(after, at, f, ok)
    length = tl.load(lengths + first.to(tl.int64) * (2 * M + D) + r, mask=inside, other=1.0)
    n = tl.load(norms + r, mask=inside, other=1.0)
    around, safe, scaled = length + EPS, tl.where(n > 0, n, 1.0), moves & (n > 0)
    along = tl.sum(w * grad, 1)
    d_n = tl.load(d_norms + r, mask=inside, other=0.0)
    tl.store(d_norms + r, d_n + tl.where(scaled, along / safe, 0.0), mask=inside)
    back = tl.where(scaled & (length > 0), along * around / (safe * safe * tl.maximum(length, 1e-30)), 0.0)
    d = (n / around)[:, None] * (grad - back[:, None] * w)
    d_before = d
    if PRENORM:
        old = _at(d_sums, at, f, ok)
        d += old
        d_before = tl.zeros_like(grad)
        _put(d_sums, at, f, tl.where(moves[:, None], d, old) if MASKED else d, ok)
    _put(d_weights, at, f, tl.where(moves[:, None], d_before, grad) if MASKED else d_before, ok)
    if MOMENTUM:
        d = _direction_backward(d, d_last, last, kept, d_kept, first, r, b, at, f, moves, inside, ok, D, M, MASKED)
    if MASKED:
        d = tl.where(moves[:, None], d, 0.0)
    # the weights that the chunk had read lie beside the gradient: one product takes both
    _put_beside(beside, b, row, f, _at(before, at, f, ok), ok, 1, D, M)
    if d_step is None:
        _put_beside(beside, b, row, f, d, ok, 0, D, M)
    else:
        _put(d_step, at, f, d, ok)


def step_weights_backward(
    rows: int, d_weights: Tensor, d_sums: Tensor | None, write_grad: Tensor, d_last: Tensor | None, kept: Tensor | None,
    full: Tensor | None, heads: int, lengths: Tensor, norms: Tensor, d_norms: Tensor, d_step: Tensor | None,
    beside: Tensor, d_kept: Tensor, size: int, hidden: int,
) -> Prepared:  # fmt: skip
    """The backward pass of `step_weights`.

    The launch takes, behind `first` and `full_at`, more of the gradient of the new weights, for how many rows that and
    `write_grad` are, the weights after and before, as saved, and, with momentum, the direction before.

    Args:
        d_weights: float32, gradient of the new weights, becomes that of the ones before. d_sums: the same of the sums.
        write_grad: more of the gradient of the new weights.
        d_last: float32, gradient of the new direction, becomes that of the one before; None: no momentum here.
        d_norms: float32, added to. d_step: filled with the gradient of the direction; None: it goes to `beside`.
        beside: `[R, 6 M D]`, filled with `[dG02; W02]` and `[dG1 | W1]`.
        d_kept: float32 `[all rows, 2 M + D]`, filled with parts of the gradient of `kept`.
        the others: as in `step_weights`.
    """
    names = "read_grad", "some_read", "some_written", "after", "before", *([] if d_last is None else ["last"])
    return _flat(
        _step_backward_kernel, names, rows, full, heads, size, hidden, d_weights=d_weights, d_sums=d_sums,
        write_grad=write_grad, d_last=d_last, kept=kept, lengths=lengths, norms=norms, d_norms=d_norms, d_step=d_step,
        beside=beside, d_kept=d_kept, MOMENTUM=d_last is not None, PRENORM=d_sums is not None,
    )  # fmt: skip


# --- the direction with its momentum where Newton-Schulz gets it ---


@triton.jit(do_not_specialize=["first", "full_at", "total", "heads"])
def _direct_backward_kernel(
    d_step, d_last, last, kept, full, beside, d_kept, first, full_at, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    r, b, row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    moves = _moving(full, full_at, b, heads, inside, MASKED)
    d = _at(d_step, at, f, ok)
    if MOMENTUM:
        d = _direction_backward(d, d_last, last, kept, d_kept, first, r, b, at, f, moves, inside, ok, D, M, MASKED)
    if MASKED:
        d = tl.where(moves[:, None], d, 0.0)
    _put_beside(beside, b, row, f, d, ok, 0, D, M)


def direct_backward(
    rows: int, d_last: Tensor | None, kept: Tensor | None, full: Tensor | None, heads: int, beside: Tensor, d_kept: Tensor,
    size: int, hidden: int,
) -> Prepared:  # fmt: skip
    """The backward pass of `direct`, into `beside`; arguments as in `step_weights_backward`.

    The launch takes, behind `first` and `full_at`, the gradient that reaches the direction and, with momentum, the one before.
    """
    names = "d_step", *([] if d_last is None else ["last"])
    return _flat(
        _direct_backward_kernel, names, rows, full, heads, size, hidden, d_last=d_last, kept=kept, beside=beside,
        d_kept=d_kept, MOMENTUM=d_last is not None,
    )  # fmt: skip
