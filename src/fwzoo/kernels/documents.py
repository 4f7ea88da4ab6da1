"""Running an operator's token loop on every packed document alone, and a scalar-decay chunk form on all of them at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .contract import compute_dtype
from .segments import scan_segments
from .tiling import Tiling

State = TypeVar("State", bound=tuple[Tensor, ...])


def each_document(
    loop: Callable[..., tuple[Tensor, State]],
    inputs: Sequence[Tensor],
    state: State,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, State]:
    """`loop(*inputs, state, mask)` on every document.

    Args:
        loop: the token loop over `[B, T, ...]` inputs and a state of N = B rows, returning `(output, state)`.
        inputs: `[B, T, ...]` each. state: N rows, one a document. mask: bool `[B, T]` or None.
        bounds: document boundaries along T, or None when every row of the batch is one document.
    """
    if bounds is None:
        return loop(*inputs, state, mask)
    make = getattr(type(state), "_make")  # noqa: B009  (a NamedTuple, which no annotation can say)
    outputs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        own_mask = None if mask is None else mask[:, start:end]
        o, own = loop(*(x[:, start:end] for x in inputs), make(field[n : n + 1] for field in state), own_mask)
        outputs.append(o)
        states.append(own)
    return torch.cat(outputs, 1), make(torch.cat(fields) for fields in zip(*states, strict=True))


def each_token(inputs: Sequence[Tensor], mask: Tensor | None) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
    """The inputs `[B, T, ...]` of every token, 0 where it is masked, and which rows are real (None: all)."""
    for t in range(inputs[0].shape[1]):
        now = tuple(x[:, t] for x in inputs)
        real = None if mask is None else mask[:, t]
        # a masked token may hold anything, NaN included: select, never multiply
        yield now if real is None else tuple(select(real, x, 0) for x in now), real


def select(condition: Tensor, x: Tensor, other: Tensor | float) -> Tensor:
    """`torch.where` with a condition `[N]` over the first axis of `x`."""
    return torch.where(condition.view(-1, *[1] * (x.ndim - 1)), x, other)


def scan_documents(
    form: Callable[..., tuple[Tensor, Tensor]],
    S: Tensor,
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    bounds: list[int] | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A chunk form of `falcon/chunk.py` over tokens that each write one pair and read after it.

    Args:
        form: `inner_product_form` or `regression_form`.
        S: state `[N, H, K, V]`.
        inputs: query, key `[B, T, H, K]`, value `[B, T, H, V]`, strength and log-decay `[B, T, H]`; T at least 1.
        mask, bounds: which tokens are real, and where documents end.
        options: further options of the form.

    Returns: output `[B, T, H, V]` in the dtype of S (rows of masked tokens are 0), and the new `[N, H, K, V]`.
    """
    (batch, tokens, heads, _), dtype = inputs[0].shape, compute_dtype(inputs[0].dtype)
    chunk = 64
    while chunk > 16 and chunk * 2 > tokens:
        chunk //= 2
    tiling = Tiling(batch, tokens, chunk, mask=mask, bounds=bounds, device=S.device)
    tiles = tuple(
        tiling.tile(x.to(dtype)) for x in inputs
    )  # a free slot has strength 0 and log-decay 0: it does nothing
    body = functools.partial(form, heads=heads, window=1, read_after_write=True, **options)
    start = tiling.enter(S)
    o, end = scan_segments(body, start.flatten(0, 1), tiles, tiling.steps, heads, chunk)
    return tiling.untile(o, heads), tiling.leave(end.view(start.shape))
