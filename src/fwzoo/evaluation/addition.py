"""Variable-length addition: trained on numbers of up to N digits, tested on longer ones.

A problem is `digits(a)+digits(b)=digits(a + b)`: both numbers have n digits, the sum n + 1, all with the least significant
digit first, so that every carry is known when it is needed. Digits are uniform, zeros at the end included; n is uniform in
1 ... N in training. Only the sum is learned, and where it ends.

Source: "Fast Weight Attention for Continual Learning" (2026).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from ..configuration import FwzooConfig
from .experiment import Experiment, figure, match_parameters, mean_and_range, prepare
from .training import IGNORED, Batch, Schedule

PLUS, EQUALS, PADDING, START, END = 10, 11, 12, 13, 14
VOCABULARY = 16
"""Digits are their own ids."""
STAGES = 8


def problems(widths: np.ndarray, rng: np.random.Generator, tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Problems of the given widths.

    Args:
        widths: number of digits of every problem, int `[B]`. tokens: length of a row; None means the longest problem's.
    Returns: ids `[B, T]`, padded on the right, and a mask bool `[B, T]` of the sum's digits and the end behind them.
    """
    n, longest = widths[:, None], int(widths.max())
    place = np.arange(longest)
    a, b = (rng.integers(0, 10, (len(widths), longest)) * (place < n) for _ in range(2))  # least significant first
    total = np.zeros((len(widths), longest + 1), dtype=np.int64)
    total[:, :longest] = a + b
    for i in range(longest):
        total[:, i + 1] += total[:, i] // 10
        total[:, i] %= 10
    position = np.arange(-1, 3 * longest + 4 if tokens is None else tokens - 1)[None]  # of the start token: -1

    def digits(number: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.take_along_axis(
            number, np.broadcast_to(index, (len(n), index.shape[1])).clip(0, number.shape[1] - 1), 1
        )

    parts: list[tuple[Any, Any]] = [
        (0, START),
        (n, digits(a, position)),
        (n + 1, PLUS),
        (2 * n + 1, digits(b, position - n - 1)),
        (2 * n + 2, EQUALS),
        (3 * n + 3, digits(total, position - 2 * n - 2)),
        (3 * n + 4, END),
    ]
    ids = np.select([position < end for end, _ in parts], [content for _, content in parts], PADDING)
    return ids, (position >= 2 * n + 2) & (position < 3 * n + 4)


def training_batch(step: int, batch_size: int, digits: int, seed: int) -> Batch:
    """The batch of a training step: widths uniform in 1 ... `digits`, rows of one length; ids and labels `[B, T]`."""
    rng = np.random.default_rng([seed, 1, step])
    ids, answer = problems(rng.integers(1, digits + 1, batch_size), rng, 3 * digits + 5)
    return torch.from_numpy(ids), torch.from_numpy(np.where(answer, ids, IGNORED))


ARCHITECTURES = ("full_attention", "gated_delta", "falcon1a", "falcon3a", "falcon1")
FALCON = {"step": "eta", "qk_norm": "rms"}
"""The options of the inner-product Falcon rules that extrapolated best in the paper.

The regression rules keep `step="beta"`: their update is stable for a gain below 2 only, which an emitted step does not keep.
"""

CONVOLUTION = 8
"""Width of the short convolutions: what all layers together see behind a separator bounds the digits that a model learns."""


@dataclass(frozen=True)
class Settings:
    """What a result depends on.

    Attributes:
        digits: N, the largest width in training. test_digits: the largest one in the test.
        batch_size: problems a step, at the full width. problems: test problems of every width.
        growth: share of the steps over which the largest width of the training grows to `digits`; 0 means that it is so at once.
        generate_every: generate the sums of every so many-th width.
    """

    digits: int = 32
    test_digits: int = 48
    hidden_size: int = 256
    layers: int = 12
    heads: int = 4
    steps: int = 2000
    batch_size: int = 128
    lr: float = 2.5e-3
    problems: int = 256
    growth: float = 0.75
    generate_every: int = 4

    def longest(self, step: int) -> int:
        """The largest width in a step of the training: it grows in `STAGES` equal stages, then it is `digits`."""
        grown = step / (self.growth * self.steps) if self.growth else 1.0
        return math.ceil(self.digits * min(STAGES, 1 + int(STAGES * grown)) / STAGES)

    def batch(self, step: int, seed: int) -> Batch:
        """The batch of a step; while numbers are shorter it has more rows, as many tokens as ever."""
        longest = self.longest(step)
        return training_batch(step, self.batch_size * (3 * self.digits + 5) // (3 * longest + 5), longest, seed)


@dataclass(frozen=True)
class Variant:
    """A model to train: a layout, fields of its configuration, and whether its short convolutions begin as delays."""

    layout: str
    fields: dict[str, Any]
    delays: bool = False

    def config(self, settings: Settings) -> Any:
        return FwzooConfig.from_layout(
            self.layout,
            vocab_size=VOCABULARY,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            initializer_range=(3 * settings.hidden_size) ** -0.5,
            tie_word_embeddings=False,
            pad_token_id=PADDING,
            **self.fields,
        )


def variants(layouts: Sequence[str]) -> dict[str, Variant]:
    """A model for every layout, with wide short convolutions that begin as delays where its mixers have any."""
    return {name: Variant(name, {**options_of(name), **_wide(name)}, delays=True) for name in layouts}


def _wide(layout: str) -> dict[str, Any]:
    allowed = "short_conv_size" in FwzooConfig.from_layout(layout).to_dict()
    return {"short_conv_size": CONVOLUTION} if allowed else {}


def options_of(layout: str) -> dict[str, Any]:
    """The options of the Falcon rules in a layout, by the best published results."""
    regression = any(rule in layout and f"{rule}a" not in layout for rule in ("falcon1", "falcon2", "falcon3"))
    return FALCON if "falcon" in layout and not regression else {}


def ablation(layout: str = "falcon3a") -> dict[str, Variant]:
    """The four models {read after, before the write} x {shifted, same-step pairs}."""
    made = {}
    for timing, pairing in itertools.product(("read_after_write", "read_before_write"), ("shifted", "same_step")):
        made[f"{timing} {pairing}"] = Variant(layout, {**options_of(layout), "timing": timing, "pairing": pairing})
    return made


def run(
    out: Path,
    name: str,
    models: dict[str, Variant],
    settings: Settings,
    seeds: Sequence[int],
    console: Console,
) -> dict[str, Any]:
    """Train and test every model with every seed; write `results.json` and `addition.png`; show a table.

    All models have as many parameters as the first within 2 %, and see the same problems in the same order.

    Raises:
        ValueError: a layout is not one, or cannot be matched. Interrupted: asked to stop; the same call goes on.
    """
    configs = {key: model.config(settings) for key, model in models.items()}
    match_parameters(list(configs.values()), list(configs), unit=8)
    about = {"models": {key: asdict(model) for key, model in models.items()}, **asdict(settings)}
    with Experiment(out, name, about, console) as experiment:
        pieces = experiment.pieces(
            {
                f"{key} seed {seed}": (
                    _train_and_test,
                    experiment,
                    f"{key} seed {seed}",
                    config,
                    models[key].delays,
                    settings,
                    seed,
                )
                for seed, (key, config) in itertools.product(seeds, configs.items())
            }
        )
        runs = {key: [pieces[f"{key} seed {seed}"] for seed in seeds] for key in models}
        summary = {key: summarize(found, settings) for key, found in runs.items()}
        experiment.save(summary=summary)
        plot(out / "addition.png", runs, settings)
    table = Table("model", "parameters", "in distribution %", f"{settings.digits + 1}-{settings.test_digits} digits %")
    for column in (f"at {settings.digits + 1} %", f"at {settings.test_digits} %", "generated, longer %", "seconds"):
        table.add_column(column)
    for key, row in summary.items():
        shown = [row[column] for column in ("in_distribution", "longer", "first", "last", "generated_longer")]
        seconds = f"{sum(run['seconds'] for run in runs[key]) / len(seeds):.0f}"
        table.add_row(key, f"{runs[key][0]['parameters']:,}", *(mean_and_range(values) for values in shown), seconds)
    console.print(table)
    return summary


def _train_and_test(
    experiment: Experiment, key: str, config: Any, delays: bool, settings: Settings, seed: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = prepare(AutoModelForCausalLM.from_config(config))
    if delays:
        delay(model)
    model = model.to(experiment.device)
    schedule = Schedule(
        steps=settings.steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        warmup=max(1, min(100, settings.steps // 10)),
        hold=max(0.6, settings.growth),  # it falls once the numbers have their full width
        seed=seed,
        bf16=True,
        muon=True,
    )
    began = time.monotonic()
    curve = experiment.train(key, model, lambda step: settings.batch(step, seed), schedule)
    seconds = time.monotonic() - began
    widths = range(1, settings.test_digits + 1)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "seconds": round(seconds, 1), "loss": curve}
    result["teacher_forced"], result["exact"] = zip(
        *(teacher_forced(model, n, settings.problems) for n in widths), strict=True
    )
    chosen = [n for n in widths if n == 1 or n % settings.generate_every == 0 or n == settings.digits + 1]
    result["generated"] = {n: generated(model, n, settings.problems) for n in chosen}
    experiment.checkpoint(key).unlink(missing_ok=True)
    return result


@torch.no_grad()
def delay(model: Any) -> Any:
    """Short convolutions begin as delays, with a fifth of what was drawn; returns the model.

    Queries and values pass as they come, the keys of head h are those of h tokens ago (modulo the width). So from its first step
    on a layer can find what followed the token that it looks for, which a rule that writes a key with its own value else has to learn.
    """
    for block in model.get_decoder().layers:
        mixer = block.mixer
        if getattr(mixer, "conv", None) is None:
            continue
        weight, heads, size = mixer.conv.weight.mul_(0.2), mixer.heads, mixer.conv.size
        q, k, v = weight.split([heads * mixer.key_size, heads * mixer.key_size, heads * mixer.value_size])
        for part in (q, v):
            part[:, -1] += 1
        for head, own in enumerate(k.chunk(heads)):
            own[:, -1 - head % size] += 1
    return model


def test_problems(model: Any, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-out problems of one width on the model's device: ids `[count, 3 n + 5]`, and where the sum begins."""
    ids, _ = problems(np.full(count, width), np.random.default_rng([0, 2, width]))
    return torch.from_numpy(ids).to(model.device), 2 * width + 3


@torch.no_grad()
def teacher_forced(model: Any, width: int, count: int) -> tuple[float, float]:
    """Share of the sum's digits that are right when all digits before are given, and of sums that are right in all."""
    ids, begin = test_problems(model, width, count)
    guesses = model.eval()(input_ids=ids, use_cache=False).logits[:, begin - 1 : -2].argmax(-1)
    right = guesses == ids[:, begin:-1]
    return right.float().mean().item(), right.all(1).float().mean().item()


@torch.no_grad()
def generated(model: Any, width: int, count: int) -> float:
    """Share of digits that are right in sums that the model writes itself, greedily."""
    ids, begin = test_problems(model, width, count)
    prompt = ids[:, :begin]
    written = model.eval().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=width + 1,
        min_new_tokens=width + 1,
        do_sample=False,
        pad_token_id=PADDING,
        eos_token_id=None,
    )
    return (written == ids[:, :-1])[:, begin:].float().mean().item()


def summarize(runs: Sequence[dict[str, Any]], settings: Settings) -> dict[str, list[float]]:
    """Of every seed: mean accuracy up to N digits and beyond, at N + 1 and at the longest, and generated beyond N."""
    n = settings.digits
    rows: dict[str, list[float]] = {}
    for run in runs:
        forced = run["teacher_forced"]
        own = [accuracy for width, accuracy in run["generated"].items() if int(width) > n]
        found = {
            "in_distribution": sum(forced[:n]) / n,
            "longer": sum(forced[n:]) / len(forced[n:]),
            "first": forced[n],
            "last": forced[-1],
            "generated_longer": sum(own) / len(own),
        }
        for key, value in found.items():
            rows.setdefault(key, []).append(value)
    return rows


def plot(path: Path, runs: dict[str, list[dict[str, Any]]], settings: Settings) -> None:
    """Accuracy against digits, a line a model: the mean of the seeds, their range shaded, generated sums as dots."""
    with figure(path) as axes:
        if axes is None:
            return
        widths = range(1, settings.test_digits + 1)
        for i, (key, found) in enumerate(runs.items()):
            forced = 100 * np.array([run["teacher_forced"] for run in found])
            axes.plot(widths, forced.mean(0), label=key, color=f"C{i}")
            axes.fill_between(widths, forced.min(0), forced.max(0), color=f"C{i}", alpha=0.2)
            own = {int(n): 100 * np.mean([run["generated"][n] for run in found]) for n in found[0]["generated"]}
            axes.plot(own.keys(), own.values(), "o", color=f"C{i}", markersize=3)
        axes.axvline(settings.digits + 0.5, color="grey", linestyle=":", label="longest in training")
        axes.set(xlabel="digits", ylabel="digits of the sum that are right, %", ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend()
