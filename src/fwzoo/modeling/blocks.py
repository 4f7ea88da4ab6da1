"""Small modules that mixers and blocks are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .. import registry
from ..kernels.contract import NO_TRITON, check_cu_seqlens, few_tokens, has_shape
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


def head_norm(x: Tensor, kind: str | None, eps: float) -> Tensor:
    """Norm over the last axis, in the dtype of x: "rms" (mean square 1), "l2" (length 1) or None."""
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)  # autocast computes norms in float32
    if kind == "l2":
        return F.normalize(at_least_float32(x), dim=-1, eps=eps).to(x.dtype)
    return x


def fused_convolution(config: Any, x: Tensor) -> bool:
    """Whether the convolution before this mixer runs as one kernel with SiLU and norm: on a GPU."""
    fits = max(config.head_dim, config.value_head_dim) <= 256 and x.dtype != torch.float64
    return x.is_cuda and NO_TRITON is None and x.shape[1] > 0 and fits and config.kernel_level in ("auto", "triton")


def fused_pointwise(config: Any, x: Tensor) -> bool:
    """Whether the small steps on this tensor `[B, T, ...]` run as one kernel each: on a GPU, where no gradient is wanted."""
    if not x.is_cuda or NO_TRITON is not None or config.kernel_level not in ("auto", "triton"):
        return False
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda")
    return x.dtype != torch.float64 and not plain


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
        has_shape("past", past, (documents, history, x.shape[2]), "[N, size - 1, D]")
        if x.shape[1] == 0:
            return x, past
        if bounds is None and (mask is None or x.shape[1] == 1):
            stream = torch.cat([past, x if mask is None else torch.where(mask[..., None], x, 0)], 1)
            y, new = self._filter(stream, x.shape[1]), stream[:, x.shape[1] :].clone()
            if mask is not None:
                y, new = torch.where(mask[..., None], y, 0), torch.where(mask[..., None], new, past)
            return y, new
        chunk = max(64, history)
        tiling = Tiling(x.shape[0], x.shape[1], chunk, mask=mask, bounds=bounds, device=x.device)
        past = tiling.enter(past)
        tiles = tiling.tile(x[:, :, None])
        y = self._filter(torch.cat([tiling.before(tiles, history, past[:, None]), tiles], 1), chunk)
        back = tiling.lengths[:, None] + torch.arange(history, device=x.device)
        new = tiling.stream(past[:, :, None], tiles, back).squeeze(2)
        return tiling.untile(y, 1).squeeze(2), tiling.leave(new)

    def fused(
        self,
        parts: Sequence[Tensor],
        sizes: Sequence[int],
        norms: Sequence[str | None],
        eps: float,
        past: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: bool = True,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The same on a GPU in one pass, for channels that come in parts `[B, T, D_i]` of heads of a size, each with its norm.

        Returns: every part as `[B, T, H, size]`, and the new past, which is None unless it is to be kept.
        """
        from ..kernels import convolution  # only here: fwzoo does not need triton
        from ..kernels.ranks import make_ranks

        bounds = check_cu_seqlens(cu_seqlens, parts[0])
        if past is not None:
            has_shape("past", past, (past.shape[0], self.size - 1, self.weight.shape[0]), "[N, size - 1, D]")
        if past is not None and parts[0].shape[1] == 1 and few_tokens((*parts, self.weight, past), mask, bounds):
            found, new = convolution.convolution_step(parts, self.weight, past, mask, heads=sizes, norms=norms, eps=eps)
            return [x.unflatten(-1, (-1, size)) for x, size in zip(found, sizes, strict=True)], new
        ranks = make_ranks(parts[0], mask, bounds)
        widths = [part.shape[2] for part in parts]
        pasts = [None] * len(parts) if past is None else past.split(widths, -1)
        if len(set(sizes)) == 1 and norms[0] == norms[1]:  # all in one
            found = convolution.convolution(parts, self.weight, past, ranks, head=sizes[0], norms=norms, eps=eps)
        else:
            each = zip(parts, self.weight.split(widths), pasts, sizes, norms, strict=True)
            found = [
                convolution.convolution([x], weight, own, ranks, head=size, norms=[norm], eps=eps)[0]
                for x, weight, own, size, norm in each
            ]
        heads = [x.unflatten(-1, (-1, size)) for x, size in zip(found, sizes, strict=True)]
        if not keep:
            return heads, None
        if past is None:
            past = parts[0].new_zeros(ranks.documents, self.size - 1, sum(widths))
        kept = [convolution.last_inputs(x, own, ranks) for x, own in zip(parts, past.split(widths, -1), strict=True)]
        return heads, torch.cat(kept, -1)

    def _filter(self, stream: Tensor, tokens: int) -> Tensor:
        """The last `tokens` outputs of a stream `[M, size - 1 + tokens, D]`."""
        taps = (stream[:, i : i + tokens] * self.weight[:, i] for i in range(self.size))
        return F.silu(sum(taps, stream.new_zeros(()))).to(stream.dtype)  # autocast leaves the weight in float32

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

    steps_alike: ClassVar[bool] = True

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

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        past = {} if memory is None else memory.read()
        q, k, v, new = self.project(hidden, past, mask, cu_seqlens, keep=memory is not None)
        options = {"mask": mask, "cu_seqlens": cu_seqlens, "level": self.config.kernel_level}
        o, state = self.remember(q, k, v, hidden, past, **options)
        if memory is not None:
            memory.write(**new, **state._asdict())
        return self.merge(o, hidden)

    def remember(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, Any]:
        """The operator on q, k, v `[B, T, H, .]`, going on from the state fields `past`: what it read and its new state."""
        raise NotImplementedError

    @property
    def kernel_options(self) -> dict[str, Any]:
        """The operator's options that decide which kernels can run."""
        return {}

    @property
    def query_key_norm(self) -> tuple[str | None, float]:
        """Norm of query and key, "rms", "l2" or None, and its epsilon."""
        return None, 0.0

    def project(
        self,
        hidden: Tensor,
        past: dict[str, Tensor],
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
        """q, k `[B, T, H, K]`, normed; v `[B, T, H, V]`; and the convolution's new past, whose old one is taken from `past`.

        keep: the new past is wanted; without a cache, as in training, a GPU then has nothing to gather.
        """
        projected = [self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)]
        norm, eps = self.query_key_norm
        sizes, norms = (self.key_size, self.key_size, self.value_size), (norm, norm, None)
        new: dict[str, Tensor | None] = {}
        if self.conv is not None and fused_convolution(self.config, hidden):
            old = past.pop("conv", None)
            heads, new["conv"] = self.conv.fused(projected, sizes, norms, eps, old, mask, cu_seqlens, keep)
            return *heads, new
        if self.conv is not None:
            x, new["conv"] = self.conv(torch.cat(projected, -1), past.pop("conv", None), mask, cu_seqlens)
            projected = list(x.split([self.heads * size for size in sizes], -1))
        heads = [head_norm(x.unflatten(-1, (self.heads, -1)), n, eps) for x, n in zip(projected, norms, strict=True)]
        return *heads, new

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
        if (
            fused_pointwise(self.config, o) and self.norm.weight.device == o.device
        ):  # not where accelerate holds it back
            from ..kernels.pointwise import gated_norm  # only here: fwzoo does not need triton

            gate = None if self.gate_proj is None else self.gate_proj(hidden)
            return self.o_proj(gated_norm(o, self.norm.weight, self.config.norm_eps, gate).flatten(-2))
        o = self.norm(o).flatten(-2)
        if self.gate_proj is not None:
            o = o * F.silu(self.gate_proj(hidden))
        return self.o_proj(o)


@registry.register_feed_forward("mlp")
class SwiGLU(nn.Module):
    """Feed-forward `down(silu(gate(x)) * up(x))`, without biases."""

    steps_alike: ClassVar[bool] = True

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, memory: Any = None, mask: Any = None, cu_seqlens: Any = None) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; every token on its own, so the sequence arguments do not matter."""
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        if fused_pointwise(self.config, up):
            from ..kernels.pointwise import swiglu  # only here: fwzoo does not need triton

            return self.down_proj(swiglu(gate, up))
        return self.down_proj(F.silu(gate) * up)
