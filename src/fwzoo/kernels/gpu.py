"""What the Triton kernels share: blocks, loads, dots, rows by rank, and operators that torch.compile sees whole.

Imported only by the `triton` levels. Under the interpreter (TRITON_INTERPRET=1) 16-bit values are widened as they are loaded,
because its 16-bit arithmetic is not right. Kernels read strides from shapes: every tensor they get is contiguous.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import INTERPRETING
from .ranks import CHUNK, Ranks

INTERPRET = tl.constexpr(INTERPRETING)


def power(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


def block(size: int) -> int:
    """The power of two, at least 16, that holds `size`."""
    return max(16, power(size))


def parts(size: int, block: int) -> int:
    """How many blocks hold `size`."""
    return -(-size // block)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The device of `x` made current, so that a launch goes there."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


_COMPILED: dict[tuple[Any, ...], Any] = {}
SETTINGS = ("num_warps", "num_stages")


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """`kernel[grid](**arguments)`, but what was compiled is found by fewer steps: Triton's own takes 50 microseconds a launch.

    Arguments that the kernel has no parameter for are left out, but for num_warps and num_stages.
    """
    given = [arguments.get(name) for name in kernel.arg_names]
    launch_in_order(kernel, grid, given, {name: arguments[name] for name in SETTINGS if name in arguments})


def launch_in_order(kernel: Any, grid: tuple[int, ...], given: Sequence[Any], options: dict[str, Any]) -> None:
    """`launch` with the first arguments in the kernel's order; options: the others, num_warps and num_stages.

    A tensor goes to what was compiled as its address, which spares asking the driver what it is.
    """
    key: list[Any] = [id(kernel), *options.items()]
    addresses: list[Any] = []
    if not INTERPRETING:
        key.append(given[0].get_device())
        for unspecialized, x in zip(_unspecialized(kernel), given, strict=False):
            if isinstance(x, Tensor):
                address = x.data_ptr()
                key += x.dtype, address % 16
                addresses.append(address)
            else:
                key.append(x if x is None or not unspecialized else -(2**31) <= x < 2**31)
                addresses.append(x)
        compiled, others = _COMPILED.get(tuple(key), (None, ()))
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*addresses, *others)
            return
    others = [options.get(name) for name in kernel.arg_names[len(given) :]]
    settings = {name: options[name] for name in SETTINGS if name in options}
    compiled = kernel[grid](*given, *others, **settings)
    if not INTERPRETING:
        _COMPILED[tuple(key)] = compiled, others


_UNSPECIALIZED: dict[int, list[bool]] = {}


def _unspecialized(kernel: Any) -> list[bool]:
    """Which parameters of a kernel are numbers that it is compiled once for."""
    found = _UNSPECIALIZED.get(id(kernel))
    if found is None:
        found = [not x.is_constexpr and x.do_not_specialize for x in kernel.params]
        _UNSPECIALIZED[id(kernel)] = found
    return found


def custom(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake_forward: Callable[..., Any],
    fake_backward: Callable[..., Any],
    *,
    outputs: int,
    inputs: Sequence[int],
    module: str,
    materialize: bool = True,
) -> Callable[..., Any]:
    """An operator that torch.compile and autograd see as one node, its backward another.

    Args:
        name: of the operator.
        forward: annotated function of tensors and numbers, returning a tuple of new tensors.
        backward: annotated function of the gradients of the first `outputs` results, then all arguments and all results of
            `forward`; it returns one gradient for each argument in `inputs`.
        fake_forward, fake_backward: the same with shapes only.
        outputs: how many results are differentiable; the others are kept for backward.
        inputs: positions of the differentiable arguments.
        module: `__name__` of the caller, so that two copies of the package can live in one process.
        materialize: whether `backward` gets zeros, and not None, for results that have no gradient.
    """
    space = re.sub(r"\W", "_", module)
    run = torch.library.custom_op(f"{space}::{name}", forward, mutates_args=())
    run_backward = torch.library.custom_op(f"{space}::{name}_backward", backward, mutates_args=())
    run.register_fake(fake_forward)
    run_backward.register_fake(fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tensors = [isinstance(x, Tensor) for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output)
        ctx.set_materialize_grads(materialize)

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        arguments = [saved.pop(0) if tensor else other for tensor, other in zip(ctx.tensors, ctx.others, strict=True)]
        found = run_backward(*grads[:outputs], *arguments, *saved)
        results: list[Any] = [None] * len(arguments)
        for at, grad in zip(inputs, found, strict=True):
            if isinstance(arguments[at], Tensor):
                results[at] = grad
        return tuple(results)

    run.register_autograd(differentiate, setup_context=keep)
    return run


# --- in kernels ---


@triton.jit
def read(pointers, mask):
    """Values where `mask`, else 0."""
    x = tl.load(pointers, mask=mask, other=0.0)
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def dot(a, b):
    """a @ b in the dtype of a, accumulated in float32; float32 operands keep their digits."""
    return tl.dot(a, b.to(a.dtype), input_precision="tf32x3")


@triton.jit
def of_chunk(c, docs, chunk_doc, T, NC, PLAIN: tl.constexpr):
    """Document, its first row, its number of real tokens, and which of its chunks `c` is. NC: chunks of a plain document."""
    if PLAIN:
        n = (c // NC).to(tl.int64)
        return n, n * T, tl.zeros_like(n) + T, c - n * NC
    else:
        n = tl.load(chunk_doc + c).to(tl.int64)
        at = docs + 4 * n
        return n, tl.load(at), tl.load(at + 1), c - tl.load(at + 2)


@triton.jit
def row_of(rows, start, rank, ok, MASKED: tl.constexpr):
    """Row of the flattened inputs that holds this rank of the document that starts at row `start`."""
    row = start + rank
    if MASKED:
        row = tl.load(rows + row, mask=ok, other=0)
    return row


@triton.jit
def key_pointers(
    k,
    head_x,
    rows,
    n,
    start,
    length,
    h,
    r,
    H,
    K: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where the key of the pair in slot `r` begins, and whether there is one. Slots before the document are in its head."""
    rank = r - SHIFT
    row = row_of(rows, start, rank, (rank >= 0) & (r < length), MASKED)
    pointers = k + (row * H + h) * K
    if SHIFT + W > 1:
        head = head_x + ((n * H + h) * W + r + (W - 1)) * K
        pointers = tl.where(rank >= 0, pointers, head)
    return pointers, (r < length) & (r > -W)


