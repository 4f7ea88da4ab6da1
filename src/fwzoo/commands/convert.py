"""`fwzoo convert`: a checkpoint from another code's layout to ours, or back."""

from pathlib import Path

import typer

from fwzoo import registry
from fwzoo.conversion.lact_official import convert

from .common import bad, blamed_on, empty_folder, quiet_transformers

LAYOUTS = {"lact-official": convert}


def run(layout: str, source: Path, target: Path) -> None:
    """Convert, and print a line for every tensor."""
    quiet_transformers()
    if layout not in LAYOUTS:
        raise bad("LAYOUT", registry.unknown("the layout", layout, LAYOUTS))
    empty_folder("TARGET", target, "give another folder.")
    with blamed_on("SOURCE"):
        report = LAYOUTS[layout](source, target)
    for mapped in report:
        typer.echo(str(mapped))
    typer.echo(f"saved {target}, {len(report)} tensors")
