"""What the zoo contains: architectures, mixers and feed-forward modules, by name.

A new architecture registers itself where it is written: its configuration with `@register_architecture`, its modules
with `@register_mixer` or `@register_feed_forward`. Nothing else lists names.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .configuration.base import FwzooConfig

T = TypeVar("T", bound=type)

_ARCHITECTURES: dict[str, type[FwzooConfig]] = {}
_MIXER_OPTIONS: dict[str, type[FwzooConfig]] = {}
_FEED_FORWARD_OPTIONS: dict[str, type[FwzooConfig]] = {}
_MIXERS: dict[str, type] = {}
_FEED_FORWARDS: dict[str, type] = {}
_ON_SAVE: list[Callable[..., None]] = []


def register_architecture(config_class: T) -> T:
    """Class decorator: a configuration whose `model_type` names an architecture."""
    _ARCHITECTURES[config_class.model_type] = config_class  # type: ignore[attr-defined]
    return config_class


def register_mixer_options(*names: str) -> Callable[[T], T]:
    """Class decorator: the configuration class whose fields are the options of these mixers."""

    def add(config_class: T) -> T:
        _MIXER_OPTIONS.update(dict.fromkeys(names, config_class))
        return config_class

    return add


def register_feed_forward_options(*names: str) -> Callable[[T], T]:
    """Class decorator: the configuration class whose fields are the options of these feed-forward modules."""

    def add(config_class: T) -> T:
        _FEED_FORWARD_OPTIONS.update(dict.fromkeys(names, config_class))
        return config_class

    return add


def register_mixer(*names: str) -> Callable[[T], T]:
    """Class decorator: the token mixer `cls(config, layer_index)` for these mixer names."""

    def add(cls: T) -> T:
        _MIXERS.update(dict.fromkeys(names, cls))
        return cls

    return add


def register_feed_forward(*names: str) -> Callable[[T], T]:
    """Class decorator: the feed-forward module `cls(config, layer_index)` for these names."""

    def add(cls: T) -> T:
        _FEED_FORWARDS.update(dict.fromkeys(names, cls))
        return cls

    return add


def on_save(function: Callable[..., None]) -> Callable[..., None]:
    """Function decorator: `function(config, folder, **card)` runs after a configuration was saved to a folder.

    `card`: `name` and `tags` for the model card, where they are known.
    """
    _ON_SAVE.append(function)
    return function


def saved(config: Any, folder: Any, **card: Any) -> None:
    """Run what was registered with `on_save`."""
    for function in _ON_SAVE:
        function(config, folder, **card)


def writes_code() -> bool:
    """Whether saving writes the model's code: true of the package, false of the code that it writes."""
    return bool(_ON_SAVE)


def architectures() -> dict[str, type[FwzooConfig]]:
    """Every registered architecture: model type to configuration class, in order of registration."""
    return dict(_ARCHITECTURES)


def mixer_options() -> dict[str, type[FwzooConfig]]:
    """Every known mixer name, with the configuration class that holds its options."""
    return dict(_MIXER_OPTIONS)


def feed_forward_options() -> dict[str, type[FwzooConfig]]:
    """The feed-forward names that have options, with the configuration class that holds them."""
    return dict(_FEED_FORWARD_OPTIONS)


def mixer(name: str) -> type:
    """The module class of a mixer. Raises ValueError for an unknown name, with the nearest known one."""
    return _find("mixer", name, _MIXERS)


def feed_forward(name: str) -> type:
    """The module class of a feed-forward slot. Raises ValueError for an unknown name, with the nearest known one."""
    return _find("feed_forward", name, _FEED_FORWARDS)


def feed_forward_names() -> list[str]:
    """Every known feed-forward name; "none" leaves the slot empty."""
    return [*_FEED_FORWARDS, "none"]


def parts(config: Any) -> list[type]:
    """The registered classes that a model of `config` is made of: its configuration first, then those whose fields its

    modules take as options, then the modules. "mlp", the default of every feed-forward slot, is always among them.
    """
    names = dict.fromkeys(["mlp", *config.mixers, *config.feed_forwards])
    tables: tuple[Mapping[str, type], ...] = (_MIXER_OPTIONS, _FEED_FORWARD_OPTIONS, _MIXERS, _FEED_FORWARDS)
    found = [table[name] for table in tables for name in names if name in table]
    return list(dict.fromkeys([type(config), *found]))


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """The sentence for a name that is not known, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} is {name!r}; allowed: {', '.join(known)}{hint}"


def _find(what: str, name: str, table: Mapping[str, type]) -> type:
    if name not in table:
        raise ValueError(unknown(what, name, table))
    return table[name]
