"""FwPKM: a product-key memory that is written while it is read.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..registry import register_architecture, register_feed_forward_options
from .base import FwzooConfig
from .memories import FastMemoryConfig
from .pkm import check_product_keys


@register_feed_forward_options("fwpkm")
@register_architecture
class FwpkmConfig(FastMemoryConfig):
    """FwPKM: product-key memories, written while they are read, in some layers of a gated delta model.

    Args:
        fwpkm_subkeys: sub-keys n a half; the table has n * n slots.
        fwpkm_heads: number of queries a token. fwpkm_top_k: slots a head reads.
        fwpkm_score: "idw", -log(score_eps + squared distance), or "dot". fwpkm_score_eps: that epsilon.
        row_averaging: divide the change of a row by the number of its reads in the chunk.
        gate_weighting: weight a token's write by its gate.
        address_loss: move the sub-keys so that the use of slots spreads.
        value_lr, key_lr: step sizes of the rows and of the sub-keys.
        fwpkm_max_slots: most rows a sequence may write, None for no limit. fwpkm_evict: beyond it, drop the least recently
            written rows instead of raising.
    """

    model_type = "fwpkm"
    default_memory: ClassVar[str] = "fwpkm"

    fwpkm_subkeys: int = 512
    fwpkm_heads: int = 1
    fwpkm_top_k: int = 8
    fwpkm_score: str = "idw"
    fwpkm_score_eps: float = 1e-3
    row_averaging: bool = True
    gate_weighting: bool = True
    address_loss: bool = True
    value_lr: float = 1.0
    key_lr: float = 1.0
    fwpkm_max_slots: int | None = None
    fwpkm_evict: bool = False

    @staticmethod
    def check_options(config: Any) -> None:
        FastMemoryConfig.check_options(config)
        check_product_keys(config, "fwpkm")
        if not config.fwpkm_score_eps > 0:
            raise ValueError(f"fwpkm_score_eps is {config.fwpkm_score_eps!r}; it must be greater than 0")
        for name in ("row_averaging", "gate_weighting", "address_loss", "fwpkm_evict"):
            config._check_choice(name, (True, False))
        for name in ("value_lr", "key_lr"):
            if not getattr(config, name) >= 0:
                raise ValueError(f"{name} is {getattr(config, name)!r}; it must be at least 0")
        if config.fwpkm_max_slots is not None:
            config._check_int("fwpkm_max_slots", 1)

    @classmethod
    def tiny(cls, **overrides: Any) -> FwzooConfig:
        return super().tiny(**{"fwpkm_subkeys": 8, "fwpkm_top_k": 3, **overrides})
