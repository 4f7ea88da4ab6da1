"""LaCT: large-chunk test-time training, a fast SwiGLU memory beside sliding-window attention.

Source: "Test-Time Training Done Right" (2025).
"""

from __future__ import annotations

from typing import Any, ClassVar

from .. import registry
from ..registry import register_architecture, register_mixer_options
from .base import FwzooConfig
from .rotary import check_rotary

PRESETS: dict[str, dict[str, Any]] = {
    "760m": {"hidden_size": 1536, "intermediate_size": 4096},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192},
}
"""The published sizes; what they have in common is in `LactConfig.preset`."""


@register_architecture
@register_mixer_options("lact")
class LactConfig(FwzooConfig):
    """LaCT: sliding-window attention and a fast SwiGLU that is updated once a chunk of tokens, in every layer.

    Both branches share one projection to query, key and value of E = num_attention_heads * head_dim channels each.

    Args:
        num_lact_heads: heads of the fast memory, of size d = E / heads.
        lact_chunk_size: tokens of a document in one update.
        lact_window: tokens that a token of the window branch sees, itself included.
        lact_expansion: hidden size of the fast SwiGLU over d.
        lact_rank: rank r of the initial W0 and W2 = L R + I / 2; 0 makes them dense.
        lact_init_gain: gain of L and R.
        lact_momentum: keep a learned share of the last update. lact_muon: orthogonalise updates.
        lact_prenorm: sum updates un-normalised and read a rescaled copy, instead of rescaling the weights themselves.
        lact_rate_per_channel: d rates a head and matrix instead of one; needs an expansion of 1.
        lact_output_scale: multiply the memory's output by SiLU of a projection, one value a head.
        lact_nope: no rotary embedding in the memory branch.
        lact_qk_norm: RMSNorm of query and key over all channels. lact_qk_norm_per_head: over a head of the window branch instead.
        lact_qkv_bias, lact_output_bias: biases of the projections.
        lact_qkv_silu: SiLU on the memory's query, key and value; lact_v_silu: on the value too.
        lact_rotary_base, lact_rotary_scaling: as `rotary_base` and `rotary_scaling` of attention.
    """

    model_type = "lact"
    default_mixer: ClassVar[str] = "lact"

    num_lact_heads: int = 4
    lact_chunk_size: int = 2048
    lact_window: int = 512
    lact_expansion: float = 1.0
    lact_rank: int = 32
    lact_init_gain: float = 0.5
    lact_momentum: bool = True
    lact_muon: bool = False
    lact_prenorm: bool = False
    lact_rate_per_channel: bool = False
    lact_output_scale: bool = True
    lact_nope: bool = False
    lact_qk_norm: bool = False
    lact_qk_norm_per_head: bool = False
    lact_qkv_bias: bool = False
    lact_output_bias: bool = False
    lact_qkv_silu: bool = True
    lact_v_silu: bool = True
    lact_rotary_base: float = 1e6
    lact_rotary_scaling: dict[str, Any] | None = None

    @staticmethod
    def check_options(config: Any) -> None:
        for name in ("num_lact_heads", "lact_chunk_size", "lact_window"):
            config._check_int(name, 1)
        config._check_int("lact_rank", 0)
        for name in LactConfig.options():
            if isinstance(LactConfig.__dataclass_fields__[name].default, bool):
                config._check_choice(name, (True, False))
        if config.head_dim % 2:
            raise ValueError(f"head_dim is {config.head_dim}; it must be even for rotary positions")
        channels = config.num_attention_heads * config.head_dim
        if channels % config.num_lact_heads:
            raise ValueError(
                f"num_lact_heads is {config.num_lact_heads}; it must divide num_attention_heads * head_dim = {channels}"
            )
        size = channels // config.num_lact_heads
        if not config.lact_expansion * size >= 1:
            raise ValueError(f"lact_expansion is {config.lact_expansion!r}; it must be at least 1 / {size}")
        if config.lact_rate_per_channel and int(config.lact_expansion * size) != size:
            raise ValueError(
                f"lact_expansion is {config.lact_expansion!r}; it must be 1 with lact_rate_per_channel = True"
            )
        for name in ("lact_init_gain", "lact_rotary_base"):
            if not getattr(config, name) > 0:
                raise ValueError(f"{name} is {getattr(config, name)!r}; it must be greater than 0")
        if config.lact_qk_norm_per_head and not config.lact_qk_norm:
            raise ValueError("lact_qk_norm_per_head is True and lact_qk_norm False; there is no norm to be one a head")
        check_rotary(config, "lact_")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> LactConfig:
        """The published shape "760m" or "3b" (SGD with momentum; `lact_muon=True` is the other published variant).

        Raises:
            ValueError: no preset has this name; the message names those that exist.
        """
        if name.lower() not in PRESETS:
            raise ValueError(registry.unknown("name", name, PRESETS))
        shared = {
            "vocab_size": 32000,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "lact_window": 2048,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return cls(**{**shared, **PRESETS[name.lower()], **overrides})

    @classmethod
    def tiny(cls, **overrides: Any) -> FwzooConfig:
        sizes = {"num_lact_heads": 2, "lact_chunk_size": 8, "lact_window": 6, "lact_rank": 4}
        return super().tiny(**{**sizes, **overrides})
