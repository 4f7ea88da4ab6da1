"""Newton-Schulz orthogonalisation of the three matrices of all heads at once, and its backward pass, as batched products.

Matrices are flat `[R, 3 M D]` as in `passes.py`; products run in their dtype. X are the same `[3 R, short, long]`. Imported only
by the `triton` level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import Prepared, block, parts, power, read, roomy
from .rules import FROBENIUS_EPS, NEWTON_SCHULZ

SQUARES = 4096  # numbers of a matrix that a program sums or scales


@triton.jit
def _squares_kernel(x, sums, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    z, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = read(x + z * SIZE + at, at < SIZE).to(tl.float32)
    tl.store(sums + z * PARTS + tl.program_id(0), tl.sum(value * value))


@triton.jit
def _scale_kernel(
    x, sums, out, SIZE: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr
):
    z, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, BP)
    norm = tl.sqrt(tl.sum(tl.load(sums + z * PARTS + part, mask=part < PARTS, other=0.0)))
    value = read(x + z * SIZE + at, at < SIZE).to(tl.float32) / (norm + EPS)
    tl.store(out + z * SIZE + at, value.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _product_kernel(
    a, b, addend, out, alpha, beta,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, TRANSPOSED: tl.constexpr, SYMMETRIC: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """alpha a b + beta addend; TRANSPOSED: b is `[COLUMNS, INNER]`; SYMMETRIC: one of two tiles, and its mirror image."""
    number, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        column = ((tl.sqrt(8.0 * number + 1.5) - 1.0) * 0.5).to(tl.int32)  # 1.5, not 1: the root is no exact one
        i0, j0 = (number - column * (column + 1) // 2) * BI, column * BJ
    else:
        i0, j0 = number // tl.cdiv(COLUMNS, BJ) * BI, number % tl.cdiv(COLUMNS, BJ) * BJ
    i, j, k = i0 + tl.arange(0, BI), j0 + tl.arange(0, BJ), tl.arange(0, BK)
    i_ok, j_ok = (i < ROWS)[:, None], (j < COLUMNS)[None, :]
    acc = tl.zeros([BI, BJ], tl.float32)
    a += z * ROWS * INNER
    b += z * INNER * COLUMNS
    for k0 in range(0, INNER, BK):
        k_ok = k0 + k < INNER
        left = read(a + i[:, None] * INNER + (k0 + k)[None, :], i_ok & k_ok[None, :])
        if TRANSPOSED:
            right = tl.trans(read(b + j[:, None] * INNER + (k0 + k)[None, :], (j < COLUMNS)[:, None] & k_ok[None, :]))
        else:
            right = read(b + (k0 + k)[:, None] * COLUMNS + j[None, :], k_ok[:, None] & j_ok)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    acc *= alpha
    at, out = i[:, None] * COLUMNS + j[None, :], out + z * ROWS * COLUMNS
    if addend is not None:
        acc += beta * read(addend + z * ROWS * COLUMNS + at, i_ok & j_ok).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=i_ok & j_ok)
    if SYMMETRIC and i0 != j0:
        tl.store(
            out + j[:, None] * COLUMNS + i[None, :], tl.trans(value), mask=(j < COLUMNS)[:, None] & (i < ROWS)[None, :]
        )


def _product(
    out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, addend: Tensor | None = None, beta: float = 0.0, *,
    transposed: bool = False, symmetric: bool = False,
) -> Prepared:  # fmt: skip
    """What fills `out` with `_product_kernel`."""
    (count, rows, columns), inner, narrow = out.shape, a.shape[2], a.dtype == torch.bfloat16
    most = (32, 32) if not narrow else (64, 64) if not roomy(a) else (128, 128) if symmetric else (256, 128)
    bi, bj = (min(block(size), limit) for size, limit in zip((rows, columns), most, strict=True))
    if symmetric:
        bi = bj = min(bi, bj)
        tiles = parts(rows, bi) * (parts(rows, bi) + 1) // 2
    else:
        tiles = parts(rows, bi) * parts(columns, bj)
    return Prepared(
        _product_kernel, (tiles, count), (), a=a, b=b, addend=addend, out=out, alpha=alpha, beta=beta, ROWS=rows, COLUMNS=columns,
        INNER=inner, TRANSPOSED=transposed, SYMMETRIC=symmetric, BI=bi, BJ=bj, BK=min(block(inner), 64 if narrow else 32),
        num_warps=8 if bi * bj >= 128 * 128 else 4, num_stages=3 if bi > 128 else 4,
    )  # fmt: skip


class Orthogonal:
    """What orthogonalises directions like `flat`, one after the other.

    Args:
        size, hidden: D and M. room: memory in the dtype of `flat` that it may use, if that is enough, until the next call.
    """

    def __init__(self, flat: Tensor, size: int, hidden: int, room: Tensor) -> None:
        short, long = sorted((size, hidden))
        count = parts(short * long, SQUARES)
        shapes = [(3 * flat.shape[0], short, width) for width in (long, long, short, short)]
        sizes = [math.prod(shape) for shape in shapes]
        room = room.flatten() if room.numel() >= sum(sizes) else flat.new_empty(sum(sizes))
        pieces = room[: sum(sizes)].split(sizes)
        x, other, gram, factor = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        sums = x.new_empty(x.shape[0], count, dtype=torch.float32)
        shared = {"sums": sums, "SIZE": short * long, "PARTS": count, "BLOCK": SQUARES}
        grid = count, x.shape[0]
        self._sizes = size, hidden
        self._squares = Prepared(_squares_kernel, grid, ("x",), **shared)
        self._scale = Prepared(_scale_kernel, grid, ("x",), out=x, EPS=FROBENIUS_EPS, BP=power(count), **shared)
        self._products: list[Prepared] = []
        for a, b, c in NEWTON_SCHULZ:
            self._products += (
                _product(gram, x, x, transposed=True, symmetric=True),
                _product(factor, gram, gram, c, gram, b, symmetric=True),
                _product(other, factor, x, 1.0, x, a),
            )
            x, other = other, x
        self._x = x

    def __call__(self, flat: Tensor) -> Tensor:
        """The orthogonalised directions, flat; the next call may overwrite them."""
        wide = _wide(flat, *self._sizes)
        self._squares(wide)
        self._scale(wide)
        for product in self._products:
            product()
        return _flat(self._x, *self._sizes)


@dataclass(frozen=True)
class Trail:
    """What the backward pass needs: the X, X X^T and polynomial of every step, and the norm of the direction `[3 R, 1, 1]`."""

    steps: list[tuple[Tensor, Tensor, Tensor]]
    norm: Tensor


def retraced(flat: Tensor, size: int, hidden: int) -> Trail:
    """What `orthogonal_backward` needs of directions, flat. size, hidden: D and M."""
    g = _wide(flat, size, hidden)
    wide = torch.promote_types(g.dtype, torch.float32)
    norm = torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True, dtype=wide)
    x = torch.div(g, norm + FROBENIUS_EPS, out=torch.empty_like(g))
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for a, b, c in NEWTON_SCHULZ:
        gram = torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        steps.append((x, gram, factor))
        if len(steps) < len(NEWTON_SCHULZ):
            x = torch.baddbmm(x, factor, x, beta=a)
    return Trail(steps, norm)


def orthogonal_backward(d_flat: Tensor, flat: Tensor, trail: Trail, size: int, hidden: int) -> Tensor:
    """Gradient of the direction, float32 and flat, from that of the orthogonalised one."""
    d = _wide(d_flat.to(flat.dtype), size, hidden)
    for (a, b, c), (x, gram, factor) in zip(reversed(NEWTON_SCHULZ), reversed(trail.steps), strict=True):
        d_factor = torch.bmm(d, x.mT)
        d = torch.baddbmm(d, factor.mT, d, beta=a)
        d_gram = torch.baddbmm(d_factor, d_factor, gram.mT, beta=b, alpha=c)
        d_gram = torch.baddbmm(d_gram, gram.mT, d_factor, alpha=c)
        d = torch.baddbmm(d, d_gram + d_gram.mT, x)
    d, g = d.float(), _wide(flat, size, hidden).float()
    around = trail.norm + FROBENIUS_EPS
    along = (g * d).sum((1, 2), keepdim=True) / (trail.norm.clamp(min=1e-30) * around.square())
    return _flat(d / around - g * along, size, hidden)


def _wide(flat: Tensor, size: int, hidden: int) -> Tensor:
    """Flat `[R, 3 M D]` as matrices `[3 R, short, long]`."""
    if hidden == size:
        return flat.reshape(-1, size, size)
    both, w1 = split(flat, size, hidden)
    both = both.unflatten(1, (2, hidden))
    if hidden > size:
        both = both.mT
    else:
        w1 = w1.mT
    return torch.cat([both, w1[:, None]], 1).flatten(0, 1)


def _flat(x: Tensor, size: int, hidden: int) -> Tensor:
    """The inverse of `_wide`."""
    if hidden == size:
        return x.reshape(-1, 3 * size * size)
    x = x.unflatten(0, (-1, 3))
    both, w1 = x[:, :2], x[:, 2]
    if hidden > size:
        both = both.mT
    else:
        w1 = w1.mT
    return torch.cat([both.flatten(1), w1.flatten(1)], 1)


def split(flat: Tensor, size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """W0 over W2 `[R, 2 M, D]` and W1 `[R, D, M]` in flat matrices."""
    cut = 2 * hidden * size
    return flat[:, :cut].unflatten(1, (2 * hidden, size)), flat[:, cut:].unflatten(1, (size, hidden))
