"""Linear attention on a GPU: the kernels of falcon1a, with every pair written by its own token and a normaliser z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import step
from ..associative import Associative, Kept, gate_gradients, new_weights, segment_length, weights_of
from ..contract import few_tokens
from ..gpu import custom, out_of_chunks, prefix
from ..plans import planned
from ..ranks import CHUNK, make_ranks, ranks_of
from .reference import LinearAttentionState, started


def linear_attention_triton(
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
    """Triton form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.linear_attention`, checked."""
    if few_tokens((q, k, v, log_decay, *(state or ())), mask, bounds):
        state = started(state, q, v, bounds)
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
        *(state or (None, None)),
        *ranks.tables,
        ranks.sizes,
        normalize,
        eps,
    )
    return o, LinearAttentionState(S, z)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = ranks_of(sizes, docs, chunk_doc, segment_doc, rows)
    if log_decay is None:
        decay = q.new_zeros(2, ranks.chunks, q.shape[2], CHUNK, dtype=torch.float32)
    else:
        decay = prefix(log_decay, ranks)
    weights, mixes = weights_of(q, decay, ranks)
    call = Associative(
        q, k, v, None, None, None, decay[0], decay[1], weights, mixes, ranks, ones=True, normalize=normalize, eps=eps
    )
    o, S, z, kept = call.forward(S, z)
    return o, S, z, *kept, decay, weights, mixes


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Any, S: Any, z: Any, *others: Any) -> Any:
    sizes, normalize = others[4], others[5]
    documents, segments, heads, wide = sizes[2], sizes[6], q.shape[2], {"dtype": torch.float32}
    return (
        torch.empty_like(v),
        q.new_empty(documents, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(documents, heads, k.shape[3], **wide),
        q.new_empty(segments, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(segments, heads, k.shape[3], **wide),
        q.new_empty(segments, heads, **wide),
        q.new_empty(q.shape[:3] if normalize else (0,), **wide),
        q.new_empty(2, sizes[5], heads, CHUNK, **wide),
        *new_weights(q, ranks_of(sizes, None, None, None, None), 1),
    )


def _backward(
    d_o: Tensor | None,
    d_S: Tensor | None,
    d_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
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
    weights: Tensor,
    mixes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks = ranks_of(sizes, docs, chunk_doc, segment_doc, rows)
    call = Associative(
        q, k, v, None, None, None, decay[0], decay[1], weights, mixes, ranks, ones=True, normalize=normalize, eps=eps
    )
    d_log_decay = q.new_empty(0)

    def through_gates(grads: dict[str, Any]) -> None:
        nonlocal d_log_decay
        assert log_decay is not None
        d_log_decay = out_of_chunks(gate_gradients(grads, decay[0]), ranks, log_decay.dtype)

    d_q, d_k, d_v, _, _, d_S, d_z = call.backward(
        torch.zeros_like(o) if d_o is None else d_o,
        o,
        d_S,
        d_z,
        S_end,
        z_end,
        Kept(states, z_states, total, seen),
        None if log_decay is None else through_gates,
    )
    if z is not None and d_z is None:
        d_z = torch.zeros_like(z)
    of_state = (q.new_empty(0) if given is None or x is None else x for given, x in ((S, d_S), (z, d_z)))
    return d_q, d_k, d_v, d_log_decay, *of_state


def _fake_backward(d_o: Any, d_S: Any, d_z: Any, *arguments: Any) -> tuple[Tensor, ...]:
    q = arguments[0]
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in arguments[:6])


_linear_attention = custom(
    "linear_attention", planned(_forward), planned(_backward), _fake_forward, _fake_backward, outputs=3, inputs=range(6), module=__name__,
    materialize=False,
)  # fmt: skip
