"""Triton: the top eigenvalue of the Gram matrix of every window of keys."""
# mypy: disable-error-code="assignment"
# (in a kernel, a tuple grows)

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu import key_pointers, of_chunk, read, slots_of

SQUARINGS = tl.constexpr(24)


@triton.jit
def _square(power, W: tl.constexpr):
    """The square of a symmetric matrix, a tuple of its W * W entries."""
    square = ()
    for i in tl.static_range(W):
        for j in tl.static_range(W):
            if j < i:
                square = square + (square[j * W + i],)
            else:
                entry = power[i * W] * power[j * W]
                for m in tl.static_range(1, W):
                    entry += power[i * W + m] * power[j * W + m]
                square = square + (entry,)
    return square


@triton.jit
def top_direction(gram, W: tl.constexpr):
    """Top eigenvalue and eigenvector of a semidefinite matrix, a tuple of its entries, by squaring until only the top direction is left.

    A thread holds whole matrices, so that nothing passes between threads.
    """
    power = gram
    for _ in range(SQUARINGS // 3):
        power = _eighth_power(power, W)
    return _quotient(gram, power, W)


@triton.jit
def top_value(gram, W: tl.constexpr):
    """The eigenvalue alone of one matrix, a tuple of scalars: most need few squarings."""
    power, rounds, rest = gram, 0, 1.0
    while (rounds < SQUARINGS // 3) & (rest > 1e-4):
        power = _eighth_power(power, W)
        rounds += 1
        trace, square = power[0], power[0] * power[0]
        for i in tl.static_range(1, W):
            trace += power[i * W + i]
            square += power[i * W + i] * power[i * W + i]
            for j in tl.static_range(i):
                square += 2.0 * power[i * W + j] * power[i * W + j]
        rest = 1.0 - square / tl.maximum(
            trace * trace, 1e-30
        )  # the others' share, squared from here on: the error of the quotient
    top, _u = _quotient(gram, power, W)
    return top


@triton.jit
def _eighth_power(power, W: tl.constexpr):
    """The 8th power of a semidefinite matrix over its largest entry."""
    largest = power[0]
    for i in tl.static_range(1, W):  # it is on the diagonal
        largest = tl.maximum(largest, power[i * W + i])
    inverse, scaled = 1.0 / tl.maximum(largest, 1e-30), ()
    for i in tl.static_range(W * W):
        scaled = scaled + (power[i] * inverse,)
    return _square(_square(_square(scaled, W), W), W)


@triton.jit
def _quotient(gram, power, W: tl.constexpr):
    """Eigenvalue and eigenvector of gram from a power of it that has rank 1."""
    best, place = power[0], power[0] * 0.0
    for i in tl.static_range(1, W):
        place = tl.where(power[i * W + i] > best, 1.0 * i, place)
        best = tl.maximum(best, power[i * W + i])
    u, norm, image = (), best * 0.0, best * 0.0
    for i in tl.static_range(W):
        entry = power[i * W]
        for j in tl.static_range(1, W):
            entry = tl.where(place == j, power[i * W + j], entry)
        u = u + (entry,)
        norm += entry * entry
    scale, unit = tl.where(norm > 0, 1.0 / tl.sqrt(tl.maximum(norm, 1e-30)), 0.0), ()
    for i in tl.static_range(W):
        unit = unit + (u[i] * scale,)
    for i in tl.static_range(W):
        for j in tl.static_range(W):
            image += unit[i] * gram[i * W + j] * unit[j]
    return image, unit


@triton.jit(do_not_specialize=["T", "NC", "M"])
def window_products(
    k,
    head_x,
    bands,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    M,
    H,
    K: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Products of every key with itself and the W - 1 before it, `[W, M, H, C]`."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, r = slots_of(i, W, C, 16)
    d = tl.arange(0, BK)
    p, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    x = read(p[:, None] + d[None, :], ok[:, None] & (d < K)[None, :]).to(tl.float32)
    at = bands + (c * H + h) * C + tl.arange(0, C)
    tl.store(at, tl.sum(x * x, 1))
    for apart in tl.static_range(1, W):
        p, ok = key_pointers(k, head_x, rows, n, start, length, h, r - apart, H, K, W, SHIFT, MASKED)
        y = read(p[:, None] + d[None, :], (ok & (e >= apart))[:, None] & (d < K)[None, :]).to(tl.float32)
        tl.store(at + apart * M * H * C, tl.sum(x * y, 1))


@triton.jit(do_not_specialize=["T", "NC", "M"])
def top_eigenvalues(
    bands,
    energy,
    vector,
    docs,
    chunk_doc,
    T,
    NC,
    M,
    H,
    W: tl.constexpr,
    PLAIN: tl.constexpr,
    C: tl.constexpr,
):
    """Top eigenvalue and eigenvector of the Gram matrix of every window, from the products of its keys."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, r = slots_of(i, W, C, 16)
    token = (e >= W - 1) & (r < length)
    at, gram = bands + (c * H + h) * C + tl.arange(0, C), ()
    for a in tl.static_range(W):
        for b in tl.static_range(W):
            if b < a:
                gram = gram + (gram[b * W + a],)
            else:
                gram = gram + (tl.load(at + (b - a) * M * H * C - a, mask=token, other=0.0),)
    top, u = top_direction(gram, W)
    tl.store(energy + (c * H + h) * C + tl.arange(0, C), top)
    for w in tl.static_range(W):
        tl.store(vector + ((start + r) * H + h) * W + w, u[w], mask=token)