@triton.jit
def value_pointers(
    v,
    head_v,
    rows,
    n,
    start,
    length,
    first,
    h,
    r,
    H,
    V: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The same for the value. `first` is 1 where the document's first token has no pair: with a window, its slot is one of
    the head's. (Without one it has the token's own value, which nothing writes.)
    """
    row = row_of(rows, start, r, (r >= 0) & (r < length), MASKED)
    pointers = v + (row * H + h) * V
    if W > 1:
        head = head_v + ((n * H + h) * W + r + (W - 1)) * V
        pointers = tl.where(r >= first, pointers, head)
    return pointers, (r < length) & (r > -W)


# --- one number a token and head, between tokens [B, T, H] and chunks [M, H, C] ---


@triton.jit(do_not_specialize=["T", "NC"])
def _into_chunks(
    x,
    out,
    low,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H,
    OVERLAP: tl.constexpr,
    PREFIX: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, h = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    r = i * (C - OVERLAP) - OVERLAP + e
    ok = (e >= OVERLAP) & (r < length)
    row = row_of(rows, start, r, ok, MASKED)
    both = ok[:, None] & (h < H)[None, :]
    value = read(x + row[:, None] * H + h[None, :], both).to(tl.float32)
    at = (c * H + h)[None, :] * C + e[:, None]
    if PREFIX:
        wide = tl.cumsum(value.to(tl.float64), 0)
        high = wide.to(tl.float32)
        tl.store(low + at, (wide - high.to(tl.float64)).to(tl.float32), mask=(h < H)[None, :])
        tl.store(out + at, high, mask=(h < H)[None, :])
    else:
        tl.store(out + at, value, mask=(h < H)[None, :])


@triton.jit(do_not_specialize=["T", "NC"])
def _out_of_chunks(
    x,
    out,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H,
    OVERLAP: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, h = tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    r = i * (C - OVERLAP) - OVERLAP + e
    ok = (e >= OVERLAP) & (r < length)
    row = row_of(rows, start, r, ok, MASKED)
    both = ok[:, None] & (h < H)[None, :]
    value = tl.load(x + (c * H + h)[None, :] * C + e[:, None], mask=both, other=0.0)
    tl.store(out + row[:, None] * H + h[None, :], value, mask=both)


def tables(ranks: Ranks) -> dict[str, Any]:
    """The arguments that every kernel over chunks takes."""
    plain = ranks.docs is None
    return {
        "docs": ranks.docs,
        "chunk_doc": ranks.chunk_doc,
        "rows": ranks.rows,
        "T": ranks.tokens,
        "NC": ranks.chunks // ranks.documents,
        "PLAIN": plain,
        "MASKED": ranks.rows is not None,
        "C": CHUNK,
    }


def into_chunks(x: Tensor, ranks: Ranks) -> Tensor:
    """`[B, T, H]` to float32 `[M, H, C]`, 0 in slots without a token of their own."""
    out = x.new_empty(ranks.chunks, x.shape[2], CHUNK, dtype=torch.float32)
    _move(_into_chunks, (x.contiguous(), out, None), ranks, x.shape[2], PREFIX=False)
    return out


def prefix(x: Tensor, ranks: Ranks) -> Tensor:
    """Sums of `[B, T, H]` from each chunk's start up to every token, and what float32 left off of them: `[2, M, H, C]`."""
    out = x.new_empty(2, ranks.chunks, x.shape[2], CHUNK, dtype=torch.float32)
    _move(_into_chunks, (x.contiguous(), out[0], out[1]), ranks, x.shape[2], PREFIX=True)
    return out


def out_of_chunks(x: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """`[M, H, C]` to `[B, T, H]`; masked tokens are 0."""
    make = torch.empty if ranks.rows is None else torch.zeros
    out = make(ranks.batch, ranks.tokens, x.shape[1], dtype=dtype, device=x.device)
    _move(_out_of_chunks, (x, out), ranks, x.shape[1])
    return out


def _move(kernel: Any, tensors: tuple[Any, ...], ranks: Ranks, heads: int, **options: Any) -> None:
    width = min(16, 1 << (heads - 1).bit_length())
    with on_device(tensors[0]):
        kernel[(ranks.chunks, parts(heads, width))](
            *tensors, **tables(ranks), H=heads, OVERLAP=ranks.overlap, BH=width, **options
        )
