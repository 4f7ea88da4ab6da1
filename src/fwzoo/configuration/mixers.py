"""Options of the mixers that any architecture's layers may use: softmax attention, gated delta rule, linear attention."""

from __future__ import annotations

from typing import Any

from ..registry import register_mixer_options
from .base import FwzooConfig
from .rotary import check_rotary


@register_mixer_options("full_attention", "sliding_attention")
class AttentionOptions(FwzooConfig):
    """Options of softmax attention.

    Args:
        num_key_value_heads: key and value heads, each shared by a group of query heads; None means
            `num_attention_heads`.
        attention_window: number of tokens that a sliding-window layer sees, itself included.
        rotary_base: base of the rotary frequencies. rotary_scaling: None, or transformers' `rope_parameters` beside the base:
            "rope_type" (linear, llama3 or yarn) and what that type needs.
        attention_qk_norm: learned RMSNorm of query and key a head.
        attention_qkv_bias, attention_output_bias: biases of the projections.
        logit_scaling: factor of the logits of a query that sees M keys, for contexts longer than L = training_length:
            "none"; "log": log M / log L; "log_beyond": the same, only where M > L; "yarn": (0.1 log(M / L) + 1)^2, only
            where M > L; "ssmax": s log M with a learned s a head, initially 1 / log L.
        training_length: L.
        swa_probability: in training, the probability that a full-attention layer sees only its window in a step.
    """

    num_key_value_heads: int | None = None
    attention_window: int = 2048
    rotary_base: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    attention_qk_norm: bool = False
    attention_qkv_bias: bool = False
    attention_output_bias: bool = False
    logit_scaling: str = "none"
    training_length: int = 2048
    swa_probability: float = 0.0

    @staticmethod
    def check_options(config: Any) -> None:
        if config.num_key_value_heads is None:
            config.num_key_value_heads = config.num_attention_heads
        config._check_int("num_key_value_heads", 1)
        config._check_int("attention_window", 1)
        config._check_int("training_length", 2)
        for name in ("attention_qk_norm", "attention_qkv_bias", "attention_output_bias"):
            config._check_choice(name, (True, False))
        config._check_choice("logit_scaling", ("none", "log", "log_beyond", "yarn", "ssmax"))
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {config.num_key_value_heads}; it must divide "
                f"num_attention_heads = {config.num_attention_heads}"
            )
        if config.head_dim % 2:
            raise ValueError(f"head_dim is {config.head_dim}; it must be even for rotary positions")
        if not config.rotary_base > 1:
            raise ValueError(f"rotary_base is {config.rotary_base!r}; it must be greater than 1")
        check_rotary(config)
        if not 0 <= config.swa_probability <= 1:
            raise ValueError(f"swa_probability is {config.swa_probability!r}; it must be between 0 and 1")


@register_mixer_options("gated_delta")
class GatedDeltaOptions(FwzooConfig):
    """Options of the gated delta rule.

    Args:
        short_conv_size: width of the causal depthwise convolution on q, k and v; 0 turns it off.
    """

    short_conv_size: int = 4

    @staticmethod
    def check_options(config: Any) -> None:
        config._check_int("short_conv_size", 0)


@register_mixer_options("linear_attention")
class LinearAttentionOptions(FwzooConfig):
    """Options of linear attention.

    Args:
        linear_feature_map: "elu1", "relu", "softplus" or "identity", applied to query and key. "identity" needs
            `linear_normalize=False`: a divisor of both signs can vanish.
        linear_normalize: divide the read by the sum of keys seen from the query.
        linear_eps: added to that divisor.
        linear_decay: "none", "head" (one learned decay a head, initially 0.999) or "token" (from the input).
        linear_initial_state: "zeros" or "identity", which needs value_head_dim = head_dim and `linear_normalize=False`.
    """

    linear_feature_map: str = "elu1"
    linear_normalize: bool = True
    linear_eps: float = 1e-6
    linear_decay: str = "none"
    linear_initial_state: str = "zeros"

    @staticmethod
    def check_options(config: Any) -> None:
        config._check_choice("linear_feature_map", ("elu1", "relu", "softplus", "identity"))
        config._check_choice("linear_normalize", (True, False))
        config._check_choice("linear_decay", ("none", "head", "token"))
        config._check_choice("linear_initial_state", ("zeros", "identity"))
        if not config.linear_eps >= 0:
            raise ValueError(f"linear_eps is {config.linear_eps!r}; it must be at least 0")
        for name in ("linear_feature_map", "linear_initial_state"):
            if getattr(config, name) == "identity" and config.linear_normalize:
                raise ValueError(f"{name} is 'identity' and linear_normalize is True; it needs linear_normalize=False")
        if config.linear_initial_state == "identity" and config.value_head_dim != config.head_dim:
            raise ValueError(
                f"linear_initial_state is 'identity' and value_head_dim is {config.value_head_dim}; "
                f"it must be head_dim = {config.head_dim}"
            )
