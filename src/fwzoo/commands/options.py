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


def numbers(help: str, low: int) -> Any:
    """An option that is a list of whole numbers of at least `low`, with commas between."""

    def parse(text: Any) -> Any:
        if isinstance(text, tuple):  # the default
            return text
        parts = str(text).split(",")
        if not all(part.strip().isdigit() and int(part) >= low for part in parts):
            allowed = f"whole numbers of {low} or more with commas between"
            raise typer.BadParameter(f"{str(text)!r} is not allowed; allowed are {allowed}.")
        return tuple(sorted({int(part) for part in parts}))

    return typer.Option(help=help, parser=parse, metavar="INT,INT,...")
