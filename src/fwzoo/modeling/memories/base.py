"""What the memories share: the layer around a fast memory, its scope, and buffers that change between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels.contract import discarding_states
from ..blocks import at_least_float32

_generating: ContextVar[bool] = ContextVar("fwzoo_generating", default=False)


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Within this context every sequence has its own memory, in training mode too."""
    token = _generating.set(True)
    try:
        yield
    finally:
        _generating.reset(token)


class StagedBuffers(nn.Module):
    """A module whose buffers change by training.

    A forward pass stages the new values; they are put in place by `commit()`, which the model calls at the beginning of
    its next forward pass and before its weights are saved. A recomputed forward pass therefore sees the same buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[str, Tensor] = {}
        self.register_state_dict_pre_hook(_commit)

    def stage(self, **values: Tensor) -> None:
        """Keep `values` for the next `commit()`, in place of what was staged before."""
        self._staged = {name: x.detach() for name, x in values.items()}

    @torch.no_grad()
    def commit(self) -> None:
        """Put staged values in place."""
        staged, self._staged = self._staged, {}
        if staged:
            self.place(**staged)

    def place(self, **values: Tensor) -> None:
        """Write staged values into the buffers."""
        raise NotImplementedError

    def initialize_parameters(self, config: Any) -> None:
        """Give parameters and buffers of its own their initial values (by transformers' `initialization` helpers)."""
        raise NotImplementedError


def _commit(module: Any, *_: Any) -> None:
    module.commit()


class FastMemory(StagedBuffers):
    """The layer around a memory that is written while it is read: `hidden [B, T, D]` to `[B, T, D]`.

    Query, value and gate each have their own norm and projection; the value read and the token's own value are mixed by
    the gate. A subclass reads and writes the memory.

    Source: "Fast-weight Product Key Memory" (2026).
    """

    is_memory: ClassVar[bool] = True
    has_own_norm: ClassVar[bool] = True

    def __init__(self, config: Any, layer_index: int, queries: int) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        width, values, eps = config.hidden_size, config.memory_value_dim, config.norm_eps
        self.gated = config.gate_activation != "none"
        self.q_norm, self.v_norm = (nn.RMSNorm(width, eps=eps) for _ in range(2))
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.g_norm = nn.RMSNorm(width, eps=eps) if self.gated else None
        self.g_proj = nn.Linear(width, 1, bias=False) if self.gated else None
        self.o_norm = nn.RMSNorm(values, eps=eps)
        self.o_proj = nn.Linear(values, width, bias=False)

    def forward(
        self, hidden: Tensor, memory: Any = None, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`; memory: `LayerMemory` or None; mask bool `[B, T]`; cu_seqlens int64 `[S + 1]`."""
        q, v = self.q_proj(self.q_norm(hidden)), self.v_proj(self.v_norm(hidden))
        gate = self._gate(hidden)
        past = {} if memory is None else memory.read()
        options = {"mask": mask, "cu_seqlens": cu_seqlens, "scope": self.scope, "group": self.group}
        try:
            with discarding_states(memory is None and not self.carries):
                v_hat, state = self.remember(q, v, gate, past, **options)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_index}: {error}") from error
        if memory is not None:
            memory.write(**state._asdict())
        if self.carries:
            self.stage(**self.carried(self.flush(state)))
        g = gate[..., None]
        mixed = g * v_hat
        if self.config.value_residual:
            mixed = mixed + ((1 - g) * v if self.gated else v)
        return self.o_proj(self.o_norm(mixed.to(v.dtype)))

    def _gate(self, hidden: Tensor) -> Tensor:
        """`[B, T]`, float32 or wider."""
        if self.g_norm is None or self.g_proj is None:
            return torch.ones(
                hidden.shape[:2], device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32)
            )
        gate = at_least_float32(self.g_proj(self.g_norm(hidden)).squeeze(-1))
        return gate.sigmoid() if self.config.gate_activation == "sigmoid" else gate

    def health(self, hidden: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers that show whether the memory works, for hidden `[B, T, D]` and what it wrote; see `MemoryHealthCallback`."""
        return {"gate": self._gate(hidden).mean(), **self.written(self.flush(self.state(state)))}

    @property
    def scope(self) -> str:
        """Whose memory it is now: "sequence" or "batch"."""
        return self.config.training_scope if self.training and not _generating.get() else "sequence"

    @property
    def group(self) -> Any:
        """The ranks that share the memory now: all of them under scope "batch"."""
        if self.scope != "batch" or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return dist.group.WORLD

    @property
    def carries(self) -> bool:
        """Whether what a forward pass wrote is put into the checkpoint's fast weights."""
        return self.config.carry_fast_weights and self.scope == "batch"

    def updates(self, tokens: int) -> int:
        """How many chunks of `tokens` tokens are written: with lookahead a full one waits for the next token."""
        return max(0, tokens - bool(self.config.lookahead)) // self.config.memory_chunk_size

    # --- what a subclass adds ---

    def remember(
        self, q: Tensor, v: Tensor, gate: Tensor, past: dict[str, Tensor], **options: Any
    ) -> tuple[Tensor, Any]:
        """Read and write for projected tokens, from the state fields `past`; the value read `[B, T, V]` and the state."""
        raise NotImplementedError

    def flush(self, state: Any) -> Any:
        """The state after its pending tokens were written."""
        raise NotImplementedError

    def written(self, state: Any) -> dict[str, Tensor]:
        """`state_norm`, how far the first memory of a state is from the checkpoint's, and `slots_used` where it has slots."""
        raise NotImplementedError

    def carried(self, state: Any, index: int = 0) -> dict[str, Tensor]:
        """What `place` needs to make memory `index` of a state the checkpoint's fast weights."""
        raise NotImplementedError

    def state(self, tensors: dict[str, Tensor]) -> Any:
        """The operator's state made of its fields."""
        raise NotImplementedError


def query_scale(config: Any) -> float:
    """Expected size of an entry of a projected query at initialisation."""
    return config.initializer_range * config.hidden_size**0.5
