"""Needles in a haystack: pairs of symbols hidden in real text, asked for after one or more readings.

A needle is a key and its value, one token each, of symbols that the text does not hold (or rarely). A haystack is text
of L tokens with a needle at every depth of a grid; after it has been read 1, 2, ... times through `model.memorize`, every
key is asked alone, and the likeliest next token must be its value. The same model with its fast updates frozen reads the
same haystacks. A row to train on is shorter: needles in text, more text, then every key with its value, in random order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from ..modeling.cache import FastWeightCache
from .experiment import Experiment, figure, prepare
from .reading import answers
from .training import IGNORED, Batch, Schedule

FROZEN = {"value_lr": 0.0, "key_lr": 0.0, "fwmlp_lr": 0.0}
"""Options that keep every fast memory as it is in the checkpoint."""


def symbols(tokenizer: Any, count: int = 124) -> np.ndarray:
    """Tokens to make needles of, int `[count]`, the first half keys: the extra tokens of bytes, else single-token words.

    Raises:
        ValueError: the tokenizer does not have so many.
    """
    if isinstance(tokenizer, ByT5Tokenizer):
        found = list(range(259, 384))
    else:
        words = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)))
        found = [token for token, word in words if len(word) > 5 and word[0] == " " and word[1:].isalpha()]
    if len(found) < count:
        raise ValueError(f"the tokenizer has {len(found)} symbols for needles; it must have {count}")
    return np.array(found[:count])


def needles(marks: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` different keys with random values, `[count, 2]`."""
    half = len(marks) // 2
    return np.stack([rng.permutation(marks[:half])[:count], rng.choice(marks[half:], count)], 1)


