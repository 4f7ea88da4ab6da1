"""Models: the backbone, the cache, and the modules that sit in its layers."""

from .._discovery import import_all
from .backbone import FwzooForCausalLM, FwzooModel, FwzooPreTrainedModel
from .cache import FastWeightCache

import_all(f"{__name__}.mixers")
import_all(f"{__name__}.memories")

__all__ = ["FastWeightCache", "FwzooForCausalLM", "FwzooModel", "FwzooPreTrainedModel"]
