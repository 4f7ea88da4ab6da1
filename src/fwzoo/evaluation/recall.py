"""Multi-query associative recall (MQAR): pairs read once, then asked for; how many does a state of so many bytes hold?

A row is filler, N pairs of a key and a value, filler, then keys in random order, each with its value, which is to be
predicted. Keys and values have symbols of their own. Every mixer gets the same bytes of state, and is trained with several
peak learning rates, of which the one that recalls most on rows of their own counts: mixers differ in what they need.

Source: "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from ..configuration import FwzooConfig
from ..modeling.cache import CACHE_KEY, FastWeightCache
from .addition import options_of
from .experiment import Experiment, figure, match_parameters, mean_and_range, prepare
from .training import IGNORED, Batch, Schedule

FILLER = 0
GAP = 16
"""Fillers between the pairs and the questions: a memory that is written once a chunk has then written all pairs."""


def draw(
    pairs: np.ndarray, most: int, asked: int, symbols: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels int64 `[B, T]`, T = 2 most + GAP + 2 asked.

    Args:
        pairs: N of every row, int `[B]`, at most `most`. asked: questions a row (pairs are asked again when N is less).
        symbols: number of keys, and of values. Keys are ids 1 ... symbols, values the next ones.
    """
    batch = len(pairs)
    keys = rng.random((batch, symbols)).argsort(1)[:, :most] + 1
    values = rng.integers(symbols + 1, 2 * symbols + 1, (batch, most))
    both = np.stack([keys, values], 2)
    read = np.where((np.arange(most) >= most - pairs[:, None])[..., None], both, FILLER)  # the last N places
    turn = rng.random((batch, most)) + (np.arange(most) < most - pairs[:, None])
    order = np.take_along_axis(turn.argsort(1), np.arange(asked)[None] % pairs[:, None], 1)
    questions = np.take_along_axis(both, order[..., None], 1)
    labels = np.stack([np.full_like(order, IGNORED), questions[..., 1]], 2)
    gap = np.full((batch, GAP), FILLER)
    ids = np.concatenate([read.reshape(batch, -1), gap, questions.reshape(batch, -1)], 1)
    before = np.full((batch, 2 * most + GAP), IGNORED)
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate([before, labels.reshape(batch, -1)], 1))


@dataclass(frozen=True)
class Settings:
    """What a result depends on.

    Attributes:
        state_bytes: of all layers together, at the longest row. pairs: largest N in training. test_pairs: those tested.
        asked: questions a row. symbols: number of keys, and of values.
        lrs: peak learning rates that every layout is trained with.
    """

    state_bytes: int = 40960
    pairs: int = 64
    test_pairs: tuple[int, ...] = (4, 8, 16, 32, 48, 64, 96, 128)
    asked: int = 32
    symbols: int = 256
    hidden_size: int = 128
    layers: int = 2
    heads: int = 2
    steps: int = 1500
    batch_size: int = 64
    lrs: tuple[float, ...] = (2e-3, 8e-3)
    rows: int = 128

    @property
    def tokens(self) -> int:
        return 2 * max(self.test_pairs) + GAP + 2 * self.asked


MODELS = (
    "linear_attention",
    "gated_delta",
    "falcon1",
    "falcon2",
    "falcon3",
    "falcon1a",
    "falcon2a",
    "falcon3a",
    "lact",
    "sliding_attention",
    "sliding_attention+fwpkm@1",
    "sliding_attention+fwmlp@1",
    "full_attention",
)
"""All mixers and fast memories; full attention has no fixed state and stands for what can be reached."""


