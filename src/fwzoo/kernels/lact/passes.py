"""What lies between the matrix products of LaCT on a GPU: element by element and row by row, each in one Triton kernel.

Rows of tokens are `[R, C, .]` with R = N * H; every kernel writes over what it reads, so that a chunk stays in the cache.
Arithmetic is float32, whatever the buffers hold. Imported only by the `triton` level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import on_device, read
from .rules import NORM_EPS, WIDEST

ELEMENTS = 2048  # of every operand a program holds

# slots of a `Table`: keys, values and their gradients take three
KEYS, VALUES, RATES, KEPT, FULL, SAVED, LENGTHS, DIRECTION = (tl.constexpr(i) for i in (0, 3, 6, 7, 8, 9, 10, 11))
AFTER, LAST, READ, D_RATES, D_KEPT, D_KEYS, D_VALUES = (tl.constexpr(i) for i in (12, 13, 14, 15, 16, 17, 20))
SLOTS = 24
ALIGNED_SLOTS = (*range(6), 9, 11, 12, 13, 14, *range(17, 23))  # of which vectors are read


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


# --- where the tensors of a chunk are: addresses on the device, so that one CUDA graph serves every chunk ---


@triton.jit(
    do_not_specialize=["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]
)
def _aim_kernel(
    base, stride, p0: tl.int64, p1: tl.int64, p2: tl.int64, p3: tl.int64, p4: tl.int64, p5: tl.int64, p6: tl.int64,
    p7: tl.int64, s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64,
    s7: tl.int64,
):  # fmt: skip
    tl.store(base, p0)
    tl.store(base + 1, p1)
    tl.store(base + 2, p2)
    tl.store(base + 3, p3)
    tl.store(base + 4, p4)
    tl.store(base + 5, p5)
    tl.store(base + 6, p6)
    tl.store(base + 7, p7)
    tl.store(stride, s0)
    tl.store(stride + 1, s1)
    tl.store(stride + 2, s2)
    tl.store(stride + 3, s3)
    tl.store(stride + 4, s4)
    tl.store(stride + 5, s5)
    tl.store(stride + 6, s6)
    tl.store(stride + 7, s7)


@triton.jit
def _advance_kernel(table, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.arange(0, BLOCK)
    ok = slot < SLOTS
    base = tl.load(table + slot, mask=ok, other=0)
    tl.store(table + 2 * SLOTS + slot, base, mask=ok)
    tl.store(table + slot, base + tl.load(table + SLOTS + slot, mask=ok, other=0), mask=ok)


@triton.jit
def _aimed(now, slot: tl.constexpr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """What a slot points at, elements of type `kind`."""
    pointer = tl.load(now + slot).to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["rows", "offset"])
def _move_kernel(
    now, x, rows, offset, SLOT: tl.constexpr, C: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, BYTES: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = (r < rows)[:, None] & (d < D)[None, :]
    far = _aimed(now, SLOT, x.dtype.element_ty, ALIGNED)
    if C:
        row, token = tl.load(now + SLOT + 1) // BYTES, tl.load(now + SLOT + 2) // BYTES
        if ALIGNED:
            row, token = tl.multiple_of(row, 16 // BYTES), tl.multiple_of(token, 16 // BYTES)
        there = r // C * row + r % C * token
    else:
        there = r * D + offset
    if OUT:
        _put(far, there, d, _at(x, r * D, d, ok), ok)
    else:
        _put(x, r * D, d, _at(far, there, d, ok), ok)


class Table:
    """Addresses of what a chunk reads and writes, by slot; those of the next chunk follow by a step a slot.

    Args:
        aligned: every address of `ALIGNED_SLOTS` is a multiple of 16 bytes.
    """

    def __init__(self, device: torch.device, aligned: bool) -> None:
        self._table, self.aligned = torch.zeros(3, SLOTS, dtype=torch.long, device=device), aligned
        self.now = self._table[2]

    def aim(self, chunk: Sequence[int], next_chunk: Sequence[int] | None = None) -> None:
        """Say where the first chunk is, and where the second one (the others follow at the same distance)."""
        steps = [0] * SLOTS if next_chunk is None else [b - a for a, b in zip(chunk, next_chunk, strict=True)]
        with on_device(self._table):
            for i in range(0, SLOTS, 8):
                _aim_kernel[(1,)](
                    self._table[0, i:], self._table[1, i:], *chunk[i : i + 8], *steps[i : i + 8], num_warps=1
                )

    def advance(self) -> None:
        """On to the next chunk."""
        with on_device(self._table):
            _advance_kernel[(1,)](self._table, SLOTS=SLOTS, BLOCK=triton.next_power_of_2(SLOTS), num_warps=1)

    def move(self, slot: tl.constexpr, x: Tensor, out: bool = False, offset: int = 0) -> None:
        """Copy between contiguous `x` and what a slot points at: rows `[R, C, D]`, whose strides in bytes are in the two slots

        behind it, or contiguous `[R, F]`, which begins `offset` numbers later. `out`: from `x`.
        """
        tokens, size = (x.shape[1], x.shape[2]) if x.ndim == 3 else (0, x.shape[1])
        rows = x.shape[0] * max(tokens, 1)
        columns, lines = _blocks(size)
        with on_device(x):
            _move_kernel[(triton.cdiv(rows, lines), triton.cdiv(size, columns))](
                self.now, x, rows, offset, SLOT=slot.value, C=tokens, D=size, OUT=out, BYTES=x.element_size(),
                ALIGNED=self.aligned and slot.value in ALIGNED_SLOTS, ROWS=lines, BD=columns,
            )  # fmt: skip


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
    now, both, error, rows,
    M: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    inside = r < rows
    ok = inside[:, None] & (m < M)[None, :]
    rates = _aimed(now, RATES, tl.float32, False)
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


def written(table: Table, both: Tensor, error: Tensor, per_channel: bool) -> None:
    """From gates and ups `[R, C, 2 M]` and errors `[R, C, M]`, in their place, the rows that W0, W2 and W1 get.

    RATES are float32 `[3, R C, 1 or M]`.
    """
    rows, hidden = error.shape[0] * error.shape[1], error.shape[2]
    columns, lines = _blocks(hidden, 512)
    with on_device(both):
        _written_kernel[(triton.cdiv(rows, lines), triton.cdiv(hidden, columns))](
            table.now, both, error, rows, M=hidden, PER_CHANNEL=per_channel, ROWS=lines, BM=columns
        )


@triton.jit(do_not_specialize=["rows"])
def _written_backward_kernel(
    now, four, two, rows,
    M: tl.constexpr, PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    rates, d_rates = _aimed(now, RATES, tl.float32, False), _aimed(now, D_RATES, tl.float32, False)
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


def written_backward(table: Table, four: Tensor, two: Tensor, per_channel: bool) -> None:
    """The backward pass of `written`, all in place; D_RATES are filled (with a rate a channel, only the middle one).

    Args:
        four: `[R, C, 4 M]`, gradients of the rows of W0 and W2, gates, ups; becomes the rows and the gradients of gates, ups.
        two: `[R, C, 2 M]`, gradients of the rows of W1, errors; becomes the rows and the gradients of the errors.
    """
    rows, hidden = two.shape[0] * two.shape[1], two.shape[2] // 2
    columns, lines = _blocks(hidden, 1024)
    with on_device(four):
        _written_backward_kernel[(triton.cdiv(rows, lines),)](
            table.now, four, two, rows, M=hidden, PER_CHANNEL=per_channel, ROWS=lines, BM=columns, num_warps=8
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
    now, step, last, sums, weights, norms, narrow, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr,
    KEEP: tl.constexpr, ALIGNED: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r, b, _row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    moves = inside
    if MASKED:
        moves = inside & (tl.load(_aimed(now, FULL, tl.int32, False) + b // heads, mask=inside, other=0) != 0)
    g = _at(step, at, f, ok)
    if MOMENTUM:
        old = _at(last, at, f, ok)
        g += tl.load(_aimed(now, KEPT, tl.float32, False) + b, mask=inside, other=0.0)[:, None] * old
        if MASKED:
            g = tl.where(moves[:, None], g, old)
        _put(last, at, f, g, ok)
        if KEEP:
            _put(_aimed(now, DIRECTION, narrow.dtype.element_ty, ALIGNED), at, f, g, ok)
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
    _put(narrow, at, f, w, ok)
    _put(_aimed(now, SAVED, narrow.dtype.element_ty, ALIGNED), at, f, w, ok)
    if KEEP:
        tl.store(_aimed(now, LENGTHS, tl.float32, False) + r, length, mask=inside)


def _flat_grid(rows: int, size: int, hidden: int) -> tuple[tuple[int], dict[str, int]]:
    columns, lines = _blocks(max(size, hidden), WIDEST)
    total = rows * (2 * hidden + size)
    return (triton.cdiv(total, lines),), {"total": total, "D": size, "M": hidden, "ROWS": lines, "BF": columns}


def step_weights(
    table: Table, step: Tensor, last: Tensor | None, masked: bool, heads: int, sums: Tensor, weights: Tensor,
    norms: Tensor, narrow: Tensor, keep: bool, size: int, hidden: int,
) -> None:  # fmt: skip
    """Add a direction, with momentum, to the weights, and give their rows the norms of the beginning.

    With momentum KEPT is float32 `[R]`; when masked, FULL is int32 `[N]`, which documents' chunks are full. SAVED is filled with
    the new weights, and with `keep` LENGTHS with the norms of the rows before they are rescaled and, with momentum, DIRECTION.

    Args:
        step: the direction, of the first rows of all others. last: the direction before, float32, replaced by the new one;
            None: no momentum.
        sums: float32, advanced in place; the weights themselves unless the sums are kept un-normalised.
        weights: float32, replaced. norms: float32 `[R, 2 M + D]`. narrow: the new weights in the products' dtype.
        size, hidden: D and M.
    """
    grid, constants = _flat_grid(step.shape[0], size, hidden)
    with on_device(step):
        _step_kernel[grid](
            table.now, step, last, sums, weights, norms, narrow, heads=heads, **constants, MOMENTUM=last is not None,
            MASKED=masked, PRENORM=sums is not weights, KEEP=keep, ALIGNED=table.aligned, EPS=NORM_EPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total", "heads"])
def _step_backward_kernel(
    now, d_weights, d_sums, write, d_last, norms, d_norms, d_step, beside, parts, total, heads,
    D: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, PRENORM: tl.constexpr,
    ALIGNED: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r, b, row, at, width = _flat_rows(total, D, M, ROWS)
    f, inside = tl.arange(0, BF), r < total
    ok = inside[:, None] & (f[None, :] < width[:, None])
    kind: tl.constexpr = write.dtype.element_ty
    grad = _at(d_weights, at, f, ok) + _at(_aimed(now, READ, kind, ALIGNED), at, f, ok) + _at(write, at, f, ok)
    moves = inside
    if MASKED:
        moves = inside & (tl.load(_aimed(now, FULL, tl.int32, False) + b // heads, mask=inside, other=0) != 0)
    w = _at(_aimed(now, AFTER, kind, ALIGNED), at, f, ok)
    length = tl.load(_aimed(now, LENGTHS, tl.float32, False) + r, mask=inside, other=1.0)
    n = tl.load(norms + r, mask=inside, other=1.0)
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
        later = _at(d_last, at, f, ok)
        d_after += later
        products = tl.sum(d_after * _at(_aimed(now, LAST, kind, ALIGNED), at, f, ok), 1)
        earlier = tl.load(_aimed(now, KEPT, tl.float32, False) + b, mask=inside, other=0.0)[:, None] * d_after
        if MASKED:
            earlier, products = tl.where(moves[:, None], earlier, later), tl.where(moves, products, 0.0)
        _put(d_last, at, f, earlier, ok)
        tl.store(parts + r, products, mask=inside)
    if MASKED:
        d_after = tl.where(moves[:, None], d_after, 0.0)
    # the weights that the chunk had read lie beside the gradient: one product takes both
    lower = row < 2 * M
    put = b * 6 * M * D + tl.where(lower, row * D, 4 * M * D + (row - 2 * M) * 2 * M)
    before = _at(_aimed(now, SAVED, kind, ALIGNED), at, f, ok)
    _put(beside, put + tl.where(lower, 2 * M * D, M), f, before, ok)
    if d_step is None:
        _put(beside, put, f, d_after, ok)
    else:
        _put(d_step, at, f, d_after, ok)


def step_weights_backward(
    table: Table, rows: int, d_weights: Tensor, d_sums: Tensor | None, write: Tensor, d_last: Tensor | None, masked: bool,
    heads: int, norms: Tensor, d_norms: Tensor, d_step: Tensor | None, beside: Tensor, parts: Tensor, size: int, hidden: int,
) -> None:  # fmt: skip
    """The backward pass of `step_weights`, for the first `rows` rows. KEPT, FULL and LENGTHS are as there, AFTER what it saved,

    SAVED the weights before, LAST the direction before, READ a part of the gradient of the new weights.

    Args:
        d_weights: float32, gradient of the new weights, becomes that of the ones before. d_sums: the same of the sums.
        write: more of the gradient of the new weights. d_last: gradient of the new direction, becomes that of the one
            before; None: no momentum. d_norms: float32, added to.
        d_step: filled with the gradient of the direction, float32; None: it goes to `beside`, `[R, 6 M D]`, which is filled
            with `[dG02; W02]` and `[dG1 | W1]`. parts: float32 `[R, 2 M + D]`, filled with parts of the gradient of KEPT.
    """
    grid, constants = _flat_grid(rows, size, hidden)
    with on_device(write):
        _step_backward_kernel[grid](
            table.now, d_weights, d_sums, write, d_last, norms, d_norms, d_step, beside, parts, heads=heads, **constants,
            MOMENTUM=d_last is not None, MASKED=masked, PRENORM=d_sums is not None, ALIGNED=table.aligned, EPS=NORM_EPS,
        )  # fmt: skip
