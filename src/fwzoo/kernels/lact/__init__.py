"""Large-chunk test-time training: a fast SwiGLU a head that is updated once a chunk of tokens.

Source: "Test-Time Training Done Right" (2025).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import contract
from ..contract import Op
from ..samples import FLOATS, Draw, Sample, Samples
from .chunk import lact_chunk
from .reference import lact_reference
from .rules import WIDEST, LactState, Options, Tokens, Weights, empty_state

__all__ = ["LactState", "lact"]


def _samples(draw: Draw) -> Samples:
    sizes, size, hidden = draw.sizes, draw.sizes.key, 2 * draw.sizes.key
    tokens = {"q": draw.unit_heads(size), "k": draw.unit_heads(size), "v": draw.heads(size)}
    rates = {f"lr{i}": 0.01 * draw.gate(1) for i in range(3)}
    shapes = {"w0": (hidden, size), "w1": (size, hidden), "w2": (hidden, size)}
    weights = {name: draw.normal(sizes.heads, *shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    momentum = {"momentum": draw.gate()}
    dtypes = FLOATS[:2]  # a fast SwiGLU leaves the range of float16
    yield Sample("", tokens, rates, weights, {"chunk_size": 64}, dtypes)
    yield Sample("momentum, prenorm", tokens, rates | momentum, weights, {"chunk_size": 64, "prenorm": True}, dtypes)


def _limit(few: bool = False, hidden: int = 1, **_: Any) -> str | None:
    """hidden: M."""
    return f"M is {hidden}, and the Triton kernels take M up to {WIDEST}" if hidden > WIDEST else None


def _triton(*arguments: Any) -> tuple[Tensor, LactState]:
    from .triton import lact_triton  # only here: fwzoo does not need triton

    return lact_triton(*arguments)


LACT = contract.register(
    Op(
        "lact",
        {"reference": lact_reference, "chunk": lact_chunk, "triton": _triton},
        samples=_samples,
        limit=_limit,
        fits=functools.partial(contract.heads_fit, largest=WIDEST),
    )
)


def lact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr0: Tensor,
    lr1: Tensor,
    lr2: Tensor,
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    momentum: Tensor | None = None,
    chunk_size: int = 2048,
    muon: bool = False,
    prenorm: bool = False,
    state: LactState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, LactState]:
    """Read a fast SwiGLU with every token; after every `chunk_size` tokens, move it towards their key-value pairs.

    All tokens of a chunk read the weights from before the chunk. Gradients flow through the updates.

    Source: "Test-Time Training Done Right" (2025).

    Args:
        q, k, v: query, key and value `[B, T, H, D]`, already normalised and rotated.
        lr0, lr1, lr2: rates of the three matrices, `[B, T, H, 1]` or, with M = D, `[B, T, H, D]`.
        w0, w1, w2: initial weights `[H, M, D]`, `[H, D, M]`, `[H, M, D]`; not used when a state is given.
        momentum: `[B, T, H]`, share of the last direction that is kept (mean over the chunk); None for none.
        chunk_size: C, tokens of a document in one update.
        muon: orthogonalise each direction with five Newton-Schulz steps.
        prenorm: sum the updates un-normalised and read a copy with rescaled rows; otherwise rescale the weights themselves.
        state: `LactState` to continue from. mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, D and M up to 8192).

    Returns:
        Output `[B, T, H, D]` in the dtype of q (rows of masked tokens are 0), and the complete `LactState`.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    _check_tokens(q, k, v, (lr0, lr1, lr2), momentum)
    _check_weights(q, lr0, w0, w1, w2)
    contract.whole_number("chunk_size", chunk_size, 1)
    contract.one_of("muon", muon, (True, False))
    contract.one_of("prenorm", prenorm, (True, False))
    options = Options(chunk_size, momentum is not None, muon, prenorm)
    contract.check_mask(mask, q)
    bounds = contract.check_cu_seqlens(cu_seqlens, q)
    documents = q.shape[0] if bounds is None else len(bounds) - 1
    dtype = contract.compute_dtype(q.dtype)
    state, counts = _start(state, k, lr0.shape[-1], (w0, w1, w2), documents, chunk_size)
    if momentum is None:
        momentum = q.new_zeros(q.shape[:3], dtype=dtype)
    tokens = Tokens(k, v, *(x.to(dtype) for x in (lr0, lr1, lr2, momentum)))
    contract.check_values({"q": q, **tokens._asdict()}, mask)
    run = LACT.resolve(level, q.shape[1], (q, k, v), _limit(hidden=w0.shape[1]))
    return run(q, tokens, options, state, counts, mask, bounds)


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, rates: tuple[Tensor, ...], momentum: Tensor | None) -> None:
    contract.is_tensor("q", q, 4)
    batch, length, heads, size = q.shape
    if batch < 1 or heads < 1 or size < 1:
        raise ValueError(f"q has shape {list(q.shape)}; B, H and D must be at least 1")
    for name, x in (("k", k), ("v", v)):
        contract.is_tensor(name, x, 4)
        contract.has_shape(name, x, q.shape, "[B, T, H, D] like q")
        contract.same_device(name, x, q)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; it must be {q.dtype}, like q")
    for i, x in enumerate(rates):
        contract.is_tensor(f"lr{i}", x, 4)
    columns = size if rates[0].shape[-1] == size else 1
    for i, x in enumerate(rates):
        contract.has_shape(
            f"lr{i}", x, (batch, length, heads, columns), "[B, T, H, 1] or [B, T, H, D], all three alike,"
        )
        contract.same_device(f"lr{i}", x, q)
    if momentum is not None:
        contract.is_tensor("momentum", momentum, 3)
        contract.has_shape("momentum", momentum, (batch, length, heads), "[B, T, H]")
        contract.same_device("momentum", momentum, q)


