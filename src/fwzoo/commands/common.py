"""What several commands need: complaints about input, configurations by name, models from a folder or the Hub."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from fwzoo import registry
from fwzoo.configuration import FwzooConfig


def quiet_transformers() -> None:
    """Keep transformers' progress bars and notices out of the output of a command."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def bad(option: str, message: str) -> typer.BadParameter:
    """The error to raise for a bad value of `option`; `message` names the value and what is allowed."""
    return typer.BadParameter(message, param_hint=option)


@contextmanager
def blamed_on(option: str) -> Iterator[None]:
    """Turn the library's complaint about a value into a complaint about `option`."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise bad(option, " ".join(str(error).split())) from error


@contextmanager
def resumable(console: Any) -> Iterator[None]:
    """An experiment that was interrupted has been saved: say how to go on, and end as an interrupted command does."""
    from fwzoo.evaluation.training import Interrupted

    try:
        yield
    except Interrupted:
        console.print("saved; the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None


def known_architecture(option: str, name: str) -> type[PreTrainedConfig]:
    """The config class registered under `name`; a usage error with the nearest name otherwise."""
    known = registry.architectures()
    if name not in known:
        raise bad(option, registry.unknown("the architecture", name, known))
    return known[name]


def read_config(option: str, path: Path) -> dict[str, Any]:
    """The fields of a JSON config file; a usage error when it is not one of a registered architecture."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise bad(option, f"{str(path)!r} cannot be read ({error.strerror}); allowed is a JSON file.") from error
    except ValueError as error:
        raise bad(option, f"{str(path)!r} is not JSON ({error}); allowed is a JSON file.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise bad(option, f"{str(path)!r} has no 'model_type'; allowed are {', '.join(registry.architectures())}.")
    known_architecture(option, fields["model_type"])
    return fields


def make_config(option: str, model_type: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """A config of a registered architecture, checked; a usage error when a field is not allowed."""
    with blamed_on(option):
        return AutoConfig.for_model(model_type, **overrides)


def layout_config(option: str, text: str, **fields: Any) -> PreTrainedConfig:
    """The config of `LAYOUT` or `LAYOUT:FIELD=VALUE:...`, checked; a usage error when it is not allowed.

    Values are read as JSON where they are JSON (numbers, true, null), and as text otherwise.
    """
    layout, *settings = text.split(":")
    with blamed_on(option):
        plain = FwzooConfig.from_layout(layout, **fields)
    families = [part for part in registry.parts(plain) if issubclass(part, FwzooConfig)]
    common = {field.name for field in dataclasses.fields(FwzooConfig)} & set(FwzooConfig.__annotations__)
    known = common.union(*(family.options() for family in families))
    known -= {"mixers", "feed_forwards", "default_memory"}  # the layout's
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise bad(option, f"{setting!r} of {text!r} is not allowed; allowed behind a layout is FIELD=VALUE.")
        if name not in known:
            raise bad(option, registry.unknown(f"the option behind {layout!r}", name, known))
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    with blamed_on(option):
        return FwzooConfig.from_layout(layout, **fields)


def load_config(option: str, name: str) -> PreTrainedConfig:
    """The config saved in a folder or on the Hub; a usage error when it is none of a registered architecture."""
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise bad(
            option,
            f"{name!r} is not a model folder, a Hub name or a registered architecture "
            f"({first_sentence(error)}); registered are {', '.join(registry.architectures())}.",
        ) from error
    if config.model_type not in registry.architectures():
        raise bad(option, registry.unknown(f"the model type of {name!r}", config.model_type, registry.architectures()))
    return config


def load_model(option: str, name: str) -> tuple[Any, Any]:
    """The model, on the GPU where there is one, and its tokenizer, from a folder or the Hub."""
    load_config(option, name)
    with blamed_on(option):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.to(device()).eval(), tokenizer


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def short(number: float, unit: str = "") -> str:
    """Three digits and a letter: 12.3M."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{' ' * bool(unit)}{' kMGT'[power].strip()}{unit}"


def first_sentence(error: BaseException) -> str:
    """The beginning of a long message, without its line breaks."""
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")


def empty_folder(option: str, path: Path, otherwise: str, but: frozenset[str] = frozenset()) -> Path:
    """`path` if it holds nothing `but` these names or does not exist; else a usage error, ending `otherwise`."""
    if path.exists() and not path.is_dir():
        raise bad(option, f"{str(path)!r} is a file; allowed is a folder.")
    if path.is_dir() and {entry.name for entry in path.iterdir()} - but:
        raise bad(option, f"{str(path)!r} is not empty; {otherwise}")
    return path


def versions() -> str:
    """The versions that a result depends on."""
    import fwzoo

    return f"fwzoo {fwzoo.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
