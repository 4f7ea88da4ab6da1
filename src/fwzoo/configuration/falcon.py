"""Falcon-1, 2, 3 and their inner-product forms 1A, 2A, 3A: fast-weight attention as online learning.

Source: "Fast Weight Attention for Continual Learning" (2026). The six architectures differ in the mixer's rule only.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ..registry import register_architecture, register_mixer_options
from .base import FwzooConfig

HALF_LIFE = 300  # tokens; memory half-life at initialisation


@register_mixer_options("falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a")
class FalconFamilyConfig(FwzooConfig):
    """Options of the Falcon mixers.

    Args:
        window: number of pairs that every token writes (falcon3, falcon3a).
        pairing: "shifted" pairs the previous key with this value; "same_step" this key with this value.
        timing: "read_after_write" or "read_before_write".
        step: "beta": gain 2 sigmoid(.) over the energy; "eta": the layer emits the step itself, softplus(.) / K
            (our reading of the published setting, whose text does not define it further).
        scale_coupled: multiply the ridge by the energy of the key.
        qk_norm: "rms", "l2" or "none", applied to query and key a head.
        feature_map: "identity", "elu1", "relu" or "silu", applied after the norm.
        short_conv_size: width of the causal depthwise convolution on q, k and v; 0 turns it off.
        output_gate: multiply the output by SiLU of a projection of the input.
        ridge_scale: largest ridge; None means the value that gives a half-life of 300 tokens at initialisation.
        eps: added to the energy. decay_floor: smallest decay of a token.
    """

    window: int = 4
    pairing: str = "shifted"
    timing: str = "read_after_write"
    step: str = "beta"
    scale_coupled: bool = True
    qk_norm: str = "rms"
    feature_map: str = "identity"
    short_conv_size: int = 4
    output_gate: bool = False
    ridge_scale: float | None = None
    eps: float = 1e-6
    decay_floor: float = 1e-4

    @staticmethod
    def check_options(config: Any) -> None:
        config._check_int("window", 1)
        config._check_int("short_conv_size", 0)
        config._check_choice("pairing", ("shifted", "same_step"))
        config._check_choice("timing", ("read_after_write", "read_before_write"))
        config._check_choice("step", ("beta", "eta"))
        config._check_choice("qk_norm", ("rms", "l2", "none"))
        config._check_choice("feature_map", ("identity", "elu1", "relu", "silu"))
        config._check_choice("scale_coupled", (True, False))
        config._check_choice("output_gate", (True, False))
        if config.ridge_scale is None:
            config.ridge_scale = _initial_ridge_scale(config)
        if not config.ridge_scale >= 0:
            raise ValueError(f"ridge_scale is {config.ridge_scale!r}; it must be at least 0")
        if not config.eps >= 0:
            raise ValueError(f"eps is {config.eps!r}; it must be at least 0")
        if not 0 < config.decay_floor <= 1:
            raise ValueError(f"decay_floor is {config.decay_floor!r}; it must be greater than 0 and at most 1")

    @classmethod
    def tiny(cls, **overrides: Any) -> FwzooConfig:
        return super().tiny(**{"window": 3, **overrides})


def _initial_ridge_scale(config: Any) -> float:
    """Ridge scale at which eta * ridge = ln 2 / HALF_LIFE with every gate at its middle."""
    energy = 1.0 if config.qk_norm == "l2" else float(config.head_dim)
    eta = 1 / energy if config.step == "beta" else math.log(2) / config.head_dim
    ridge = math.log(2) / HALF_LIFE / eta
    return 2 * ridge / (energy if config.scale_coupled else 1.0)


@register_architecture
class Falcon1Config(FalconFamilyConfig):
    """Falcon-1: regression with one gain a head (a gated delta rule on shifted pairs)."""

    model_type = "falcon1"
    default_mixer: ClassVar[str] = "falcon1"


@register_architecture
class Falcon2Config(FalconFamilyConfig):
    """Falcon-2: regression with one gain and one decay a value column."""

    model_type = "falcon2"
    default_mixer: ClassVar[str] = "falcon2"


@register_architecture
class Falcon3Config(FalconFamilyConfig):
    """Falcon-3: regression on a sliding window of pairs."""

    model_type = "falcon3"
    default_mixer: ClassVar[str] = "falcon3"


@register_architecture
class Falcon1AConfig(FalconFamilyConfig):
    """Falcon-1A: inner product with one gain a head (linear attention on shifted pairs with a learned decay)."""

    model_type = "falcon1a"
    default_mixer: ClassVar[str] = "falcon1a"


@register_architecture
class Falcon2AConfig(FalconFamilyConfig):
    """Falcon-2A: inner product with one gain and one decay a value column."""

    model_type = "falcon2a"
    default_mixer: ClassVar[str] = "falcon2a"


@register_architecture
class Falcon3AConfig(FalconFamilyConfig):
    """Falcon-3A: inner product on a sliding window of pairs."""

    model_type = "falcon3a"
    default_mixer: ClassVar[str] = "falcon3a"
