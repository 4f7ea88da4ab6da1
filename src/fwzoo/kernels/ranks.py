"""Rank space: how a Triton kernel finds the rows of a document without copying them.

A call is N documents. The real tokens of document n have ranks 0, 1, ... in order; a row index maps rank to row of the
flattened inputs `[B * T, H, F]` (the identity without a mask). A chunk is a tile of `CHUNK` consecutive slots. Its first
`overlap` slots are the last pairs of the chunk before it, so a chunk holds `stride = CHUNK - overlap` tokens of its own and
slot e of chunk i has rank `i * stride - overlap + e`. Everything here is made without a device synchronisation; for the
plain case (no mask, no packing) it is arithmetic in the kernel and there are no tables at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # slots of a chunk, C
BLOCK = 16  # slots of a block of falcon3, N


@dataclass(frozen=True)
class Ranks:
    """The documents of one call, cut into chunks, and the chunks grouped into segments.

    Attributes:
        batch, tokens: B and T. documents: N.
        overlap: slots of a chunk that belong to the chunk before it (falcon3: to the block before theirs, see `gpu.slots_of`).
        segment: chunks of a segment.
        chunks, segments: their numbers in all documents (upper bounds under a mask).
        docs: int64 `[N + 1, 4]`: first row, real tokens, first chunk, first segment; None when plain.
        chunk_doc, segment_doc: int32, document of every chunk and every segment; None when plain.
        rows: int64 `[B * T]`, row of every real token, in order within its document from its first row on; None without mask.
    """

    batch: int
    tokens: int
    documents: int
    overlap: int
    segment: int
    chunks: int
    segments: int
    docs: Tensor | None
    chunk_doc: Tensor | None
    segment_doc: Tensor | None
    rows: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """The numbers, as an operator can take them."""
        return [self.batch, self.tokens, self.documents, self.overlap, self.segment, self.chunks, self.segments]

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors, in the order of `ranks_of`."""
        return self.docs, self.chunk_doc, self.segment_doc, self.rows

    @property
    def stride(self) -> int:
        """Tokens of a chunk."""
        return CHUNK - self.overlap

    def lengths(self, device: torch.device) -> Tensor:
        """int64 `[N]`: real tokens of every document."""
        if self.docs is None:
            return torch.full((self.documents,), self.tokens, dtype=torch.long, device=device)
        return self.docs[:-1, 1]

    def new_like(self, x: Tensor) -> Tensor:
        """A new tensor like `x` `[B, T, ...]`, for kernels to fill by real tokens: masked ones are 0."""
        return torch.empty_like(x) if self.rows is None else torch.zeros_like(x)

    def new_pairs_like(self, x: Tensor, unpaired: int | None) -> Tensor:
        """The same for gradients by pairs: all are 0 that may belong to none, in a plain document the row `unpaired`, if there is one."""
        if self.docs is not None:
            return torch.zeros_like(x)
        found = torch.empty_like(x)
        if unpaired is not None:
            found[:, unpaired] = 0
        return found

    def last(self, x: Tensor, back: int = 1) -> tuple[Tensor, Tensor]:
        """Row of the `back`-th last real token of every document from `x` `[B, T, ...]`, and bool `[N]`, whether it exists."""
        flat, lengths = x.flatten(0, 1), self.lengths(x.device)
        there = lengths >= back
        if self.docs is None:
            if self.tokens < back:
                return torch.zeros_like(flat[: self.documents]), there
            return x[:, self.tokens - back].clone(), there  # not a view: a state does not keep the call's keys
        at = (self.docs[:-1, 0] + lengths - back).clamp(0, flat.shape[0] - 1)
        row = at if self.rows is None else self.rows[at]
        return torch.where(there.view(-1, *[1] * (x.ndim - 2)), flat[row], 0), there


def ranks_of(
    sizes: list[int],
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
) -> Ranks:
    """The inverse of `Ranks.sizes` and `Ranks.tables`."""
    batch, tokens, documents, overlap, segment, chunks, segments = sizes
    return Ranks(batch, tokens, documents, overlap, segment, chunks, segments, docs, chunk_doc, segment_doc, rows)


def make_ranks(
    q: Tensor, mask: Tensor | None, bounds: list[int] | None, *, overlap: int = 0, segment: int = 1
) -> Ranks:
    """Rank tables for inputs `[B, T, ...]`, on their device.

    Args:
        mask: bool `[B, T]`, True for a real token, or None. bounds: document boundaries along T, or None.
        overlap: slots of a chunk shared with the one before. segment: chunks of a segment.
    """
    batch, tokens, device = q.shape[0], q.shape[1], q.device
    starts = [b * tokens for b in range(batch)] if bounds is None else bounds[:-1]
    sizes = [tokens] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    stride = CHUNK - overlap
    chunks = [-(-size // stride) for size in sizes]
    if bounds is None and tokens > 0:  # as many segments, but of equal length
        segment = -(-chunks[0] // -(-chunks[0] // segment))
    segments = [-(-n // segment) for n in chunks]
    common = (batch, tokens, len(sizes), overlap, segment, sum(chunks), sum(segments))
    if mask is None and bounds is None:
        return Ranks(*common, None, None, None, None)
    lists = [
        [*starts, batch * tokens],
        [*sizes, 0],
        [0, *itertools.accumulate(chunks)],
        [0, *itertools.accumulate(segments)],
    ]
    table = torch.tensor(lists).T.contiguous().to(device, non_blocking=True)
    documents = torch.arange(len(sizes), dtype=torch.int32)
    chunk_doc, segment_doc = (
        documents.repeat_interleave(torch.tensor(n)).to(device, non_blocking=True) for n in (chunks, segments)
    )
    rows = None
    if mask is not None:
        total = batch * tokens
        document = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device, non_blocking=True)
        real = mask.reshape(-1)
        rows = torch.argsort(document * 2 + (~real).long(), stable=True)
        table[:-1, 1] = torch.zeros(len(sizes), dtype=torch.long, device=device).index_add_(0, document, real.long())
        assert rows.shape[0] == total
    return Ranks(*common, table, chunk_doc, segment_doc, rows)
