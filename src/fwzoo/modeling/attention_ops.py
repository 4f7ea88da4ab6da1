"""Softmax attention over a sliding window of a document's real tokens: positions, rotary embedding, attention and its past.

Axis letters: N sequences, P = window - 1 past tokens, F head size; the others as in the kernels.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..configuration.rotary import ScaledRotary
from ..kernels.contract import compute_dtype
from ..kernels.tiling import Tiling


class WindowPast(NamedTuple):
    """The last P real tokens of every sequence: k, v `[N, P, H, F]`, newest last; count int64 `[N]`, real tokens ever."""

    k: Tensor
    v: Tensor
    count: Tensor


def token_positions(
    like: Tensor, past: Tensor | None, mask: Tensor | None, bounds: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Number of the document's real tokens before each token, and of all its real tokens.

    Args:
        like: `[B, T, ..]`. past: int64 `[N]`, real tokens in earlier calls, or None.
        mask: bool `[B, T]`, True for real tokens, or None. bounds: document boundaries along T, or None.
    Returns: int64 `[B, T]` and `[N]`.
    """
    shape, device = like.shape[:2], like.device
    real = torch.ones(shape, dtype=torch.long, device=device) if mask is None else mask.long()
    seen = F.pad(real.cumsum(1), (1, 0))
    starts = torch.zeros_like(seen[:, :1]) if bounds is None else seen[:, bounds[:-1]]
    ends = seen[:, -1:] if bounds is None else seen[:, bounds[1:]]
    offset = -starts if past is None else past.view_as(starts) - starts
    total = (ends + offset).flatten()
    if bounds is not None:
        sizes = torch.tensor([b - a for a, b in itertools.pairwise(bounds)], device=device)
        offset = offset.repeat_interleave(sizes, 1, output_size=shape[1])
    return seen[:, :-1] + offset, total


