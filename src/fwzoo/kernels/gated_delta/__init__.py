"""The gated delta rule: decay the fast weights, then correct what they say about this key.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import contract
from ..contract import Op
from ..samples import Draw, Sample, Samples
from .chunk import gated_delta_chunk
from .reference import GatedDeltaState, gated_delta_reference

__all__ = ["GatedDeltaState", "gated_delta"]


def _samples(draw: Draw) -> Samples:
    sizes = draw.sizes
    tokens = {"q": draw.unit_heads(sizes.key), "k": draw.unit_heads(sizes.key), "v": draw.heads(sizes.value)}
    yield Sample("", tokens, {"log_decay": -0.1 * draw.gate(), "beta": draw.gate()})


def _triton(*arguments: Any) -> tuple[Tensor, GatedDeltaState]:
    from .triton import gated_delta_triton  # only here: fwzoo does not need triton

    return gated_delta_triton(*arguments)


GATED_DELTA = contract.register(
    Op(
        "gated_delta",
        {"reference": gated_delta_reference, "chunk": gated_delta_chunk, "triton": _triton},
        short=4,
        samples=_samples,
    )
)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: GatedDeltaState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, GatedDeltaState]:
    """S_t = g_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, read as o_t = scale * S_t^T q_t, a matrix S a head.

    Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).

    Args:
        q, k: query and key `[B, T, H, K]`, used as they are (normalisation is the layer's).
        v: value `[B, T, H, V]`.
        log_decay: log g, at most 0, `[B, T, H]`.
        beta: gain b `[B, T, H]`, not bounded above.
        scale: factor of the read; None means 1 / sqrt(K).
        state: `GatedDeltaState` to continue from. mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, K and V up to 256).

    Returns:
        Output `[B, T, H, V]` in the dtype of v (rows of masked tokens are 0), and the complete `GatedDeltaState`.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    contract.check_qkv(q, k, v)
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        contract.check_gate(name, gate, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    contract.finite_number("scale", scale)
    bounds, documents = contract.check_documents(mask, cu_seqlens, q)
    state = contract.start_state(state, lambda q, v: GatedDeltaState(contract.empty_weights(documents, q, v)), q, v)
    contract.check_values({"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}, mask)
    contract.check_log_decay(log_decay, mask)
    run = GATED_DELTA.resolve(level, q.shape[1], (q, k, v))
    return run(q, k, v, log_decay, beta, scale, state, mask, bounds)
