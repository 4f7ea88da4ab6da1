"""Rotary frequencies that are scaled for contexts longer than those in training, as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TYPES = ("linear", "llama3", "yarn")  # those whose frequencies do not depend on the length of the input


class ScaledRotary(NamedTuple):
    """The angle a position of every pair of channels, and the factor of rotated queries and keys."""

    frequencies: tuple[float, ...]
    factor: float


def scaled_rotary(size: int, base: float, scaling: dict[str, Any] | None) -> ScaledRotary | None:
    """Frequencies for heads of `size` channels, or None where nothing is scaled.

    Args:
        scaling: transformers' `rope_parameters` without the base: "rope_type" and what that type needs.
    """
    if scaling is None:
        return None
    parameters = {**scaling, "rope_theta": base}
    sizes = {"head_dim": size, "hidden_size": size, "num_attention_heads": 1}
    config = SimpleNamespace(**sizes, rope_parameters=parameters, standardize_rope_params=lambda: None)
    with torch.device("cpu"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    return ScaledRotary(tuple(frequencies.tolist()), factor)


def check_rotary(config: Any, prefix: str = "") -> None:
    """Validate `rotary_scaling` of a configuration, its name with a prefix."""
    name = f"{prefix}rotary_scaling"
    scaling = getattr(config, name)
    if scaling is None:
        return
    if not isinstance(scaling, dict) or scaling.get("rope_type") not in TYPES:
        raise ValueError(f"{name} is {scaling!r}; it must be None or a dict whose 'rope_type' is {', '.join(TYPES)}")
    try:
        scaled_rotary(config.head_dim, getattr(config, f"{prefix}rotary_base"), scaling)
    except KeyError as error:
        raise ValueError(f"{name} is {scaling!r}; {scaling['rope_type']!r} needs {error.args[0]!r} too") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {scaling!r}, of which transformers says: {error}") from error
