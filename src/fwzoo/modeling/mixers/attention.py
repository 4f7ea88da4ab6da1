"""Softmax attention over everything or over a sliding window: grouped queries, rotary positions, torch's own kernel.

Axis letters as in the kernels; G key-value heads, P keys kept from earlier calls. Masks, holes and packing end in the
tiling: every document's real tokens lie in one row, so a token's place in its row is its position.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.rotary import ScaledRotary, scaled_rotary
from ...kernels.contract import check_cu_seqlens, compute_dtype
from ...kernels.costs import Cost, attention_flops, chunks
from ...kernels.tiling import Tiling
from ...registry import register_mixer
from ..attention_ops import rotary
from ..blocks import at_least_float32


class KeyValues(NamedTuple):
    """Keys and values of earlier tokens, one row a document.

    Attributes:
        k: rotated keys `[N, G, P, K]`. v: values `[N, G, P, V]`. Without a window, slot p holds token p. With a window
            of P tokens it is a ring: slot p holds the last token whose position is p modulo P.
        count: int64 `[N]`, tokens of the document so far.
    """

    k: Tensor
    v: Tensor
    count: Tensor


@register_mixer("full_attention", "sliding_attention")
class SoftmaxAttention(nn.Module):
    """`hidden [B, T, D]` to `[B, T, D]`."""

    operator = None

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.window = config.attention_window if config.mixers[layer_index] == "sliding_attention" else None
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.scaled_rotary = scaled_rotary(config.head_dim, config.rotary_base, config.rotary_scaling)
        bias = config.attention_qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.groups * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * config.value_head_dim, bias=bias)
        self.o_proj = nn.Linear(
            self.heads * config.value_head_dim, config.hidden_size, bias=config.attention_output_bias
        )
        normed = config.attention_qk_norm
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if normed else None
        self.logit_scale = nn.Parameter(torch.empty(self.heads)) if config.logit_scaling == "ssmax" else None

    def initialize_parameters(self, config: Any) -> None:
        """The learned factor of log M starts where it changes nothing at the training length."""
        if self.logit_scale is not None:
            init.constant_(self.logit_scale, 1 / math.log(config.training_length))

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        q, k, v = (
            proj(hidden).unflatten(-1, (heads, -1))
            for proj, heads in ((self.q_proj, self.heads), (self.k_proj, self.groups), (self.v_proj, self.groups))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast computes norms in float32
        bounds = check_cu_seqlens(cu_seqlens, hidden)
        read = None if memory is None else memory.read()
        past = self._past(k, v, read, k.shape[0] if bounds is None else len(bounds) - 1)
        window = self._window(training=self.training and memory is None)
        run = functools.partial(self._attend, window=window, keep=memory is not None, fresh=not read)
        o, past = (run if bounds is None else functools.partial(by_length, run))(q, k, v, past, mask, bounds)
        if memory is not None:
            memory.write(**past._asdict())
        return self.o_proj(o.flatten(-2))

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost."""
        config, window = self.config, self.window
        sizes = (config.head_dim, config.value_head_dim)
        if window is None or tokens <= window:
            flops = attention_flops(tokens, tokens, *sizes)
        else:
            flops = chunks(tokens, window) * attention_flops(window, 2 * window, *sizes)
        row = self.groups * sum(sizes) * self.q_proj.weight.element_size()
        kept, seen = (tokens, tokens) if window is None else (window, min(tokens, window))
        return Cost(self.heads * flops, state_bytes=row * kept + 8, moved=row * (seen + 1))

    def _past(self, k: Tensor, v: Tensor, read: dict[str, Tensor] | None, documents: int) -> KeyValues:
        """What earlier calls left: the tensors read from the memory, or no token at all."""
        if read:
            return KeyValues(**read)
        kept = self.window if read is not None and self.window is not None else 0
        return KeyValues(
            k.new_zeros(documents, self.groups, kept, k.shape[3]),
            v.new_zeros(documents, self.groups, kept, v.shape[3]),
            torch.zeros(documents, dtype=torch.long, device=k.device),
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: KeyValues,
        mask: Tensor | None,
        bounds: list[int] | None,
        *,
        window: int | None,
        keep: bool,
        fresh: bool,
    ) -> tuple[Tensor, KeyValues]:
        """q `[B, T, H, K]`, k, v `[B, T, G, .]`: what each token reads `[B, T, H, V]`, and what to keep."""
        batch, tokens = q.shape[:2]
        if tokens == 0:
            return v.new_zeros(batch, 0, self.heads, v.shape[3]), past
        longest = tokens if bounds is None else max(b - a for a, b in itertools.pairwise(bounds))
        tiling = Tiling(batch, tokens, longest, mask=mask, bounds=bounds, device=q.device)
        past = KeyValues(*(tiling.enter(x) for x in past))
        active = tiling.steps[0]  # documents without a token come last and have no row
        q, k, v = (tiling.tile(x).unflatten(0, (active, -1)) for x in (q, k, v))
        position = past.count[:active, None] + torch.arange(tiling.chunk, device=q.device)
        q, k = (turned(x, position, self.config.rotary_base, self.scaled_rotary) for x in (q, k))
        q = self._scale(q, position, window)
        if fresh:
            o = attend(q, k, v, window)
        else:
            old = slots(past.count, past.k.shape[2], self.window)[:active]
            near = slice(window)  # the queries that may see the past
            keys, values = (
                torch.cat([past.k[:active], k[:, :, near]], 2),
                torch.cat([past.v[:active], v[:, :, near]], 2),
            )
            o = attend_at(
                q[:, :, near], keys, values, position[:, near], torch.cat([old, position[:, near]], 1), window
            )
            if window is not None and tiling.chunk > window:
                o = torch.cat([o, attend(q, k, v, window)[:, :, window:]], 2)
        if keep:
            past = self._extended(past, k, v, tiling)
        return tiling.untile(o.flatten(0, 1), self.heads), KeyValues(*(tiling.leave(x) for x in past))

    def _window(self, training: bool) -> int | None:
        """How many tokens a query sees, None for all; in training, `swa_probability` decides for full attention."""
        if self.window is None and training and self.config.swa_probability > 0:
            return self.config.attention_window if torch.rand(()).item() < self.config.swa_probability else None
        return self.window

    def _scale(self, q: Tensor, position: Tensor, window: int | None) -> Tensor:
        """Queries `[M, H, C, K]` times the factor of their logits, from the number of keys they see."""
        kind, length = self.config.logit_scaling, self.config.training_length
        if kind == "none":
            return q
        seen = position + 1 if window is None else (position + 1).clamp(max=window)
        seen = seen[:, None].to(compute_dtype(q.dtype))
        if self.logit_scale is not None:
            factor = at_least_float32(self.logit_scale)[:, None] * seen.log()
        elif kind == "yarn":
            factor = torch.where(seen > length, (0.1 * (seen / length).log() + 1).square(), 1)
        else:
            factor = seen.log() / math.log(length)
            if kind == "log_beyond":
                factor = torch.where(seen > length, factor, 1)
        return (q * factor[..., None]).to(q.dtype)

    def _extended(self, past: KeyValues, k: Tensor, v: Tensor, tiling: Tiling) -> KeyValues:
        """The past with this call's tokens added: one row more a token, or the ring turned on."""
        count = past.count + tiling.lengths
        kept = past.k.shape[2]
        size = self.window or kept + tiling.chunk
        position = slots(count, size, self.window)
        fresh = position >= past.count[:, None]
        slot = torch.arange(size, device=k.device) if self.window else position
        index = torch.where(fresh, kept + position - past.count[:, None], slot)
        index = index.clamp(0, kept + tiling.chunk - 1)
        rows = []
        for old, new in ((past.k, k), (past.v, v)):
            new = F.pad(new, (0, 0) * 3 + (0, old.shape[0] - new.shape[0]))
            row = torch.cat([old, new], 2).gather(
                2, index[:, None, :, None].expand(-1, *new.shape[1:2], -1, new.shape[3])
            )
            rows.append(torch.where((position >= 0)[:, None, :, None], row, 0))
        return KeyValues(rows[0], rows[1], count)


