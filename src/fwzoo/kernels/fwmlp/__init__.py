"""Fast-weight MLP: a SwiGLU whose matrices take a gradient step once a chunk.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import contract
from ..contract import Op
from ..product_keys import check_finite
from ..samples import FLOATS, Draw, Sample, Samples
from . import chunk
from .chunk import fwmlp_chunk
from .reference import fwmlp_reference
from .state import WEIGHTS, FwmlpState, Options, empty_state

__all__ = ["WEIGHTS", "FwmlpState", "fwmlp", "fwmlp_flush"]


def _samples(draw: Draw) -> Samples:
    sizes, width = draw.sizes, 2 * draw.sizes.key
    weights = {name: draw.normal(width, sizes.key) * sizes.key**-0.5 for name in ("w_gate", "w_up")}
    weights |= {name: draw.normal(width) for name in ("b_gate", "b_up")}
    weights |= {"w_down": draw.normal(sizes.value, width) * width**-0.5, "b_down": draw.normal(sizes.value)}
    tokens = {"q": draw.tokens(sizes.key), "v": draw.tokens(sizes.value)}
    yield Sample("", tokens, weights=weights, options={"chunk_size": 64}, dtypes=FLOATS[:1])


FWMLP = contract.register(Op("fwmlp", {"reference": fwmlp_reference, "chunk": fwmlp_chunk}, samples=_samples))


def fwmlp(
    q: Tensor,
    v: Tensor,
    w_gate: Tensor,
    b_gate: Tensor,
    w_up: Tensor,
    b_up: Tensor,
    w_down: Tensor,
    b_down: Tensor,
    *,
    chunk_size: int = 512,
    lr: float = 1.0,
    lookahead: bool = True,
    normalize_targets: bool = True,
    scope: str = "sequence",
    group: Any = None,
    state: FwmlpState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, FwmlpState]:
    """Read a SwiGLU at every token; once a chunk, move its weights so that it predicts what came next.

    Source: "Fast-weight Product Key Memory" (2026).

    Args:
        q: queries `[B, T, K]`. v: values `[B, T, V]`, the targets.
        w_gate, w_up: `[M, K]`. b_gate, b_up: `[M]`. w_down: `[V, M]`. b_down: `[V]`. Where every memory starts.
        chunk_size: tokens between updates. lr: step size.
        lookahead: the target of a token is the next token's v (otherwise its own).
        normalize_targets: z-score the targets over features.
        scope: "sequence": every row (or document) has its own memory; "batch": one memory for all.
        group: process group whose ranks share the memory, for scope "batch".
        state: `FwmlpState` to continue from. mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference" or "chunk".

    Returns:
        Output `[B, T, V]` in the dtype of v (rows of masked tokens are 0), and the complete `FwmlpState`.
        Gradients flow to q only.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    contract.is_tensor("q", q, 3)
    contract.is_tensor("v", v, 3)
    contract.has_shape("v", v, (*q.shape[:2], v.shape[2]), "[B, T, V]")
    if min(q.shape[0], q.shape[2], v.shape[2]) < 1:
        raise ValueError(f"q has shape {list(q.shape)} and v {list(v.shape)}; B, K and V must be at least 1")
    if v.dtype != q.dtype:
        raise ValueError(f"v has dtype {v.dtype}; it must be {q.dtype}, like q")
    contract.same_device("v", v, q)
    weights = (w_gate, b_gate, w_up, b_up, w_down, b_down)
    _check_weights(weights, q, v)
    options = _check_options(
        chunk_size=chunk_size, lr=lr, lookahead=lookahead, normalize_targets=normalize_targets, scope=scope, group=group
    )
    bounds, sequences = contract.check_documents(mask, cu_seqlens, q)
    dtype = contract.compute_dtype(q.dtype)
    empty = empty_state(sequences, q, v, weights, options, dtype)
    if state is None:
        state = empty
    else:  # tensors that need no change as they are: of count, it is known what it holds
        state = FwmlpState(*(x.detach() if x.requires_grad else x for x in contract.check_state(state, empty)))
    check_finite(mask, q=q, v=v)
    run = FWMLP.resolve(level, q.shape[1])
    if q.is_meta:  # no values to count real tokens by: shapes only
        return torch.empty_like(v), state
    return run(q, v, options, state, mask, bounds)


def fwmlp_flush(state: FwmlpState, **options: Any) -> FwmlpState:
    """Write what is pending: the update runs on the pending tokens that have a target, and a new chunk starts.

    Args:
        state: what `fwmlp` returned. options: keyword options of that call.
    """
    defaults = {name: x for name, x in (fwmlp.__kwdefaults__ or {}).items() if name in Options.__dataclass_fields__}
    if unknown := set(options) - set(defaults):
        raise TypeError(f"{sorted(unknown)[0]} is not an option of fwmlp")
    checked = _check_options(**{**defaults, **options})
    if not isinstance(state, FwmlpState):
        raise TypeError(f"state is a {type(state).__name__}; it must be a fwzoo.kernels.FwmlpState")
    return chunk.fwmlp_flush(state, checked)


def _check_weights(weights: tuple[Tensor, ...], q: Tensor, v: Tensor) -> None:
    k_size, v_size = q.shape[2], v.shape[2]
    contract.is_tensor("w_gate", weights[0], 2)
    width = weights[0].shape[0]
    shapes = ((width, k_size), (width,), (width, k_size), (width,), (v_size, width), (v_size,))
    axes = ("[M, K]", "[M]", "[M, K]", "[M]", "[V, M]", "[V]")
    for name, x, shape, letters in zip(WEIGHTS, weights, shapes, axes, strict=True):
        contract.is_tensor(name, x, len(shape))
        contract.has_shape(name, x, shape, letters)
        contract.same_device(name, x, q)


def _check_options(**options: Any) -> Options:
    checked = Options(**options)
    checked.check()
    if not checked.lr >= 0:
        raise ValueError(f"lr is {checked.lr!r}; it must be at least 0")
    return checked
