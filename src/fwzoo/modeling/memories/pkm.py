"""The PKM memory: a product-key table that is learned by gradient descent.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ...kernels import pkm
from ...kernels.costs import Cost
from ...registry import register_feed_forward
from .base import StagedBuffers, query_scale

MOMENTUM = 0.1  # of the running statistics of the queries


@register_feed_forward("pkm")
class PkmMemory(StagedBuffers):
    """A product-key memory: `hidden [B, T, D]` to `[B, T, D]`, every token on its own.

    Parameters: keys `[2, H, n, K / 2]`, values `[n * n, D]`.
    """

    operator = staticmethod(pkm)
    is_memory: ClassVar[bool] = True
    steps_alike: ClassVar[bool] = True

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        heads, n, size = config.pkm_heads, config.pkm_subkeys, config.memory_key_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.keys = nn.Parameter(torch.empty(2, heads, n, size // 2))
        self.values = nn.Parameter(torch.empty(n * n, config.hidden_size))
        if config.pkm_query_norm == "batch":
            self.register_buffer("query_mean", torch.zeros(heads * size))
            self.register_buffer("query_variance", torch.ones(heads * size))

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; mask bool `[B, T]`: only real tokens enter batch statistics."""
        config = self.config
        q = self._normalize(self.q_proj(hidden), mask).unflatten(-1, (config.pkm_heads, -1))
        options = {"top_k": config.pkm_top_k, "score": config.pkm_score, "sparse_grad": config.pkm_sparse_grad}
        try:
            read = pkm(q, self.keys, self.values, **options, level=config.kernel_level)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_index}: {error}") from error
        assert isinstance(read, Tensor)
        return read.to(hidden.dtype)

    def _normalize(self, q: Tensor, mask: Tensor | None) -> Tensor:
        if self.config.pkm_query_norm == "layer":
            return F.layer_norm(q.unflatten(-1, (self.config.pkm_heads, -1)), (self.config.memory_key_dim,)).flatten(-2)
        if self.config.pkm_query_norm == "none":
            return q
        mean, variance = self.query_mean, self.query_variance
        real = (q if mask is None else q[mask]).flatten(0, -2)
        if self.training and real.shape[0] > 1:
            variance, mean = torch.var_mean(real.to(torch.promote_types(q.dtype, torch.float32)), 0, correction=0)
            self.stage(mean=mean, variance=variance)
        return ((q - mean) * (variance + 1e-5).rsqrt()).to(q.dtype)

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost; of the table, a token reads `pkm_top_k` rows a head."""
        rows = max(0, self.values.shape[0] - self.config.pkm_heads * self.config.pkm_top_k)
        unread = rows * self.values.shape[1] * self.values.element_size()
        return Cost(2 * tokens * self.keys.numel(), unread=unread)

    def place(self, **values: Tensor) -> None:
        self.query_mean.lerp_(values["mean"].to(self.query_mean.dtype), MOMENTUM)
        self.query_variance.lerp_(values["variance"].to(self.query_variance.dtype), MOMENTUM)

    def initialize_parameters(self, config: Any) -> None:
        bound = query_scale(self.config) if self.config.pkm_query_norm == "none" else 1.0
        init.uniform_(self.keys, -bound, bound)
        init.normal_(self.values, mean=0.0, std=self.config.hidden_size**-0.5)
        if self.config.pkm_query_norm == "batch":
            init.zeros_(self.query_mean)
            init.ones_(self.query_variance)
