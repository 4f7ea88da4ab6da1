"""`fwzoo selftest`: whether the kernels are right on this machine."""

import json
import os
import sys
from collections import defaultdict
from importlib import metadata

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fwzoo.analysis.selftest import Verdict, selftest

from .common import blamed_on, device, versions

MOST_PROCESSES = 12  # each holds about half a GB of the card


def run(op: str | None, on: str | None, as_json: bool) -> int:
    """Compare every kernel with its definition; the exit code is 1 when one is wrong."""
    with blamed_on("--device"):
        where = torch.device(on or device())
        torch.empty(1, device=where)
    errors = Console(stderr=True)
    verdicts: list[Verdict] = []
    with blamed_on("--op"), errors.status("comparing kernels with their definitions") as status:
        processes = min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2)) if where.type == "cuda" else 1
        for verdict in selftest(where, op, processes=processes):
            verdicts.append(verdict)
            status.update(_name(verdict))
    wrong = [verdict for verdict in verdicts if verdict.passed is False]
    if as_json:
        report = {"machine": machine(where), "passed": not wrong, "cases": [verdict.row() for verdict in verdicts]}
        print(json.dumps(report, indent=1))
        return bool(wrong)
    console = Console()
    console.print(_table(verdicts))
    absent = dict.fromkeys((v.op, v.level, v.note) for v in verdicts if v.passed is None)
    for name, level, why in absent:
        console.print(f"{name} {level} did not run: {why}", soft_wrap=True)
    for verdict in wrong:
        what = verdict.note or f"error {verdict.error:.1e}, allowed {verdict.limit:.1e}"
        console.print(f"wrong: {_name(verdict)}: {what}")
    for name, value in machine(where).items():
        console.print(f"{name}: {value}", soft_wrap=True)
    ran = sum(verdict.passed is not None for verdict in verdicts)
    console.print(f"{len(wrong)} of {ran} cases are wrong" if wrong else f"all {ran} cases are right", style="bold")
    return bool(wrong)


def _name(verdict: Verdict) -> str:
    parts = (verdict.op, verdict.sample, verdict.mode, verdict.level, verdict.sizes, verdict.dtype)
    return " ".join(part for part in parts if part)


def _table(verdicts: list[Verdict]) -> Table:
    """One row an operator, sample, mode and level."""
    title = "kernels against their definition in float64: largest errors"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operator", "sample", "mode", "level"):
        table.add_column(heading, overflow="fold")
    for heading in ("cases", "error", "of limit", "s"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    groups: dict[tuple[str, str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.op, verdict.sample, verdict.mode, verdict.level].append(verdict)
    for names, group in groups.items():
        ran = [verdict for verdict in group if verdict.passed is not None]
        if not ran:
            continue
        errors = [v.error for v in ran if v.error is not None]
        shares = [v.error / v.limit for v in ran if v.error is not None and v.limit]
        largest, share = max(errors, default=float("nan")), max(shares, default=float("nan"))
        seconds = f"{sum(verdict.seconds for verdict in ran):.1f}"
        right = "right" if all(verdict.passed for verdict in ran) else "WRONG"
        table.add_row(*names, str(len(ran)), f"{largest:.1e}", f"{share:.0%}", seconds, right)
    return table


def machine(where: torch.device) -> dict[str, str]:
    """What a result depends on: card, driver, versions."""
    about = {"device": str(where)}
    if where.type == "cuda":
        about["card"] = torch.cuda.get_device_name(where)
        about["CUDA of torch"] = str(torch.version.cuda)
        about["driver"] = _driver()
    try:
        about["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        about["triton"] = "not installed"
    about["python"] = sys.version.split()[0]
    return about | dict(part.split(" ") for part in versions().split(", "))


def _driver() -> str:
    """Version of the NVIDIA driver, from the kernel module."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return next(word for word in file.readline().split() if word[0].isdigit())
    except (OSError, StopIteration):
        return "unknown"
