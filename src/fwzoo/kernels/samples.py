"""Random inputs of every operator, for `fwzoo selftest`. An operator says in its own folder what its inputs look like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """Batch B, tokens T, heads H, key size K, value size V."""

    batch: int
    tokens: int
    heads: int
    key: int
    value: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.tokens} H{self.heads} K{self.key} V{self.value}"


@dataclass(frozen=True)
class Sample:
    """Arguments of one call by name, all float64 on the CPU.

    Attributes:
        name: what is special about it, for the report.
        tokens: inputs `[B, T, ...]` that come in the dtype of the activations. gates: those that stay in float32.
        weights: inputs without a token axis, in float32. options: keyword options.
        dtypes: activation dtypes that make sense (choices between slots do not survive rounding to 16 bit).
    """

    name: str
    tokens: dict[str, Tensor]
    gates: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS

    @property
    def length(self) -> int:
        """T."""
        return next(iter(self.tokens.values())).shape[1]


class Draw:
    """Random tensors of given sizes, the same for the same seed on every machine."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes = sizes
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, float64."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), float64."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64)

    def tokens(self, *features: int) -> Tensor:
        """Standard normal `[B, T, *features]`."""
        return self.normal(self.sizes.batch, self.sizes.tokens, *features)

    def heads(self, size: int) -> Tensor:
        """Standard normal `[B, T, H, size]`."""
        return self.tokens(self.sizes.heads, size)

    def unit_heads(self, size: int) -> Tensor:
        """Directions `[B, T, H, size]`."""
        return F.normalize(self.heads(size), dim=-1)

    def gate(self, *features: int) -> Tensor:
        """Uniform in [0, 1) `[B, T, H, *features]`."""
        return self.uniform(self.sizes.batch, self.sizes.tokens, self.sizes.heads, *features)


Samples = Iterator[Sample]
