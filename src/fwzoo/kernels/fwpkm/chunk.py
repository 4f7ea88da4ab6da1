"""FwPKM in chunks: all reads of a chunk at once, then the closed forms of its update.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..clock import Clock, at_ticks, pending_targets
from ..contract import compute_dtype
from ..product_keys import Bags, Selection, keep_read, select, sort_bags, watching
from .overlay import Overlay
from .state import FwpkmState, Options


@torch.compiler.disable  # how many chunks and rows there are depends on the values
def fwpkm_chunk(
    q: Tensor,
    v: Tensor,
    gate: Tensor,
    keys: Tensor,
    values: Tensor,
    options: Options,
    state: FwpkmState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FwpkmState]:
    """Chunk form over `[B, T, .]`; arguments are those of `fwzoo.kernels.fwpkm`, checked."""
    dtype, chunk = compute_dtype(q.dtype), options.chunk_size
    clock = Clock(
        q,
        chunk,
        options.lookahead,
        options.shared,
        mask=mask,
        bounds=bounds,
        pending=state.real,
        count=state.count,
        group=options.group,
    )
    q_stream, v_stream, gate_stream = (
        clock.stream(x, old) for x, old in ((q, state.q), (v.detach(), state.v), (gate.detach(), state.gate))
    )
    target, known = clock.targets()
    memory = Memory(state.keys, Overlay(values, state, options.max_slots, options.evict), options)
    graph, joined, reads = torch.is_grad_enabled() and q.requires_grad, [], []
    o = v_stream.new_zeros(clock.sequences, 0 if graph else clock.ticks - clock.first, v.shape[2], dtype=dtype)
    for queries, (part, now) in zip(q_stream.split(chunk, 1), clock.steps(), strict=False):
        v_hat, selection = memory.read(queries[:, part.start - part.stop + chunk :].to(dtype))
        if graph:
            joined.append(v_hat)
        else:
            o[:, part.start - clock.first : part.stop - clock.first] = v_hat
        if watching():
            reads.append(selection)
        if now is not None:
            chosen = queries, at_ticks(v_stream, target[:, part]), gate_stream[:, part]
            memory.update(selection, v_hat, *chosen, known[:, part] & now, clock.real[:, part] & now)
    new = FwpkmState(
        keys=memory.keys,
        **memory.overlay.fields(),
        q=clock.pending(q_stream.detach()),
        v=clock.pending(v_stream),
        gate=clock.pending(gate_stream),
        real=clock.pending(clock.real),
        count=clock.new_count(),
        base=state.base,
    )
    if reads:
        keep_read(*in_token_order(clock, reads))
    return clock.back(torch.cat(joined, 1) if joined else o).to(v.dtype), new


def in_token_order(clock: Clock, reads: list[Any]) -> list[Tensor]:
    """Slots and weights `[B, T, H, k]` of what was selected chunk by chunk."""
    streams = []
    for field in ("slots", "weights"):
        rows = [getattr(selection, field) for selection in reads]
        streams.append(clock.back(torch.cat([x.reshape(clock.sequences, -1, *x.shape[2:]) for x in rows], 1)))
    return streams


def fwpkm_flush(state: FwpkmState, values: Tensor, options: Options) -> FwpkmState:
    """Update with the pending tokens that have a target, and start a new chunk."""
    target, known = pending_targets(state.v, state.real, options.lookahead)
    memory = Memory(state.keys, Overlay(values, state, options.max_slots, options.evict), options)
    with torch.no_grad():
        v_hat, selection = memory.read(state.q.to(state.keys.dtype))
    memory.update(selection, v_hat, state.q, target, state.gate, known, known)
    cleared = {name: torch.zeros_like(getattr(state, name)) for name in ("q", "v", "gate", "real", "count")}
    return FwpkmState(keys=memory.keys, **memory.overlay.fields(), **cleared, base=state.base)


class Memory:
    """The fast weights of all memories during a call.

    Args:
        keys: `[G, 2, H, n, F]`. overlay: the tables.
    """

    def __init__(self, keys: Tensor, overlay: Overlay, options: Options) -> None:
        self.keys, self.overlay, self.options = keys, overlay, options

    def read(self, q: Tensor) -> tuple[Tensor, Selection]:
        """Values read `[N, W, V]` for queries `[N, W, H, K]`, and what was selected (`[G, tokens, H, k]`)."""
        groups = self.keys.shape[0]
        selection = select(
            q.reshape(groups, -1, *q.shape[2:]),
            self.keys,
            self.options.top_k,
            self.options.score,
            self.options.score_eps,
        )
        v_hat = self.overlay.read(self._entries(selection).flatten(0, 1), selection.weights.flatten(2).flatten(0, 1))
        return v_hat.view(*q.shape[:2], v_hat.shape[1]), selection

    def _entries(self, selection: Selection) -> Tensor:
        """`[G, tokens, H * k]`"""
        memory = torch.arange(self.keys.shape[0], device=self.keys.device)[:, None, None]
        return memory * self.overlay.size + selection.slots.flatten(2)

    @torch.no_grad()
    def update(
        self, selection: Selection, v_hat: Tensor, q: Tensor, target: Tensor, gate: Tensor, writes: Tensor, real: Tensor
    ) -> None:
        """Move values and sub-keys by a chunk of tokens.

        Args:
            selection, v_hat: what `read` returned for the chunk. q `[N, W, H, K]`, target `[N, W, V]`, gate `[N, W]`.
            writes: bool `[N, W]`, tokens whose target is known. real: bool `[N, W]`, tokens that count as uses of the keys.
        """
        options, dtype, groups = self.options, self.keys.dtype, self.keys.shape[0]
        target = options.written(target, dtype)
        weight = selection.weights.flatten(2)
        if options.gate_weighting:
            weight = gate.to(dtype).reshape(groups, -1, 1) * weight
        written = writes.reshape(groups, -1)
        self._write_values((target - v_hat)[writes], weight[written], self._entries(selection)[written])
        if options.address_loss:
            self._move_keys(selection, q.to(dtype).reshape(groups, -1, *q.shape[2:]), real.reshape(groups, -1))

    def _write_values(self, residual: Tensor, weight: Tensor, entries: Tensor) -> None:
        """residual `[X, V]`; weight and entries `[X, H * k]`."""
        options = self.options
        rows, bags = sort_bags(residual, entries, weight)
        counts = bags.counts
        if options.group is not None:
            rows, bags, counts = _pool_rows(rows, bags.sum(), counts, options.group)
        scale = torch.full_like(counts, options.value_lr, dtype=residual.dtype)
        if options.row_averaging:
            scale = scale / counts
        self.overlay.add(rows, bags.scaled(scale))

    def _move_keys(self, selection: Selection, q: Tensor, real: Tensor) -> None:
        """A gradient step on sum p log p, p the mean use of every sub-key."""
        groups, _, heads, n, size = self.keys.shape
        # sub-keys kept by the real tokens, [X, H, 2, k]: their share of the use, and where they lie in [G, 2, H, n]
        memory = torch.nonzero(real)[:, 0]
        table = torch.arange(groups * 2 * heads, device=q.device).view(groups, 2, heads).transpose(1, 2) * n
        at = selection.index[real] + table[memory][..., None]
        half = selection.half[real]
        share = half.softmax(-1)
        use = share.new_zeros(groups * 2 * heads * n).index_add_(0, at.flatten(), share.flatten())
        tokens = real.sum(1)
        if self.options.group is not None:
            dist.all_reduce(use, group=self.options.group)
            dist.all_reduce(tokens, group=self.options.group)
        tokens = tokens.clamp(min=1)
        mean = use.view(groups, -1) / tokens[:, None]
        log_mean = torch.where(mean > 0, mean, 1).log().flatten()[at]
        weight = share * (log_mean - (share * log_mean).sum(-1, keepdim=True)) / tokens[memory][:, None, None, None]
        # the gradient of a sub-key is a weighted sum of query halves (dot), or of their differences from it (idw)
        if self.options.score == "idw":
            weight = 2 * weight * half.exp()
        moved, bags = sort_bags(q[real].reshape(-1, size), at.flatten(0, 2), weight.flatten(0, 2))
        step = bags.sum()
        if self.options.score == "idw":
            total = use.new_zeros(moved.shape[0]).index_add_(0, torch.repeat_interleave(bags.counts), bags.weights)
            step -= total[:, None] * self.keys.reshape(-1, size)[moved]
        d_keys = torch.zeros_like(self.keys).view(-1, size)
        d_keys[moved] = step
        if self.options.group is not None:
            dist.all_reduce(d_keys, group=self.options.group)
        self.keys = self.keys - self.options.key_lr * d_keys.view_as(self.keys)


def _pool_rows(rows: Tensor, change: Tensor, counts: Tensor, group: object) -> tuple[Tensor, Bags, Tensor]:
    """Entries, sums and counts added up over all ranks; every rank gets the same."""
    ranks = dist.get_world_size(group)
    number = torch.tensor([rows.shape[0]], device=rows.device)
    numbers = [torch.zeros_like(number) for _ in range(ranks)]
    dist.all_gather(numbers, number, group=group)
    longest = max(int(x) for x in numbers)

    def gather(x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[: int(n)] for part, n in zip(parts, numbers, strict=True)])

    merged, inverse = torch.unique(gather(rows), return_inverse=True)
    total = change.new_zeros(merged.shape[0], change.shape[1]).index_add_(0, inverse, gather(change))
    return merged, Bags.of_rows(total), counts.new_zeros(merged.shape[0]).index_add_(0, inverse, gather(counts))
