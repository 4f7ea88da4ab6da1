"""The operators: one public function each, the same contract for all (see `contract.py`)."""

from .contract import Explanation, debug, explain
from .falcon import FalconState, falcon
from .lact import LactState, lact

__all__ = ["Explanation", "FalconState", "LactState", "debug", "explain", "falcon", "lact"]
