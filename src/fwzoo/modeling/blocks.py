"""Small modules that mixers and blocks are made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .. import registry
from ..kernels.contract import check_cu_seqlens
from ..kernels.tiling import Tiling


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over a document's real tokens, followed by SiLU.

    Masked tokens neither enter the convolution nor shift it, and documents do not see each other.

    Args:
        channels: D. size: width of the filter.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))

    def forward(
        self, x: Tensor, past: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x `[B, T, D]`; past: the last size - 1 real inputs `[N, size - 1, D]`, or None. Returns the output and new past."""
        bounds = check_cu_seqlens(cu_seqlens, x)
        documents = x.shape[0] if bounds is None else len(bounds) - 1
        history = self.size - 1
        if past is None:
            past = x.new_zeros(documents, history, x.shape[2])
        if x.shape[1] == 0:
            return x, past
        whole = mask is None and bounds is None
        chunk = max(x.shape[1] if whole else 64, history, 1)
        tiling = Tiling(x.shape[0], x.shape[1], chunk, mask=mask, bounds=bounds, device=x.device)
        past = tiling.enter(past)
        tiles = tiling.tile(x[:, :, None])
        stream = torch.cat([tiling.before(tiles, history, past[:, None]), tiles], 1)
        y = sum((stream[:, i : i + chunk] * self.weight[:, i] for i in range(self.size)), x.new_zeros(()))
        back = tiling.lengths[:, None] + torch.arange(history, device=x.device)
        new = tiling.stream(past[:, :, None], tiles, back).squeeze(2)
        return F.silu(tiling.untile(y, 1).squeeze(2)), tiling.leave(new)

    def initialize_parameters(self, config: Any) -> None:
        bound = self.size**-0.5
        init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, size={self.size}"


@registry.register_feed_forward("mlp")
class SwiGLU(nn.Module):
    """Feed-forward `down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, memory: Any = None, mask: Any = None, cu_seqlens: Any = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; every token on its own, so the sequence arguments do not matter."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
