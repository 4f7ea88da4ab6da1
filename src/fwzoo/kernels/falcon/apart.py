"""Triton: the numbers of a vector as scalars in every thread's registers, so that a thread can run over columns of its own without waiting."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def eight_of(x):
    """The 8 numbers in x `[8]`."""
    even, odd = tl.split(tl.reshape(x, [2, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    x0, x4 = tl.split(a)
    x2, x6 = tl.split(c)
    x1, x5 = tl.split(b)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def sixteen_of(x):
    """The 16 numbers in x `[16]`."""
    even, odd = tl.split(tl.reshape(x, [2, 2, 2, 2]))
    aa, ac = tl.split(even)
    ba, bc = tl.split(odd)
    a, e = tl.split(aa)
    c, g = tl.split(ac)
    b, f = tl.split(ba)
    d, h = tl.split(bc)
    x0, x8 = tl.split(a)
    x4, x12 = tl.split(e)
    x2, x10 = tl.split(c)
    x6, x14 = tl.split(g)
    x1, x9 = tl.split(b)
    x5, x13 = tl.split(f)
    x3, x11 = tl.split(d)
    x7, x15 = tl.split(h)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
