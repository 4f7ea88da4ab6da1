"""Linear attention on a GPU: the kernels of falcon1a, with every pair written by its own token and a normaliser z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import step
from ..associative import Associative, Kept, segment_length
from ..contract import few_tokens
from ..gpu import custom, out_of_chunks, prefix
from ..ranks import CHUNK, Ranks, make_ranks, ranks_of
from .reference import LinearAttentionState


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    normalize: bool,
    eps: float,
    state: LinearAttentionState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, LinearAttentionState]:
    """Triton form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.linear_attention`, checked."""
    if few_tokens((q, k, v, log_decay, *state), mask, bounds):
        norm = {"z": state.z, "normalize": normalize, "eps": eps}
        o, S, z = step.steps(q, k, v, None, log_decay, state.S, mask, regression=False, **norm)
        return o, LinearAttentionState(S, z)
    ranks = make_ranks(q, mask, bounds, segment=segment_length(q, 0))
    q, k, v = (x.contiguous() for x in (q, k, v))
    o, S, z, *_ = _linear_attention(
        q,
        k,
        v,
        log_decay,
        state.S,
        state.z,
        *ranks.tables,
        ranks.sizes,
        normalize,
        eps,
    )
    return o, LinearAttentionState(S, z)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    ranks: Ranks,
    normalize: bool,
    eps: float,
) -> Associative:
    """decay: the two halves of the log-decay's prefix, `[2, M, H, C]`."""
    nothing, first = q.new_empty(0), torch.zeros(ranks.documents, dtype=torch.int32, device=q.device)
    strength = torch.ones_like(decay[0])
    return Associative(
        q, k, v, nothing, nothing, first, strength, decay[0], decay[1], ranks, ones=True, normalize=normalize, eps=eps
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = ranks_of(sizes, docs, chunk_doc, segment_doc, rows)
    if log_decay is None:
        decay = q.new_zeros(2, ranks.chunks, q.shape[2], CHUNK, dtype=torch.float32)
    else:
        decay = prefix(log_decay, ranks)
    call = _call(q, k, v, decay, ranks, normalize, eps)
    o, S, z, kept = call.forward(S, z)
    return o, S, z, *kept, decay


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Any, S: Tensor, z: Tensor, *others: Any) -> Any:
    sizes, normalize = others[4], others[5]
    segments, heads, wide = sizes[6], q.shape[2], {"dtype": torch.float32}
    return (
        torch.empty_like(v),
        torch.empty_like(S),
        torch.empty_like(z),
        q.new_empty(segments, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(segments, heads, k.shape[3], **wide),
        q.new_empty(segments, heads, **wide),
        q.new_empty(q.shape[:3] if normalize else (0,), **wide),
        q.new_empty(2, sizes[5], heads, CHUNK, **wide),
    )


def _backward(
    d_o: Tensor,
    d_S: Tensor,
    d_z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    normalize: bool,
    eps: float,
    o: Tensor,
    S_end: Tensor,
    z_end: Tensor,
    states: Tensor,
    z_states: Tensor,
    total: Tensor,
    seen: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = ranks_of(sizes, docs, chunk_doc, segment_doc, rows)
    call = _call(q, k, v, decay, ranks, normalize, eps)
    d_log_decay = q.new_empty(0)

    def through_gates(d_strength: Tensor, found: Tensor) -> None:
        nonlocal d_log_decay
        assert log_decay is not None
        d_log_decay = out_of_chunks(found, ranks, log_decay.dtype)

    d_q, d_k, d_v, _, _, d_S, d_z = call.backward(
        d_o,
        o,
        d_S,
        d_z,
        S_end,
        z_end,
        Kept(states, z_states, total, seen),
        None if log_decay is None else through_gates,
    )
    return d_q, d_k, d_v, d_log_decay, d_S, d_z


def _fake_backward(
    d_o: Tensor, d_S: Tensor, d_z: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Any, *_: Any
) -> Any:
    d_log_decay = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay)
    return *(torch.empty_like(x) for x in (q, k, v)), d_log_decay, torch.empty_like(d_S), torch.empty_like(d_z)


_linear_attention = custom(
    "linear_attention", _forward, _backward, _fake_forward, _fake_backward, outputs=3, inputs=range(6), module=__name__
)
