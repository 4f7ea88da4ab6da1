"""FwMLP: a SwiGLU whose weights are written while it is read.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..registry import register_architecture, register_feed_forward_options
from .memories import FastMemoryConfig


@register_feed_forward_options("fwmlp")
@register_architecture
class FwmlpConfig(FastMemoryConfig):
    """FwMLP: SwiGLU memories, written while they are read, in some layers of a gated delta model.

    Args:
        fwmlp_width: width M of the fast SwiGLU; None means memory_key_dim.
        fwmlp_lr: step size.
    """

    model_type = "fwmlp"
    default_memory: ClassVar[str] = "fwmlp"

    fwmlp_width: int | None = None
    fwmlp_lr: float = 1.0

    @staticmethod
    def check_options(config: Any) -> None:
        FastMemoryConfig.check_options(config)
        if config.fwmlp_width is None:
            config.fwmlp_width = config.memory_key_dim
        config._check_int("fwmlp_width", 1)
        if not config.fwmlp_lr >= 0:
            raise ValueError(f"fwmlp_lr is {config.fwmlp_lr!r}; it must be at least 0")
