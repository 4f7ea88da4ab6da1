"""The gated delta rule on a GPU: the kernels of `delta.py`, whose residual here sees the decayed state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import step
from ..contract import few_tokens
from ..delta import Form, delta_backward, delta_forward, kept_like
from ..gpu import custom, into_chunks, out_of_chunks, prefix
from ..ranks import make_ranks, ranks_of
from .reference import GatedDeltaState


def gated_delta_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, state: GatedDeltaState,
    mask: Tensor | None, bounds: list[int] | None,
) -> tuple[Tensor, GatedDeltaState]:  # fmt: skip
    """Triton form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.gated_delta`, checked."""
    if few_tokens((q, k, v, log_decay, beta, state.S), mask, bounds):
        o, S, _ = step.steps(q, k, v, beta, log_decay, state.S, mask, scale=scale, regression=True)
        return o, GatedDeltaState(S)
    ranks = make_ranks(q, mask, bounds)
    q, k, v, log_decay, beta, S = (x.contiguous() for x in (q, k, v, log_decay, beta, state.S))
    o, S, *_kept = _gated_delta(q, k, v, log_decay, beta, S, *ranks.tables, ranks.sizes, float(scale))
    return o, GatedDeltaState(S)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor, docs: Tensor | None,
    chunk_doc: Tensor | None, segment_doc: Tensor | None, rows: Tensor | None, sizes: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranks, form = ranks_of(sizes, docs, chunk_doc, segment_doc, rows), Form(shifted=False, decayed=True, scale=scale)
    upto, upto_low = prefix(log_decay, ranks)
    return delta_forward(q, k, k[:0], v, into_chunks(beta, ranks), upto, upto_low, S, ranks, form)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor, *others: Any) -> Any:
    return torch.empty_like(v), torch.empty_like(S), *kept_like(q, v, others[4][5])


def _backward(
    d_o: Tensor | None, d_S_out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, S: Tensor,
    docs: Tensor | None, chunk_doc: Tensor | None, segment_doc: Tensor | None, rows: Tensor | None,
    sizes: list[int], scale: float, o: Tensor, S_out: Tensor, solve: Tensor, residual_t: Tensor, borders_t: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranks, form = ranks_of(sizes, docs, chunk_doc, segment_doc, rows), Form(shifted=False, decayed=True, scale=scale)
    strength, (upto, upto_low) = into_chunks(beta, ranks), prefix(log_decay, ranks)
    d_q, d_k, _d_head, d_v, d_beta, d_log_decay, d_S = delta_backward(
        q,
        k,
        k[:0],
        v,
        strength,
        upto,
        upto_low,
        solve,
        residual_t,
        borders_t,
        torch.zeros_like(o) if d_o is None else d_o.contiguous(),
        None if d_S_out is None else d_S_out.contiguous(),
        ranks,
        form,
    )
    d_log_decay = out_of_chunks(d_log_decay, ranks, log_decay.dtype)
    return d_q, d_k, d_v, d_log_decay, out_of_chunks(d_beta, ranks, beta.dtype), d_S


def _fake_backward(d_o: Any, d_S_out: Any, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[:6])


_gated_delta = custom(
    "gated_delta", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(6), module=__name__,
    materialize=False,
)  # fmt: skip
