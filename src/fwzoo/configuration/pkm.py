"""PKM: a product-key memory that is learned by gradient descent and fixed afterwards. A memory for any layout.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

from typing import Any

from ..registry import register_feed_forward_options
from .memories import MemoryFamilyConfig


@register_feed_forward_options("pkm")
class PkmFamilyConfig(MemoryFamilyConfig):
    """Options of the PKM memory.

    Args:
        pkm_subkeys: sub-keys n a half; the table has n * n slots.
        pkm_heads: number of queries a token. pkm_top_k: slots a head reads.
        pkm_score: "dot" or "idw", -log(1e-3 + squared distance).
        pkm_query_norm: "none", "layer" or "batch" normalisation of the queries.
        pkm_sparse_grad: the table's gradient is a sparse tensor of the rows read, as of `nn.Embedding(sparse=True)`: for SGD,
            SparseAdam and Adagrad. AdamW and the clipping of gradients need False.
    """

    pkm_subkeys: int = 512
    pkm_heads: int = 4
    pkm_top_k: int = 32
    pkm_score: str = "dot"
    pkm_query_norm: str = "none"
    pkm_sparse_grad: bool = False

    @staticmethod
    def check_options(config: Any) -> None:
        MemoryFamilyConfig.check_options(config)
        check_product_keys(config, "pkm")
        config._check_choice("pkm_query_norm", ("none", "layer", "batch"))
        config._check_choice("pkm_sparse_grad", (True, False))


def check_product_keys(config: Any, prefix: str) -> None:
    """Check the options that PKM and FwPKM have in common."""
    for name in ("subkeys", "heads", "top_k"):
        config._check_int(f"{prefix}_{name}", 1)
    config._check_choice(f"{prefix}_score", ("dot", "idw"))
    top_k, subkeys = getattr(config, f"{prefix}_top_k"), getattr(config, f"{prefix}_subkeys")
    if top_k > subkeys:
        raise ValueError(f"{prefix}_top_k is {top_k}; it must be at most {prefix}_subkeys = {subkeys}")
    if config.memory_key_dim % 2:
        raise ValueError(f"memory_key_dim is {config.memory_key_dim}; it must be even, half for each list of sub-keys")
