"""The Falcon token mixer: projections, short convolution, gates and the operator, for all six rules.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import FalconState, falcon
from ...kernels.falcon import RULES
from ...registry import register_mixer
from ..blocks import FEATURE_MAPS, FastWeightMixer, at_least_float32


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

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        config = self.config
        past = {} if memory is None else memory.read()
        norm = None if config.qk_norm == "none" else config.qk_norm
        q, k, v, new = self.project(hidden, past, mask, cu_seqlens, norm=norm, eps=config.norm_eps)
        feature = FEATURE_MAPS[config.feature_map]
        o, state = falcon(
            feature(q),
            feature(k),
            v,
            *self._gates(hidden),
            rule=self.rule,
            window=config.window,
            pairing=config.pairing,
            timing=config.timing,
            step=config.step,
            scale_coupled=config.scale_coupled,
            eps=config.eps,
            decay_floor=config.decay_floor,
            state=FalconState(**past) if past else None,
            mask=mask,
            cu_seqlens=cu_seqlens,
            level=config.kernel_level,
        )
        if memory is not None:
            memory.write(**new, **state._asdict())
        return self.merge(o, hidden)

    def _gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Gain (or step) and ridge, in float32 or wider."""
        beta, ridge = at_least_float32(self.beta_proj(hidden)), at_least_float32(self.ridge_proj(hidden))
        if RULES[self.rule].per_column:
            beta = beta.unflatten(-1, (self.heads, -1))
        beta = 2 * beta.sigmoid() if self.config.step == "beta" else F.softplus(beta) / self.key_size
        return beta, self.config.ridge_scale * ridge.sigmoid()
