"""Triton: a matrix of 16 columns as 16 vectors and back, so that a thread can run over columns without a word to another."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sixteen(x):
    """x `[..., 2, 2, 2, 2]` as 16 tensors, in the order of the flattened axes."""
    a, b = tl.split(x)
    aa, ab = tl.split(a)
    ba, bb = tl.split(b)
    aaa, aab = tl.split(aa)
    aba, abb = tl.split(ab)
    baa, bab = tl.split(ba)
    bba, bbb = tl.split(bb)
    x0, x8 = tl.split(aaa)
    x4, x12 = tl.split(aab)
    x2, x10 = tl.split(aba)
    x6, x14 = tl.split(abb)
    x1, x9 = tl.split(baa)
    x5, x13 = tl.split(bab)
    x3, x11 = tl.split(bba)
    x7, x15 = tl.split(bbb)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def columns_of(x, R: tl.constexpr):
    """The columns of x `[R, 16]`, each `[R]`."""
    return _sixteen(tl.reshape(x, [R, 2, 2, 2, 2]))


@triton.jit
def numbers_of(x):
    """The numbers in x `[16]`."""
    return _sixteen(tl.reshape(x, [2, 2, 2, 2]))


@triton.jit
def matrix_of(x, R: tl.constexpr):
    """The inverse of `columns_of`."""
    even = tl.join(
        tl.join(tl.join(x[0], x[8]), tl.join(x[4], x[12])), tl.join(tl.join(x[2], x[10]), tl.join(x[6], x[14]))
    )
    odd = tl.join(
        tl.join(tl.join(x[1], x[9]), tl.join(x[5], x[13])), tl.join(tl.join(x[3], x[11]), tl.join(x[7], x[15]))
    )
    return tl.reshape(tl.join(even, odd), [R, 16])
