"""The operators: one public function each, the same contract for all (see `contract.py`)."""

from .contract import Explanation, debug, explain
from .falcon import FalconState, falcon
from .gated_delta import GatedDeltaState, gated_delta
from .lact import LactState, lact
from .linear_attention import LinearAttentionState, linear_attention

__all__ = [
    "Explanation",
    "FalconState",
    "GatedDeltaState",
    "LactState",
    "LinearAttentionState",
    "debug",
    "explain",
    "falcon",
    "gated_delta",
    "lact",
    "linear_attention",
]
