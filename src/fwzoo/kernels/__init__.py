"""The operators: one public function each, the same contract for all (see `contract.py`)."""

from .contract import Explanation, debug, explain
from .falcon import FalconState, falcon

__all__ = ["Explanation", "FalconState", "debug", "explain", "falcon"]
