"""The FwPKM memory: a product-key table that every sequence overlays with the rows it writes.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import initialization as init

from ...kernels import FwpkmState, explain, fwpkm, fwpkm_flush
from ...kernels.costs import Cost
from ...registry import register_feed_forward
from .base import FastMemory, query_scale


@register_feed_forward("fwpkm")
class FwpkmMemory(FastMemory):
    """A product-key memory with fast weights.

    Buffers (saved, never optimised): keys `[2, H, n, K / 2]`, values `[n * n, V]`.
    """

    operator = staticmethod(fwpkm)
    steps_alike: ClassVar[bool] = True  # but for the token with which a chunk is written

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, layer_index, config.fwpkm_heads * config.memory_key_dim)
        n, size = config.fwpkm_subkeys, config.memory_key_dim // 2
        self.register_buffer("keys", torch.zeros(2, config.fwpkm_heads, n, size))
        self.register_buffer("values", torch.zeros(n * n, config.memory_value_dim))

    def remember(
        self, q: Tensor, v: Tensor, gate: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, FwpkmState]:
        q = q.unflatten(-1, (self.config.fwpkm_heads, -1))
        state = self.state(past) if past else None
        own = {**self._options(), "level": self.config.kernel_level}
        return fwpkm(q, v, gate, self.keys, self.values, state=state, **own, **options)

    def steps_left(self, memory: Any) -> int:
        """How many tokens can be decoded one by one before a chunk is written (asks the device)."""
        waiting = int(memory.read()["count"].max())
        return self.config.memory_chunk_size - waiting - (not self.config.lookahead)

    @property
    def steps_are_kernels(self) -> bool:
        """Whether a step waits for nothing on the device, so that a graph can hold it."""
        query = self.values.new_empty(1, 1, self.config.fwpkm_heads, self.config.memory_key_dim)
        choice = explain(fwpkm, query, self.keys, self.values, **self._options())
        return (choice.level if self.config.kernel_level == "auto" else self.config.kernel_level) == "triton"

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost; distances count as products, and a token writes as many rows as it can."""
        config, chunk = self.config, self.config.memory_chunk_size
        size, element = self.values.shape[1], self.q_proj.weight.element_size()
        reads = config.fwpkm_heads * config.fwpkm_top_k
        written = min(self.values.shape[0], self.updates(tokens) * chunk * reads)
        places = 1 << (written - 1).bit_length() if written else 0  # the cache holds powers of two
        token = element * (self.q_proj.out_features + size) + max(element, 4) + 1
        state = 4 * self.keys.numel() + places * (4 * size + 24) + chunk * token + 40
        # sub-keys to score, rows to read; once a chunk rows and sub-keys are read and written again
        moved = 4 * self.keys.numel() + 3 * 4 * reads * size + 2 * token + 2 * 4 * self.keys.numel() // chunk
        return Cost(2 * tokens * self.keys.numel(), self.keys.numel() + self.values.numel(), state, moved)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "top_k": config.fwpkm_top_k,
            "chunk_size": config.memory_chunk_size,
            "score": config.fwpkm_score,
            "score_eps": config.fwpkm_score_eps,
            "lookahead": config.lookahead,
            "normalize_targets": config.normalize_targets,
            "row_averaging": config.row_averaging,
            "gate_weighting": config.gate_weighting,
            "address_loss": config.address_loss,
            "value_lr": config.value_lr,
            "key_lr": config.key_lr,
            "max_slots": config.fwpkm_max_slots,
            "evict": config.fwpkm_evict,
        }

    def flush(self, state: FwpkmState) -> FwpkmState:
        scope = "sequence" if state.count.shape[0] == state.real.shape[0] else "batch"
        group = self.group if scope == "batch" else None
        return fwpkm_flush(state, self.keys, self.values, scope=scope, group=group, **self._options())

    def written(self, state: FwpkmState) -> dict[str, Tensor]:
        rows = self.carried(state)
        moved = rows["rows"].float() - self.values[rows["slots"]].float()
        return {"state_norm": moved.norm(), "slots_used": torch.tensor(float(rows["slots"].numel()))}

    def carried(self, state: FwpkmState, index: int = 0) -> dict[str, Tensor]:
        slots, where = state.slots[index], state.where[index]
        valid = slots < self.values.shape[0]
        return {"keys": state.keys[index], "slots": slots[valid], "rows": state.shared_rows[where[valid]]}

    def place(self, **values: Tensor) -> None:
        self.keys.copy_(values["keys"])
        self.values.index_copy_(0, values["slots"], values["rows"].to(self.values.dtype))

    def state(self, tensors: dict[str, Tensor]) -> FwpkmState:
        return FwpkmState(**tensors)

    def initialize_parameters(self, config: Any) -> None:
        bound = query_scale(self.config)
        init.uniform_(self.keys, -bound, bound)
        init.normal_(self.values, mean=0.0, std=0.02)
