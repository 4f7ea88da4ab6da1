"""The gated delta rule in chunks of tokens: falcon1's regression form, whose residual here sees the decayed state."""

from __future__ import annotations

from torch import Tensor

from ..contract import compute_dtype
from ..documents import scan_documents
from ..falcon.chunk import regression_form
from .reference import GatedDeltaState, gated_delta_reference


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float,
    state: GatedDeltaState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, GatedDeltaState]:
    """Chunk-parallel form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.gated_delta`, checked."""
    if q.shape[1] == 0:
        return gated_delta_reference(q, k, v, log_decay, beta, scale, state, mask, bounds)
    inputs = (scale * q.to(compute_dtype(q.dtype)), k, v, beta, log_decay)
    o, S = scan_documents(regression_form, state.S, inputs, mask, bounds, decay_before_residual=True)
    return o.to(v.dtype), GatedDeltaState(S)