def _check_weights(q: Tensor, lr0: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> None:
    heads, size = q.shape[2:]
    contract.is_tensor("w0", w0, 3)
    hidden = w0.shape[1]
    contract.has_shape("w0", w0, (heads, max(hidden, 1), size), "[H, M, D]")
    for name, x, shape, axes in (
        ("w1", w1, (heads, size, hidden), "[H, D, M]"),
        ("w2", w2, (heads, hidden, size), "[H, M, D]"),
    ):
        contract.is_tensor(name, x, 3)
        contract.has_shape(name, x, shape, axes)
    for name, x in (("w0", w0), ("w1", w1), ("w2", w2)):
        contract.same_device(name, x, q)
    if lr0.shape[-1] > 1 and hidden != size:
        raise ValueError(
            f"lr0 has shape {list(lr0.shape)}, one rate a channel, with M = {hidden}; M must be D = {size} for that"
        )


def _start(
    state: LactState | None, k: Tensor, rates: int, weights: Weights, documents: int, chunk_size: int
) -> tuple[LactState, list[int]]:
    """The state to begin with, checked, and how many tokens are pending in every document."""
    dtype = contract.compute_dtype(k.dtype)
    if state is None:
        return empty_state(documents, k, rates, weights, chunk_size, dtype), [0] * documents
    like, *shapes = (x.new_empty(x.shape, device="meta") for x in (k, *weights))  # a step fills no state for nothing
    w0, w1, w2 = shapes
    state = contract.check_state(state, empty_state(documents, like, rates, (w0, w1, w2), chunk_size, dtype), k)
    if k.shape[1] == 1 and k.is_cuda and torch.cuda.is_current_stream_capturing():
        return state, [0] * documents  # cannot be asked for: whoever captures a step sees to it that it fills no chunk
    counts = state.count.tolist()  # decides which chunks become full
    if not all(0 <= count < chunk_size for count in counts):
        raise ValueError(f"state.count is {counts}; it must lie between 0 and chunk_size - 1 = {chunk_size - 1}")
    return state, counts