def by_length(
    run: Callable[..., tuple[Tensor, KeyValues]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: KeyValues,
    mask: Tensor | None,
    bounds: list[int],
) -> tuple[Tensor, KeyValues]:
    """`run` on packed documents of similar length at a time, so that no row is padded to more than twice its length."""
    groups: dict[int, list[int]] = {}
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        groups.setdefault((end - start).bit_length(), []).append(n)
    if len(groups) == 1:
        return run(q, k, v, past, mask, bounds)
    order = [n for group in groups.values() for n in group]
    outputs, pasts, tokens = [], [], []
    for group in groups.values():
        own = torch.tensor([t for n in group for t in range(bounds[n], bounds[n + 1])], dtype=torch.long).to(q.device)
        rows = torch.tensor(group, device=q.device)
        o, new = run(
            *(x.index_select(1, own) for x in (q, k, v)),
            KeyValues(*(x.index_select(0, rows) for x in past)),
            None if mask is None else mask.index_select(1, own),
            [0, *itertools.accumulate(bounds[n + 1] - bounds[n] for n in group)],
        )
        outputs.append(o)
        pasts.append(new)
        tokens.append(own)
    size = max(new.k.shape[2] for new in pasts)
    back = torch.argsort(torch.tensor(order)).to(q.device)
    k, v = (
        torch.cat([F.pad(rows, (0, 0, 0, size - rows.shape[2])) for rows in parts])[back]
        for parts in zip(*(new[:2] for new in pasts), strict=True)
    )
    count = torch.cat([new.count for new in pasts])[back]
    return torch.cat(outputs, 1).index_select(1, torch.argsort(torch.cat(tokens))), KeyValues(k, v, count)


def turned(x: Tensor, position: Tensor, base: float, scaled: ScaledRotary | None) -> Tensor:
    """Rotary positions for rows `[M, H, C, K]`; position `[M, C]`."""
    return rotary(x.transpose(1, 2), position, base, scaled).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention within rows of tokens, in time and memory linear in C where there is a window.

    Args:
        q `[M, H, C, K]`, k, v `[M, G, C, .]`. window: tokens that a query sees, itself included; None for all.
    """
    tokens = q.shape[2]
    if window is None or tokens <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    blocks = -(-tokens // window)
    q, k, v = (F.pad(x, (0, 0, 0, blocks * window - tokens)).unflatten(2, (blocks, window)) for x in (q, k, v))
    # every block of queries reads its own block of keys and the one before it
    k, v = (torch.cat([F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x], 3) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    rows, columns = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    seen = ((columns > rows) & (columns <= rows + window)).expand(blocks, -1, -1)
    real = columns >= window * (torch.arange(blocks, device=q.device) == 0)[:, None, None]
    o = _sdpa(q, k, v, (seen & real).repeat(q.shape[0] // blocks, 1, 1))
    return o.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]


def attend_at(q: Tensor, k: Tensor, v: Tensor, position: Tensor, of_key: Tensor, window: int | None) -> Tensor:
    """Attention with given positions: q `[M, H, C, K]` at `[M, C]`, k, v `[M, G, E, .]` at `[M, E]`, -1 for no key."""
    distance = position[:, :, None] - of_key[:, None]
    seen = (distance >= 0) & (of_key >= 0)[:, None]
    if window is not None:
        seen = seen & (distance < window)
    return _sdpa(q, k, v, seen)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """torch's kernel with a mask bool `[M, C, E]`, True where a query sees a key."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=q.shape[1] != k.shape[1])


def slots(count: Tensor, size: int, window: int | None) -> Tensor:
    """Position of the token in every slot after `count` `[N]` tokens, -1 for none: `[N, size]` (see `KeyValues`)."""
    slot, count = torch.arange(size, device=count.device), count[:, None]
    if window is None:
        return torch.where(slot < count, slot, -1)
    return (count - 1 - (count - 1 - slot) % window).clamp(min=-1)
