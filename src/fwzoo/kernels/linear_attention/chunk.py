"""Linear attention in chunks of tokens: falcon1a's inner-product form. The normaliser z is one more value column, of ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import compute_dtype
from ..documents import scan_documents
from ..falcon.chunk import inner_product_form
from .reference import LinearAttentionState, linear_attention_reference, started


def linear_attention_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    normalize: bool,
    eps: float,
    state: LinearAttentionState | None,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LinearAttentionState]:
    """Chunk-parallel form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.linear_attention`, checked."""
    if q.shape[1] == 0:
        return linear_attention_reference(q, k, v, log_decay, normalize, eps, state, mask, bounds)
    state = started(state, q, v, bounds)
    ones = q.new_ones(q.shape[:3], dtype=compute_dtype(q.dtype))
    decay = torch.zeros_like(ones) if log_decay is None else log_decay
    values = F.pad(v.to(ones.dtype), (0, 1), value=1)
    S = torch.cat([state.S, state.z[..., None]], -1)
    both, S = scan_documents(inner_product_form, S, (q, k, values, ones, decay), mask, bounds)
    o, seen = both.split([v.shape[-1], 1], -1)
    if normalize:
        seen = seen + eps
        o = o / (seen if mask is None else torch.where(mask[..., None, None], seen, 1))
    return o.to(v.dtype), LinearAttentionState(S[..., :-1], S[..., -1])
