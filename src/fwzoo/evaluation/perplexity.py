"""Perplexity against position in a long text: with the memory carried, and with it reset every window.

Three readings of the same tokens, each window by window, so that memory is constant where the model's state is:

- carried: one memory from the first token to the last (full context).
- reset: the memory begins anew with every window of W tokens.
- sliding: every token is predicted from the W / 2 to W tokens before it, and no memory of what came earlier.

A gap is the cost of a reading minus that of the carried one, in nats a token, with a 95 % confidence interval from
resampling windows. The first window, and the first token of every window, count in no reading.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .experiment import Experiment, figure
from .reading import Reader

RESAMPLES = 10_000
MODES = ("carried", "reset", "sliding")


@dataclass(frozen=True)
class Settings:
    """What a result depends on.

    Attributes:
        window: W, tokens. tokens: how many of the text are read, at most. batch_size: windows read at once.
    """

    window: int = 2048
    tokens: int = 1 << 20
    batch_size: int = 8


def run(out: Path, name: str, model: Any, text: Tensor, settings: Settings, console: Console) -> dict[str, Any]:
    """Read `text` (int64 `[T]`) in every mode; write `results.json`, `costs.npz` and `perplexity.png`; show a table.

    Raises:
        ValueError: the text is shorter than two windows. Interrupted: asked to stop; the same call goes on.
    """
    window = settings.window
    text = text[: min(len(text), settings.tokens) // window * window]
    if len(text) < 2 * window:
        raise ValueError(
            f"the text has {len(text)} whole tokens of windows of {window}; it must have at least two windows"
        )
    about = {"model": name, "length": len(text), "sum": int(text.sum()), **asdict(settings)}
    with Experiment(out, "ppl", about, console) as experiment:
        for mode in MODES:
            experiment.piece(mode, _read, experiment, mode, model, text, settings)
        found = {mode: np.array(experiment.data["pieces"][mode]["windows"]) for mode in MODES}
        gaps = {mode: gap(found[mode][1:] - found["carried"][1:]) for mode in ("reset", "sliding")}
        summary: dict[str, Any] = {
            "gap_nats": gaps,
            "perplexity": {mode: math.exp(np.mean(found[mode][1:])) for mode in MODES},
        }
        experiment.save(summary=summary)
        plot(out / "perplexity.png", experiment.data["pieces"], window)
    table = Table("memory", "nats a token", "perplexity", "gap to carried, nats (95 %)")
    for mode in MODES:
        shown = "" if mode == "carried" else "{:+.4f} ({:+.4f} to {:+.4f})".format(*gaps[mode])
        table.add_row(mode, f"{np.mean(found[mode][1:]):.4f}", f"{summary['perplexity'][mode]:.3f}", shown)
    console.print(table)
    console.print(f"{len(found['carried'])} windows of {window} tokens, the first left out")
    return summary


def gap(differences: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean of differences a window, and its 95 % interval from resampled windows."""
    rng = np.random.default_rng(seed)
    n = len(differences)
    means = [differences[rng.integers(0, n, n)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(differences.mean()), float(low), float(high)


def _read(experiment: Experiment, mode: str, model: Any, text: Tensor, settings: Settings) -> dict[str, Any]:
    """Mean cost of every window, and of every place in a window, in nats; goes on from what an interrupt left."""
    window, file = settings.window, experiment.checkpoint(mode)
    reader, model = Reader(model), model.eval()
    windows: list[float] = []
    places = torch.zeros(window, dtype=torch.float64)
    if file.exists():
        state = torch.load(file, map_location=model.device, weights_only=True)
        windows, places = state["windows"], state["places"].cpu()
        if mode == "carried":
            reader.cache.load_state_dict(state["cache"])
            reader.before = state["before"]
    total = len(text) // window
    with experiment.progress(mode, total) as advance:
        while len(windows) < total:
            done = len(windows)
            nats = _windows(mode, reader, text, done, 1 if mode == "carried" else settings.batch_size, window)
            nats[:, 0] = torch.nan
            windows = windows + nats.nanmean(1).tolist()
            if done or len(nats) > 1:
                places += nats[0 if done else 1 :].nan_to_num().sum(0).double().cpu()
            advance(len(windows))
            if experiment.interrupt.requested:
                state = {"windows": windows, "places": places}
                if mode == "carried":
                    state |= {"cache": reader.cache.state_dict(), "before": reader.before}
                torch.save(state, file)
            experiment.check()
    file.unlink(missing_ok=True)
    return {"windows": windows, "places": (places / (total - 1)).tolist()}


def _windows(mode: str, reader: Reader, text: Tensor, start: int, count: int, window: int) -> Tensor:
    """Nats of every token of the windows from `start` on, `[at most count, W]`."""
    rows = text.view(-1, window)[start : start + count]
    if mode == "carried":
        return reader.read(rows)
    nats = Reader(reader.model).read(rows)
    if mode == "sliding":
        half = window // 2
        first = max(start, 1)
        earlier = [text[k * window - half : (k + 1) * window - half] for k in range(first, start + len(rows))]
        if earlier:
            nats[first - start :, :half] = Reader(reader.model).read(torch.stack(earlier))[:, window - half :][:, :half]
    return nats


def plot(path: Path, pieces: dict[str, Any], window: int) -> None:
    """Cost against the place in the window, and against the place in the text."""
    with figure(path, columns=2, width=6) as axes:
        if axes is None:
            return
        edges = np.unique(np.geomspace(1, window, 40).astype(int))
        for mode, piece in pieces.items():
            means = [np.mean(piece["places"][a:b]) for a, b in itertools.pairwise(edges)]
            axes[0].plot(edges[:-1], means, label=mode)
            smooth = max(1, len(piece["windows"]) // 50)
            kept = np.array(piece["windows"])[: len(piece["windows"]) // smooth * smooth].reshape(-1, smooth).mean(1)
            axes[1].plot((np.arange(len(kept)) + 0.5) * smooth * window, kept, label=mode)
        axes[0].set(xlabel="place in the window, tokens", ylabel="nats a token", xscale="log")
        axes[1].set(xlabel="place in the text, tokens", ylabel="nats a token")
        for one in axes:
            one.grid(alpha=0.3)
            one.legend()
