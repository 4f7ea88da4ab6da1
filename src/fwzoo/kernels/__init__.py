"""The operators: one public function each, the same contract for all (see `contract.py`)."""

from .contract import Explanation, debug, explain
from .falcon import FalconState, falcon
from .fwmlp import FwmlpState, fwmlp, fwmlp_flush
from .fwpkm import FwpkmState, fwpkm, fwpkm_flush
from .gated_delta import GatedDeltaState, gated_delta
from .lact import LactState, lact
from .linear_attention import LinearAttentionState, linear_attention
from .pkm import pkm

__all__ = [
    "Explanation",
    "FalconState",
    "FwmlpState",
    "FwpkmState",
    "GatedDeltaState",
    "LactState",
    "LinearAttentionState",
    "debug",
    "explain",
    "falcon",
    "fwmlp",
    "fwmlp_flush",
    "fwpkm",
    "fwpkm_flush",
    "gated_delta",
    "lact",
    "linear_attention",
    "pkm",
]
