"""`fwzoo upcycle`: a pretrained Llama, Mistral or Qwen as the start of a hybrid."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fwzoo.conversion.upcycle import Report, upcycle

from .common import bad, blamed_on, empty_folder, quiet_transformers


def run(source: str, target: Path, layout: str, window: int | None, settings: list[str], seed: int) -> None:
    """Upcycle, and print what became of the tensors."""
    quiet_transformers()
    empty_folder("TARGET", target, "give another folder.")
    options = dict(_setting(text) for text in settings)
    with blamed_on("SOURCE, --layout or --set"):
        report = upcycle(source, target, layout, window=window, seed=seed, **options)
    console = Console()
    console.print(_table(report))
    console.print(f"layout: {report.layout}", soft_wrap=True)
    console.print(f"wrote {target}; the report of every tensor is in upcycle.json", soft_wrap=True)


def _setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value in JSON or a word."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise bad("--set", f"{text!r} is not a setting; allowed is NAME=VALUE, such as lact_rank=16.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _table(report: Report) -> Table:
    """Every tensor, those of equal name and origin in different layers on one line."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, origin in report.tensors.items():
        shape = " × ".join(map(str, origin.shape))
        _add(rows, name, origin.how, shape, ", ".join(_split(source)[1] for source in origin.sources))
    for name, reason in report.dropped.items():
        _add(rows, name, "dropped", "", re.sub(r" in layer \d+", "", reason))
    counts = Counter(origin.how for origin in report.tensors.values()) + Counter(dropped=len(report.dropped))
    table = Table(title=", ".join(f"{what} {count}" for what, count in counts.items()))
    for heading in ("what", "tensor", "layers", "shape", "from, or why"):
        table.add_column(heading, overflow="fold")
    for (what, name, shape, note), layers in rows.items():
        table.add_row(what, name, _ranges(layers), shape, note)
    return table


def _add(rows: dict[tuple[str, ...], list[int]], name: str, what: str, shape: str, note: str) -> None:
    layer, short = _split(name)
    rows.setdefault((what, short, shape, note), []).extend(layer)


def _split(name: str) -> tuple[list[int], str]:
    """The layer of a tensor, in a list, and its name within the layer; no layer for a tensor outside."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return ([int(layer[1])], layer[2]) if layer else ([], name)


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