def config_of(layout: str, settings: Settings, size: int, extra: int) -> Any:
    """The configuration of a layout whose state grows with `size`, and a little with `extra`."""
    fields: dict[str, Any] = {
        "vocab_size": 2 * settings.symbols + 1,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "initializer_range": (3 * settings.hidden_size) ** -0.5,
        "tie_word_embeddings": False,
    }
    options: dict[str, Any] = {"head_dim": 2 * size, "value_head_dim": 2 * size + extra}
    if "fwpkm" in layout or "fwmlp" in layout:
        options = {
            "attention_window": 4,
            "memory_chunk_size": GAP // 2,
            "memory_key_dim": 2 * size,
            "memory_value_dim": 2 * size + extra,
            "training_scope": "sequence",
        }
        options |= {"fwpkm_subkeys": 16, "fwpkm_top_k": 4} if "fwpkm" in layout else {}
    elif layout == "sliding_attention":
        options = {"attention_window": size}
    elif layout == "full_attention":
        options = {}
    elif "lact" in layout:
        options = {"lact_expansion": size * settings.heads / settings.hidden_size, "num_lact_heads": settings.heads}
        options |= {"lact_window": 4, "lact_chunk_size": GAP // 2, "lact_rank": 0}
    elif "linear_attention" in layout:
        options |= {"linear_decay": "token"}
    if "falcon" in layout:
        options |= options_of(layout)
    return FwzooConfig.from_layout(layout, **fields, **options)


@torch.no_grad()
def bytes_held(config: Any, tokens: int) -> int:
    """Bytes of state of one sequence after `tokens` tokens (of a memory that writes rows: with the weights of seed 0)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    cache = FastWeightCache(config)
    model.get_decoder()(torch.arange(tokens)[None] % config.vocab_size, use_cache=True, **{CACHE_KEY: cache})
    return cache.nbytes


def at_state_bytes(layout: str, settings: Settings) -> tuple[int, int, int]:
    """`size` and `extra` of the largest configuration of a layout that keeps within the bytes of state, and its bytes.

    Raises:
        ValueError: even the smallest one needs more.
    """
    tokens = settings.tokens if layout == "full_attention" or "fwpkm" in layout else 1

    def held(size: int, extra: int = 0) -> int:
        return bytes_held(config_of(layout, settings, size, extra), tokens)

    if layout == "full_attention":
        return 0, 0, held(0)
    limit = settings.state_bytes
    if (least := held(1)) > limit:
        raise ValueError(f"state_bytes is {limit}; {layout!r} needs at least {least}")
    size, extra = _largest(lambda size: held(size) <= limit, 1), 0
    if held(size, 1) > held(size):
        extra = _largest(lambda extra: held(size, extra) <= limit, 0)
    return size, extra, held(size, extra)


def _largest(fits: Callable[[int], bool], known: int) -> int:
    """The largest number that fits, from one that does."""
    step = 1
    while fits(known + step):
        known, step = known + step, 2 * step
    while step > 1:
        step //= 2
        if fits(known + step):
            known += step
    return known


def run(
    out: Path, layouts: Sequence[str], settings: Settings, seeds: Sequence[int], console: Console
) -> dict[str, Any]:
    """Train and test every layout with every seed; write `results.json` and `recall.png`; show a table.

    Raises:
        ValueError: a layout is not one, or does not fit into the bytes. Interrupted: asked to stop; the same call goes on.
    """
    about = {"layouts": list(layouts), **asdict(settings)}
    with Experiment(out, "recall", about, console) as experiment:
        pieces = experiment.pieces({f"{layout} size": (_size, layout, settings) for layout in layouts})
        runs = {
            f"{layout} seed {seed} lr {lr:g}": (layout, settings, seed, lr)
            for seed, lr, layout in itertools.product(seeds, sorted(settings.lrs, reverse=True), layouts)
        }
        pieces |= experiment.pieces({key: (_train_and_test, experiment, key, *run) for key, run in runs.items()})
        best = {
            layout: [
                max(
                    (pieces[f"{layout} seed {seed} lr {lr:g}"] for lr in settings.lrs),
                    key=lambda run: run["validation"],
                )
                for seed in seeds
            ]
            for layout in layouts
        }
        summary = {
            layout: {
                "state_bytes": pieces[f"{layout} size"]["state_bytes"],
                "lr": [run["lr"] for run in best[layout]],
                "accuracy": {str(n): [run["accuracy"][str(n)] for run in best[layout]] for n in settings.test_pairs},
            }
            for layout in layouts
        }
        experiment.save(summary=summary)
        plot(out / "recall.png", summary, settings)
    table = Table("layout", "state bytes", "learning rate", *(f"{n} pairs %" for n in settings.test_pairs))
    for layout, row in summary.items():
        cells = [mean_and_range(row["accuracy"][str(n)]) for n in settings.test_pairs]
        rates = ", ".join(f"{lr:g}" for lr in sorted(set(row["lr"])))
        table.add_row(layout, f"{row['state_bytes']:,}", rates, *cells)
    console.print(table)
    return summary


def _size(layout: str, settings: Settings) -> dict[str, Any]:
    """The sizes of a layout: state as asked for, parameters as linear attention of the usual head size has."""
    usual = FwzooConfig.from_layout(
        "linear_attention",
        vocab_size=2 * settings.symbols + 1,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        tie_word_embeddings=False,
    )
    size, extra, held = at_state_bytes(layout, settings)
    config = config_of(layout, settings, size, extra)
    match_parameters([usual, config], ["linear_attention", layout], unit=8)
    return {"state_bytes": held, "size": size, "extra": extra, "intermediate_size": config.intermediate_size}


def _train_and_test(
    experiment: Experiment, key: str, layout: str, settings: Settings, seed: int, lr: float
) -> dict[str, Any]:
    torch.manual_seed(seed)
    found = experiment.data["pieces"][f"{layout} size"]
    config = config_of(layout, settings, found["size"], found["extra"])
    config.intermediate_size = found["intermediate_size"]
    model = prepare(AutoModelForCausalLM.from_config(config)).to(experiment.device)
    schedule = Schedule(
        steps=settings.steps,
        batch_size=settings.batch_size,
        lr=lr,
        warmup=max(1, min(100, settings.steps // 10)),
        hold=0.6,  # a mixer that has to learn first which value belongs to a key is slow to begin
        seed=seed,
        muon=True,
    )

    def batch(step: int) -> Batch:
        rng = np.random.default_rng([seed, 1, step])
        pairs = rng.integers(1, settings.pairs + 1, settings.batch_size)
        return draw(pairs, settings.pairs, settings.asked, settings.symbols, rng)

    began = time.monotonic()
    curve = experiment.train(key, model, batch, schedule)
    seconds = time.monotonic() - began
    accuracy = {str(n): measure(model, n, settings, 2) for n in settings.test_pairs}
    validation = measure(model, settings.pairs, settings, 3)
    experiment.checkpoint(key).unlink(missing_ok=True)
    parameters = sum(p.numel() for p in model.parameters())
    about = {"lr": lr, "parameters": parameters, "seconds": round(seconds, 1), "loss": curve}
    return {**about, "validation": validation, "accuracy": accuracy}


@torch.no_grad()
def measure(model: Any, pairs: int, settings: Settings, part: int) -> float:
    """Share of held-out questions answered with the right value; rows of different parts are different."""
    rng = np.random.default_rng([0, part, pairs])
    right = []
    for rows in np.array_split(np.full(settings.rows, pairs), -(-settings.rows // settings.batch_size)):
        ids, labels = (x.to(model.device) for x in draw(rows, pairs, settings.asked, settings.symbols, rng))
        guesses = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:] != IGNORED
        right.append((guesses == labels[:, 1:])[wanted].float())
    return torch.cat(right).mean().item()


def plot(path: Path, summary: dict[str, Any], settings: Settings) -> None:
    """Accuracy against the number of pairs, a line a layout."""
    with figure(path, width=8.5) as axes:
        if axes is None:
            return
        for i, (layout, row) in enumerate(summary.items()):
            lines = 100 * np.array([row["accuracy"][str(n)] for n in settings.test_pairs])
            style = "--" if layout == "full_attention" else "-" if i < 10 else "-."
            label = f"{layout} ({row['state_bytes']:,} bytes)"
            axes.plot(settings.test_pairs, lines.mean(1), style, marker=".", color=f"C{i % 10}", label=label)
            axes.fill_between(settings.test_pairs, lines.min(1), lines.max(1), color=f"C{i % 10}", alpha=0.15)
        axes.axvline(settings.pairs, color="grey", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(settings.test_pairs, map(str, settings.test_pairs))
        axes.set(
            xlabel="pairs in the context (dotted: the most in training)", ylabel="values recalled, %", ylim=(0, 102)
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
