"""`fwzoo capacity`: how many associations stores and the zoo's memories hold, as table, plot and JSON."""

import json
from pathlib import Path

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

from .common import empty_folder, versions

MEMORY_PAIRS = 4096  # at most; their capacities are far below those of the stores


def run(size: int, pairs: int, queries: int, seed: int, out: Path | None, as_json: bool) -> None:
    """Measure every store up to `pairs` stored pairs and every memory, and show, print or write what was found."""
    if out is not None:
        empty_folder(
            "--out", out, "allowed is a new or empty folder.", but=frozenset({"capacity.json", "capacity.png"})
        )
    torch.set_num_threads(1)  # blocks this small gain little from more, and threads that wait for each other cost much
    notices = Console(stderr=True)
    counts, memory_counts = pair_counts(pairs), pair_counts(min(pairs, MEMORY_PAIRS), CHUNK)
    steps = memory_steps(size, seed)
    few = sum(m * draws(m, queries) for m in counts if m < queries)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with torch.no_grad(), Progress(*columns, console=notices) as progress:
        task = progress.add_task("stores", total=few + counts[-1])
        stores = measure_stores(
            size, counts, queries=queries, seed=seed, advance=lambda keys: progress.advance(task, keys)
        )
        task = progress.add_task("memories", total=len(steps) * ROWS * memory_counts[-1])
        memories = {
            name: measure_memory(
                step, size, memory_counts, queries=queries, seed=seed, advance=lambda keys: progress.advance(task, keys)
            )
            for name, step in steps.items()
        }
    report = CapacityReport(size, stores, memories)
    if out is not None:
        written = report.save(out)
        notices.print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    _show(Console(), report, counts[-1])


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
