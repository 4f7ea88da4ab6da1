"""Where every document's real tokens go when they are cut into chunks.

The chunk forms see only tiles: `[M * H, C, F]`, C consecutive real tokens of one document and one head. Masks, holes and
packing end here. Tiles are ordered by chunk number first, so the scan over chunks reads contiguous slices; documents are
ordered by falling number of chunks, so the documents that still have a chunk are always the first ones. A document's
free slots lie behind its last real token and read as 0.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    """`x[index]` with zero rows where index is -1. Every row is taken at most once, so the gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        rows = x.index_select(0, index.clamp(min=0))
        return rows.masked_fill_((index < 0).view(-1, *[1] * (x.ndim - 1)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, inverse = ctx.saved_tensors
        return _TakeRows.apply(grads[0].contiguous(), inverse, index), None, None


class Tiling:
    """The map between tokens `[B, T, H, F]` and tiles `[M * H, C, F]`.

    Args:
        batch, tokens: B and T of the inputs.
        chunk: C.
        mask: bool `[B, T]`, True for a real token, or None.
        bounds: document boundaries along T as a list, or None.
        device: where the index tensors live.

    Attributes:
        documents: N.
        steps: for every chunk number, how many documents have that chunk.
        lengths: int64 `[N]`, real tokens a document, in tile order.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        chunk: int,
        *,
        mask: Tensor | None,
        bounds: list[int] | None,
        device: torch.device,
    ) -> None:
        self.batch, self.tokens, self.chunk, self.device = batch, tokens, chunk, device
        starts = [b * tokens for b in range(batch)] if bounds is None else bounds[:-1]
        sizes = [tokens] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        self.documents = len(sizes)
        self.dense = mask is None and bounds is None
        by_size = sorted(range(self.documents), key=lambda n: -sizes[n])
        self._sorted = by_size == list(range(self.documents))
        chunks = [-(-sizes[n] // chunk) for n in by_size]
        self.steps = [sum(c > step for c in chunks) for step in range(chunks[0] if chunks else 0)]
        if self.dense:  # made where they live: nothing is copied from the host, so a CUDA graph can capture it
            self._order = self._rank = torch.arange(batch, device=device)
            self._offsets = torch.arange(len(self.steps) + 1, device=device) * batch
            self.lengths = torch.full((batch,), tokens, device=device)
        else:
            self._order = torch.tensor(by_size, device=device)
            self._rank = torch.argsort(self._order)
            self._offsets = torch.tensor([0, *self.steps], device=device).cumsum(0)
            self.lengths = torch.tensor([sizes[n] for n in by_size], device=device)
        self._previous = torch.cat(
            [torch.arange(n, device=device) + o for n, o in zip(self.steps[1:], self._starts(), strict=False)]
            or [self._order[:0]]
        )
        if not self.dense:
            self._index_tokens(mask, starts, sizes)

    def _starts(self) -> list[int]:
        starts = [0]
        for n in self.steps:
            starts.append(starts[-1] + n)
        return starts

    def _index_tokens(self, mask: Tensor | None, starts: list[int], sizes: list[int]) -> None:
        """Index of the token in every slot (-1: free), and of the slot of every token (-1: masked)."""
        total, device = self.batch * self.tokens, self.device
        document = torch.repeat_interleave(torch.tensor(sizes, device=device))
        real = torch.ones(total, dtype=torch.bool, device=device) if mask is None else mask.reshape(-1)
        in_order = torch.argsort(document * 2 + (~real).long(), stable=True)
        lengths = torch.zeros(self.documents, dtype=torch.long, device=device).index_add_(0, document, real.long())
        self.lengths = lengths[self._order]
        start = torch.tensor(starts, device=device)[self._order]
        step = torch.repeat_interleave(torch.tensor(self.steps, device=device))
        doc = torch.cat([torch.arange(n, device=device) for n in self.steps] or [step])
        position = step[:, None] * self.chunk + torch.arange(self.chunk, device=device)
        filled = position < self.lengths[doc][:, None]
        token = in_order[(start[doc][:, None] + position).clamp(max=total - 1)]
        self._token = torch.where(filled, token, -1).reshape(-1)
        slots = torch.arange(self._token.numel(), device=device)
        slot = torch.full((total + 1,), -1, device=device)
        slot[torch.where(self._token < 0, total, self._token)] = slots
        self._slot = slot[:-1].contiguous()

    # --- tokens and tiles ---

    def tile(self, x: Tensor) -> Tensor:
        """`[B, T, H, *F]` to `[M * H, C, *F]`; free slots are 0, whatever masked tokens hold."""
        heads, features, c = x.shape[2], x.shape[3:], self.chunk
        if self.dense:
            chunks = len(self.steps)
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, chunks * c - self.tokens))
            x = x.reshape(self.batch, chunks, c, heads, -1).permute(1, 0, 3, 2, 4)
        else:
            x = _TakeRows.apply(x.reshape(self.batch * self.tokens, heads, -1), self._token, self._slot)
            x = x.view(-1, c, heads, x.shape[-1]).transpose(1, 2)
        return x.reshape(-1, c, *features)

    def untile(self, y: Tensor, heads: int) -> Tensor:
        """`[M * H, C, F]` back to `[B, T, H, F]`; rows of masked tokens are 0."""
        c = self.chunk
        if self.dense:
            y = y.view(len(self.steps), self.batch, heads, c, -1).permute(1, 0, 3, 2, 4)
            return y.reshape(self.batch, len(self.steps) * c, heads, -1)[:, : self.tokens]
        y = y.view(-1, heads, c, y.shape[-1]).transpose(1, 2).reshape(-1, heads, y.shape[-1])
        return _TakeRows.apply(y, self._slot, self._token).view(self.batch, self.tokens, heads, -1)

    def positions(self) -> Tensor:
        """int64 `[M, C]`: number of real tokens of the document before each slot."""
        if self.dense:
            step = torch.arange(len(self.steps), device=self.device).repeat_interleave(self.batch)
        else:
            step = torch.repeat_interleave(torch.tensor(self.steps, device=self.device))
        return step[:, None] * self.chunk + torch.arange(self.chunk, device=self.device)

    def per_tile(self, x: Tensor) -> Tensor:
        """A per-document tensor `[N, ...]` in tile order, repeated for every tile: `[M, ...]`."""
        return torch.cat([x[:n] for n in self.steps])

    def before(self, tiles: Tensor, rows: int, initial: Tensor) -> Tensor:
        """The last `rows` slots of the tile before each tile; `initial` `[N, H, rows, F]` before a document's first.

        Args:
            tiles: `[M * H, C, F]`, C >= rows.
        Returns: `[M * H, rows, F]`.
        """
        heads, first = initial.shape[1], initial[: self.steps[0]]
        last = tiles.view(-1, heads, *tiles.shape[1:])[:, :, self.chunk - rows :]
        later = last[: -self.batch] if self.dense else last.index_select(0, self._previous)
        return torch.cat([first.to(tiles.dtype), later]).reshape(-1, rows, tiles.shape[-1])

    def pick(self, tiles: Tensor, position: Tensor, heads: int) -> Tensor:
        """Rows of given positions of every document.

        Args:
            tiles: `[M * H, C, F]`.
            position: int64 `[N, m]`; a negative one reads as 0.
        Returns: `[N, H, m, F]`.
        """
        position = position.clamp(max=len(self.steps) * self.chunk - 1)
        where = position.clamp(min=0)
        document = torch.arange(self.documents, device=self.device)[:, None]
        tile = (self._offsets[where // self.chunk] + document).clamp(max=sum(self.steps) - 1)
        rows = tiles.view(-1, heads, *tiles.shape[1:])[tile, :, where % self.chunk]
        return torch.where((position < 0)[..., None, None], 0, rows).transpose(1, 2)

    def stream(self, past: Tensor, tiles: Tensor, position: Tensor) -> Tensor:
        """Rows of every document's past followed by its tokens, at given positions.

        Args:
            past: `[N, P, H, F]`, in tile order. tiles: `[M * H, C, F]`. position: int64 `[N, m]`.
        Returns: `[N, m, H, F]`.
        """
        size, heads = past.shape[1:3]
        fresh = self.pick(tiles, position - size, heads).transpose(1, 2)
        if size == 0:
            return fresh
        old = past.gather(1, position.clamp(max=size - 1)[..., None, None].expand(-1, -1, *past.shape[2:]))
        return torch.where((position < size)[..., None, None], old, fresh)

    # --- per-document tensors ---

    def enter(self, x: Tensor) -> Tensor:
        """`[N, ...]` from the caller's order to tile order."""
        return x if self._sorted else x.index_select(0, self._order)

    def leave(self, x: Tensor) -> Tensor:
        """`[N, ...]` from tile order to the caller's order."""
        return x if self._sorted else x.index_select(0, self._rank)
