"""The linear attention mixer: the classical fast-weight layer.

Source: "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ...kernels import LinearAttentionState, linear_attention
from ...kernels.contract import compute_dtype
from ...kernels.costs import Cost
from ...kernels.falcon.cost import scan_flops
from ...registry import register_mixer
from ..blocks import FEATURE_MAPS, FastWeightMixer, at_least_float32, half_life

INITIAL_DECAY = 0.999


@register_mixer("linear_attention")
class LinearAttentionMixer(FastWeightMixer):
    """`hidden [B, T, D]` to `[B, T, D]`; decay none, sigmoid(w) a head, or sigmoid(w + projection of the token)."""

    operator = staticmethod(linear_attention)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, conv=0, gate=False)
        self.decay_logit = None if config.linear_decay == "none" else nn.Parameter(torch.empty(self.heads))
        self.decay_proj = None
        if config.linear_decay == "token":
            self.decay_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def initialize_parameters(self, config: Any) -> None:
        """Decay 0.999 in every head."""
        if self.decay_logit is not None:
            init.constant_(self.decay_logit, math.log(INITIAL_DECAY / (1 - INITIAL_DECAY)))

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, LinearAttentionState]:
        config, cu_seqlens = self.config, options["cu_seqlens"]
        feature = FEATURE_MAPS[config.linear_feature_map]
        if not past and config.linear_initial_state == "identity":
            past = self._identity(q, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        return linear_attention(
            feature(q).to(v.dtype),  # autocast computes some feature maps in float32
            feature(k).to(v.dtype),
            v,
            self._log_decay(hidden),
            normalize=config.linear_normalize,
            eps=config.linear_eps,
            state=LinearAttentionState(**past) if past else None,
            **options,
        )

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The half-life, where there is decay, beside the norm."""
        log_decay = self._log_decay(hidden)
        return {**super().health(hidden, state), **({} if log_decay is None else {"half_life": half_life(log_decay)})}

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost; the normaliser is one more value column."""
        more = 4 * self.heads * self.key_size
        return self.operator_cost(scan_flops(False, tokens, self.key_size, self.value_size + 1), more)

    def _log_decay(self, hidden: Tensor) -> Tensor | None:
        """`[B, T, H]`, at most 0, or None."""
        if self.decay_logit is None:
            return None
        logit = at_least_float32(self.decay_logit)
        if self.decay_proj is not None:
            logit = logit + self.decay_proj(hidden)
        return F.logsigmoid(logit).expand(*hidden.shape[:2], -1)

    def _identity(self, q: Tensor, documents: int) -> dict[str, Tensor]:
        """The state that reads the query back, before the first token."""
        S = torch.eye(self.key_size, device=q.device, dtype=compute_dtype(q.dtype))
        S = S.expand(documents, self.heads, -1, -1)
        return {"S": S, "z": torch.zeros_like(S[..., 0])}
