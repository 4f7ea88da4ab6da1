"""Several layouts trained under one budget, and what comes out: losses, bytes of state, speed.

Parameters are matched through the width of the feed-forward networks; tokens, their order, the learning-rate schedule and
the seeds are the same for all.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..analysis.cost import model_cost
from ..training.data import PackedRows, Row, Texts, collate
from ..training.trainer import Schedule, loss_unit, train

DEFAULT = ("fa", "la", "la:linear_decay=head", "gdn", "falcon1a", "falcon3a")
"""Softmax attention, linear attention, the same with learned decay, gated delta, Falcon-1A, Falcon-3A."""

RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """What one layout reached with one seed.

    Attributes:
        train_loss, validation_loss: in the unit of the comparison; the former over the last tenth of the steps.
        tokens_a_second: forward and backward on one batch, median of five.
        state_bytes: context length to the bytes of a sequence's state.
        curve: pairs of step and validation loss.
    """

    layout: str
    seed: int
    parameters: int
    train_loss: float
    validation_loss: float
    tokens_a_second: float
    state_bytes: dict[str, int]
    curve: list[list[float]]


def split_documents(documents: Sequence[str], share: float = 0.1) -> tuple[list[str], list[str]]:
    """The beginning of every document to train on, and its last `share`, which is held out (cut at a space)."""
    fit, held_out = [], []
    for text in documents:
        at = text.rfind(" ", 0, int((1 - share) * len(text)) + 1) + 1 or int((1 - share) * len(text))
        fit.append(text[:at])
        held_out.append(text[at:])
    return [text for text in fit if text], [text for text in held_out if text]


def run_one(
    name: str,
    config: Any,
    seed: int,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    eval_rows: Sequence[Row],
    sequence_length: int,
    schedule: Schedule,
    contexts: Sequence[int],
    console: Console,
) -> Result | None:
    """Train one layout, or go on with it, or read what it reached earlier; None when it was interrupted."""
    if (folder / RESULT).is_file():
        return Result(**json.loads((folder / RESULT).read_text(encoding="utf-8")))
    for path in folder.glob("checkpoint-*"):
        if not (path / TRAINER_STATE_NAME).is_file():  # written last: this checkpoint is not complete
            shutil.rmtree(path)
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if folder.is_dir() and (checkpoint is None or int(checkpoint.rpartition("-")[2]) >= schedule.steps):
        shutil.rmtree(folder)  # it ended before its first checkpoint, or between its last and the result
        checkpoint = None
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    rows = PackedRows(Texts(texts), tokenizer, sequence_length, seed=seed)
    outcome = train(model, tokenizer, rows, folder, schedule, eval_rows, resume=checkpoint is not None, console=console)
    if outcome.interrupted:
        return None
    curve = json.loads((folder / "loss.json").read_text(encoding="utf-8"))
    last = [loss for _, loss in curve["train"]][-max(1, len(curve["train"]) // 10) :]
    batch = [row for row, _ in zip(rows, range(schedule.batch_size), strict=False)]
    result = Result(
        layout=name,
        seed=seed,
        parameters=model.num_parameters(),
        train_loss=statistics.fmean(last),
        validation_loss=outcome.metrics[f"eval_{loss_unit(tokenizer)}"],
        tokens_a_second=tokens_a_second(model, batch),
        state_bytes={str(tokens): model_cost(model, tokens).total.state_bytes for tokens in contexts},
        curve=curve["eval"],
    )
    (folder / RESULT).write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    for old in folder.glob("checkpoint-*"):
        shutil.rmtree(old)
    return result


def tokens_a_second(model: Any, rows: Sequence[Row], repeats: int = 5) -> float:
    """Tokens that forward and backward take in a second, on one batch of rows; the median of `repeats` runs."""
    batch = {name: x.to(model.device) for name, x in collate(list(rows)).items()}
    seconds = []
    for _ in range(repeats + 1):  # the first warms up
        began = time.perf_counter()
        model.train()(**batch, use_cache=False).loss.backward()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    model.zero_grad()
    return batch["input_ids"].numel() / statistics.median(seconds[1:])


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For every layout, means over its seeds; `validation_deviation` is their standard deviation (0 for one seed)."""
    rows = []
    for name in dict.fromkeys(result.layout for result in results):
        own = [result for result in results if result.layout == name]
        losses = [result.validation_loss for result in own]
        rows.append(
            {
                "layout": name,
                "parameters": own[0].parameters,
                "train_loss": statistics.fmean(result.train_loss for result in own),
                "validation_loss": statistics.fmean(losses),
                "validation_deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "tokens_a_second": statistics.fmean(result.tokens_a_second for result in own),
                "state_bytes": own[0].state_bytes,
                "curve": [
                    [points[0][0], statistics.fmean(loss for _, loss in points)]
                    for points in zip(*(result.curve for result in own), strict=True)
                ],
            }
        )
    return rows


def plot(path: Path, rows: Sequence[dict[str, Any]], unit: str) -> bool:
    """Draw validation curves, final losses, and bytes of state against context; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    curves, bars, states = figure.subplots(1, 3)
    names = [row["layout"] for row in rows]
    for i, row in enumerate(rows):
        if row["curve"]:
            curves.plot(*zip(*row["curve"], strict=True), marker=".", color=f"C{i}", label=row["layout"])
        contexts = [int(tokens) for tokens in row["state_bytes"]]
        states.loglog(contexts, row["state_bytes"].values(), marker=".", color=f"C{i}", label=row["layout"])
    losses, spread = ([row[key] for row in rows] for key in ("validation_loss", "validation_deviation"))
    bars.barh(names, losses, xerr=spread, color=[f"C{i}" for i in range(len(rows))])
    bars.invert_yaxis()
    room = 0.5 * (max(losses) - min(losses)) + 2 * max(spread) + 0.01
    bars.set(xlim=(max(0.0, min(losses) - room), max(losses) + room / 2), xlabel=f"validation, {unit} (axis cut)")
    curves.set(xlabel="step", ylabel=f"validation, {unit}")
    states.set(xlabel="context, tokens", ylabel="bytes of state a sequence")
    for axes in (curves, states):
        axes.grid(alpha=0.3, which="both")
    states.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True


def schedule_for(steps: int, batch_size: int, lr: float, seed: int) -> Schedule:
    """The schedule that every layout gets: warm-up over a tenth of the steps, then a cosine to a tenth of the rate."""
    return Schedule(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup=steps // 10,
        seed=seed,
        eval_every=max(1, math.ceil(steps / 5)),
        save_every=max(1, math.ceil(steps / 4)),
        log_every=max(1, steps // 50),
    )
