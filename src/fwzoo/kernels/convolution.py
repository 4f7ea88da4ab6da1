"""Causal depthwise convolution, SiLU and the norm of a head in one Triton kernel, on documents with masks.

Axis letters as everywhere, D channels, W taps, F channels a head. Rows are found by rank (see `ranks.py`): masks and packing
cost no copies. Imported only where the tensors are on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import may_overwrite_states
from .gpu import block, custom, launch, of_chunk, on_device, read, row_of, tables
from .plans import planned
from .ranks import Ranks, ranks_of

NORMS = {None: 0, "rms": 1, "l2": 2}
ROWS = 16  # rows at a time: more do not fit in the registers
ROWS_OF_SUMS = 8  # where sums for every tap are kept too


@triton.jit
def _tensor_of(head, a0, a1, a2, D0, D1, D2, F: tl.constexpr):
    """Of tensors whose channels lie side by side, the one that holds this head, the head's first channel in it, and its width."""
    first = head * F
    a, own, width = a0, first, D0
    if a1 is not None:
        a, own, width = (
            tl.where(first < D0, a0, a1),
            tl.where(first < D0, first, first - D0),
            tl.where(first < D0, D0, D1),
        )
    if a2 is not None:
        last = first >= D0 + D1
        a, own, width = tl.where(last, a2, a), tl.where(last, first - D0 - D1, own), tl.where(last, D2, width)
    return a, own, width


@triton.jit
def _taps_of(weight, column, inside, W: tl.constexpr):
    """The filter of every column, a tuple of W times float32 `[F]`: loaded once a program, they cost more than the rows otherwise."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (read(weight + column * W + j, inside).to(tl.float32),)
    return taps


@triton.jit
def _filtered(
    x,
    past,
    taps,
    rows,
    n,
    start,
    length,
    r,
    own,
    width,
    column,
    inside,
    D,
    W: tl.constexpr,
    PAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The convolution at ranks `r` before SiLU, float32 `[C, F]`; own: the columns in x, which is `width` wide, column: in all D."""
    total = tl.zeros([r.shape[0], column.shape[0]], tl.float32)
    for j in tl.static_range(W):
        rank = r - (W - 1) + j
        ok = (rank >= 0) & (r < length)
        row = row_of(rows, start, rank, ok, MASKED)
        value = read(x + row[:, None] * width + own[None, :], ok[:, None] & inside[None, :]).to(tl.float32)
        if PAST:
            at = past + (n * (W - 1) + rank + (W - 1))[:, None] * D + column[None, :]
            value += read(at, ((rank < 0) & (r < length))[:, None] & inside[None, :]).to(tl.float32)
        total += value * taps[j][None, :]
    return total


@triton.jit
def _inverse_norm(y, eps, F: tl.constexpr, NORM: tl.constexpr):
    """What rows `[C, F]` are multiplied with, `[C, 1]`."""
    squares = tl.sum(y * y, 1)
    inverse = 1.0 / tl.sqrt(squares / F + eps) if NORM == 1 else 1.0 / tl.maximum(tl.sqrt(squares), eps)
    return inverse[:, None]


