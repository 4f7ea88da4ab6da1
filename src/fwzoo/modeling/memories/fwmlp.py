"""The FwMLP memory: a SwiGLU of which every sequence has its own copy.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init

from ...kernels import FwmlpState, fwmlp, fwmlp_flush
from ...kernels.costs import Cost
from ...kernels.fwmlp import WEIGHTS
from ...registry import register_feed_forward
from .base import FastMemory


@register_feed_forward("fwmlp")
class FwmlpMemory(FastMemory):
    """A SwiGLU memory with fast weights.

    Buffers (saved, never optimised): w_gate, w_up `[M, K]`, b_gate, b_up `[M]`, w_down `[V, M]`, b_down `[V]`.
    """

    operator = staticmethod(fwmlp)

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(config, layer_index, config.memory_key_dim)
        width, keys, values = config.fwmlp_width, config.memory_key_dim, config.memory_value_dim
        shapes = ((width, keys), (width,), (width, keys), (width,), (values, width), (values,))
        for name, shape in zip(WEIGHTS, shapes, strict=True):
            self.register_buffer(name, torch.zeros(shape))

    def remember(
        self, q: Tensor, v: Tensor, gate: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, FwmlpState]:
        state = self.state(past) if past else None
        weights = {name: getattr(self, name) for name in WEIGHTS}
        own = {**self._options(), "level": self.config.kernel_level}
        return fwmlp(q, v, **weights, state=state, **own, **options)

    def cost(self, tokens: int) -> Cost:
        """What `tokens` tokens cost."""
        chunk, element = self.config.memory_chunk_size, self.q_proj.weight.element_size()
        up, down = self.w_up.numel(), self.w_down.numel()
        flops = tokens * (4 * up + 2 * down) + self.updates(tokens) * chunk * (8 * up + 4 * down)
        fast = sum(getattr(self, name).numel() for name in WEIGHTS)
        token = element * (self.q_proj.out_features + self.v_proj.out_features) + 1
        moved = 4 * fast + 2 * token + 2 * 4 * fast // chunk
        return Cost(flops, fast, 4 * fast + token * chunk + 8, moved)

    def _options(self) -> dict[str, Any]:
        return {
            "chunk_size": self.config.memory_chunk_size,
            "lr": self.config.fwmlp_lr,
            "lookahead": self.config.lookahead,
            "normalize_targets": self.config.normalize_targets,
        }

    def flush(self, state: FwmlpState) -> FwmlpState:
        scope = "sequence" if state.count.shape[0] == state.real.shape[0] else "batch"
        group = self.group if scope == "batch" else None
        return fwmlp_flush(state, scope=scope, group=group, **self._options())

    def written(self, state: FwmlpState) -> dict[str, Tensor]:
        moved = [(x.float() - getattr(self, name).float()).norm() for name, x in self.carried(state).items()]
        return {"state_norm": torch.stack(moved).norm()}

    def carried(self, state: FwmlpState, index: int = 0) -> dict[str, Tensor]:
        return {name: getattr(state, name)[index] for name in WEIGHTS}

    def place(self, **values: Tensor) -> None:
        for name, x in values.items():
            getattr(self, name).copy_(x)

    def state(self, tensors: dict[str, Tensor]) -> FwmlpState:
        return FwmlpState(**tensors)

    def initialize_parameters(self, config: Any) -> None:
        for name in WEIGHTS:
            weight = getattr(self, name)
            if name.startswith("w_"):
                init.normal_(weight, mean=0.0, std=weight.shape[1] ** -0.5)
            else:
                init.zeros_(weight)
