"""FwMLP as its definition: one token after the other, and after every chunk a gradient step on the written loss.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..clock import Token, run_reference
from ..contract import compute_dtype
from .state import WEIGHTS, FwmlpState, Options


def fwmlp_reference(
    q: Tensor, v: Tensor, options: Options, state: FwmlpState, mask: Tensor | None, bounds: list[int] | None
) -> tuple[Tensor, FwmlpState]:
    """Token loop over `[B, T, .]`; arguments are those of `fwzoo.kernels.fwmlp`, checked; the weights are in the state."""
    options.check_reference()
    dtype = compute_dtype(q.dtype)
    memories = [[getattr(state, name)[g] for name in WEIGHTS] for g in range(state.w_gate.shape[0])]

    def read(g: int, token: Token) -> Token:
        return (mlp(memories[g], token[0].to(dtype)),)

    @torch.enable_grad()
    def update(g: int, tokens: list[tuple[Token, Tensor | None]]) -> None:
        weights = [w.detach().requires_grad_() for w in memories[g]]
        losses = [
            0.5 * (mlp(weights, x.detach().to(dtype)) - options.written(target, dtype)).square()
            for (x, _), target in tokens
            if target is not None
        ]
        if losses:
            grads = torch.autograd.grad(torch.stack(losses).mean(), weights)
            memories[g] = [w.detach() - options.lr * grad for w, grad in zip(weights, grads, strict=True)]

    (o,), (pending_q, pending_v), real, count = run_reference(
        (q, v.detach()),
        (state.q, state.v),
        state.real,
        state.count,
        options.chunk_size,
        options.lookahead,
        options.shared,
        mask,
        bounds,
        read,
        update,
        (v.new_zeros(v.shape[2], dtype=dtype),),
    )
    weights = {name: torch.stack([memory[i] for memory in memories]) for i, name in enumerate(WEIGHTS)}
    return o.to(v.dtype), FwmlpState(**weights, q=pending_q, v=pending_v, real=real, count=count)


def mlp(weights: list[Tensor], q: Tensor) -> Tensor:
    """W_d (silu(W_g q + b_g) * (W_u q + b_u)) + b_d for one token `[K]`."""
    w_gate, b_gate, w_up, b_up, w_down, b_down = weights
    return w_down @ (F.silu(w_gate @ q + b_gate) * (w_up @ q + b_up)) + b_down
