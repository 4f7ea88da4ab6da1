"""What lies between the matrix products of LaCT on a GPU: element by element and row by row, each in one Triton kernel.

Rows of tokens are `[R, C, .]` with R = N * H; every kernel writes over what it reads, so that a chunk stays in the cache.
Arithmetic is float32, whatever the buffers hold. Imported only by the `triton` level.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import on_device, read
from .rules import NORM_EPS, WIDEST

ELEMENTS = 2048  # of every operand a program holds


def _blocks(size: int, most: int = ELEMENTS) -> tuple[int, int]:
    """Columns and rows of a program's tile."""
    columns = min(triton.next_power_of_2(size), most)
    return columns, max(1, ELEMENTS // columns)


@triton.jit
def _at(x, rows, columns, ok):
    """Values at `rows`, where each begins, and columns, float32 `[R, F]`."""
    return read(x + rows[:, None] + columns[None, :], ok).to(tl.float32)


@triton.jit
def _put(x, rows, columns, value, ok):
    tl.store(x + rows[:, None] + columns[None, :], value.to(x.dtype.element_ty), mask=ok)


# --- reading: h = silu(gate) * up ---


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(both, rows, M: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    ok = (r < rows)[:, None] & (m < M)[None, :]
    gate, up = _at(both, r * 2 * M, m, ok), _at(both, r * 2 * M + M, m, ok)
    _put(both, r * 2 * M, m, gate * tl.sigmoid(gate) * up, ok)


def swiglu(both: Tensor) -> Tensor:
    """Hidden units `[R, C, M]`, in the place of the gates of `[R, C, 2 M]`."""
    rows, hidden = both.shape[0] * both.shape[1], both.shape[2] // 2
    columns, lines = _blocks(hidden, 512)
    with on_device(both):
        _swiglu_kernel[(triton.cdiv(rows, lines), triton.cdiv(hidden, columns))](
            both, rows, M=hidden, ROWS=lines, BM=columns
        )
    return both[..., :hidden]


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


def swiglu_backward(both: Tensor, d_hidden: Tensor) -> None:
    """The gradients of gates and ups in their place, and the hidden units in the place of their gradient."""
    rows, hidden = both.shape[0] * both.shape[1], d_hidden.shape[2]
    columns, lines = _blocks(hidden, 512)
    with on_device(both):
        _swiglu_backward_kernel[(triton.cdiv(rows, lines), triton.cdiv(hidden, columns))](
            both, d_hidden, rows, M=hidden, ROWS=lines, BM=columns
        )


# --- what a chunk writes: rows whose products with k and v are the three directions ---


@triton.jit(do_not_specialize=["rows"])
def _written_kernel(
    both, error, rates, rows,
    M: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = r < rows
    ok = inside[:, None] & (m < M)[None, :]
    gate, up, e = _at(both, r * 2 * M, m, ok), _at(both, r * 2 * M + M, m, ok), _at(error, r * M, m, ok)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    slope = sigmoid + active * (1.0 - sigmoid)
    if PER_CHANNEL:  # the rates of W0 and W2 are with the keys
        lr1 = _at(rates + rows * M, r * M, m, ok)
        zero, one, two = slope * e * up, lr1 * active * up, e * active
    else:
        lr0, lr1, lr2 = (
            tl.load(rates + r, mask=inside, other=0.0)[:, None],
            tl.load(rates + rows + r, mask=inside, other=0.0)[:, None],
            tl.load(rates + 2 * rows + r, mask=inside, other=0.0)[:, None],
        )
        zero, one, two = lr0 * slope * e * up, lr1 * active * up, lr2 * e * active
    _put(both, r * 2 * M, m, zero, ok)
    _put(both, r * 2 * M + M, m, two, ok)
    _put(error, r * M, m, one, ok)


def written(both: Tensor, error: Tensor, rates: Tensor) -> None:
    """From gates and ups `[R, C, 2 M]` and errors `[R, C, M]`, in their place, the rows that W0, W2 and W1 get.

    Args:
        rates: float32 `[3, R C, 1 or M]`.
    """
    rows, hidden = error.shape[0] * error.shape[1], error.shape[2]
    columns, lines = _blocks(hidden, 512)
    with on_device(both):
        _written_kernel[(triton.cdiv(rows, lines), triton.cdiv(hidden, columns))](
            both, error, rates, rows, M=hidden, PER_CHANNEL=rates.shape[2] > 1, ROWS=lines, BM=columns
        )


@triton.jit(do_not_specialize=["rows"])
def _written_backward_kernel(
    four, two, rates, d_rates, rows,
    M: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    if not PER_CHANNEL:
        lr0, lr1, lr2 = (
            tl.load(rates + r, mask=inside, other=0.0)[:, None],
            tl.load(rates + rows + r, mask=inside, other=0.0)[:, None],
            tl.load(rates + 2 * rows + r, mask=inside, other=0.0)[:, None],
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
            lr1 = _at(rates + rows * M, r * M, m, ok)
            _put(d_rates + rows * M, r * M, m, grad1 * one, ok)
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
        tl.store(d_rates + r, sum0, mask=inside)
        tl.store(d_rates + rows + r, sum1, mask=inside)
        tl.store(d_rates + 2 * rows + r, sum2, mask=inside)


def written_backward(four: Tensor, two: Tensor, rates: Tensor, d_rates: Tensor) -> None:
    """The backward pass of `written`, all in place.

    Args:
        four: `[R, C, 4 M]`, gradients of the rows of W0 and W2, gates, ups; becomes the rows and the gradients of gates, ups.
        two: `[R, C, 2 M]`, gradients of the rows of W1, errors; becomes the rows and the gradients of the errors.
        rates, d_rates: float32 `[3, R C, 1 or M]`; with a rate a channel, only the middle one is done here.
    """
    rows, hidden = two.shape[0] * two.shape[1], two.shape[2] // 2
    columns, lines = _blocks(hidden, 1024)
    with on_device(four):
        _written_backward_kernel[(triton.cdiv(rows, lines),)](
            four,
            two,
            rates,
            d_rates,
            rows,
            M=hidden,
            PER_CHANNEL=rates.shape[2] > 1,
            ROWS=lines,
            BM=columns,
            num_warps=8,
        )


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


@triton.jit(do_not_specialize=["total", "heads"])
def _step_kernel(
    step, last, kept, full, sums, weights, norms, saved, lengths, saved_last, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr,
    SAVE: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r, b, _row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    moves = inside
    if MASKED:
        moves = inside & (tl.load(full + b // heads, mask=inside, other=0) != 0)
    g = _at(step, at, f, ok)
    if MOMENTUM:
        old = _at(last, at, f, ok)
        g += tl.load(kept + b, mask=inside, other=0.0)[:, None] * old
        if MASKED:
            g = tl.where(moves[:, None], g, old)
        _put(last, at, f, g, ok)
        if SAVE:
            _put(saved_last, at, f, g, ok)
    before = _at(sums, at, f, ok)
    after = before + g
    length = tl.sqrt(tl.sum(after * after, 1))
    n = tl.load(norms + r, mask=inside, other=0.0)
    w = after * (n / (length + EPS))[:, None]
    if MASKED:
        w = tl.where(moves[:, None], w, _at(weights, at, f, ok))
        after = tl.where(moves[:, None], after, before)
    if PRENORM:
        _put(sums, at, f, after, ok)
    _put(weights, at, f, w, ok)
    _put(saved, at, f, w, ok)
    if SAVE:
        tl.store(lengths + r, length, mask=inside)


def _flat_grid(rows: int, size: int, hidden: int) -> tuple[tuple[int], dict[str, int]]:
    columns, lines = _blocks(max(size, hidden), WIDEST)
    total = rows * (2 * hidden + size)
    return (triton.cdiv(total, lines),), {"total": total, "D": size, "M": hidden, "ROWS": lines, "BF": columns}


def step_weights(
    step: Tensor, last: Tensor | None, kept: Tensor | None, full: Tensor | None, heads: int, sums: Tensor,
    weights: Tensor, norms: Tensor, saved: Tensor, lengths: Tensor | None, saved_last: Tensor | None,
    size: int, hidden: int,
) -> None:  # fmt: skip
    """Add a direction, with momentum, to the weights, and give their rows the norms of the beginning.

    Args:
        step: the direction, of the first rows of all others. last: the direction before, float32, replaced by the new one; None: no momentum.
        kept: float32 `[R]`, share of it that is kept. full: int32 `[N]`, which documents' chunks are full, None: all.
        sums: float32, advanced in place; the weights themselves unless the sums are kept un-normalised.
        weights: float32, replaced. norms: float32 `[R, 2 M + D]`. saved: filled with the new weights.
        lengths: filled with the norms of the rows before they are rescaled. saved_last: filled with the new direction.
        size, hidden: D and M.
    """
    grid, constants = _flat_grid(step.shape[0], size, hidden)
    with on_device(step):
        _step_kernel[grid](
            step, last, kept, full, sums, weights, norms, saved, lengths, saved_last, heads=heads, **constants,
            MOMENTUM=last is not None, MASKED=full is not None, PRENORM=sums is not weights, SAVE=lengths is not None,
            EPS=NORM_EPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "heads"])
def _step_backward_kernel(
    d_weights, d_sums, read_grad, write_grad, d_last, last, kept, full, weights, before, lengths, norms, d_norms,
    d_step, d_kept, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr,
    BESIDE: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    r, b, row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    grad = _at(d_weights, at, f, ok) + _at(read_grad, at, f, ok) + _at(write_grad, at, f, ok)
    moves = inside
    if MASKED:
        moves = inside & (tl.load(full + b // heads, mask=inside, other=0) != 0)
    w = _at(weights, at, f, ok)
    length, n = tl.load(lengths + r, mask=inside, other=1.0), tl.load(norms + r, mask=inside, other=1.0)
    around, safe, scaled = length + EPS, tl.where(n > 0, n, 1.0), moves & (n > 0)
    along = tl.sum(w * grad, 1)
    d_n = tl.load(d_norms + r, mask=inside, other=0.0)
    tl.store(d_norms + r, d_n + tl.where(scaled, along / safe, 0.0), mask=inside)
    back = tl.where(scaled & (length > 0), along * around / (safe * safe * tl.maximum(length, 1e-30)), 0.0)
    d_after = (n / around)[:, None] * (grad - back[:, None] * w)
    d_before = d_after
    if PRENORM:
        old = _at(d_sums, at, f, ok)
        d_after += old
        d_before = tl.zeros_like(grad)
        _put(d_sums, at, f, tl.where(moves[:, None], d_after, old) if MASKED else d_after, ok)
    _put(d_weights, at, f, tl.where(moves[:, None], d_before, grad) if MASKED else d_before, ok)
    if MOMENTUM:
        later_last = _at(d_last, at, f, ok)
        d_after += later_last
        products = tl.sum(d_after * _at(last, at, f, ok), 1)
        earlier = tl.load(kept + b, mask=inside, other=0.0)[:, None] * d_after
        if MASKED:
            earlier, products = tl.where(moves[:, None], earlier, later_last), tl.where(moves, products, 0.0)
        _put(d_last, at, f, earlier, ok)
        tl.store(d_kept + r, products, mask=inside)
    if MASKED:
        d_after = tl.where(moves[:, None], d_after, 0.0)
    if BESIDE:  # the weights that the chunk had read lie beside the gradient: one product takes both
        lower = row < 2 * M
        put = b * 6 * M * D + tl.where(lower, row * D, 4 * M * D + (row - 2 * M) * 2 * M)
        _put(d_step, put, f, d_after, ok)
        _put(d_step, put + tl.where(lower, 2 * M * D, M), f, _at(before, at, f, ok), ok)
    else:
        _put(d_step, at, f, d_after, ok)


def step_weights_backward(
    rows: int, d_weights: Tensor, d_sums: Tensor | None, read: Tensor, write: Tensor, d_last: Tensor | None,
    last: Tensor | None, kept: Tensor | None, full: Tensor | None, heads: int, weights: Tensor, before: Tensor | None,
    lengths: Tensor, norms: Tensor, d_norms: Tensor, d_step: Tensor, d_kept: Tensor, size: int, hidden: int,
) -> None:  # fmt: skip
    """The backward pass of `step_weights`, for the first `rows` rows.

    Args:
        d_weights: float32, gradient of the new weights, becomes that of the ones before. d_sums: the same of the sums.
        read, write: more of the gradient of the new weights. d_last: gradient of the new direction, becomes that of the
            one before, or None. last: the direction before. weights, lengths: as saved.
        before: the weights before, which are put beside `d_step` `[R, 6 M D]`, `[dG02; W02]` and `[dG1 | W1]`; None: not.
        d_norms: float32, added to. d_step: filled. d_kept: float32 `[R, 2 M + D]`, filled with parts of the gradient of kept.
    """
    grid, constants = _flat_grid(rows, size, hidden)
    with on_device(weights):
        _step_backward_kernel[grid](
            d_weights, d_sums, read, write, d_last, last, kept, full, weights, before, lengths, norms, d_norms, d_step,
            d_kept, heads=heads, **constants, MOMENTUM=d_last is not None, MASKED=full is not None,
            PRENORM=d_sums is not None, BESIDE=before is not None, EPS=NORM_EPS,
        )  # fmt: skip
