"""`fwzoo info` and `fwzoo archs`: what a model is made of, and what is registered."""

import inspect
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from fwzoo import registry

from .common import blamed_on, device, load_config, make_config, quiet_transformers, versions


def archs() -> None:
    """Print a table of the registered architectures."""
    table = Table("architecture", "config", "what it is", title="registered architectures")
    for name, config_class in registry.architectures().items():
        summary = (inspect.getdoc(config_class) or "").split("\n")[0]
        table.add_row(name, config_class.__name__, summary)
    Console().print(table)


def info(name: str) -> None:
    """Print the layers, parameters, memory sizes and kernel levels of a saved model or of an architecture's defaults.

    The weights are not read: the model is built without storage.
    """
    quiet_transformers()
    registered = name in registry.architectures() and not Path(name).is_dir()
    config = make_config("MODEL_OR_ARCH", name, {}) if registered else load_config("MODEL_OR_ARCH", name)
    with blamed_on("MODEL_OR_ARCH"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = zip(config.mixers, config.feed_forwards, model.model.layers, model.state_bytes(), strict=True)
    training = [(level, reason) for _, _, level, reason in model.kernel_report(device=device())]
    with torch.no_grad():
        kernels = [(level, reason) for _, _, level, reason in model.kernel_report(device=device())]

    console = Console()
    table = Table(
        title=f"{config.model_type} with its default sizes" if registered else f"{name} ({config.model_type})"
    )
    for heading in ("layer", "mixer", "feed-forward", "kernel level"):
        table.add_column(heading)
    for heading in ("parameters", "bytes of memory"):
        table.add_column(heading, justify="right")
    for i, (mixer, feed_forward, layer, state) in enumerate(rows):
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        table.add_row(str(i), mixer, feed_forward, kernels[i][0], f"{parameters:,}", f"{state:,}")
    console.print(table)
    console.print(f"layout: {config.layout}", soft_wrap=True)
    console.print(f"{model.num_parameters():,} parameters in all, the {config.vocab_size:,} embeddings included")
    console.print(f"{sum(model.state_bytes()):,} bytes of memory a sequence")
    for level, reason in dict.fromkeys(kernels):
        console.print(f"kernel level {level}: {reason}", soft_wrap=True)
    for level, reason in dict.fromkeys(found for found in training if found not in kernels):
        console.print(f"kernel level {level} in training: {reason}", soft_wrap=True)
    console.print(versions())
