"""FwPKM on a GPU: a chunk is searched, read and, once its targets are known, written by a handful of kernels.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..clock import Clock, known_count, remember_count
from ..contract import few_tokens, may_discard_states, may_overwrite_states
from ..product_key_search import Found, backward, search
from ..product_keys import keep_read, watching
from .chunk import in_token_order
from .state import FwpkmState, Options
from .table import Chunk, Table, step, weights_backward


@torch.compiler.disable  # how many chunks and rows there are depends on the values
def fwpkm_triton(
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
    """Triton form over `[B, T, .]`; arguments are those of `fwzoo.kernels.fwpkm`, checked."""
    q, v, gate, values = q.contiguous(), v.detach().contiguous(), gate.detach().contiguous(), values.contiguous()
    if few_tokens((q, v), mask, bounds) and not options.shared and not watching() and _only_reads(q, options, state):
        return _few(q, v, gate, values, options, state, mask)
    call = _Call(q, v, gate, values, options, state, mask, bounds)
    q_stream = call.clock.stream(q, state.q)
    o = _Differentiable.apply(q_stream, call) if call.graph else call.run(q_stream)
    return call.clock.back(o), state if may_discard_states() else call.state(q_stream)


def _only_reads(q: Tensor, options: Options, state: FwpkmState) -> bool:
    """Whether no memory is written after these tokens. While a graph is captured the caller vouches for it."""
    if _capturing(q):
        return True
    pending = max(known_count(state.count), default=0) + q.shape[1]
    return pending <= options.chunk_size if options.lookahead else pending < options.chunk_size


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _few(
    q: Tensor, v: Tensor, gate: Tensor, values: Tensor, options: Options, state: FwpkmState, mask: Tensor | None
) -> tuple[Tensor, FwpkmState]:
    counts = None if mask is not None or _capturing(q) else known_count(state.count)
    if not may_overwrite_states():
        pending = ("q", "v", "gate", "real", "count")
        state = state._replace(**{name: getattr(state, name).clone() for name in pending})
    found = search(q, state.keys, options.top_k, options.score, options.score_eps)
    o, state = step(found, values, state, q, v, gate, None if mask is None else mask.contiguous())
    if counts is not None:
        remember_count(state.count, [count + q.shape[1] for count in counts])
    return o, state


class _Call:
    """One call: its clock, its tables, and a chunk after the other."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        gate: Tensor,
        values: Tensor,
        options: Options,
        state: FwpkmState,
        mask: Tensor | None,
        bounds: list[int] | None,
    ) -> None:
        self.options, self.old = options, state
        self.clock = clock = Clock(
            q,
            options.chunk_size,
            options.lookahead,
            options.shared,
            mask=mask,
            bounds=bounds,
            pending=state.real,
            count=state.count,
        )
        self.graph = torch.is_grad_enabled() and q.requires_grad
        self.v, self.gate = clock.stream(v, state.v).contiguous(), clock.stream(gate, state.gate).contiguous()
        target, known = clock.targets()
        self.target, self.known, self.real = target.contiguous(), known.contiguous(), clock.real.contiguous()
        updates = sum(any(clock.due(i)) for i in range(clock.chunks))
        tokens = clock.sequences * min(options.chunk_size, clock.ticks)
        self.table = Table(values, state, options, q.shape[2], updates, tokens, self.graph)
        self.keys = state.keys.contiguous()

    def run(self, q_stream: Tensor, steps: list[_Read] | None = None) -> Tensor:
        """What the streams `[N, L, H, K]` read from tick `first` on, `[N, L - first, V]`; `steps` takes what backward needs."""
        clock, options = self.clock, self.options
        o = self.v.new_empty(clock.sequences, clock.ticks - clock.first, self.v.shape[2])
        reads = []
        for chunk, write in self._chunks():
            q = q_stream[:, chunk.start : chunk.start + chunk.width]
            q = q.reshape(self.keys.shape[0], -1, *q.shape[2:]).contiguous()
            found = search(q, self.keys, options.top_k, options.score, options.score_eps)
            kept = self.table.read(found, o, chunk, write)
            if steps is not None:
                steps.append((chunk, q, self.keys, found, kept))
            if watching():
                reads.append(found)
            if write:
                self.keys = self.table.write(found, q, self.keys, chunk)
        if reads:
            slots, weights = in_token_order(clock, reads)
            keep_read(slots.long(), weights)
        return o

    def _chunks(self) -> Any:
        """Every chunk that is read, and whether it is written then."""
        clock, size = self.clock, self.options.chunk_size
        real = torch.nn.functional.pad(self.real, (0, clock.chunks * size - clock.ticks))
        tokens = real.unflatten(1, (clock.chunks, size)).sum(2, dtype=torch.int32)
        tokens = (tokens.sum(0, keepdim=True, dtype=torch.int32) if self.options.shared else tokens).t()
        tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % 4)).contiguous()  # aligned rows
        for i in range(clock.chunks):
            due, start = clock.due(i), max(i * size, clock.first)
            width = min((i + 1) * size, clock.ticks) - start
            now = None
            if any(due) and not all(due):
                now = clock.on_device(due).bool()
            streams = (self.v, self.gate, self.target, self.known, self.real)
            ticks = (start, width, clock.ticks, clock.first, clock.ticks - clock.first)
            yield Chunk(*ticks, *streams, now, tokens[i]), any(due)

    def state(self, q_stream: Tensor) -> FwpkmState:
        """The state after the call."""
        clock = self.clock
        return FwpkmState(
            keys=self.keys,
            **self.table.fields(),
            q=clock.pending(q_stream.detach()),
            v=clock.pending(self.v),
            gate=clock.pending(self.gate),
            real=clock.pending(clock.real),
            count=clock.new_count(),
            base=self.old.base,
        )


_Read = tuple[Chunk, Tensor, Tensor, Found, "Tensor | None"]


class _Differentiable(torch.autograd.Function):
    """`_Call.run` with the gradient of the queries, through the weights of the slots read."""

    @staticmethod
    def forward(ctx: Any, q_stream: Tensor, call: _Call) -> Tensor:
        ctx.steps, ctx.call = [], call
        ctx.shape, ctx.dtype = q_stream.shape, q_stream.dtype
        return call.run(q_stream, ctx.steps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        table, options, d_o = ctx.call.table, ctx.call.options, grads[0].contiguous()
        d_q = d_o.new_zeros(ctx.shape, dtype=ctx.dtype)
        for chunk, q, keys, found, kept in ctx.steps:
            d_weights = weights_backward(d_o, found.slots, kept, table, chunk)
            part, *_ = backward(q, keys, found, options.score, d_weights)
            d_q[:, chunk.start : chunk.start + chunk.width] = part.view(ctx.shape[0], -1, *ctx.shape[2:])
        return d_q, None
