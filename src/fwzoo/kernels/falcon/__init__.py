"""Fast-weight attention as online learning: the six Falcon rules as one operator.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import contract
from ..contract import Op
from ..samples import Draw, Sample, Samples
from .chunk import falcon_chunk
from .reference import falcon_reference
from .rules import RULES, FalconState, Options, Rule, empty_state, log_decay

__all__ = ["RULES", "FalconState", "Rule", "falcon", "falcon_log_decay"]

LARGEST_WINDOW = 8  # that the Triton kernels take
SMALLEST_FLOOR = 1e-4  # the same for falcon2 and falcon2a, see `rescaled.py`


def _samples(draw: Draw) -> Samples:
    sizes = draw.sizes
    for name, rule in RULES.items():
        gain = (sizes.value,) if rule.per_column else ()
        tokens = {"q": draw.unit_heads(sizes.key), "k": draw.unit_heads(sizes.key), "v": draw.heads(sizes.value)}
        gates = {"beta": 2 * draw.gate(*gain), "ridge": 0.1 * draw.gate()}
        yield Sample(name, tokens, gates, options={"rule": name})


def _triton(*arguments: Any) -> tuple[Tensor, FalconState]:
    from .triton import falcon_triton  # only here: fwzoo does not need triton

    return falcon_triton(*arguments)


def _limit(few: bool, *, rule: str = "falcon1", window: int = 4, decay_floor: float = 1e-4, **_: Any) -> str | None:
    contract.one_of("rule", rule, tuple(RULES))
    if RULES[rule].per_column and decay_floor < SMALLEST_FLOOR and not few:
        return f"decay_floor is {decay_floor}, and the Triton kernels of {rule} take {SMALLEST_FLOOR} and above"
    if RULES[rule].sliding and window > LARGEST_WINDOW:
        return f"window is {window}, and the Triton kernels take up to {LARGEST_WINDOW}"
    return None


FALCON = contract.register(
    Op(
        "falcon",
        {"reference": falcon_reference, "chunk": falcon_chunk, "triton": _triton},
        short=4,
        samples=_samples,
        limit=_limit,
    )
)


def falcon(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    *,
    rule: str = "falcon1",
    window: int = 4,
    pairing: str = "shifted",
    timing: str = "read_after_write",
    step: str = "beta",
    scale_coupled: bool = False,
    eps: float = 1e-6,
    decay_floor: float = 1e-4,
    state: FalconState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, FalconState]:
    """Read and write a fast-weight matrix a head, token by token, as online ridge regression or its inner-product form.

    Source: "Fast Weight Attention for Continual Learning" (2026).

    Args:
        q, k: query and key `[B, T, H, K]`, already normalised and feature-mapped.
        v: value `[B, T, H, V]`.
        beta: gain in (0, 2), `[B, T, H]`; `[B, T, H, V]` for falcon2 and falcon2a. With `step="eta"` the step itself.
        ridge: ridge coefficient >= 0, `[B, T, H]`.
        rule: falcon1, falcon2, falcon3 (regression), falcon1a, falcon2a, falcon3a (inner product).
        window: number of pairs a token writes, for falcon3 and falcon3a.
        pairing: "shifted" pairs the previous real key with this value; "same_step" this key with this value.
        timing: "read_after_write" or "read_before_write".
        step: "beta" divides the gain by energy + ridge + eps; "eta" takes it as it is.
        scale_coupled: multiply the ridge by the energy.
        eps: added to the energy. decay_floor: smallest decay of a step, in (0, 1].
        state: `FalconState` to continue from. mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, K and V up to 256, window up to 8).

    Returns:
        Output `[B, T, H, V]` in the dtype of v (rows of masked tokens are 0), and the complete `FalconState`.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    _check_inputs(q, k, v, beta, ridge, rule)
    options = _check_options(rule, window, pairing, timing, step, scale_coupled, eps, decay_floor)
    bounds, documents = contract.check_documents(mask, cu_seqlens, q)
    dtype = contract.compute_dtype(q.dtype)
    state = contract.given_state(state, lambda q, v: empty_state(documents, q, v, options.window, dtype), q, v)
    if contract.debugging():
        _check_values(q, k, v, beta, ridge, mask, options)
    tensors = (q, k, v, beta, ridge, *(state or ()))
    limit = _limit(contract.few_tokens(tensors, mask, bounds), rule=rule, window=window, decay_floor=decay_floor)
    run = FALCON.resolve(level, q.shape[1], (q, k, v), limit)
    return run(q, k, v, beta, ridge, options, state, mask, bounds)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, ridge: Tensor, rule: str) -> None:
    contract.one_of("rule", rule, tuple(RULES))
    contract.check_qkv(q, k, v)
    columns = (v.shape[-1],) if RULES[rule].per_column else ()
    axes = "[B, T, H, V], one gain a value column," if columns else "[B, T, H]"
    contract.is_tensor("beta", beta, 3 + len(columns))
    contract.has_shape("beta", beta, (*q.shape[:3], *columns), f"{axes} for rule {rule!r}")
    contract.same_device("beta", beta, q)
    contract.check_gate("ridge", ridge, q)


def falcon_log_decay(k: Tensor, beta: Tensor, ridge: Tensor, *, rule: str, **options: Any) -> Tensor:
    """Log of the decay that `falcon` with these options applies at every token with a full window, to look at a model.

    Returns: `[B, T', H]`; `[B, T', H, V]` for falcon2 and falcon2a.
    """
    return log_decay(k, beta, ridge, _check_options(rule, **options))


def _check_options(
    rule: str,
    window: int,
    pairing: str,
    timing: str,
    step: str,
    scale_coupled: bool,
    eps: float,
    decay_floor: float,
) -> Options:
    contract.whole_number("window", window, 1)
    contract.one_of("pairing", pairing, ("shifted", "same_step"))
    contract.one_of("timing", timing, ("read_after_write", "read_before_write"))
    contract.one_of("step", step, ("beta", "eta"))
    contract.one_of("scale_coupled", scale_coupled, (True, False))
    if not eps >= 0:
        raise ValueError(f"eps is {eps!r}; it must be at least 0")
    if not 0 < decay_floor <= 1:
        raise ValueError(f"decay_floor is {decay_floor!r}; it must be greater than 0 and at most 1")
    return Options(
        rule=RULES[rule],
        window=window if RULES[rule].sliding else 1,
        shifted=pairing == "shifted",
        read_after_write=timing == "read_after_write",
        step=step,
        scale_coupled=scale_coupled,
        eps=eps,
        decay_floor=decay_floor,
    )


def _check_values(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, ridge: Tensor, mask: Tensor | None, options: Options
) -> None:
    contract.check_values({"q": q, "k": k, "v": v, "beta": beta, "ridge": ridge}, mask)
    real = slice(None) if mask is None else mask
    if (ridge[real] < 0).any():
        raise ValueError(f"ridge has minimum {ridge[real].min().item():.3g}; it must be at least 0")
    low, high = beta[real].aminmax() if beta[real].numel() else (beta.new_ones(()), beta.new_ones(()))
    if low < 0 or (options.step == "beta" and high > 2):
        allowed = "between 0 and 2" if options.step == "beta" else "at least 0"
        raise ValueError(f"beta ranges from {low.item():.3g} to {high.item():.3g}; it must be {allowed}")
