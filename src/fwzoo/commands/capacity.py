"""`fwzoo capacity`: how many associations stores and the zoo's memories hold, as table, plot and JSON."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fwzoo.analysis.capacity import (
    CHUNK,
    OPTIMAL,
    ROWS,
    STORES,
    CapacityReport,
    Held,
    draws,
    measure_memory,
    measure_stores,
    memory_steps,
    pair_counts,
)
from fwzoo.evaluation.experiment import Experiment

from .common import bad, resumable, versions

MEMORY_PAIRS = 4096  # at most; their capacities are far below those of the stores


def run(size: int, pairs: int, queries: int, seed: int, out: Path | None, as_json: bool) -> None:
    """Measure every store up to `pairs` stored pairs and every memory, and show, print or write what was found.

    With a folder the stores, and every memory, are a piece that is kept when the command is interrupted.
    """
    torch.set_num_threads(1)  # blocks this small gain little from more, and threads that wait for each other cost much
    notices = Console(stderr=True)
    settings = {"size": size, "pairs": pairs, "queries": queries, "seed": seed}
    try:
        with (
            resumable(notices),
            nullcontext() if out is None else Experiment(out, "capacity", settings, notices) as experiment,
        ):
            report = _measure(**settings, notices=notices, experiment=experiment)
    except ValueError as error:
        raise bad("--out", str(error)) from error
    if out is not None:
        written = report.save(out)
        notices.print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    _show(Console(), report, max(next(iter(report.stores.values())).ratio_at))


def _measure(
    size: int, pairs: int, queries: int, seed: int, notices: Console, experiment: Experiment | None
) -> CapacityReport:
    counts, memory_counts = pair_counts(pairs), pair_counts(min(pairs, MEMORY_PAIRS), CHUNK)
    steps = memory_steps(size, seed)
    few = sum(m * draws(m, queries) for m in counts if m < queries)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with torch.no_grad(), Progress(*columns, console=notices) as progress:

        def advance(keys: int) -> None:
            if experiment is not None:
                experiment.check()
            progress.advance(task, keys)

        def kept(piece: str, measure: Callable[..., Any], *what: Any) -> Any:
            """What a piece measured, as for JSON."""

            def work() -> Any:
                found = measure(*what, queries=queries, seed=seed, advance=advance)
                return {k: held.as_dict() for k, held in found.items()} if isinstance(found, dict) else found.as_dict()

            return work() if experiment is None else experiment.piece(piece, work)

        task, total = progress.add_task("stores", total=few + counts[-1]), ROWS * memory_counts[-1]
        stores = kept("stores", measure_stores, size, counts)
        progress.update(task, completed=few + counts[-1])
        task, memories = progress.add_task("memories", total=len(steps) * total), {}
        for i, (name, step) in enumerate(steps.items(), 1):
            memories[name] = Held.of(kept(name, measure_memory, step, size, memory_counts))
            progress.update(task, completed=i * total)
    return CapacityReport(size, {name: Held.of(held) for name, held in stores.items()}, memories)


def _show(console: Console, report: CapacityReport, most: int) -> None:
    table = Table(
        "store", "recall", title=f"keys of {report.size}: pairs at which interference is as large as the signal"
    )
    table.add_column("capacity", justify="right")
    table.add_column(f"ratio at M = {most:,}", justify="right")
    for name, held in report.stores.items():
        store = STORES[name]
        recall = OPTIMAL if store is None else store.recall
        table.add_row(name, recall, _pairs(held), f"{held.ratio_at[most]:.3g}")
    console.print(table)
    last = max(next(iter(report.memories.values())).ratio_at)
    table = Table("memory", title=f"the zoo's memories, keys and values of {report.size}, after M writes")
    for heading in ("capacity", f"ratio at M = {last:,}", "state bytes", "bytes a pair"):
        table.add_column(heading, justify="right")
    for name, held in report.memories.items():
        held_pairs = last if held.capacity is None else held.capacity
        a_pair = f"{held.state_bytes / held_pairs:,.0f}" if held_pairs else "–"
        table.add_row(name, _pairs(held), f"{held.ratio_at[last]:.3g}", f"{held.state_bytes:,}", a_pair)
    console.print(table)
    console.print(versions())


def _pairs(held: Held) -> str:
    """The capacity for people: beyond, and below, what was measured it is a bound."""
    if held.capacity is None:
        return f"> {max(held.ratio_at):,}"
    return f"{round(held.capacity):,}" if held.capacity else f"< {min(held.ratio_at):,}"
