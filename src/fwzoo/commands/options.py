"""Kinds of options that several commands have."""

import math
from typing import Any

import typer


def number(help: str, kind: type, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Any:
    """A number option, int or float, from `low` to `high` and greater than `above`."""
    limits = [f"{low} or more"] * (low > -math.inf) + [f"more than {above}"] * (above > -math.inf)
    limits += [f"at most {high}"] * (high < math.inf)
    allowed = f"{'a whole number' if kind is int else 'a number'}, {' and '.join(limits)}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high and value > above):
            raise typer.BadParameter(f"{str(text)!r} is not allowed; allowed is {allowed}.")
        return value

    return typer.Option(help=help, parser=parse, metavar=kind.__name__.upper())


def numbers(help: str, low: float = -math.inf, above: float = -math.inf, kind: type = int) -> Any:
    """An option that is a list of numbers, int or float, from `low` on and greater than `above`, with commas between."""
    limit = f"{low} or more" if low > -math.inf else f"more than {above}"
    allowed = f"{'whole ' if kind is int else ''}numbers of {limit} with commas between"

    def parse(text: Any) -> Any:
        if isinstance(text, tuple):  # the default
            return text
        try:
            found = {kind(part) for part in str(text).split(",")}
        except ValueError:
            found = {math.nan}
        if not all(math.isfinite(x) and x >= low and x > above for x in found):
            raise typer.BadParameter(f"{str(text)!r} is not allowed; allowed are {allowed}.")
        return tuple(sorted(found))

    return typer.Option(help=help, parser=parse, metavar=f"{kind.__name__.upper()},...")
