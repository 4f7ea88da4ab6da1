"""What the experiments share: results on disk piece by piece, progress, interruption, tables and figures."""

from __future__ import annotations

import datetime
import json
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
    """
    model.get_input_embeddings().weight.normal_()
    for block in model.get_decoder().layers:
        block.mixer.o_proj.weight.zero_()
    return model


def parameters_of(config: Any) -> int:
    """Learned numbers of a model of this configuration (no memory is taken for it)."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def matched(make: Callable[[int], Any], target: int, tolerance: float = 0.02) -> Any:
    """The configuration whose number of parameters is closest to `target`, by the width of its feed-forward network.

    Args:
        make: takes `intermediate_size`.

    Raises:
        ValueError: none is within `tolerance`.
    """
    low, high = (parameters_of(make(size)) for size in (8, 16))
    width = 8 + 8 * (target - low) / max(1, high - low)
    for unit in (8, 1):  # multiples of 8 are fast on a GPU
        config = make(max(1, round(width / unit) * unit))
        count = parameters_of(config)
        if abs(count - target) <= tolerance * target:
            return config
    raise ValueError(f"layout {config.layout!r} has {count:,} parameters; {target:,} cannot be matched within 2 %")


def mean_and_range(values: Sequence[float]) -> str:
    """`mean (lowest - highest)` of several seeds, in percent."""
    mean = 100 * sum(values) / len(values)
    return f"{mean:.1f}" + (f" ({100 * min(values):.1f} - {100 * max(values):.1f})" if len(values) > 1 else "")