def hidden(text: np.ndarray, pairs: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The text with a pair before each of the places (ascending)."""
    return np.insert(text, np.repeat(places, 2), pairs.reshape(-1))


@dataclass(frozen=True)
class Training:
    """How a model is trained to find needles.

    Attributes:
        length: tokens a row. needles: a row, each asked once at its end. gap: text before the questions.
        text_share: share of the text's tokens that are predicted too.
    """

    length: int = 4096
    needles: int = 48
    gap: int = 512
    text_share: float = 0.02
    steps: int = 1500
    batch_size: int = 16
    lr: float = 3e-3

    def batch(self, step: int, text: np.ndarray, marks: np.ndarray, seed: int) -> Batch:
        """The batch of a step: ids and labels int64 `[B, length]`. A seed of -1 is for tests."""
        rng = np.random.default_rng([seed + 1, 1, step])
        rows = [self.row(text, marks, rng) for _ in range(self.batch_size)]
        ids, labels = (torch.from_numpy(np.stack(x)) for x in zip(*rows, strict=True))
        return ids, labels

    def row(self, text: np.ndarray, marks: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of one row."""
        size = self.length - 4 * self.needles
        start = rng.integers(0, len(text) - size + 1)
        own, pairs = text[start : start + size], needles(marks, self.needles, rng)
        places = np.sort(rng.integers(0, size - self.gap + 1, self.needles))
        read = hidden(own, pairs, places)
        wanted = (rng.random(len(read)) < self.text_share) & ~np.isin(read, pairs)
        asked = rng.permutation(pairs)
        answer = np.stack([np.full(self.needles, IGNORED), asked[:, 1]], 1)
        labels = np.concatenate([np.where(wanted, read, IGNORED), answer.reshape(-1)])
        return np.concatenate([read, asked.reshape(-1)]), labels

    def schedule(self, seed: int) -> Schedule:
        warmup = max(1, min(100, self.steps // 10))
        return Schedule(self.steps, self.batch_size, self.lr, warmup=warmup, seed=seed)


@dataclass(frozen=True)
class Settings:
    """What a test depends on.

    Attributes:
        lengths: of haystacks, in tokens. depths: needles a haystack, evenly spread. passes: readings at most.
        samples: haystacks of every length, read `batch_size` at a time, `piece` tokens of each a call.
    """

    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    depths: int = 16
    passes: int = 4
    samples: int = 16
    batch_size: int = 16
    piece: int = 4096


def haystack(
    text: np.ndarray, marks: np.ndarray, length: int, depths: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[length]` with needles evenly from the beginning to the end, and the needles `[depths, 2]` in that order."""
    size = length - 2 * depths
    if len(text) < size:
        raise ValueError(f"the text has {len(text)} tokens; a haystack of {length} needs {size}")
    start = rng.integers(0, len(text) - size + 1)
    pairs = needles(marks, depths, rng)
    places = np.linspace(0, size - 1, depths).astype(int)
    return hidden(text[start : start + size], pairs, places), pairs


@torch.no_grad()
def read_haystacks(
    experiment: Experiment,
    title: str,
    model: Any,
    text: np.ndarray,
    marks: np.ndarray,
    length: int,
    settings: Settings,
    numbers: Sequence[int],
) -> dict[str, Any]:
    """The haystacks of these numbers, read at once: in how many of them every needle is found after every reading,
    `found [passes][depths]`, and the bytes of memory of one after the last."""
    drawn = [
        haystack(text, marks, length, settings.depths, np.random.default_rng([0, 2, length, number]))
        for number in numbers
    ]
    ids, pairs = (torch.from_numpy(np.stack(x)).to(model.device) for x in zip(*drawn, strict=True))
    cache: FastWeightCache | None = None
    found = []
    with experiment.progress(title, settings.passes * length) as advance:
        for done in range(0, settings.passes * length, length):

            def on_piece(_: int, start: int, hidden: torch.Tensor, done: int = done) -> None:
                experiment.check()
                advance(done + start + hidden.shape[1])

            cache = model.eval().memorize(ids, cache=cache, piece_size=settings.piece, on_piece=on_piece)
            found.append(answers(model, cache, pairs[..., :1], pairs[..., 1:]).sum(0).tolist())
    assert cache is not None
    return {"found": found, "bytes": cache.nbytes // len(numbers)}


def batches(settings: Settings) -> list[range]:
    """Numbers of the haystacks that are read at once."""
    count, size = settings.samples, settings.batch_size
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def joined(found: Sequence[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Of all batches of a length: share of needles found, `accuracy [passes][depths]`, and bytes of a haystack's memory."""
    right = np.sum([batch["found"] for batch in found], 0)
    return {"accuracy": (right / settings.samples).tolist(), "bytes": max(batch["bytes"] for batch in found)}


def can_freeze(model: Any) -> bool:
    """Whether a model has fast updates that can be switched off."""
    return any(name in ("fwpkm", "fwmlp") for name in model.config.feed_forwards)


def run(
    out: Path,
    name: str,
    model: Any,
    tokenizer: Any,
    text: np.ndarray,
    settings: Settings,
    console: Console,
    training: Training | None = None,
    train_text: np.ndarray | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the model where asked, test it, with and without its fast updates; write `results.json` and `niah.png`.

    Raises:
        ValueError: the text is too short. Interrupted: asked to stop; the same call goes on.
    """
    marks = symbols(tokenizer)
    about: dict[str, Any] = {"model": name, **asdict(settings), "text": [len(text), int(text.sum())]}
    if training is not None:
        about["training"] = {**asdict(training), "seed": seed}
    with Experiment(out, "niah", about, console) as experiment:
        model = model.to(experiment.device)
        if training is not None:
            assert train_text is not None
            model = trained(experiment, model, tokenizer, train_text, marks, training, seed)
        learned = dict(model.config.to_dict())
        conditions: dict[str, dict[str, float]] = {"writing": {}}
        if can_freeze(model):
            conditions["frozen"] = {key: value for key, value in FROZEN.items() if hasattr(model.config, key)}

        def measured(title: str, condition: str, length: int, numbers: range) -> dict[str, Any]:
            for key, value in conditions[condition].items():
                setattr(model.config, key, value)
            try:
                return read_haystacks(experiment, title, model, text, marks, length, settings, numbers)
            finally:
                for key in conditions[condition]:
                    setattr(model.config, key, learned[key])

        tests = list(itertools.product(settings.lengths, conditions))
        wanted = {
            f"{condition} {length} {numbers.start}-{numbers[-1]}": (condition, length, numbers)
            for length, condition in tests
            for numbers in batches(settings)
        }
        found = experiment.pieces({key: (measured, key, *test) for key, test in wanted.items()})
        pieces = {
            f"{condition} {length}": joined(
                [found[key] for key, test in wanted.items() if test[:2] == (condition, length)], settings
            )
            for length, condition in tests
        }
        summary = {
            condition: {
                str(length): [float(np.mean(row)) for row in pieces[f"{condition} {length}"]["accuracy"]]
                for length in settings.lengths
            }
            for condition in conditions
        }
        experiment.save(summary=summary)
        plot(out / "niah.png", pieces, list(conditions), settings)
    table = Table("updates", "tokens", *(f"pass {i + 1} %" for i in range(settings.passes)), "bytes")
    for condition, rows in summary.items():
        for tokens, row in rows.items():
            held = pieces[f"{condition} {tokens}"]["bytes"]
            table.add_row(condition, f"{int(tokens):,}", *(f"{100 * x:.1f}" for x in row), f"{held:,}")
    console.print(table)
    return summary


def trained(
    experiment: Experiment,
    model: Any,
    tokenizer: Any,
    text: np.ndarray,
    marks: np.ndarray,
    training: Training,
    seed: int,
) -> Any:
    """The model after training, saved with its tokenizer in `model` of the experiment's folder; loaded if it is there."""
    folder = experiment.out / "model"

    def work() -> dict[str, Any]:
        prepare(model)
        began = time.monotonic()
        schedule = training.schedule(seed)
        curve = experiment.train("training", model, lambda step: training.batch(step, text, marks, seed), schedule)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        experiment.checkpoint("training").unlink(missing_ok=True)
        return {"loss": curve, "seconds": round(time.monotonic() - began, 1)}

    experiment.piece("training", work)
    return AutoModelForCausalLM.from_pretrained(folder).to(experiment.device)


def plot(path: Path, pieces: dict[str, Any], conditions: Sequence[str], settings: Settings) -> None:
    """A map of length and depth for every pass, and below it accuracy by pass."""
    columns = settings.passes + 1
    with figure(path, columns=columns, width=3.2, height=3.6) as axes:
        if axes is None:
            return
        for number in range(settings.passes):
            rows = [pieces[f"writing {length}"]["accuracy"][number] for length in settings.lengths]
            image = axes[number].imshow(100 * np.array(rows).T, aspect="auto", vmin=0, vmax=100, cmap="RdYlGn")
            axes[number].set_xticks(
                range(len(rows)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in settings.lengths]
            )
            places = np.unique(np.linspace(0, settings.depths - 1, 5).astype(int))
            shown = [f"{100 * p / max(1, settings.depths - 1):.0f}" for p in places]
            axes[number].set_yticks(places, shown if number == 0 else [""] * len(places))
            axes[number].set(xlabel="tokens", title=f"{number + 1} reading" + "s" * (number > 0))
        axes[0].set_ylabel("depth, %")
        image.figure.colorbar(image, ax=axes[settings.passes - 1], label="needles found, %")
        for condition in conditions:
            for i, length in enumerate(settings.lengths):
                means = [100 * np.mean(row) for row in pieces[f"{condition} {length}"]["accuracy"]]
                style = "-" if condition == "writing" else ":"
                label = f"{length:,}" if condition == "writing" else None
                axes[-1].plot(range(1, settings.passes + 1), means, style, marker=".", color=f"C{i}", label=label)
        axes[-1].set(xlabel="readings (dotted: frozen)", ylabel="needles found, %", ylim=(0, 102))
        axes[-1].legend(fontsize=7)
