"""What both levels of the Falcon operator share: the six rules, the state, the energy, the step and the decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import compute_dtype


@dataclass(frozen=True)
class Rule:
    """One of the six update rules.

    Attributes:
        regression: the residual `v - S^T x` is written (rules 1, 2, 3); otherwise `v` itself (1A, 2A, 3A).
        per_column: one gain for every value column (rules 2, 2A).
        sliding: every token writes its whole window of pairs (rules 3, 3A).
    """

    regression: bool
    per_column: bool = False
    sliding: bool = False


RULES: dict[str, Rule] = {
    "falcon1": Rule(regression=True),
    "falcon2": Rule(regression=True, per_column=True),
    "falcon3": Rule(regression=True, sliding=True),
    "falcon1a": Rule(regression=False),
    "falcon2a": Rule(regression=False, per_column=True),
    "falcon3a": Rule(regression=False, sliding=True),
}


@dataclass(frozen=True)
class Options:
    """Validated keyword options of `fwzoo.kernels.falcon`; `window` is 1 for the rules without a window."""

    rule: Rule
    window: int
    shifted: bool
    read_after_write: bool
    step: str
    scale_coupled: bool
    eps: float
    decay_floor: float

    @property
    def needs_energy(self) -> bool:
        """Whether the energy enters the step or the ridge at all."""
        return self.step == "beta" or self.scale_coupled


class FalconState(NamedTuple):
    """Complete state of the Falcon recurrence: continuing from it equals never having stopped.

    Attributes:
        S: fast weights `[N, H, K, V]`, float32 (float64 for float64 inputs).
        key: last real key `[N, H, K]`, 0 when there is none.
        has_key: bool `[N]`, whether `key` is known.
        tail_x: keys of the last W - 1 pairs `[N, W - 1, H, K]`, newest last, unused leading rows 0.
        tail_v: their values `[N, W - 1, H, V]`.
        count: int64 `[N]`, how many rows of the tail are real.
    """

    S: Tensor
    key: Tensor
    has_key: Tensor
    tail_x: Tensor
    tail_v: Tensor
    count: Tensor


def empty_state(documents: int, q: Tensor, v: Tensor, window: int, dtype: torch.dtype) -> FalconState:
    """The state before the first token, for `documents` sequences shaped like q `[B, T, H, K]` and v `[B, T, H, V]`."""
    heads, k_size, v_size = q.shape[2], q.shape[3], v.shape[3]
    return FalconState(
        S=q.new_zeros(documents, heads, k_size, v_size, dtype=dtype),
        key=q.new_zeros(documents, heads, k_size),
        has_key=torch.zeros(documents, dtype=torch.bool, device=q.device),
        tail_x=q.new_zeros(documents, window - 1, heads, k_size),
        tail_v=v.new_zeros(documents, window - 1, heads, v_size),
        count=torch.zeros(documents, dtype=torch.long, device=q.device),
    )


def started(state: FalconState | None, q: Tensor, v: Tensor, bounds: list[int] | None, options: Options) -> FalconState:
    """`state`, or that before the first token of every document."""
    if state is not None:
        return state
    documents = q.shape[0] if bounds is None else len(bounds) - 1
    return empty_state(documents, q, v, options.window, compute_dtype(q.dtype))


def top_eigenvalue(gram: Tensor) -> Tensor:
    """Largest eigenvalue of symmetric `[..., W, W]`; NaN where a matrix is not finite (LAPACK would raise)."""
    if gram.shape[-1] == 1:
        return gram[..., 0, 0]
    finite = gram.isfinite().all(-1).all(-1)
    # eigh, not eigvalsh: the latter takes another algorithm (and rounds differently) when no gradient is wanted
    top = torch.linalg.eigh(torch.where(finite[..., None, None], gram, 0)).eigenvalues[..., -1]
    return torch.where(finite, top, torch.nan)


def window_energy(x: Tensor, pairs: Tensor, rule: Rule) -> Tensor:
    """Energy of a window: top eigenvalue of its average covariance (falcon3), or mean squared norm (falcon3a).

    Args:
        x: window keys `[..., W, K]`, rows that are not real pairs 0.
        pairs: number of real pairs `[...]`, at least 1.
    """
    if rule.regression:
        return top_eigenvalue(x @ x.transpose(-1, -2)) / pairs
    return x.square().sum((-1, -2)) / pairs


def step_and_decay(
    beta: Tensor, ridge: Tensor, energy: Tensor | None, writes: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Step size eta and decay gamma of every token; (0, 1) where the token does not write.

    Args:
        beta: gain (or the step itself, `step="eta"`) `[...]`, with a last axis V for the per-column rules.
        ridge: `[...]` without that axis. energy: like ridge, or None when it does not enter.
        writes: bool, broadcastable to ridge.
    Returns: eta and gamma, both shaped like beta.
    """
    if options.scale_coupled:
        assert energy is not None
        ridge = ridge * (energy.detach() if options.rule.sliding else energy)
    if options.rule.per_column:
        ridge, writes = ridge[..., None], writes[..., None]
        energy = None if energy is None else energy[..., None]
    if options.step == "beta":
        assert energy is not None
        denominator = energy + ridge + options.eps
        writes = writes & (denominator != 0)
        inverse = torch.where(writes, 1 / torch.where(writes, denominator, 1), 0)
        eta = beta * inverse
        # 1 - eta * ridge = (energy + eps + (1 - beta) * ridge) / denominator, so that float32 keeps its digits near the floor
        kept = torch.where(writes, (energy + options.eps) * inverse, 1)
        gamma = torch.addcmul(kept, 1 - beta, ridge * inverse)
    else:
        eta = torch.where(writes, beta, 0)
        gamma = 1 - eta * ridge
    return eta, gamma.clamp(min=options.decay_floor)


def log_decay(k: Tensor, beta: Tensor, ridge: Tensor, options: Options) -> Tensor:
    """Log of the decay of every token that has a full window, one sequence a row; k `[B, T, H, K]`.

    Returns: `[B, T', H]`, with a last axis V for the per-column rules.
    """
    if options.shifted:
        k, beta, ridge = k[:, :-1], beta[:, 1:], ridge[:, 1:]
    windows = k.unfold(1, options.window, 1).transpose(-1, -2)
    pairs = torch.tensor(float(options.window), device=k.device)
    energy = window_energy(windows, pairs, options.rule) if options.rule.sliding else windows.square().sum((-1, -2))
    beta, ridge = beta[:, options.window - 1 :], ridge[:, options.window - 1 :]
    _, gamma = step_and_decay(beta, ridge, energy, torch.ones_like(ridge, dtype=torch.bool), options)
    return gamma.log()
