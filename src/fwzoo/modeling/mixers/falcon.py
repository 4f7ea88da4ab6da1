"""The Falcon token mixer: projections, short convolution, gates and the operator, for all six rules.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import FalconState, falcon
from ...kernels.costs import Cost
from ...kernels.falcon import RULES, falcon_log_decay
from ...kernels.falcon.cost import falcon_flops
from ...registry import register_mixer
from ..blocks import FEATURE_MAPS, FastWeightMixer, at_least_float32, fused_pointwise, half_life


@register_mixer(*RULES)
class FalconMixer(FastWeightMixer):
    """Fast-weight attention: `hidden [B, T, D]` to `[B, T, D]`."""

    operator = staticmethod(falcon)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, conv=config.short_conv_size, gate=config.output_gate)
        self.rule = config.mixers[layer_index]
        gains = self.heads * (self.value_size if RULES[self.rule].per_column else 1)
        self.beta_proj = nn.Linear(config.hidden_size, gains, bias=False)
        self.ridge_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, FalconState]:
        feature, state = FEATURE_MAPS[self.config.feature_map], FalconState(**past) if past else None
        beta, ridge = self._gates(hidden)
        options |= {"rule": self.rule, **self._options()}
        return falcon(feature(q), feature(k), v, beta, ridge, state=state, **options)

    @property
    def kernel_options(self) -> dict[str, Any]:
        return {"rule": self.rule, "window": self.config.window}

    @property
    def query_key_norm(self) -> tuple[str | None, float]:
        kind = self.config.qk_norm
        return None if kind == "none" else kind, self.config.norm_eps

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean gain and the half-life, beside the norm."""
        _, k, _, _ = self.project(hidden, {}, None, None)
        beta, ridge = self._gates(hidden)
        k = FEATURE_MAPS[self.config.feature_map](k)
        log_decay = falcon_log_decay(k, beta, ridge, rule=self.rule, **self._options())
        return {**super().health(hidden, state), "gate": beta.mean(), "half_life": half_life(log_decay)}

    def _options(self) -> dict[str, Any]:
        names = ("window", "pairing", "timing", "step", "scale_coupled", "eps", "decay_floor")
        return {name: getattr(self.config, name) for name in names}

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost."""
        config = self.config
        rule = RULES[self.rule]
        window = config.window if rule.sliding else 1
        energy = config.step == "beta" or config.scale_coupled
        pair = self.heads * (self.key_size + self.value_size)
        kept = self.heads * self.key_size + (window - 1) * pair
        flops = falcon_flops(rule, window, energy, tokens, self.key_size, self.value_size)
        return self.operator_cost(flops, self.q_proj.weight.element_size() * kept + 9)

    def _gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Gain (or step) and ridge, in float32 or wider."""
        beta, ridge = self.beta_proj(hidden), self.ridge_proj(hidden)
        if RULES[self.rule].per_column:
            beta = beta.unflatten(-1, (self.heads, -1))
        if fused_pointwise(self.config, beta) and self.config.step == "beta":
            from ...kernels.pointwise import scaled_sigmoid  # only here: fwzoo does not need triton

            return scaled_sigmoid(beta, 2.0), scaled_sigmoid(ridge, self.config.ridge_scale)
        beta, ridge = at_least_float32(beta), at_least_float32(ridge)
        beta = 2 * beta.sigmoid() if self.config.step == "beta" else F.softplus(beta) / self.key_size
        return beta, self.config.ridge_scale * ridge.sigmoid()
