"""What both levels of FwPKM share: options, the state, and the copy-on-write table.

Axis letters: N sequences, G memories (N with scope "sequence", 1 with scope "batch"), C chunk, H heads, n sub-keys a half,
F = K / 2, M places of the slot lists, P places of the pool of rows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..clock import FastOptions, remember_count


@dataclass(frozen=True)
class Options(FastOptions):
    """Validated keyword options of `fwzoo.kernels.fwpkm`."""

    top_k: int
    score: str
    score_eps: float
    row_averaging: bool
    gate_weighting: bool
    address_loss: bool
    value_lr: float
    key_lr: float
    max_slots: int | None
    evict: bool


class FwpkmState(NamedTuple):
    """Complete state of a FwPKM memory: continuing from it equals never having stopped.

    The table of the checkpoint is not part of it. A memory holds the rows that it has written, and a sorted list of their
    slots; copies of a memory (beams) hold the same rows until one of them writes.

    How a row is found, on any device: search `slots[g]` for the slot (its unused places hold n * n and sort last); where
    slots[g, i] equals it, the row is shared_rows[where[g, i]], else it is the checkpoint's values[slot]. All lists are
    contiguous int64, `shared_rows` is one contiguous tensor with exactly the rows that some memory holds, and several
    memories may hold one place. Lists have a power of two of places, so that their shape changes seldom. A call never
    writes into the tensors of the state that it was given.

    Attributes:
        keys: sub-keys `[G, 2, H, n, F]`, float32 (float64 for float64 inputs).
        slots: int64 `[G, M]`, slots written, ascending; unused places hold n * n.
        where: int64 `[G, M]`, their places in `shared_rows`; unused places hold -1.
        written: int64 `[G, M]`, number of the chunk that wrote the slot last.
        shared_rows: `[P, V]`, the rows of all memories; the one field that is not batch-first.
        q, v, gate: pending tokens `[N, C, H, K]`, `[N, C, V]`, `[N, C]`. real: bool `[N, C]`, which of them are real.
        count: int64 `[G]`, pending ticks.
        base: float64 `[G, 4]`, sums that tell the table the state was made from.
    """

    keys: Tensor
    slots: Tensor
    where: Tensor
    written: Tensor
    shared_rows: Tensor
    q: Tensor
    v: Tensor
    gate: Tensor
    real: Tensor
    count: Tensor
    base: Tensor

    def table(self, values: Tensor) -> Tensor:
        """Every memory's table written out, `[G, n * n, V]`, for the checkpoint's `values` `[n * n, V]` (large)."""
        size = values.shape[0]
        table = values.to(self.shared_rows.dtype).repeat(self.slots.shape[0], 1, 1)
        memory, place = torch.nonzero(self.slots < size, as_tuple=True)
        table[memory, self.slots[memory, place]] = self.shared_rows[self.where[memory, place]]
        return table


def empty_state(
    sequences: int,
    q: Tensor,
    v: Tensor,
    gate: Tensor,
    keys: Tensor,
    values: Tensor,
    options: Options,
    dtype: torch.dtype,
) -> FwpkmState:
    """The state before the first token."""
    groups, chunk, device = (1 if options.shared else sequences), options.chunk_size, q.device
    nothing = torch.zeros(groups, 0, dtype=torch.long, device=device)
    return FwpkmState(
        keys=keys.detach().to(dtype).repeat(groups, 1, 1, 1, 1),
        slots=nothing,
        where=nothing,
        written=nothing,
        shared_rows=values.new_zeros(0, values.shape[1], dtype=dtype),
        q=q.new_zeros(sequences, chunk, *q.shape[2:]),
        v=v.new_zeros(sequences, chunk, v.shape[2]),
        gate=gate.new_zeros(sequences, chunk),
        real=torch.zeros(sequences, chunk, dtype=torch.bool, device=device),
        count=remember_count(torch.zeros(groups, dtype=torch.long, device=device), [0] * groups),
        base=fingerprint(keys, values).repeat(groups, 1),
    )


_FINGERPRINTS = WeakIdKeyDictionary()  # values table: (version of both tables, sums)


def fingerprint(keys: Tensor, values: Tensor) -> Tensor:
    """float64 `[4]`: weighted sums over two tables, computed once for every version of them."""
    version = (weakref.ref(keys), keys._version, keys.data_ptr(), values._version, values.data_ptr())
    known = _FINGERPRINTS.get(values)
    if known is None or known[0][0]() is not keys or known[0][1:] != version[1:]:
        sums = []
        for x in (keys.detach().flatten(0, -2), values.detach()):
            down, along = (torch.linspace(1, 2, size, dtype=torch.float64, device=x.device) for size in x.shape)
            total = x.new_zeros(2, dtype=torch.float64)
            # by blocks, as a float64 copy of all would be large; over both axes, as torch.compile cannot sum float64 over
            # one of them and over the other in one kernel
            for block, weights in zip(x.split(1 << 14), down.split(1 << 14), strict=True):
                wide = block.double()
                total = total + torch.stack([(wide * along).sum(), (wide * weights[:, None]).sum()])
            sums.append(total)
        known = (version, torch.cat(sums))
        _FINGERPRINTS[values] = known
    return known[1]
