"""What the experiments share: results on disk piece by piece, progress, interruption, tables and figures."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from .. import __version__
from ..analysis.cost import empty_model
from ..training.interrupt import DeferredInterrupt
from .training import Batch, Interrupted, Schedule, train


class Experiment:
    """Pieces of work in a folder. A piece that is done is not done again, so the same command goes on where it stopped.

    Several processes may work in one folder: each takes a piece that no other has, and none ends before all are done.

    Args:
        out: the folder; `results.json` in it holds the settings, the versions and the pieces.
        name: of the experiment. settings: what the results depend on.

    Raises:
        ValueError: the folder holds results of another experiment or of other settings.
    """

    def __init__(self, out: Path, name: str, settings: dict[str, Any], console: Console | None = None) -> None:
        self.out, self.path, self.console = out, out / "results.json", console or Console()
        settings = json.loads(json.dumps(settings))
        self.data: dict[str, Any] = {"experiment": name, "settings": settings, "pieces": {}}
        if out.exists() and not out.is_dir():
            raise ValueError(f"{str(out)!r} is a file; allowed is a folder")
        if self.path.exists():
            self.data = self._found(name, settings)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.data["versions"] = {
            "fwzoo": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        self.data["versions"] |= {"device": device, "date": datetime.date.today().isoformat()}
        (out / "locks").mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.interrupt = DeferredInterrupt(lambda: self.console.print("interrupted: saving"))

    def _found(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        try:
            data: dict[str, Any] = json.loads(self.path.read_text())
            known, had = data["experiment"], data["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(self.path)!r} holds no results of an experiment; give another folder") from error
        if known != name:
            raise ValueError(f"{str(self.out)!r} holds results of {known!r}; give another folder for {name!r}")
        for key in sorted({*had, *settings}):
            if had.get(key) != settings.get(key):
                raise ValueError(
                    f"{str(self.out)!r} holds results with {key} = {had.get(key)!r}, not {settings.get(key)!r}; "
                    "give the same value or another folder"
                )
        return data

    def piece(self, key: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a piece: the stored one, or that of `work(*arguments)`, which is stored."""
        return self.pieces({key: (work, *arguments)})[key]

    def pieces(self, wanted: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """The results of several pieces, each given as a function and its arguments; those of other processes come last."""
        open_pieces, found = list(wanted), {}
        while open_pieces:
            for key in open_pieces:
                self.check()
                try:
                    with self._lock(key).acquire(timeout=0.5 if key == open_pieces[-1] else 0):
                        found[key] = self._done(key, *wanted[key])
                except Timeout:
                    continue
            open_pieces = [key for key in open_pieces if key not in found]
        return {key: found[key] for key in wanted}

    def _done(self, key: str, work: Callable[..., Any], *arguments: Any) -> Any:
        self._merge()
        if key not in self.data["pieces"]:
            self.data["pieces"][key] = json.loads(json.dumps(work(*arguments)))
            self.save()
        return self.data["pieces"][key]

    def _lock(self, key: str) -> FileLock:
        return FileLock(self.out / "locks" / f"{_file_name(key)}.lock")

    def _merge(self) -> None:
        """Take in what other processes have stored."""
        if self.path.exists():
            self.data["pieces"] |= json.loads(self.path.read_text())["pieces"]

    def save(self, **more: Any) -> None:
        """Write `results.json`, with further entries."""
        self.data.update(more)
        with self._lock("results.json"):
            self._merge()
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(partial, self.path)

    def check(self) -> None:
        """Raise `Interrupted` when an interrupt was asked for."""
        if self.interrupt.requested:
            raise Interrupted

    def train(self, key: str, model: nn.Module, draw: Callable[[int], Batch], schedule: Schedule) -> list[float]:
        """`training.train` with a progress bar and the checkpoint `key.pt` in the folder."""
        with self.progress(key, schedule.steps) as advance:
            return train(
                model,
                draw,
                schedule,
                self.checkpoint(key),
                progress=lambda step, loss: advance(step, f"loss {loss:.4f}"),
                stop=lambda: self.interrupt.requested,
            )

    def checkpoint(self, key: str) -> Path:
        return self.out / f"{_file_name(key)}.pt"

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """A progress bar; call what it gives with the number done and a word on it."""
        bar = Progress(
            TextColumn(title, markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        task = bar.add_task("", total=total, note="")

        def advance(done: int, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        with bar:
            yield advance

    def __enter__(self) -> Experiment:
        self.interrupt.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.interrupt.__exit__(*error)


def _file_name(key: str) -> str:
    return key.replace(" ", "-").replace("/", "-")


@contextmanager
def figure(path: Path, columns: int = 1, width: float = 7.0, height: float = 4.2) -> Iterator[Any]:
    """Axes (a list where there are several columns) of a figure that is saved; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        yield None
        return
    made = Figure(figsize=(width * columns, height), layout="constrained")
    axes = made.subplots(1, columns)
    yield axes
    made.savefig(path, dpi=120)


@torch.no_grad()
def prepare(model: Any) -> Any:
    """Initial values for recall: embeddings of size 1 an entry, and mixers that begin with output 0; returns the model.

    A memory in the feed-forward slot finds a key again by what it looks like. As long as an untrained mixer's output
    outweighs the embedding of the key, it does not, and nothing is learned. The head must have its own weights.

    Output gates begin open and almost alike for all tokens, by a mean of 1 that embeddings then share: a gate drawn at
    random changes the sign of what was read from token to token, which takes long to unlearn.
    """
    embeddings, mixers = (
        model.get_input_embeddings().weight.normal_(),
        [block.mixer for block in model.get_decoder().layers],
    )
    gates = [mixer.gate_proj.weight for mixer in mixers if getattr(mixer, "gate_proj", None) is not None]
    if gates:
        embeddings.add_(1)
    for gate in gates:
        open_by = 2 * math.sqrt(2) / gate.shape[1]  # a norm leaves a mean of 1 / sqrt(2), so gates are about 2
        gate.mul_(0.2).add_(open_by)
    for mixer in mixers:
        mixer.o_proj.weight.zero_()
    return model


class Mismatch(ValueError):
    """A layout that cannot be given as many parameters as the first one: a sentence with both numbers."""


TOLERANCE = 0.02  # share by which the numbers of parameters may differ


def match_parameters(configs: Sequence[Any], names: Sequence[str], unit: int = 1) -> list[int]:
    """Set `intermediate_size` of all configs but the first so that they have as many parameters as the first has.

    Args:
        unit: the width is a multiple of it where that is close enough (multiples of 8 are fast on a GPU).
    Returns: the number of parameters of each.

    Raises:
        Mismatch: one cannot come within 2 %, or an unknown number of parameters depends on the width.
    """
    counts: list[int] = []
    for config, name in zip(configs, names, strict=True):
        count = _parameters(config)
        if counts:
            width = config.intermediate_size
            config.intermediate_size = width + 1
            each = _parameters(config) - count
            best = width + (counts[0] - count) / each if each else width
            for multiple in (unit, 1):
                config.intermediate_size = max(1, round(best / multiple) * multiple)
                count = _parameters(config)
                if abs(count / counts[0] - 1) <= TOLERANCE:
                    break
            else:
                raise Mismatch(
                    f"layout {name!r} has {count:,} parameters with the feed-forward width that fits best; it must be "
                    f"within {TOLERANCE:.0%} of {names[0]!r}, which has {counts[0]:,}."
                )
        counts.append(count)
    return counts


def _parameters(config: Any) -> int:
    return int(empty_model(config).num_parameters())


def mean_and_range(values: Sequence[float]) -> str:
    """`mean (lowest - highest)` of several seeds, in percent."""
    mean = 100 * sum(values) / len(values)
    return f"{mean:.1f}" + (f" ({100 * min(values):.1f} - {100 * max(values):.1f})" if len(values) > 1 else "")
