"""The Gated DeltaNet mixer: decay the fast weights, then correct what they say about this key.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ...kernels import GatedDeltaState, gated_delta
from ...kernels.costs import Cost
from ...kernels.falcon.cost import scan_flops
from ...registry import register_mixer
from ..blocks import FastWeightMixer, at_least_float32, half_life

LARGEST_RATE, TIME_STEPS = 16.0, (1e-3, 1e-1)


@register_mixer("gated_delta")
class GatedDeltaMixer(FastWeightMixer):
    """`hidden [B, T, D]` to `[B, T, D]`, with log-decay -exp(A) softplus(a + dt) and gain sigmoid(b) a head."""

    operator = staticmethod(gated_delta)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, conv=config.short_conv_size, gate=True)
        self.a_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))

    def initialize_parameters(self, config: Any) -> None:
        """Heads from slow to fast: exp(A) evenly spread over (0, 16), softplus(dt) log-evenly over (0.001, 0.1).

        These are the quantiles of the published draws, rounded to values that every dtype holds exactly.
        """
        level = (torch.arange(self.heads) + 0.5) / self.heads
        low, high = (math.log(step) for step in TIME_STEPS)
        dt = torch.exp(low + level * (high - low))
        init.copy_(self.log_rate, (LARGEST_RATE * level).log().bfloat16())
        init.copy_(self.dt_bias, (dt + torch.log(-torch.expm1(-dt))).bfloat16())  # the inverse of softplus

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, GatedDeltaState]:
        return gated_delta(q, k, v, *self._gates(hidden), state=GatedDeltaState(**past) if past else None, **options)

    @property
    def query_key_norm(self) -> tuple[str | None, float]:
        return "l2", 1e-6

    def _gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decay and gain `[B, T, H]`."""
        step = F.softplus(at_least_float32(self.a_proj(hidden)) + self.dt_bias)
        return -at_least_float32(self.log_rate).exp() * step, at_least_float32(self.b_proj(hidden)).sigmoid()

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean gain and the half-life, beside the norm."""
        log_decay, gain = self._gates(hidden)
        return {**super().health(hidden, state), "gate": gain.mean(), "half_life": half_life(log_decay)}

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost."""
        return self.operator_cost(scan_flops(True, tokens, self.key_size, self.value_size))
