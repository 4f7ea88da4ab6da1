"""The operators: one public function each, the same contract for all (see `contract.py`)."""

from .contract import Explanation, debug, explain
from .falcon import FalconState, falcon
from .fwmlp import FwmlpState, fwmlp, fwmlp_flush
from .fwpkm import FwpkmState, fwpkm, fwpkm_flush
from .pkm import pkm

__all__ = [
    "Explanation",
    "FalconState",
    "FwmlpState",
    "FwpkmState",
    "debug",
    "explain",
    "falcon",
    "fwmlp",
    "fwmlp_flush",
    "fwpkm",
    "fwpkm_flush",
    "pkm",
]
