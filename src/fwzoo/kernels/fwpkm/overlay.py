"""The tables of all memories during a call: the checkpoint's rows, and the rows written since in their place.

Axis letters: G memories, P places of the pool of rows, M written entries, X entries asked for.
An entry is memory * n * n + slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..product_keys import Bags, sum_rows
from .state import FwpkmState

PAGE = 32 << 20  # bytes: a smaller pool is moved when it grows, a larger one grows by pages
BLOCK = 1 << 19  # bytes of rows that a CPU changes at a time: they stay in its cache


class Overlay:
    """Written entries, sorted and found by binary search, and their rows in a pool.

    Rows are written in place, but for rows that several memories hold: the first write of one of them gives it a row of
    its own. The pool of the incoming state is copied before the first write.

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
        self.pool = Pool(state.shared_rows)
        self._state, self._owned = state, False

    # --- reading ---

    def read(self, entries: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights_i row_i: entries and weights `[X, k]` to `[X, V]`."""
        if torch.is_grad_enabled() and weights.requires_grad:  # backward needs these rows as they are now
            rows = self.get(entries.flatten()).view(*entries.shape, -1)
            return torch.bmm(weights[:, None], rows)[:, 0]
        found, place, _ = self._find(entries)
        slots = entries % self.size
        if self.entries.numel() == 0:
            counts = torch.full(entries.shape[:1], entries.shape[1], device=entries.device)
            return sum_rows(self.values, slots.flatten(), weights.flatten(), counts)
        out = sum_rows(self.values, slots[~found], weights[~found], (~found).sum(1))
        for page, start, end in self.pool.spans():
            here = found & (place >= start) & (place < end)
            out += sum_rows(page, place[here] - start, weights[here], here.sum(1))
        return out

    def get(self, entries: Tensor) -> Tensor:
        """Rows of entries `[X]`: `[X, V]`."""
        found, place, _ = self._find(entries)
        return self._rows(entries, found, place)

    def _rows(self, entries: Tensor, found: Tensor, place: Tensor) -> Tensor:
        if self.entries.numel() and bool(found.all()):
            return self.pool.get(place)
        rows = self.values.index_select(0, entries % self.size).to(self.pool.dtype)
        if self.entries.numel() and bool(found.any()):
            rows[found] = self.pool.get(place[found])
        return rows

    def _find(self, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether each entry was written, its row in the pool (0 where it was not), and its rank among the written ones."""
        rank = torch.searchsorted(self.entries, entries)
        if self.entries.numel() == 0:
            return torch.zeros_like(entries, dtype=torch.bool), torch.zeros_like(entries), rank
        at = rank.clamp(max=self.entries.shape[0] - 1)
        found = self.entries[at] == entries
        return found, torch.where(found, self.where[at], 0), rank

    # --- writing ---

    def add(self, entries: Tensor, change: Bags) -> None:
        """Add `change` `[X, V]` to the rows of entries `[X]` (ascending, each once)."""
        if entries.numel() == 0:
            return
        if not self._owned:
            self._own()
        found, old, rank = self._find(entries)
        alone = found
        if self._shared:
            holders = torch.bincount(self.where, minlength=1)
            alone = found & (holders[old.clamp(max=holders.shape[0] - 1)] == 1)
        place = old.masked_scatter(~alone, self.pool.extend(int((~alone).sum())))
        size = max(1, (BLOCK if entries.device.type == "cpu" else PAGE) // self.pool.row_bytes)
        start = 0
        for block in change.split(size):
            part = slice(start, start := start + block.counts.shape[0])
            rows = self._rows(entries[part], found[part], old[part])
            self.pool.put(place[part], rows.add_(block.sum()))
        memory = entries // self.size
        stamp = self._chunks[memory] + 1
        self._chunks[memory] = stamp
        known = rank[found]
        self.where[known], self.written[known] = place[found], stamp[found]
        if known.shape[0] < entries.shape[0]:
            self._insert(rank[~found], entries[~found], place[~found], stamp[~found])
            self._bound()

    def _own(self) -> None:
        """Copy what the incoming state holds, without rows that no memory holds any more."""
        held, where = torch.unique(self.where, return_inverse=True)
        self._shared = held.shape[0] < where.shape[0]
        self.pool = self.pool.copy(held)
        self.where, self.written = where, self.written.clone()
        self._chunks = torch.zeros(self.groups, dtype=torch.long, device=where.device)  # that wrote, of every memory
        self._chunks.scatter_reduce_(0, self.entries // self.size, self.written, "amax")
        self._owned = True

    def _insert(self, rank: Tensor, entries: Tensor, place: Tensor, stamp: Tensor) -> None:
        """Put new entries `[X]` (ascending) before the written ones `rank` `[X]`."""
        new = rank + torch.arange(rank.shape[0], device=rank.device)
        old = torch.ones(self.entries.shape[0] + new.shape[0], dtype=torch.bool, device=new.device)
        old[new] = False

        def merge(x: Tensor, more: Tensor) -> Tensor:
            return x.new_empty(old.shape).masked_scatter_(old, x).index_copy_(0, new, more)

        self.where, self.written = merge(self.where, place), merge(self.written, stamp)
        self.entries = merge(self.entries, entries)

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
        if not self._owned:
            state = self._state
            return {name: getattr(state, name) for name in ("slots", "where", "written", "shared_rows")}
        held, where = torch.unique(self.where, return_inverse=True)
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
            "where": spread(where, -1),
            "written": spread(self.written, 0),
            "shared_rows": self.pool.take(held),
        }


class Pool:
    """Rows `[P, V]` that can grow: while it is small by doubling, then by pages, so that growth moves at most a page.

    Args:
        rows: what it holds; never written until `copy`.
    """

    def __init__(self, rows: Tensor) -> None:
        self.pages, self.used = [rows], rows.shape[0]
        self.dtype, self.width = rows.dtype, rows.shape[1]
        self.row_bytes = self.width * rows.element_size()

    def spans(self) -> Iterator[tuple[Tensor, int, int]]:
        """Every page with the places it covers: first, and first of the next."""
        start = 0
        for page in self.pages:
            yield page, start, start + page.shape[0]
            start += page.shape[0]

    def get(self, place: Tensor) -> Tensor:
        """Rows of places `[X]`."""
        if len(self.pages) == 1:
            return self.pages[0].index_select(0, place)
        out = self.pages[0].new_empty(place.shape[0], self.width)
        for page, start, end in self.spans():
            here = torch.nonzero((place >= start) & (place < end))[:, 0]
            out[here] = page[place[here] - start]
        return out

    def put(self, place: Tensor, rows: Tensor) -> None:
        """Replace the rows of places `[X]`, each once."""
        if len(self.pages) == 1:
            self.pages[0].index_copy_(0, place, rows)
            return
        for page, start, end in self.spans():
            here = torch.nonzero((place >= start) & (place < end))[:, 0]
            if here.numel():
                page.index_copy_(0, place[here] - start, rows[here])

    def extend(self, count: int) -> Tensor:
        """Places of `count` new rows."""
        first, self.used = self.used, self.used + count
        room = sum(page.shape[0] for page in self.pages)
        if (missing := self.used - room) > 0:
            last, full = self.pages[-1], PAGE // self.row_bytes
            size = last.shape[0] + max(missing, last.shape[0])
            if size <= full:
                page = last.new_empty(size, self.width)
                page[: last.shape[0]] = last
                self.pages[-1] = page
            else:
                self.pages.append(last.new_empty(max(missing, full), self.width))
        return torch.arange(first, self.used, device=self.pages[0].device)

    def copy(self, held: Tensor) -> Pool:
        """A pool of its own with the rows of places `held` (ascending)."""
        new = Pool(self.pages[0].new_empty(0, self.width))
        if held.numel():
            new.pages = [self.get(x) for x in held.split(max(1, PAGE // self.row_bytes))]
            new.used = held.shape[0]
        return new

    def take(self, held: Tensor) -> Tensor:
        """The rows of places `held` (ascending) as one tensor; pages are given up as they are copied."""
        if len(self.pages) == 1 and held.shape[0] == self.pages[0].shape[0]:
            return self.pages[0]
        ends = [end for _, _, end in self.spans()]
        parts = held.split(torch.searchsorted(held, held.new_tensor([0, *ends])).diff().tolist())
        out, first, start = self.pages[0].new_empty(held.shape[0], self.width), 0, 0
        for i, (part, end) in enumerate(zip(parts, ends, strict=True)):
            torch.index_select(self.pages[i], 0, part - start, out=out[first : first + part.shape[0]])
            self.pages[i] = self.pages[i][:0].clone()
            first, start = first + part.shape[0], end
        return out