def rotary(x: Tensor, positions: Tensor, theta: float, scaled: ScaledRotary | None = None) -> Tensor:
    """Rotate the two halves of every head of `[B, T, H, F]` against each other by angles `position * theta^(-2i / F)`,

    or by those of `scaled`, with its factor.
    """
    dtype, size = compute_dtype(x.dtype), x.shape[-1]
    if scaled is None:
        frequencies = 1 / theta ** (torch.arange(0, size, 2, dtype=dtype, device=x.device) / size)
    else:
        frequencies = _on_device(scaled.frequencies, dtype, x.device)
    angles = positions[..., None, None].to(dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaled is not None:
        cos, sin = cos * scaled.factor, sin * scaled.factor
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constants, copied once: a copy makes the CPU wait and cannot be part of a CUDA graph."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    past: WindowPast | None = None,
    mask: Tensor | None = None,
    bounds: list[int] | None = None,
    keep: bool = False,
) -> tuple[Tensor, WindowPast | None]:
    """Causal softmax attention: every real token sees itself and the `window - 1` real tokens of its document before it.

    Args:
        q, k, v: `[B, T, H, F]`. past: to continue from, or None.
        mask: bool `[B, T]`, True for real tokens, or None. bounds: document boundaries along T (then B is 1), or None.
        keep: return the past for the next call.
    Returns: output `[B, T, H, F]`, rows of masked tokens 0, and the new past (None without `keep`).
    """
    if bounds is None or (past is None and not keep):
        return _attend(q, k, v, window, past, mask, bounds, keep)
    outputs, pasts = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = None if past is None else WindowPast(*(x[n : n + 1] for x in past))
        own_q, own_k, own_v = (x[:, start:end] for x in (q, k, v))
        own_mask = None if mask is None else mask[:, start:end]
        o, new = _attend(own_q, own_k, own_v, window, own, own_mask, None, True)
        outputs.append(o)
        pasts.append(new)
    return torch.cat(outputs, 1), WindowPast(*(torch.cat(field) for field in zip(*pasts, strict=True)))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    past: WindowPast | None,
    mask: Tensor | None,
    bounds: list[int] | None,
    keep: bool,
) -> tuple[Tensor, WindowPast | None]:
    """Rows of a batch, or packed documents without a past: tiles of tokens that see the P tokens before their tile.

    Tiles hold real tokens only, so a distance in a row is a distance in real tokens; documents are told apart by number.
    """
    (batch, length, heads), device = q.shape[:3], q.device
    fresh = past is None
    if past is None:
        rows = k.new_zeros(batch, window - 1, *k.shape[2:])
        past = WindowPast(rows, rows, torch.zeros(batch, dtype=torch.long, device=device))
    if length == 0:
        return torch.zeros_like(v), past if keep else None
    if length == 1 and bounds is None:
        return _attend_one(q, k, v, past, mask, keep)
    size = length if length <= max(window, 64) else max(window, 64)
    tiling = Tiling(batch, length, size, mask=mask, bounds=None, device=device)
    numbers = torch.ones(1, length, dtype=torch.long, device=device)
    if bounds is not None:
        sizes = torch.tensor([b - a for a, b in itertools.pairwise(bounds)], device=device)
        numbers = torch.arange(1, len(sizes) + 1, device=device).repeat_interleave(sizes, output_size=length)[None]
    numbers = tiling.tile(numbers.expand(batch, -1)[..., None, None])  # 0 in free slots
    q, k, v = (tiling.tile(x) for x in (q, k, v))
    keys, values, key_numbers = k, v, numbers
    before = 0 if fresh and size == length else window - 1
    if before:
        old_k, old_v = past.k.transpose(1, 2), past.v.transpose(1, 2)
        age = torch.arange(before, 0, -1, device=device)
        known = (age <= past.count[:, None]).long()[:, None, :, None]
        keys, values, key_numbers = (
            torch.cat([_before(tiling, x, before, old), x], 1) for x, old in ((k, old_k), (v, old_v), (numbers, known))
        )
    distance = torch.arange(size, device=device)[:, None] + before - torch.arange(before + size, device=device)
    visible = (numbers == key_numbers.mT) & (distance >= 0) & (distance < window)
    q_rows, k_rows, v_rows = (x.unflatten(0, (-1, heads)) for x in (q, keys, values))
    o = F.scaled_dot_product_attention(q_rows, k_rows, v_rows, attn_mask=visible[:, None])
    new = None
    if keep:
        rows = tiling.lengths[:, None] + torch.arange(window - 1, device=device)
        new = WindowPast(
            tiling.stream(past.k, k, rows).to(past.k.dtype),
            tiling.stream(past.v, v, rows).to(past.v.dtype),
            past.count + tiling.lengths,
        )
    return tiling.untile(o.flatten(0, 1), heads), new


def _attend_one(
    q: Tensor, k: Tensor, v: Tensor, past: WindowPast, mask: Tensor | None, keep: bool
) -> tuple[Tensor, WindowPast | None]:
    """`_attend` for one token a sequence, whose keys are the past and itself."""
    real = None if mask is None else mask[..., None, None]
    if real is not None:  # a masked token may hold anything
        q, k, v = (torch.where(real, x, 0) for x in (q, k, v))
    keys, values = torch.cat([past.k, k.to(past.k.dtype)], 1), torch.cat([past.v, v.to(past.v.dtype)], 1)
    known = torch.arange(past.k.shape[1], -1, -1, device=q.device) <= past.count[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, keys.to(q.dtype), values.to(q.dtype)))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=known[:, None, None]).transpose(1, 2)
    keys, values, count = keys[:, 1:], values[:, 1:], past.count + 1
    if mask is not None and real is not None:
        o, count = torch.where(real, o, 0), past.count + mask[:, 0].long()
        keys, values = torch.where(real, keys, past.k), torch.where(real, values, past.v)
    return o, WindowPast(keys, values, count) if keep else None


def _before(tiling: Tiling, tiles: Tensor, rows: int, initial: Tensor) -> Tensor:
    """`Tiling.before`, also for a single tile that is shorter than `rows`."""
    if len(tiling.steps) == 1:
        return initial.to(tiles.dtype).flatten(0, 1)
    return tiling.before(tiles, rows, initial)
