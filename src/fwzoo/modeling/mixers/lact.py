"""The LaCT token mixer: sliding-window attention and a fast SwiGLU memory that share one projection.

Source: "Test-Time Training Done Right" (2025).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.rotary import scaled_rotary
from ...kernels import LactState, lact
from ...kernels.contract import check_cu_seqlens, compute_dtype
from ...kernels.costs import Cost, attention_flops, chunks
from ...kernels.lact.cost import lact_flops
from ...kernels.lact.rules import Options
from ...registry import register_mixer
from ..attention_ops import WindowPast, rotary, token_positions, window_attention

NORM_EPS = 1e-5
INITIAL_RATE = 0.001


@register_mixer("lact")
class LactMixer(nn.Module):
    """Window attention plus fast memory: `hidden [B, T, D]` to `[B, T, D]`.

    Every learned matrix that maps activations is an `nn.Linear`; the initial fast weights are parameters of their own.
    """

    operator = staticmethod(lact)
    steps_alike: ClassVar[bool] = True  # but for the last token of a chunk

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.heads, self.attention_heads = config.num_lact_heads, config.num_attention_heads
        width, channels = config.hidden_size, self.attention_heads * config.head_dim
        size = channels // self.heads
        hidden = int(config.lact_expansion * size)
        self.rates = size if config.lact_rate_per_channel else 1
        self.scaled_rotary = scaled_rotary(config.head_dim, config.lact_rotary_base, config.lact_rotary_scaling)
        self.qkv_proj = nn.Linear(width, 3 * channels, bias=config.lact_qkv_bias)
        normed, eps = (config.head_dim, config.norm_eps) if config.lact_qk_norm_per_head else (channels, NORM_EPS)
        self.q_norm, self.k_norm = (nn.RMSNorm(normed, eps=eps) if config.lact_qk_norm else None for _ in range(2))
        self.qk_scale = nn.Parameter(torch.empty(2, channels))
        self.qk_offset = nn.Parameter(torch.empty(2, channels))
        self.rate_proj = nn.Linear(width, 3 * self.heads * self.rates)
        self.momentum_proj = nn.Linear(width, self.heads) if config.lact_momentum else None
        self.w0 = InitialWeight(self.heads, hidden, size, config.lact_rank)
        self.w1 = InitialWeight(self.heads, size, hidden)
        self.w2 = InitialWeight(self.heads, hidden, size, config.lact_rank)
        self.memory_norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.scale_proj = nn.Linear(width, self.heads) if config.lact_output_scale else None
        self.o_proj = nn.Linear(channels, width, bias=config.lact_output_bias)

    def initialize_parameters(self, config: Any) -> None:
        init.ones_(self.qk_scale)
        init.zeros_(self.qk_offset)

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        config = self.config
        past = {} if memory is None else memory.read()
        window = WindowPast(past.pop("window_k"), past.pop("window_v"), past.pop("position")) if past else None
        bounds = check_cu_seqlens(cu_seqlens, hidden)
        positions, _ = token_positions(hidden, None if window is None else window.count, mask, bounds)
        q, k, v = self.qkv_proj(hidden).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                norm(x.unflatten(-1, (-1, *norm.normalized_shape))).flatten(-2)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )

        attended, window = window_attention(
            self._rotary(self._attention_heads(q), positions),
            self._rotary(self._attention_heads(k), positions),
            self._attention_heads(v),
            config.lact_window,
            past=window,
            mask=mask,
            bounds=bounds,
            keep=memory is not None,
        )
        fast_q, fast_k, fast_v = self._memory_inputs(q, k, v, positions)
        rate0, rate1, rate2 = self._rates(hidden)
        remembered, state = lact(
            fast_q,
            fast_k,
            fast_v,
            rate0,
            rate1,
            rate2,
            self.w0(),
            self.w1(),
            self.w2(),
            momentum=None if self.momentum_proj is None else _wide(self.momentum_proj(hidden)).sigmoid(),
            chunk_size=config.lact_chunk_size,
            muon=config.lact_muon,
            prenorm=config.lact_prenorm,
            state=LactState(**past) if past else None,
            mask=mask,
            cu_seqlens=cu_seqlens,
            level=config.kernel_level,
        )
        if memory is not None and window is not None:
            memory.write(window_k=window.k, window_v=window.v, position=window.count, **state._asdict())
        remembered = self.memory_norm(remembered)
        if self.scale_proj is not None:
            remembered = remembered * F.silu(self.scale_proj(hidden))[..., None]
        return self.o_proj(attended.flatten(-2) + remembered.flatten(-2))

    def steps_left(self, memory: Any) -> int:
        """How many tokens can be decoded one by one before one fills a chunk (asks the device)."""
        return self.config.lact_chunk_size - 1 - int(memory.read()["count"].max())

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean scale of what is read, where it has one, and the distance of the fast weights from the initial ones."""
        initial = {"w0": self.w0(), "w1": self.w1(), "w2": self.w2()}
        moved = [(state[name].float() - w.float()).norm(dim=(-2, -1)) for name, w in initial.items()]
        numbers = {"state_norm": torch.stack(moved).square().sum(0).sqrt().mean()}
        if self.scale_proj is not None:
            numbers["gate"] = F.silu(self.scale_proj(hidden)).mean()
        return numbers

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost: both branches, and the initial weights made of their factors."""
        config, width = self.config, self.attention_heads * self.config.head_dim
        size, hidden = width // self.heads, self.w0.rows
        options = Options(config.lact_chunk_size, config.lact_momentum, config.lact_muon, config.lact_prenorm)
        flops = self.heads * lact_flops(options, tokens, size, hidden)
        flops += sum(w.flops for w in (self.w0, self.w1, self.w2))
        head, past = width // self.attention_heads, config.lact_window - 1
        tile = max(config.lact_window, 64)
        if tokens <= tile:
            flops += self.attention_heads * attention_flops(tokens, tokens, head, head)
        else:
            each = attention_flops(tile, tile + past, head, head)
            flops += self.attention_heads * chunks(tokens, tile) * each
        fast, element = 3 * self.heads * size * hidden, self.qkv_proj.weight.element_size()
        memory = 4 * (3 * fast + self.heads * (size + 2 * hidden))  # weights, sums, directions, and norms of rows
        token = 2 * element * width + 4 * self.heads * (3 * self.rates + 1)
        window = 2 * element * width * past
        moved = 4 * fast + window + token + (2 * memory) // options.chunk + token
        return Cost(flops, fast, memory + token * options.chunk + window + 16, moved)

    def _attention_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.attention_heads, -1))

    def _rotary(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotary(x, positions, self.config.lact_rotary_base, self.scaled_rotary)

    def _memory_inputs(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> list[Tensor]:
        """Query, key and value of the memory `[B, T, H, d]` from the shared ones `[B, T, H d]`, before rotary."""
        config = self.config
        q, k = (x * scale + offset for x, scale, offset in zip((q, k), self.qk_scale, self.qk_offset, strict=True))
        if config.lact_qkv_silu:
            q, k = F.silu(q), F.silu(k)
            v = F.silu(v) if config.lact_v_silu else v
        inputs = []
        for x in (q, k):
            x = x.unflatten(-1, (self.heads, -1))
            x = (_wide(x) / (_wide(x).norm(dim=-1, keepdim=True) + NORM_EPS)).to(x.dtype)
            if not config.lact_nope:
                # with the heads of the attention, whose angles the memory shares
                x = self._rotary(self._attention_heads(x.flatten(-2)), positions).view_as(x)
            inputs.append(x)
        return [*inputs, v.to(inputs[0].dtype).unflatten(-1, (self.heads, -1))]

    def _rates(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """The three rates `[B, T, H, 1 or d]` of every token, float32 or wider."""
        start = math.log(math.expm1(INITIAL_RATE))
        rates = F.softplus(_wide(self.rate_proj(hidden)) + start)
        return rates.unflatten(-1, (self.heads, 3, self.rates)).unbind(-2)


class InitialWeight(nn.Module):
    """Learned initial fast weights `[H, rows, columns]`: dense, or L R + I / 2 of low rank.

    Args:
        heads: H. rows, columns: size of a matrix. rank: r, or 0 for dense.
    """

    def __init__(self, heads: int, rows: int, columns: int, rank: int = 0) -> None:
        super().__init__()
        self.heads, self.rows, self.columns, self.rank = heads, rows, columns, rank
        if rank:
            self.left = nn.Parameter(torch.empty(heads, rows, rank))
            self.right = nn.Parameter(torch.empty(heads, rank, columns))
        else:
            self.weight = nn.Parameter(torch.empty(heads, rows, columns))

    def initialize_parameters(self, config: Any) -> None:
        if self.rank:
            init.normal_(self.left, std=config.lact_init_gain * self.rank**-0.5)
            init.normal_(self.right, std=config.lact_init_gain * self.right.shape[-1] ** -0.5)
        else:
            init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    @property
    def flops(self) -> int:
        """Of making the matrices."""
        return 2 * self.heads * self.rows * self.rank * self.columns

    def forward(self) -> Tensor:
        """The matrices `[H, rows, columns]`."""
        if not self.rank:
            return self.weight
        eye = torch.eye(self.left.shape[1], self.right.shape[2], dtype=self.left.dtype, device=self.left.device)
        return self.left @ self.right + eye / 2


def _wide(x: Tensor) -> Tensor:
    """Float32, or float64 for float64."""
    return x.to(compute_dtype(x.dtype))
