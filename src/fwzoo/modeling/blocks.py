"""Small modules that mixers and blocks are made of."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .. import registry
from ..kernels.contract import check_cu_seqlens
from ..kernels.costs import Cost
from ..kernels.tiling import Tiling

FEATURE_MAPS = {
    "identity": lambda x: x,
    "elu1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "silu": F.silu,
    "softplus": F.softplus,
}


def at_least_float32(x: Tensor) -> Tensor:
    """16-bit gates in float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def half_life(log_decay: Tensor) -> Tensor:
    """Tokens after which half of what was written is left, in the median head; log_decay `[B, T, H, ...]`, at most 0."""
    a_token = log_decay.flatten(0, 1).mean(0).clamp(max=-1e-9)
    return (-math.log(2) / a_token).median()


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

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's last inputs."""
        return self.weight[:, 1:].numel() * self.weight.element_size()

    def initialize_parameters(self, config: Any) -> None:
        bound = self.size**-0.5
        init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, size={self.size}"


class FastWeightMixer(nn.Module):
    """What fast-weight mixers share: query, key and value a head from a short convolution; norm, gate, output projection.

    Every learned matrix is an `nn.Linear` that is applied through its forward.

    Args:
        conv: width of the short convolution on q, k and v; 0 means none.
        gate: multiply the output by SiLU of a projection of the input.
    """

    def __init__(self, config: Any, *, conv: int, gate: bool) -> None:
        super().__init__()
        self.config = config
        self.heads, self.key_size, self.value_size = config.num_attention_heads, config.head_dim, config.value_head_dim
        keys, values = self.heads * self.key_size, self.heads * self.value_size
        self.q_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, values, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, values, bias=False) if gate else None
        self.o_proj = nn.Linear(values, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(self.value_size, eps=config.norm_eps)
        self.conv = ShortConvolution(2 * keys + values, conv) if conv else None

    def project(
        self, hidden: Tensor, past: dict[str, Tensor], mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, k `[B, T, H, K]`, v `[B, T, H, V]`, and the convolution's new past; takes its old one out of `past`."""
        qkv = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], -1)
        new: dict[str, Tensor] = {}
        if self.conv is not None:
            qkv, new["conv"] = self.conv(qkv, past.pop("conv", None), mask, cu_seqlens)
        sizes = (self.heads * self.key_size, self.heads * self.key_size, self.heads * self.value_size)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in qkv.split(sizes, -1))
        return q, k, v, new

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers that show whether the memory works, for hidden `[B, T, D]` and what it wrote; see `MemoryHealthCallback`."""
        return {"state_norm": state["S"].float().norm(dim=(-2, -1)).mean()}

    def operator_cost(self, flops: int, more: int = 0) -> Cost:
        """Cost of an operator with a float32 matrix a head: its FLOPs a head, and the bytes it keeps beside the matrices."""
        fast = self.heads * self.key_size * self.value_size
        state = 4 * fast + more + (0 if self.conv is None else self.conv.state_bytes)
        return Cost(self.heads * flops, fast, state, moved=2 * state)

    def merge(self, o: Tensor, hidden: Tensor) -> Tensor:
        """What was read `[B, T, H, V]`, normed, gated and projected: `[B, T, D]`."""
        o = self.norm(o).flatten(-2)
        if self.gate_proj is not None:
            o = o * F.silu(self.gate_proj(hidden))
        return self.o_proj(o)


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
