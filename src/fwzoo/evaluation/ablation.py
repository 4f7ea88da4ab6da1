"""FwPKM with one of its techniques switched off at a time: what each is worth for recall, and what it does to the memory.

Every model is trained on the rows of `niah.Training` (needles in text, asked after the next chunk), from the same seed,
and then measured on: recall (held-out rows of the training length), needles in haystacks several times as long after one
and more readings, and on a haystack its use of slots and its gates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from ..analysis import memory_report
from ..configuration import FwzooConfig
from .experiment import Experiment, figure, mean_and_range, prepare
from .niah import Settings, Training, batches, haystack, joined, read_haystacks
from .training import IGNORED

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no value residual": {"value_residual": False},
    "no lookahead": {"lookahead": False},
    "no target normalisation": {"normalize_targets": False},
    "no gate": {"gate_activation": "none"},
    "no gate weighting": {"gate_weighting": False},
    "no row averaging": {"row_averaging": False},
    "no entropy loss": {"address_loss": False},
    "dot instead of idw": {"fwpkm_score": "dot"},
    "top-1": {"fwpkm_top_k": 1},
    "top-2": {"fwpkm_top_k": 2},
    "top-16": {"fwpkm_top_k": 16},
}
"""What differs from the full layer (top-8)."""


@dataclass(frozen=True)
class Model:
    """The model that is ablated: a sliding window that is far shorter than any distance asked for, and one FwPKM."""

    hidden_size: int = 64
    subkeys: int = 32
    chunk_size: int = 64

    def config(self, tokenizer: Any, layout: str = "sliding_attention+fwpkm@0", **options: Any) -> Any:
        size = self.hidden_size
        fields: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": size,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "attention_window": 32,
            "memory_key_dim": size,
            "memory_value_dim": size,
            "memory_chunk_size": self.chunk_size,
            "training_scope": "sequence",
            "fwpkm_subkeys": self.subkeys,
            "initializer_range": (3 * size) ** -0.5,
            "tie_word_embeddings": False,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        return FwzooConfig.from_layout(layout, **{**fields, **options})


def run(
    out: Path,
    tokenizer: Any,
    marks: np.ndarray,
    text: np.ndarray,
    train_text: np.ndarray,
    model: Model,
    training: Training,
    settings: Settings,
    seeds: Sequence[int],
    console: Console,
) -> dict[str, Any]:
    """Train and measure every variant with every seed; write `results.json` and `ablation.png`; show a table.

    Raises:
        ValueError: the text is too short. Interrupted: asked to stop; the same call goes on.
    """
    about = {"model": asdict(model), "training": asdict(training), **asdict(settings)}
    about["text"] = [len(text), len(train_text), int(text.sum()), int(train_text.sum())]
    with Experiment(out, "ablate fwpkm", about, console) as experiment:
        wanted = {}
        for seed, (name, options) in itertools.product(seeds, VARIANTS.items()):
            key = f"{name} seed {seed}"
            config = model.config(tokenizer, **options)
            data = (marks, text, train_text, training, settings, seed)
            wanted[key] = (_train_and_measure, experiment, key, config, *data)
        pieces = experiment.pieces(wanted)
        runs = {name: [pieces[f"{name} seed {seed}"] for seed in seeds] for name in VARIANTS}
        summary = {name: {key: [run[key] for run in found] for key in found[0]} for name, found in runs.items()}
        experiment.save(summary=summary)
        plot(out / "ablation.png", summary)
    longest = settings.lengths[-1]
    table = Table("variant", "recall %", f"needles in {longest:,}: 1 reading %", f"{settings.passes} readings %")
    for column in ("slots used %", "entropy of use", "gate at keys", "gate elsewhere"):
        table.add_column(column)
    for name, row in summary.items():
        table.add_row(
            name,
            *(mean_and_range(row[key]) for key in ("recall", "once", "again", "slots")),
            f"{np.mean(row['entropy']):.2f}",
            *("-" if None in row[key] else f"{np.mean(row[key]):.2f}" for key in ("gate_keys", "gate_others")),
        )
    console.print(table)
    return summary


def _train_and_measure(
    experiment: Experiment,
    key: str,
    config: Any,
    marks: np.ndarray,
    text: np.ndarray,
    train_text: np.ndarray,
    training: Training,
    settings: Settings,
    seed: int,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = prepare(AutoModelForCausalLM.from_config(config)).to(experiment.device)
    began = time.monotonic()
    schedule = training.schedule(seed)
    curve = experiment.train(key, model, lambda step: training.batch(step, train_text, marks, seed), schedule)
    seconds = time.monotonic() - began
    test = (model, text, marks, settings.lengths[-1], settings)
    read = [read_haystacks(experiment, key, *test, numbers) for numbers in batches(settings)]
    found = joined(read, settings)["accuracy"]
    use = _use(model, *haystack(text, marks, training.length, settings.depths, np.random.default_rng([0, 3])))
    experiment.checkpoint(key).unlink(missing_ok=True)
    return {
        "recall": recall(model, training, text, marks),
        "once": float(np.mean(found[0])),
        "again": float(np.mean(found[-1])),
        **use,
        "loss": curve,
        "seconds": round(seconds, 1),
    }


@torch.no_grad()
def recall(model: Any, training: Training, text: np.ndarray, marks: np.ndarray, batches: int = 4) -> float:
    """Share of right answers on held-out rows like those of the training."""
    right = []
    for number in range(batches):
        ids, labels = (x.to(model.device) for x in replace(training, text_share=0.0).batch(number, text, marks, -1))
        guesses = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:] != IGNORED
        right.append((guesses == labels[:, 1:])[wanted].float().mean().item())
    return sum(right) / batches


def _use(model: Any, ids: np.ndarray, pairs: np.ndarray) -> dict[str, Any]:
    """Share of slots used, entropy of their use over the largest, mean gate at the needles' keys and elsewhere."""
    report = memory_report(model.eval(), torch.from_numpy(ids)[None].to(model.device))
    (layer,) = report.layers.values()
    at_key = np.isin(ids, pairs[:, 0])
    gate = None if layer.gate is None else np.array(layer.gate)
    return {
        "slots": layer.used,
        "entropy": layer.entropy / np.log(layer.slots),
        "gate_keys": None if gate is None else float(gate[at_key].mean()),
        "gate_others": None if gate is None else float(gate[~at_key].mean()),
    }


def plot(path: Path, summary: dict[str, Any]) -> None:
    """Recall, needles after one and after all readings, and slots used, a group of bars a variant."""
    with figure(path, width=10, height=4.6) as axes:
        if axes is None:
            return
        names = {
            "recall": "recall",
            "once": "needles, first reading",
            "again": "needles, last reading",
            "slots": "slots used",
        }
        place = np.arange(len(summary))
        for i, (key, label) in enumerate(names.items()):
            values = 100 * np.array([row[key] for row in summary.values()])
            means = values.mean(1)
            ends = np.abs(np.stack([values.min(1), values.max(1)]) - means)
            axes.bar(place + 0.2 * (i - 1.5), means, 0.2, yerr=ends if values.shape[1] > 1 else None, label=label)
        axes.set_xticks(place, summary, rotation=35, ha="right")
        axes.set(ylabel="%", ylim=(0, 102))
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
