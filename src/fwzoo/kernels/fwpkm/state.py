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

from ..clock import FastOptions
from ..product_keys import sum_rows


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

    Attributes:
        keys: sub-keys `[G, 2, H, n, F]`, float32 (float64 for float64 inputs).
        slots: int64 `[G, M]`, slots written, ascending; unused places hold n * n.
        where: int64 `[G, M]`, their places in `shared_rows`.
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
        count=torch.zeros(groups, dtype=torch.long, device=device),
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
            for axis in (0, 1):
                total = x.sum(axis, dtype=torch.float64)
                sums.append(total @ torch.linspace(1, 2, total.shape[0], dtype=torch.float64, device=x.device))
        known = (version, torch.stack(sums))
        _FINGERPRINTS[values] = known
    return known[1]


class Overlay:
    """The tables of all memories during a call: the checkpoint's rows, and the rows written since in their place.

    An entry is memory * n * n + slot; the entries written are kept sorted and found by binary search. Rows are written in
    place, but for rows that the incoming state or a gradient still needs: the pool is copied before the first write after
    such a use, and the copy drops rows that no memory holds any more.

    Args:
        values: the checkpoint's table `[n * n, V]`, never written.
        state: where to start.
        limit: most slots a memory may hold, or None. evict: drop the least recently written ones beyond the limit.
    """

    def __init__(self, values: Tensor, state: FwpkmState, limit: int | None = None, evict: bool = False) -> None:
        self.values, self.size = values.detach(), values.shape[0]
        self.groups, self.limit, self.evict = state.slots.shape[0], limit, evict
        valid = state.slots < self.size
        memory = torch.arange(self.groups, device=values.device)[:, None]
        self.entries = (memory * self.size + state.slots)[valid]
        self.where, self.written = state.where[valid], state.written[valid]
        self.rows, self.used = state.shared_rows, state.shared_rows.shape[0]
        self._state, self._owned, self._changed = state, False, False

    # --- reading ---

    def read(self, entries: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights_i row_i: entries and weights `[X, k]` to `[X, V]`."""
        found, place = self._find(entries)
        slots, old = entries % self.size, self.values
        if torch.is_grad_enabled() and weights.requires_grad:
            self._owned = False
        if self.entries.numel() == 0:
            counts = torch.full(entries.shape[:1], entries.shape[1], device=entries.device)
            return sum_rows(old, slots.flatten(), weights.flatten(), counts)
        out = sum_rows(old, slots[~found], weights[~found], (~found).sum(1))
        return out + sum_rows(self.rows, place[found], weights[found], found.sum(1))

    def get(self, entries: Tensor) -> Tensor:
        """Rows of entries `[X]`: `[X, V]`."""
        found, place = self._find(entries)
        if bool(found.all()):
            return self.rows[place]
        rows = self.values[entries % self.size].to(self.rows.dtype)
        if self.entries.numel():
            rows[found] = self.rows[place[found]]
        return rows

    def _find(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each entry was written, and its row in the pool (0 where it was not)."""
        if self.entries.numel() == 0:
            return torch.zeros_like(entries, dtype=torch.bool), torch.zeros_like(entries)
        at = torch.searchsorted(self.entries, entries).clamp(max=self.entries.shape[0] - 1)
        found = self.entries[at] == entries
        return found, torch.where(found, self.where[at], 0)

    # --- writing ---

    def put(self, entries: Tensor, rows: Tensor) -> None:
        """Replace the rows of entries `[X]` (ascending, each once) by rows `[X, V]`."""
        if entries.numel() == 0:
            return
        if not self._owned:
            self._own()
        found, place = self._find(entries)
        holders = torch.bincount(self.where, minlength=1)
        alone = found & (holders[place.clamp(max=holders.shape[0] - 1)] == 1)
        fresh = self._allocate(int((~alone).sum()))
        place = place.masked_scatter(~alone, fresh)
        self.rows.index_copy_(0, place, rows)
        memory, stamp = entries // self.size, self._stamp()
        known = torch.searchsorted(self.entries, entries[found])
        self.where[known], self.written[known] = place[found], stamp[memory[found]]
        if not bool(found.all()):
            new = ~found
            merged, order = torch.cat([self.entries, entries[new]]).sort()
            self.where = torch.cat([self.where, place[new]])[order]
            self.written = torch.cat([self.written, stamp[memory[new]]])[order]
            self.entries = merged
            self._bound()

    def _own(self) -> None:
        held, self.where = torch.unique(self.where, return_inverse=True)
        self.rows, self.used = self.rows[held], held.shape[0]
        self.written = self.written.clone()
        self._owned = self._changed = True

    def _allocate(self, count: int) -> Tensor:
        """Places of `count` new rows; the pool grows to the next power of two."""
        start, self.used = self.used, self.used + count
        if self.used > self.rows.shape[0]:
            rows = self.rows.new_empty(1 << (self.used - 1).bit_length(), self.rows.shape[1])
            rows[:start], rows[self.used :] = self.rows[:start], 0
            self.rows = rows
        return torch.arange(start, self.used, device=self.rows.device)

    def _stamp(self) -> Tensor:
        """int64 `[G]`: the number of the next chunk of every memory."""
        last = torch.zeros(self.groups, dtype=torch.long, device=self.entries.device)
        return last.scatter_reduce_(0, self.entries // self.size, self.written, "amax") + 1

    def _bound(self) -> None:
        """Keep every memory within `limit` slots."""
        if self.limit is None:
            return
        memory = self.entries // self.size
        counts = torch.bincount(memory, minlength=self.groups)
        if not bool((counts > self.limit).any()):
            return
        if not self.evict:
            g = int(counts.argmax())
            raise ValueError(
                f"max_slots is {self.limit}; memory {g} has now written {int(counts[g])} slots, and may hold at most "
                "max_slots of them (evict=True drops the least recently written ones instead)"
            )
        order = torch.argsort(self.written, descending=True, stable=True)
        order = order[torch.argsort(memory[order], stable=True)]
        rank = torch.arange(order.shape[0], device=order.device) - (counts.cumsum(0) - counts)[memory[order]]
        keep = order[rank < self.limit].sort().values
        self.entries, self.where, self.written = self.entries[keep], self.where[keep], self.written[keep]

    def fields(self) -> dict[str, Tensor]:
        """The fields of the state that describe the table."""
        if not self._changed:
            state = self._state
            return {name: getattr(state, name) for name in ("slots", "where", "written", "shared_rows")}
        memory = self.entries // self.size
        counts = torch.bincount(memory, minlength=self.groups)
        longest = int(counts.max()) if counts.numel() else 0
        places = 1 << (longest - 1).bit_length() if longest else 0
        rank = torch.arange(memory.shape[0], device=memory.device) - (counts.cumsum(0) - counts)[memory]

        def spread(x: Tensor, empty: int) -> Tensor:
            out = torch.full((self.groups, places), empty, device=x.device, dtype=x.dtype)
            out[memory, rank] = x
            return out

        return {
            "slots": spread(self.entries % self.size, self.size),
            "where": spread(self.where, 0),
            "written": spread(self.written, 0),
            "shared_rows": self.rows,
        }
