"""What the memories in the feed-forward slot have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import FwzooConfig


class MemoryFamilyConfig(FwzooConfig):
    """Options of every memory.

    Args:
        memory_placement: "replace" puts it in the place of the feed-forward network, "extra" adds it after that network,
            as a third residual sublayer.
        memory_key_dim: size K of a query (a head).
    """

    memory_placement: str = "replace"
    memory_key_dim: int = 512

    @staticmethod
    def check_options(config: Any) -> None:
        config._check_choice("memory_placement", ("replace", "extra"))
        config._check_int("memory_key_dim", 2)


class FastMemoryConfig(MemoryFamilyConfig):
    """Options of the memories that are written while they are read.

    Args:
        memory_value_dim: size V of a value. memory_chunk_size: tokens between updates.
        gate_activation: "sigmoid" or "identity", of the gate between what was read and the value of the token; "none": both
            are added as they are, and every token writes with weight 1.
        value_residual: mix in the value of the token (otherwise what was read, times the gate, is all).
        lookahead: a token's target is the next token's value (otherwise its own).
        normalize_targets: z-score the targets over features.
        training_scope: "batch": one memory for all rows of a training batch, as published; "sequence": one for each.
            Evaluation and generation always have one for each sequence.
        carry_fast_weights: in training, what the batch wrote is written into the checkpoint's fast weights after each step.
    """

    default_mixer: ClassVar[str] = "gated_delta"
    default_memory: ClassVar[str] = ""

    memory_value_dim: int = 512
    memory_chunk_size: int = 512
    gate_activation: str = "sigmoid"
    value_residual: bool = True
    lookahead: bool = True
    normalize_targets: bool = True
    training_scope: str = "batch"
    carry_fast_weights: bool = False

    @staticmethod
    def check_options(config: Any) -> None:
        MemoryFamilyConfig.check_options(config)
        config._check_int("memory_value_dim", 1)
        config._check_int("memory_chunk_size", 1)
        config._check_choice("gate_activation", ("sigmoid", "identity", "none"))
        config._check_choice("training_scope", ("batch", "sequence"))
        for name in ("value_residual", "lookahead", "normalize_targets", "carry_fast_weights"):
            config._check_choice(name, (True, False))
        if config.carry_fast_weights and config.training_scope != "batch":
            raise ValueError(
                f"carry_fast_weights is True with training_scope = {config.training_scope!r}; only the one memory of "
                "training_scope = 'batch' can be carried"
            )

    @classmethod
    def default_feed_forwards(cls, layers: int) -> list[str]:
        """The memory in layers 2, 6, 10, ... (in the last of fewer than three), a SwiGLU in the others."""
        return [cls.default_memory if i % 4 == min(2, layers - 1) else "mlp" for i in range(layers)]

    @classmethod
    def tiny(cls, **overrides: Any) -> FwzooConfig:
        sizes: dict[str, Any] = {"memory_key_dim": 16, "memory_value_dim": 16, "memory_chunk_size": 8}
        return super().tiny(**{**sizes, **overrides})
