"""The layout notation: the mixer and the feed-forward module of every layer, written as one line.

`gdn+pkm@6+fwpkm@2,10`: Gated DeltaNet everywhere, and memories in the feed-forward slots of layers 2, 6 and 10.
`falcon3a*3,swa+fa@11`: three Falcon-3A and one sliding-window layer in turn, and full attention in layer 11.

    layout = cycle { "+" name "@" layer { "," layer } }
    cycle  = mixer [ "*" count ] { "," mixer [ "*" count ] }

A name behind "+" is a mixer or a feed-forward module. Layers count from 0; case and spaces do not matter.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from .. import registry

ALIASES = {
    "gdn": "gated_delta",
    "fa": "full_attention",
    "swa": "sliding_attention",
    "la": "linear_attention",
}


def parse_layout(layout: str, layers: int) -> tuple[list[str], list[str]]:
    """Mixers and feed-forward modules of `layers` layers.

    Raises:
        ValueError: the text is not a layout for so many layers; the message shows the position, counted from 0.
        TypeError: layout is not a string.
    """
    if not isinstance(layout, str):
        raise TypeError(f"layout is {layout!r}; it must be a string such as 'falcon3a*3,swa+fa@11'")
    return _Parser(layout, layers).parse()


def format_layout(mixers: Sequence[str], feed_forwards: Sequence[str]) -> str:
    """The canonical layout of these layers; `parse_layout` gives them back.

    Mixers are the shortest repeating cycle, or the most frequent one and its exceptions, whichever is shorter. Feed-forward
    modules other than "mlp" follow by their first layer.
    """
    period = next(p for p in range(1, len(mixers) + 1) if all(m == mixers[i % p] for i, m in enumerate(mixers)))
    runs = [(name, len(list(run))) for name, run in itertools.groupby(mixers[:period])]
    cycle = ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs)
    most = Counter(mixers).most_common(1)[0][0]
    base = min(cycle, most + _terms(mixers, most), key=len)
    return base + _terms(feed_forwards, "mlp")


def _terms(names: Sequence[str], usual: str) -> str:
    """`+name@i,j` for every name but the usual one."""
    layers: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        if name != usual:
            layers.setdefault(name, []).append(str(i))
    return "".join(f"+{name}@{','.join(where)}" for name, where in layers.items())


class _Parser:
    """Reads one layout. A piece is a part of the text with its position in it."""

    def __init__(self, layout: str, layers: int) -> None:
        self.layout, self.layers = layout, layers

    def parse(self) -> tuple[list[str], list[str]]:
        first, *rest = self.split((0, self.layout), "+")
        cycle = [name for item in self.split(first, ",") for name in self.repeated(item)]
        if len(cycle) > self.layers:
            self.fail(first, f"names {len(cycle)} layers; there are num_hidden_layers = {self.layers}")
        mixers = list(itertools.islice(itertools.cycle(cycle), self.layers))
        feed_forwards = ["mlp"] * self.layers
        taken: dict[tuple[bool, int], str] = {}
        known = list(registry.mixer_options())
        for term in rest:
            head, *where = self.split(term, "@")
            name = self.name(head, [*known, *registry.feed_forward_names()])
            if len(where) != 1:
                self.fail(term, f"must be a name, @ and its layers, such as {name}@0")
            for piece in self.split(where[0], ","):
                layer = self.number(piece, 0, self.layers - 1, "a layer")
                slot = (name in known, layer)
                if slot in taken:
                    self.fail(piece, f"puts {name} into layer {layer}, which has {taken[slot]} there already")
                taken[slot] = name
                (mixers if name in known else feed_forwards)[layer] = name
        return mixers, feed_forwards

    def repeated(self, item: tuple[int, str]) -> list[str]:
        """`mixer` or `mixer*count`."""
        head, *times = self.split(item, "*")
        name = self.name(head, registry.mixer_options())
        if len(times) > 1:
            self.fail(item, f"must be a mixer, or a mixer and a count, such as {name}*3")
        return [name] * (self.number(times[0], 1, self.layers, "a count") if times else 1)

    def name(self, piece: tuple[int, str], known: Iterable[str]) -> str:
        name = ALIASES.get(piece[1].lower(), piece[1].lower())
        if name not in known:
            what = registry.unknown("name", piece[1], [*known, *ALIASES])
            raise ValueError(f"layout {self.layout!r}, position {piece[0]}: {what}")
        return name

    def number(self, piece: tuple[int, str], least: int, most: int, what: str) -> int:
        value = int(piece[1]) if piece[1].isascii() and piece[1].isdigit() and len(piece[1]) < 10 else -1
        if not least <= value <= most:
            self.fail(piece, f"must be {what} from {least} to {most}")
        return value

    def split(self, piece: tuple[int, str], mark: str) -> list[tuple[int, str]]:
        """The parts between the marks, without the spaces around them."""
        position, text = piece
        parts = []
        for part in text.split(mark):
            parts.append((position + len(part) - len(part.lstrip()), part.strip()))
            position += len(part) + len(mark)
        return parts

    def fail(self, piece: tuple[int, str], message: str) -> NoReturn:
        raise ValueError(f"layout {self.layout!r}, position {piece[0]}: {piece[1]!r} {message}")
