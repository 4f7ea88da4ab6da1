"""FwMLP in chunks: one batched MLP for all reads of a chunk, then the closed form of its gradient step.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..clock import Clock, at_ticks, pending_targets
from ..contract import compute_dtype
from .state import WEIGHTS, FwmlpState, Options


@torch.compiler.disable  # how many chunks and rows there are depends on the values
def fwmlp_chunk(
    q: Tensor, v: Tensor, options: Options, state: FwmlpState, mask: Tensor | None, bounds: list[int] | None
) -> tuple[Tensor, FwmlpState]:
    """Chunk form over `[B, T, .]`; arguments are those of `fwzoo.kernels.fwmlp`, checked; the weights are in the state."""
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
    q_stream, v_stream = clock.stream(q, state.q), clock.stream(v.detach(), state.v)
    target, known = clock.targets()
    weights = tuple(getattr(state, name) for name in WEIGHTS)
    pieces = []
    for x, (part, now) in zip(q_stream.split(chunk, 1), clock.steps(), strict=False):
        y = read(weights, x[:, part.start - part.stop + chunk :].to(dtype))
        pieces.append(y)
        if now is not None:
            goal = at_ticks(v_stream, target[:, part])
            weights = step_down(weights, x, y, goal, known[:, part] & now, options)
    o = torch.cat(pieces, 1) if pieces else v_stream.to(dtype)
    new = FwmlpState(
        **dict(zip(WEIGHTS, weights, strict=True)),
        q=clock.pending(q_stream.detach()),
        v=clock.pending(v_stream),
        real=clock.pending(clock.real),
        count=clock.new_count(),
    )
    return clock.back(o).to(v.dtype), new


def fwmlp_flush(state: FwmlpState, options: Options) -> FwmlpState:
    """Update with the pending tokens that have a target, and start a new chunk."""
    target, known = pending_targets(state.v, state.real, options.lookahead)
    weights = tuple(getattr(state, name) for name in WEIGHTS)
    y = read(weights, state.q.to(weights[0].dtype))
    weights = step_down(weights, state.q, y, target, known, options)
    return FwmlpState(*weights, *(torch.zeros_like(x) for x in state[len(WEIGHTS) :]))


def read(weights: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """The fast SwiGLU of every memory: q `[N, W, K]` to `[N, W, V]`."""
    w_gate, b_gate, w_up, b_up, w_down, b_down = weights
    x = q.reshape(w_gate.shape[0], -1, q.shape[-1])
    hidden = F.silu(_linear(x, w_gate, b_gate)) * _linear(x, w_up, b_up)
    return _linear(hidden, w_down, b_down).reshape(*q.shape[:2], w_down.shape[1])


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(b[:, None], x, w.transpose(1, 2))


@torch.no_grad()
def step_down(
    weights: tuple[Tensor, ...], q: Tensor, y: Tensor, target: Tensor, writes: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """One gradient step on the mean of (y - target)^2 / 2 over the tokens `writes` `[N, W]` and features."""
    w_gate, b_gate, w_up, b_up, w_down, _ = weights
    dtype, groups = w_gate.dtype, w_gate.shape[0]
    target = options.written(target, dtype)
    x = q.to(dtype).reshape(groups, -1, q.shape[-1])
    d_y = (y.detach() - target).masked_fill(~writes[..., None], 0).reshape(groups, x.shape[1], -1)
    gate, up = _linear(x, w_gate, b_gate), _linear(x, w_up, b_up)
    open_ = gate.sigmoid()
    silu = gate * open_
    d_hidden = d_y @ w_down
    d_up = d_hidden * silu
    d_gate = d_hidden * up * (open_ + silu * (1 - open_))
    sums = (
        d_gate.transpose(1, 2) @ x,
        d_gate.sum(1),
        d_up.transpose(1, 2) @ x,
        d_up.sum(1),
        d_y.transpose(1, 2) @ (silu * up),
        d_y.sum(1),
    )
    tokens = writes.reshape(groups, -1).sum(1)
    if options.group is not None:
        for total in (*sums, tokens):
            dist.all_reduce(total, group=options.group)
    scale = options.lr / (tokens.clamp(min=1).to(dtype) * y.shape[-1])
    return tuple(w - scale.view(-1, *[1] * (w.ndim - 1)) * total for w, total in zip(weights, sums, strict=True))