@triton.jit(do_not_specialize=["T", "NC"])
def _forward_kernel(
    x0, x1, x2, weight, past, y0, y1, y2, docs, chunk_doc, rows, T, NC, D0, D1, D2, NORMED, eps,
    F: tl.constexpr, BF: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, PAST: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """NORMED: how many of all channels belong to normed heads."""
    c, d, head, D = tl.program_id(0).to(tl.int64), tl.arange(0, BF), tl.program_id(1), D0 + D1 + D2
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    x, own, width = _tensor_of(head, x0, x1, x2, D0, D1, D2, F)
    y, _own, _width = _tensor_of(head, y0, y1, y2, D0, D1, D2, F)
    column, inside, own = head * F + d, d < F, own + d
    taps = _taps_of(weight, column, inside, W)
    for begin in range(0, C, ROWS):
        r = i * C + begin + tl.arange(0, ROWS)
        pre = _filtered(x, past, taps, rows, n, start, length, r, own, width, column, inside, D, W, PAST, MASKED)
        out = pre * tl.sigmoid(pre)
        if NORM:
            out = out * tl.where(head * F < NORMED, _inverse_norm(out, eps, F, NORM), 1.0)
        row = row_of(rows, start, r, r < length, MASKED)
        at = y + row[:, None] * width + own[None, :]
        tl.store(at, out.to(y.dtype.element_ty), mask=(r < length)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["T", "NC"])
def _backward_kernel(
    d_y0, d_y1, d_y2, x0, x1, x2, weight, past, d_pre, docs, chunk_doc, rows, T, NC, D0, D1, D2, NORMED, eps,
    F: tl.constexpr, BF: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, PAST: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient before SiLU, at every row, of all channels."""
    c, d, head, D = tl.program_id(0).to(tl.int64), tl.arange(0, BF), tl.program_id(1), D0 + D1 + D2
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    x, own, width = _tensor_of(head, x0, x1, x2, D0, D1, D2, F)
    d_y, _own, _width = _tensor_of(head, d_y0, d_y1, d_y2, D0, D1, D2, F)
    column, inside, own = head * F + d, d < F, own + d
    taps = _taps_of(weight, column, inside, W)
    for begin in range(0, C, ROWS):
        r = i * C + begin + tl.arange(0, ROWS)
        pre = _filtered(x, past, taps, rows, n, start, length, r, own, width, column, inside, D, W, PAST, MASKED)
        gate = tl.sigmoid(pre)
        row = row_of(rows, start, r, r < length, MASKED)
        ok = (r < length)[:, None] & inside[None, :]
        grad = read(d_y + row[:, None] * width + own[None, :], ok).to(tl.float32)
        if NORM:
            out = pre * gate
            inverse = _inverse_norm(out, eps, F, NORM)
            along = tl.sum(grad * out, 1)[:, None]
            if NORM == 1:
                normed = inverse * grad - (inverse * inverse * inverse / F) * along * out
            else:  # where eps is larger than the norm, the norm has no gradient
                normed = inverse * grad - tl.where(inverse < 1.0 / eps, inverse * inverse * inverse, 0.0) * along * out
            grad = tl.where(head * F < NORMED, normed, grad)
        grad = tl.where(ok, grad * gate * (1.0 + pre * (1.0 - gate)), 0.0)
        tl.store(d_pre + row[:, None] * D + column[None, :], grad.to(d_pre.dtype.element_ty), mask=ok)


@triton.jit
def _later(d_pre, rows, start, length, r, wanted, column, inside, D, MASKED: tl.constexpr):
    """Gradient before SiLU at ranks `r`, 0 where there is no token or it is not wanted: `[ROWS, F]`."""
    ok = wanted & (r >= 0) & (r < length)
    row = row_of(rows, start, r, ok, MASKED)
    return read(d_pre + row[:, None] * D + column[None, :], ok[:, None] & inside[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=["T", "NC"])
def _input_kernel(
    d_pre, x0, x1, x2, weight, past, d_x0, d_x1, d_x2, d_past, d_weight, docs, chunk_doc, rows, T, NC, D0, D1, D2,
    F: tl.constexpr, BF: tl.constexpr, W: tl.constexpr, PAST: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Gradient of the inputs, and every chunk's part of the weight's gradient `[chunks, D, W]`."""
    c, d, head, D = tl.program_id(0).to(tl.int64), tl.arange(0, BF), tl.program_id(1), D0 + D1 + D2
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    x, own, width = _tensor_of(head, x0, x1, x2, D0, D1, D2, F)
    d_x, _own, _width = _tensor_of(head, d_x0, d_x1, d_x2, D0, D1, D2, F)
    column, inside, e, g = head * F + d, d < F, tl.arange(0, ROWS), tl.arange(0, BW)
    own = own + d
    taps = _taps_of(weight, column, inside, W)
    totals = ()
    for _ in tl.static_range(W):
        totals = totals + (tl.zeros([ROWS, BF], tl.float32),)
    for begin in range(0, C, ROWS):
        r = i * C + begin + e
        row = row_of(rows, start, r, r < length, MASKED)
        at, ok = row[:, None] * width + own[None, :], (r < length)[:, None] & inside[None, :]
        value = read(x + at, ok).to(tl.float32)
        grad, sums = tl.zeros([ROWS, BF], tl.float32), ()
        for j in tl.static_range(W):
            after = _later(d_pre, rows, start, length, r + (W - 1) - j, r < length, column, inside, D, MASKED)
            grad += after * taps[j][None, :]
            sums = sums + (totals[j] + value * after,)
        totals = sums
        tl.store(d_x + at, grad.to(d_x.dtype.element_ty), mask=ok)
    for j in tl.static_range(W):
        part = tl.sum(totals[j], 0)
        if PAST and i == 0:
            old = past + (n * (W - 1) + g)[:, None] * D + column[None, :]
            value = read(old, (g < W - 1)[:, None] & inside[None, :]).to(tl.float32)
            after = _later(d_pre, rows, start, length, g - j, g < W - 1, column, inside, D, MASKED)
            part += tl.sum(value * after, 0)
        tl.store(d_weight + (c * D + column) * W + j, part, mask=inside)
    if PAST and i == 0:
        before = tl.zeros([BW, BF], tl.float32)
        for j in tl.static_range(W):
            before += _later(d_pre, rows, start, length, g - j, g < W - 1, column, inside, D, MASKED) * taps[j][None, :]
        there = d_past + (n * (W - 1) + g)[:, None] * D + column[None, :]
        tl.store(there, before.to(d_past.dtype.element_ty), mask=(g < W - 1)[:, None] & inside[None, :])


def _warps(head: int) -> int:
    return 4 if head <= 64 else 8


def _named(name: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    return {f"{name}{i}": x for i, x in enumerate(tensors)}


def _common(
    xs: Sequence[Tensor | None], weight: Tensor, past: Tensor | None, ranks: Ranks, head: int
) -> dict[str, Any]:
    widths = {f"D{i}": 0 if x is None else x.shape[2] for i, x in enumerate(xs)}
    return {
        **tables(ranks),
        **_named("x", xs),
        **widths,
        "weight": weight,
        "past": past,
        "F": head,
        "BF": block(head),
        "W": weight.shape[1],
        "PAST": past is not None,
    }


def _forward(
    x0: Tensor, x1: Tensor | None, x2: Tensor | None, weight: Tensor, past: Tensor | None, docs: Tensor | None,
    chunk_doc: Tensor | None, rows: Tensor | None, sizes: list[int], norm: int, normed: int, head: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ranks = ranks_of(sizes, docs, chunk_doc, None, rows)
    ys = [None if x is None else ranks.new_like(x) for x in (x0, x1, x2)]
    common = _common((x0, x1, x2), weight, past, ranks, head)
    with on_device(x0):
        launch(
            _forward_kernel, (ranks.chunks, weight.shape[0] // head), **common, **_named("y", ys), NORMED=normed, eps=eps, NORM=norm,
            ROWS=ROWS, num_warps=_warps(head),
        )  # fmt: skip
    y0, y1, y2 = (x0.new_empty(0) if y is None else y for y in ys)
    return y0, y1, y2


@planned
def _gradients(
    d_y0: Tensor, d_y1: Tensor, d_y2: Tensor, x0: Tensor, x1: Tensor | None, x2: Tensor | None, weight: Tensor, past: Tensor | None,
    docs: Tensor | None, chunk_doc: Tensor | None, rows: Tensor | None, sizes: list[int], norm: int, normed: int, head: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranks, xs = ranks_of(sizes, docs, chunk_doc, None, rows), (x0, x1, x2)
    d_ys = [None if x is None else d_y for x, d_y in zip(xs, (d_y0, d_y1, d_y2), strict=True)]
    d_xs = [None if x is None else ranks.new_like(x) for x in xs]
    d_past = x0.new_empty(0) if past is None else torch.zeros_like(past)
    d_pre = x0.new_empty(*x0.shape[:2], weight.shape[0])
    parts = x0.new_empty(ranks.chunks, *weight.shape, dtype=torch.float32)
    common, grid = _common(xs, weight, past, ranks, head), (ranks.chunks, weight.shape[0] // head)
    with on_device(x0):
        launch(
            _backward_kernel, grid, **common, **_named("d_y", d_ys), d_pre=d_pre, NORMED=normed, eps=eps, NORM=norm, ROWS=ROWS,
            num_warps=_warps(head),
        )  # fmt: skip
        launch(
            _input_kernel, grid, d_pre=d_pre, **common, **_named("d_x", d_xs), d_past=d_past, d_weight=parts, ROWS=ROWS_OF_SUMS,
            BW=block(weight.shape[1]), num_warps=4,
        )  # fmt: skip
    d_x0, d_x1, d_x2 = (x0.new_empty(0) if d_x is None else d_x for d_x in d_xs)
    return d_x0, d_x1, d_x2, parts, d_past


def _backward(
    d_y0: Tensor, d_y1: Tensor, d_y2: Tensor, x0: Tensor, x1: Tensor | None, x2: Tensor | None, weight: Tensor, past: Tensor | None,
    docs: Tensor | None, chunk_doc: Tensor | None, rows: Tensor | None, sizes: list[int], norm: int, normed: int, head: int, eps: float,
    y0: Tensor, y1: Tensor, y2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_ys = (d_y.contiguous() for d_y in (d_y0, d_y1, d_y2))
    *d_xs, parts, d_past = _gradients(
        *d_ys, x0, x1, x2, weight, past, docs, chunk_doc, rows, sizes, norm, normed, head, eps
    )
    return *d_xs, parts.sum(0).to(weight.dtype), d_past


def _like(x: Tensor | None, first: Tensor) -> Tensor:
    return first.new_empty(0) if x is None else torch.empty_like(x)


_convolution = custom(
    "convolution",
    planned(_forward),
    _backward,
    lambda *arguments: tuple(_like(x, arguments[0]) for x in arguments[:3]),
    lambda *arguments: tuple(_like(x, arguments[3]) for x in arguments[3:8]),
    outputs=3,
    inputs=range(5),
    module=__name__,
)


def convolution(
    parts: Sequence[Tensor],
    weight: Tensor,
    past: Tensor | None,
    ranks: Ranks,
    *,
    head: int,
    norms: Sequence[str | None],
    eps: float = 0.0,
) -> list[Tensor]:
    """SiLU of the causal depthwise convolution of every document's real tokens, each head then normed.

    Args:
        parts: up to three `[B, T, D_i]`, whose channels lie side by side in D. weight: `[D, W]`, newest tap last.
        past: the last W - 1 real inputs `[N, W - 1, D]`, or None.
        ranks: with overlap 0. head: F, divides D_i. norms: of every part, over F channels: the first ones "rms" or "l2", all the same,
            the others None. eps: of the norm.

    Returns: `[B, T, D_i]` in the dtype of x; rows of masked tokens are 0.
    """
    kind = norms[0]
    own = [part.shape[2] for part, norm in zip(parts, norms, strict=True) if norm is not None]
    assert list(norms) == [kind] * len(own) + [None] * (len(parts) - len(own))
    missing = (None,) * (3 - len(parts))
    past = None if past is None else past.contiguous()
    ys = _convolution(
        *(x.contiguous() for x in parts), *missing, weight.contiguous(), past, ranks.docs, ranks.chunk_doc, ranks.rows, ranks.sizes,
        NORMS[kind], sum(own), head, eps,
    )  # fmt: skip
    return list(ys[: len(parts)])


@triton.jit
def _step_head(
    x, weight, past, new_past, y, real, head, first, D, past_D, eps,
    F: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One head of a part whose channels begin at `first` of all channels."""
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, BF)
    own, column, inside = head * F + d, first + head * F + d, d < F
    # a masked token has no entries: its past stays where it is (a bound, as masks of blocks and scalars do not mix)
    alive = tl.load(real + n).to(tl.int32) if MASKED else 1
    moves, stays = d < F * alive, d < F * (1 - alive)
    now = read(x + n * D + own, moves)
    total = now.to(tl.float32) * read(weight + column * W + W - 1, inside).to(tl.float32)
    for j in tl.static_range(W - 1):
        at = (n * (W - 1) + j) * past_D + column
        kept = read(past + at, inside)
        total += kept.to(tl.float32) * read(weight + column * W + j, inside).to(tl.float32)
        if j > 0:
            tl.store(new_past + at - past_D, kept.to(new_past.dtype.element_ty), mask=moves)
        tl.store(new_past + at, kept.to(new_past.dtype.element_ty), mask=stays)
    if W > 1:
        at = (n * (W - 1) + W - 2) * past_D + column
        tl.store(new_past + at, now.to(new_past.dtype.element_ty), mask=moves)
    out = tl.where(moves, total * tl.sigmoid(total), 0.0)
    if NORM:
        square = tl.sum(out * out, 0)
        out = out / tl.sqrt(square / F + eps) if NORM == 1 else out / tl.maximum(tl.sqrt(square), eps)
    tl.store(y + n * D + own, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _step_kernel(
    x0, x1, x2, weight, past, new_past, y0, y1, y2, real, D0, D1, D2, eps,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    W: tl.constexpr, MASKED: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    head, past_D = tl.program_id(1), D0 + D1 + D2
    if head < D0 // F0:
        _step_head(x0, weight, past, new_past, y0, real, head, 0, D0, past_D, eps, F0, W, N0, MASKED, BF)
    elif head < D0 // F0 + D1 // F1:
        head -= D0 // F0
        _step_head(x1, weight, past, new_past, y1, real, head, D0, D1, past_D, eps, F1, W, N1, MASKED, BF)
    else:
        head -= D0 // F0 + D1 // F1
        _step_head(x2, weight, past, new_past, y2, real, head, D0 + D1, D2, past_D, eps, F2, W, N2, MASKED, BF)


def convolution_step(
    parts: Sequence[Tensor],
    weight: Tensor,
    past: Tensor,
    mask: Tensor | None,
    *,
    heads: Sequence[int],
    norms: Sequence[str | None],
    eps: float,
) -> tuple[list[Tensor], Tensor]:
    """`convolution` for one token, without a backward pass, of three parts at once, and the new past.

    Args:
        parts: three `[B, 1, D_i]`. weight: `[D, W]`. past: `[B, W - 1, D]`, overwritten within `contract.overwriting_states()`.
        mask: bool `[B, 1]` or None. heads, norms: F and norm of every part.
    """
    past, mask = past.contiguous(), None if mask is None else mask.contiguous()
    parts = [x.contiguous() for x in parts]
    new, outputs = past if may_overwrite_states() else torch.empty_like(past), [torch.empty_like(x) for x in parts]
    widths = [x.shape[2] for x in parts]
    number = sum(width // head for width, head in zip(widths, heads, strict=True))
    with on_device(past):
        launch(
            _step_kernel, (past.shape[0], number), **{f"x{i}": x for i, x in enumerate(parts)}, weight=weight.contiguous(), past=past,
            new_past=new, **{f"y{i}": y for i, y in enumerate(outputs)}, real=mask, **{f"D{i}": width for i, width in enumerate(widths)},
            eps=eps, **{f"F{i}": head for i, head in enumerate(heads)}, **{f"N{i}": NORMS[norm] for i, norm in enumerate(norms)},
            W=weight.shape[1], MASKED=mask is not None, BF=block(max(heads)), num_warps=1,
        )  # fmt: skip
    return outputs, new


def last_inputs(x: Tensor, past: Tensor, ranks: Ranks) -> Tensor:
    """The last W - 1 real inputs of every document after `x` `[B, T, D]`, given those before it: `[N, W - 1, D]`."""
    size, kept = past.shape[1], []
    for back in range(size, 0, -1):
        row, there = ranks.last(x, back)
        earlier = (size - back + ranks.lengths(x.device)).clamp(max=size - 1)
        old = past.gather(1, earlier[:, None, None].expand(-1, 1, past.shape[2]))[:, 0]
        kept.append(torch.where(there[:, None], row, old))
    return torch.stack(kept, 1)
