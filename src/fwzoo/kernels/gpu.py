"""What the Triton kernels share: blocks, loads, dots, rows by rank, and operators that torch.compile sees whole.

Imported only by the `triton` levels. Under the interpreter (TRITON_INTERPRET=1) 16-bit values are widened as they are loaded,
because its 16-bit arithmetic is not right. Kernels read strides from shapes: every tensor they get is contiguous.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from triton import knobs

from .ahead import LOCK, ahead, compile_call, rehearsed
from .contract import INTERPRETING
from .plans import note_launch
from .ranks import CHUNK, Ranks

INTERPRET = tl.constexpr(INTERPRETING)
PLAIN = (Tensor, torch.nn.Parameter)
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch


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


@functools.cache
def _shared_memory(device: int) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"])


def roomy(x: Tensor) -> bool:
    """Whether a program on the device of `x` has the shared memory of a Hopper card, or is interpreted."""
    return INTERPRETING or _shared_memory(x.get_device()) >= 200 * 1024


class _Parameters(NamedTuple):
    """Those of a kernel: all names; a choice of the constants, and one of the other ones; of the latter, places and whether a number's
    value is compiled in.
    """

    names: list[str]
    constants: Callable[[list[Any]], Any]
    others: Callable[[list[Any]], tuple[Any, ...]]
    places: list[tuple[int, bool]]


_PARAMETERS: dict[int, _Parameters] = {}  # by the kernel's id: Triton's own hash of a kernel takes longer
_COMPILED: dict[tuple[Any, ...], Any] = {}


def _parameters(kernel: Any) -> _Parameters:
    constants = [i for i, x in enumerate(kernel.params) if x.is_constexpr]
    places = [(i, not x.do_not_specialize) for i, x in enumerate(kernel.params) if not x.is_constexpr]
    others = operator.itemgetter(*(i for i, _ in places))
    return _Parameters(kernel.arg_names, operator.itemgetter(*constants), others, places)


class _Interpreted:
    """What a compiled kernel is for `plans`, of one that the interpreter runs: tensors are found again by their addresses."""

    function, packed_metadata = None, ()

    def __init__(self, kernel: Any, values: list[Any], options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options
        self._like = [x if isinstance(x, Tensor) and x.numel() else None for x in values]

    def run(self, x: int, y: int, z: int, *more: Any) -> None:
        values = list(more[6:])
        for place, like in enumerate(self._like):
            if like is not None:
                data = (ctypes.c_byte * (like.numel() * like.element_size())).from_address(values[place])
                values[place] = torch.frombuffer(data, dtype=like.dtype).view(like.shape)
        self._kernel[x, y, z](*values, **self._options)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> Any:
    """`kernel[grid](**arguments)`, but what was compiled is found and started by fewer steps: Triton's own take 50 microseconds.

    The first argument is a tensor, on the current device. Arguments that the kernel has no parameter for are left out, but for
    num_warps, num_stages and maxnreg. Returns what was compiled, nothing under the interpreter and in a rehearsal (see `ahead.py`).
    """
    options: dict[str, Any] = {name: arguments[name] for name in OPTIONS if name in arguments}
    if INTERPRETING:
        values = list(map(arguments.get, kernel.arg_names))
        with _disable_current_modes():  # what the interpreter does with torch is no part of the call
            kernel[grid](*values, **options)
        note_launch((*grid, 1, 1)[:3], _Interpreted(kernel, values, options), values)
        return None
    parameters = _PARAMETERS.get(id(kernel))
    if parameters is None:
        parameters = _PARAMETERS[id(kernel)] = _parameters(kernel)
    rehearsal = rehearsed()
    address_of = Tensor.data_ptr if rehearsal is None else rehearsal.address
    given: list[Any] = list(map(arguments.get, parameters.names))
    device, addresses, key = given[0].get_device(), given.copy(), [id(kernel), *options.values()]
    for (place, specialised), x in zip(parameters.places, parameters.others(given), strict=True):
        if isinstance(x, Tensor):
            addresses[place] = address = address_of(x)
            key += x.dtype, address & 15
        elif specialised or x is None:
            key.append(x)
        elif isinstance(x, int):
            key.append(-(2**31) <= x < 2**31)
    whole_key = (device, parameters.constants(given), *key)
    if rehearsal is not None:
        rehearsal.note(whole_key, kernel, given, addresses, options)
        return None
    compiled = _COMPILED.get(whole_key)
    if compiled is None:
        with LOCK:
            if whole_key not in _COMPILED:
                compile_call(_COMPILED)
            compiled = _COMPILED[whole_key] = kernel[grid](*given, **options)
    elif knobs.runtime.launch_enter_hook.calls:
        kernel[grid](*given, **options)
    else:
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses)
    note_launch((*grid, 1, 1)[:3], compiled, given)
    return compiled


def launch_in_order(kernel: Any, grid: tuple[int, ...], given: Sequence[Any], options: dict[str, Any]) -> None:
    """`launch` with the first arguments in the kernel's order; options: the others, num_warps and num_stages."""
    launch(kernel, grid, **dict(zip(kernel.arg_names, given, strict=False)), **options)


