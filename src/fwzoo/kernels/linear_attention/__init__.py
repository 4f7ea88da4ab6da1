"""Linear attention, the classical fast-weight layer: add every key-value pair, read with the query, normalise.

Source: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import contract
from ..contract import Op
from ..samples import Draw, Sample, Samples
from .chunk import linear_attention_chunk
from .reference import LinearAttentionState, empty_state, linear_attention_reference

__all__ = ["LinearAttentionState", "linear_attention"]


def _samples(draw: Draw) -> Samples:
    sizes = draw.sizes
    tokens = {
        "q": draw.unit_heads(sizes.key).abs(),
        "k": draw.unit_heads(sizes.key).abs(),
        "v": draw.heads(sizes.value),
    }
    yield Sample("normalised", tokens)
    yield Sample("decayed", tokens, {"log_decay": -0.1 * draw.gate()}, options={"normalize": False})


def _triton(*arguments: Any) -> tuple[Tensor, LinearAttentionState]:
    from .triton import linear_attention_triton  # only here: fwzoo does not need triton

    return linear_attention_triton(*arguments)


LINEAR_ATTENTION = contract.register(
    Op(
        "linear_attention",
        {"reference": linear_attention_reference, "chunk": linear_attention_chunk, "triton": _triton},
        short=4,
        samples=_samples,
    )
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    state: LinearAttentionState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, LinearAttentionState]:
    """S_t = l_t S_{t-1} + k_t v_t^T, z_t = l_t z_{t-1} + k_t, read as o_t = S_t^T q_t / (q_t . z_t + eps).

    Source: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020).

    Args:
        q, k: query and key `[B, T, H, K]`, already feature-mapped; with `normalize` they should not be negative.
        v: value `[B, T, H, V]`.
        log_decay: log l, at most 0, `[B, T, H]`; None means no decay.
        normalize: divide by q . z + eps; z is kept up to date in any case. eps: added to the divisor.
        state: `LinearAttentionState` to continue from. mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, K and V up to 256).

    Returns:
        Output `[B, T, H, V]` in the dtype of v (rows of masked tokens are 0), and the complete `LinearAttentionState`.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    contract.check_qkv(q, k, v)
    gates = {} if log_decay is None else {"log_decay": log_decay}
    for name, gate in gates.items():
        contract.check_gate(name, gate, q)
    contract.one_of("normalize", normalize, (True, False))
    contract.finite_number("eps", eps, least=0)
    bounds, documents = contract.check_documents(mask, cu_seqlens, q)
    state = contract.given_state(state, lambda q, v: empty_state(documents, q, v), q, v)
    contract.check_values({"q": q, "k": k, "v": v, **gates}, mask)
    for gate in gates.values():
        contract.check_log_decay(gate, mask)
    run = LINEAR_ATTENTION.resolve(level, q.shape[1], (q, k, v))
    return run(q, k, v, log_decay, normalize, eps, state, mask, bounds)
