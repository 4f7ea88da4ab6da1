"""The Falcon token mixer: projections, short convolution, gates and the operator, for all six rules.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import FalconState, falcon
from ...kernels.falcon import RULES
from ...registry import register_mixer
from ..blocks import ShortConvolution

FEATURE_MAPS = {
    "identity": lambda x: x,
    "elu1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "silu": F.silu,
}


@register_mixer(*RULES)
class FalconMixer(nn.Module):
    """Fast-weight attention: `hidden [B, T, D]` to `[B, T, D]`.

    Every learned matrix is an `nn.Linear` that is applied through its forward.
    """

    operator = staticmethod(falcon)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.config, self.rule = config, config.mixers[layer_index]
        self.heads, self.key_size, self.value_size = config.num_attention_heads, config.head_dim, config.value_head_dim
        keys, values = self.heads * self.key_size, self.heads * self.value_size
        gains = values if RULES[self.rule].per_column else self.heads
        self.q_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, values, bias=False)
        self.beta_proj = nn.Linear(config.hidden_size, gains, bias=False)
        self.ridge_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, values, bias=False) if config.output_gate else None
        self.o_proj = nn.Linear(values, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(self.value_size, eps=config.norm_eps)
        size = config.short_conv_size
        self.conv = ShortConvolution(2 * keys + values, size) if size else None

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        config = self.config
        past = {} if memory is None else memory.read()
        new: dict[str, Tensor] = {}
        qkv = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], -1)
        if self.conv is not None:
            qkv, new["conv"] = self.conv(qkv, past.pop("conv", None), mask, cu_seqlens)
        sizes = (self.heads * self.key_size, self.heads * self.key_size, self.heads * self.value_size)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in qkv.split(sizes, -1))
        o, state = falcon(
            self._feature(q),
            self._feature(k),
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
        o = self.norm(o).flatten(-2)
        if self.gate_proj is not None:
            o = o * F.silu(self.gate_proj(hidden))
        return self.o_proj(o)

    def _feature(self, x: Tensor) -> Tensor:
        """Norm and feature map of query or key `[B, T, H, K]`."""
        if self.config.qk_norm == "rms":
            x = F.rms_norm(x, (self.key_size,), eps=self.config.norm_eps)
        elif self.config.qk_norm == "l2":
            x = F.normalize(x, dim=-1, eps=self.config.norm_eps)
        return FEATURE_MAPS[self.config.feature_map](x)

    def _gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Gain (or step) and ridge, in float32 or wider."""
        beta, ridge = self.beta_proj(hidden), self.ridge_proj(hidden)
        if beta.dtype in (torch.float16, torch.bfloat16):
            beta, ridge = beta.float(), ridge.float()
        if RULES[self.rule].per_column:
            beta = beta.unflatten(-1, (self.heads, -1))
        beta = 2 * beta.sigmoid() if self.config.step == "beta" else F.softplus(beta) / self.key_size
        return beta, self.config.ridge_scale * ridge.sigmoid()