_LIBRARIES: dict[str, torch.library.Library] = {}


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
    _LIBRARIES.pop(f"{space}::{name}", None)  # an operator lives as long as its library; a module may be loaded again
    library = _LIBRARIES[f"{space}::{name}"] = torch.library.Library(space, "FRAGMENT")

    def both(*arguments: Any) -> None:
        results = forward(*arguments)
        grads = [torch.empty_like(x) for x in results[:outputs]]
        backward(*grads, *arguments, *results)
        if not materialize:  # often nobody wants a gradient through the state
            backward(grads[0], *[None] * (outputs - 1), *arguments, *results)

    trained, forward, backward = ahead(forward, both), ahead(forward), ahead(backward)

    def define(own: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        library.define(own + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        for device in ("CUDA", "CPU"):  # on a CPU under the interpreter
            library.impl(own, function, device)
        torch.library.register_fake(f"{space}::{own}", fake, lib=library)
        return getattr(getattr(torch.ops, space), own).default

    run, run_backward = define(name, forward, fake_forward), define(f"{name}_backward", backward, fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tensors = [isinstance(x, Tensor) for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output)
        ctx.set_materialize_grads(materialize)

    def differentiate(ctx: Any, *grads: Any, run: Callable[..., Any] = run_backward) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if tensor else other for tensor, other in zip(ctx.tensors, ctx.others, strict=True)]
        found = run(*grads[:outputs], *arguments, *saved)
        results: list[Any] = [None] * len(arguments)
        for at, grad in zip(inputs, found, strict=True):
            if isinstance(arguments[at], Tensor):
                results[at] = grad
        return tuple(results)

    torch.library.register_autograd(f"{space}::{name}", differentiate, setup_context=keep, lib=library)

    class Direct(torch.autograd.Function):
        """The same where nobody looks at operators: torch's way to a custom one takes longer than a kernel."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = trained(*arguments)
            keep(ctx, arguments, results)
            ctx.mark_non_differentiable(*results[outputs:])
            return results

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return differentiate(ctx, *grads, run=backward)

    def call(*arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        watched = is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active()
        if torch.compiler.is_compiling() or watched or any(type(x) not in PLAIN for x in tensors):
            return run(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return Direct.apply(*arguments)
        return forward(*arguments)

    return call


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
def decayed_by(x):
    """exp(x) of float32, 0 where that is below 1e-38: Triton's own keeps such numbers, with three instructions more."""
    if INTERPRET:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def split_dot(a, b):
    """a @ b of float32 and any dtype, accumulated in float32; a keeps 16 bits or more: beside bfloat16 it is two halves, and two products."""
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        return tl.dot(high, b, tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b))
    else:
        return dot(a, b)


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
def slots_of(i, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Place in its block and rank of every slot of chunk `i` of a document: the first W - 1 pairs of each block of N slots are the
    last of the block before it."""
    slot = tl.arange(0, C)
    return slot % N, (i * (C // N) + slot // N) * (N - W + 1) - (W - 1) + slot % N


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
    """Where the key of the pair in slot `r` begins, and whether there is one. Slots before the document are in its head (None:
    there are no pairs in them).
    """
    rank = r - SHIFT
    row = row_of(rows, start, rank, (rank >= 0) & (r < length), MASKED)
    pointers, there = k + (row * H + h) * K, (r < length) & (r > -W)
    if SHIFT + W > 1:
        if head_x is None:
            there = there & (rank >= 0)
        else:
            pointers = tl.where(rank >= 0, pointers, head_x + ((n * H + h) * W + r + (W - 1)) * K)
    return pointers, there


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
    pointers, there = v + (row * H + h) * V, (r < length) & (r > -W)
    if W > 1:
        if head_v is None:
            there = there & (r >= first)
        else:
            pointers = tl.where(r >= first, pointers, head_v + ((n * H + h) * W + r + (W - 1)) * V)
    return pointers, there


@triton.jit
def missing_pairs(first, n, SHIFT: tl.constexpr):
    """1 where the first token of document `n` has no pair: what `first` says of it (None: it has no key before it)."""
    return SHIFT if first is None else tl.load(first + n)


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
    _move(_into_chunks, ranks, x.shape[2], x=x.contiguous(), out=out, PREFIX=False)
    return out


def prefix(x: Tensor, ranks: Ranks) -> Tensor:
    """Sums of `[B, T, H]` from each chunk's start up to every token, and what float32 left off of them: `[2, M, H, C]`."""
    out = x.new_empty(2, ranks.chunks, x.shape[2], CHUNK, dtype=torch.float32)
    _move(_into_chunks, ranks, x.shape[2], x=x.contiguous(), out=out[0], low=out[1], PREFIX=True)
    return out


def out_of_chunks(x: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """`[M, H, C]` to `[B, T, H]`; masked tokens are 0."""
    make = torch.empty if ranks.rows is None else torch.zeros
    out = make(ranks.batch, ranks.tokens, x.shape[1], dtype=dtype, device=x.device)
    _move(_out_of_chunks, ranks, x.shape[1], x=x, out=out)
    return out


def _move(kernel: Any, ranks: Ranks, heads: int, **arguments: Any) -> None:
    width = min(16, power(heads))
    with on_device(arguments["x"]):
        launch(
            kernel, (ranks.chunks, parts(heads, width)), **tables(ranks), H=heads, OVERLAP=ranks.overlap, BH=width, **arguments
        )  # fmt: skip


# --- many launches that are nearly alike ---


class Prepared:
    """Launches of a kernel on the current device that differ in a few arguments, which are given when it is called.

    What was compiled depends on the alignment of those alone, so it is found in one step.

    Args:
        kernel, grid: as in `launch`. varying: names of the arguments that differ, tensors or integers. arguments: the others.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], varying: Sequence[str], **arguments: Any) -> None:
        self._kernel, self._grid, self._varying, self._arguments = kernel, grid, varying, arguments
        self._rehearsed = rehearsed() is not None
        self._given = [] if self._rehearsed else [
            x.data_ptr() if isinstance(x := arguments.get(name), Tensor) else x for name in kernel.arg_names
        ]  # fmt: skip
        self._at = [kernel.arg_names.index(name) for name in varying]
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *values: Any) -> None:
        """Launch it; values: of the varying arguments."""
        if self._rehearsed:
            launch(self._kernel, self._grid, **self._arguments, **dict(zip(self._varying, values, strict=True)))
            return
        given = self._given.copy()
        key = []
        for at, x in zip(self._at, values, strict=True):
            if isinstance(x, Tensor):
                given[at] = address = x.data_ptr()
                key.append(address & 15)
            else:
                given[at] = x
                key.append(x >> 31)
        compiled = self._compiled.get(tuple(key))
        if compiled is None or knobs.runtime.launch_enter_hook.calls:
            varying = dict(zip(self._varying, values, strict=True))
            compiled = launch(self._kernel, self._grid, **self._arguments, **varying)
            if compiled is not None:
                self._compiled[tuple(key)] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        x, y, z = (*self._grid, 1, 1)[:3]
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
