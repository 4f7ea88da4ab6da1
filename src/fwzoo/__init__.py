"""fwzoo: language models whose memory is written while they read.

Importing this module registers every architecture with transformers' Auto classes:

    >>> import fwzoo
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import kernels, registry
from ._discovery import import_all
from ._version import __version__
from .configuration import FwzooConfig
from .kernels import debug, explain

import_all(f"{__name__}.configuration")

from . import analysis, conversion  # noqa: E402
from .modeling import FastWeightCache, FwzooForCausalLM, FwzooModel, FwzooPreTrainedModel  # noqa: E402
from .modeling.backbone import architecture_classes  # noqa: E402

__all__ = [
    "FastWeightCache",
    "FwzooConfig",
    "FwzooForCausalLM",
    "FwzooModel",
    "FwzooPreTrainedModel",
    "__version__",
    "analysis",
    "conversion",
    "debug",
    "explain",
    "kernels",
    "registry",
]

for _model_type, _config_class in registry.architectures().items():
    _classes = (_config_class, *architecture_classes(_config_class))
    AutoConfig.register(_model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _classes[1], exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _classes[2], exist_ok=True)
    globals().update({cls.__name__: cls for cls in _classes})
    __all__ += [cls.__name__ for cls in _classes]


def __getattr__(name: str) -> Any:
    """Class names are also found in the spelling of their model type: `Falcon1aConfig` is `Falcon1AConfig`."""
    for known in __all__:
        if known.lower() == name.lower() and known != name:
            return globals()[known]
    raise AttributeError(registry.unknown("fwzoo attribute", name, __all__))
