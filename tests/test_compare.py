"""`fwzoo compare`: one budget for all, what is reported, interruption and resumption, bad input."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import fwzoo
from fwzoo import cli
from fwzoo.analysis.cost import empty_model
from fwzoo.evaluation.compare import DEFAULT, schedule_for, split_documents, summary
from fwzoo.evaluation.experiment import Mismatch, match_parameters
from fwzoo.training import trainer
from fwzoo.training.data import PackedRows, Texts, collate

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune wants a wife. " * 60
LAYOUTS = ("fa", "la:linear_decay=head", "falcon3a")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["fwzoo", "compare", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def small(text: Path, out: Path) -> list[object]:
    sizes = ["--hidden-size", 32, "--heads", 2, "--steps", 10, "--sequence-length", 64, "--batch-size", 2]
    layouts = [word for name in LAYOUTS for word in ("--layout", name)]
    return [text, "--out", out, *sizes, *layouts, "--context", 64, "--context", 1024]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_parameters_of_the_default_layouts_match() -> None:
    from fwzoo.commands.common import layout_config

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384}
    configs = [layout_config("--layout", name, **sizes) for name in DEFAULT]
    before = [empty_model(config).num_parameters() for config in configs]
    assert max(before) > 1.02 * before[0]
    counts = match_parameters(configs, DEFAULT)
    assert counts == [AutoModelForCausalLM.from_config(config).num_parameters() for config in configs]
    assert counts[0] == before[0] and all(abs(count / counts[0] - 1) < 0.005 for count in counts)


def test_a_layout_without_a_width_to_change_is_refused() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 384}
    configs = [fwzoo.FwzooConfig.from_layout(name, **sizes) for name in ("fa", "gdn+none@0")]
    with pytest.raises(Mismatch, match=r"layout 'gdn\+none@0' has 4.,... parameters .* within 2% of 'fa', which has 7"):
        match_parameters(configs, ("fa", "gdn+none@0"))


def test_the_end_of_every_document_is_held_out() -> None:
    fit, held_out = split_documents(["a b c d e f g h i j k l m n o p q r s t", "x" * 100])
    assert fit[0] + held_out[0] == "a b c d e f g h i j k l m n o p q r s t" and fit[0].endswith(" ")
    assert len(held_out[1]) == 10
    assert split_documents(["", "z"]) == ([], ["z"])


def test_the_schedule_is_the_same_but_for_the_seed() -> None:
    first, second = schedule_for(100, 4, 1e-3, 0), schedule_for(100, 4, 1e-3, 1)
    assert first.warmup == 10 and first.seed == 0 and second.seed == 1
    assert {**vars(first), "seed": 1} == vars(second)


def test_compare_on_a_text(text: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    out = tmp_path / "out"
    seen: dict[str, list[bytes]] = {}
    plain = fwzoo.FwzooForCausalLM.forward

    def forward(self, *arguments, **options):
        if self.training and torch.is_grad_enabled():
            seen.setdefault(self.config.layout, []).append(options["input_ids"].numpy().tobytes())
        return plain(self, *arguments, **options)

    monkeypatch.setattr(fwzoo.FwzooForCausalLM, "forward", forward)
    assert not command(monkeypatch, *small(text, out))
    shown = capfd.readouterr().out
    assert "3/3 falcon3a, seed 0" in shown and "@1024" in shown
    first, *others = (batches[:10] for batches in seen.values())
    assert len(first) == 10 and all(batches == first for batches in others)

    found = json.loads((out / "compare.json").read_text())
    assert found["unit"] == "bits_per_byte"
    assert [row["layout"] for row in found["layouts"]] == list(LAYOUTS)
    attention, _, falcon = found["layouts"]
    assert attention["state_bytes"] == {"64": 2 * (64 * 2 * 32 * 4 + 8), "1024": 2 * (1024 * 2 * 32 * 4 + 8)}
    assert len(set(falcon["state_bytes"].values())) == 1
    for row in found["layouts"]:
        assert abs(row["parameters"] / attention["parameters"] - 1) < 0.02
        assert 2 < row["validation_loss"] < 8 and 2 < row["train_loss"] < 8.5 and row["tokens_a_second"] > 0
        assert row["curve"][-1] == [10, pytest.approx(row["validation_loss"])]
        folder = row["layout"].replace(":", "_").replace("=", "_") + "-seed0"
        assert validation(out / folder) == pytest.approx(row["validation_loss"], rel=1e-5)
    assert (out / "compare.png").stat().st_size > 10_000
    assert not list(out.glob("*/checkpoint-*"))

    # again: nothing is trained, the same is reported
    trained = sum(map(len, seen.values()))
    assert not command(monkeypatch, *small(text, out))
    assert sum(map(len, seen.values())) == trained
    assert json.loads((out / "compare.json").read_text())["layouts"] == found["layouts"]
    capfd.readouterr()

    # with other options: refused
    assert command(monkeypatch, *small(text, out), "--lr", 0.5) == 2
    said = capfd.readouterr().err
    assert "--lr" in said and "0.5 is not what the comparison in" in said and len(said.splitlines()) == 1
    text.write_text(TEXT + "And more.")
    assert command(monkeypatch, *small(text, out)) == 2
    assert "TEXT: the text is not what the comparison in" in capfd.readouterr().err


@torch.no_grad()
def validation(folder: Path) -> float:
    """Bits per byte of the held-out text under a saved model, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = list(PackedRows(Texts(split_documents([TEXT])[1]), ByT5Tokenizer(), 64))
    nats, count = 0.0, 0
    for row in rows:
        batch = collate([row])
        labels = batch["labels"][0, 1:]
        logits = model(batch["input_ids"], use_cache=False).logits[0, :-1].log_softmax(-1)
        real = labels >= 0
        nats -= logits[real].gather(1, labels[real][:, None]).sum().item()
        count += (labels >= 3).sum().item()
    return nats / math.log(2) / count


def test_an_interrupted_comparison_goes_on_exactly(text: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    assert not command(monkeypatch, *small(text, tmp_path / "whole"))
    plain, steps = trainer.SaveOnInterrupt.on_step_end, []

    def interrupt(self, args, state, control, **options):
        steps.append(state.global_step)
        self.interrupt.requested = len(steps) == 14  # the fourth step of the second layout
        plain(self, args, state, control, **options)

    monkeypatch.setattr(trainer.SaveOnInterrupt, "on_step_end", interrupt)
    assert command(monkeypatch, *small(text, tmp_path / "cut")) == 130
    assert "the same command goes on from here" in capfd.readouterr().out
    assert steps[-1] == 4 and not (tmp_path / "cut" / "compare.json").exists()
    (tmp_path / "cut" / "la_linear_decay_head-seed0" / "checkpoint-9").mkdir()  # as a kill while saving leaves it
    assert not command(monkeypatch, *small(text, tmp_path / "cut"))
    assert steps[14:20] == [5, 6, 7, 8, 9, 10]  # and not from the beginning
    whole, cut = (json.loads((tmp_path / name / "compare.json").read_text())["layouts"] for name in ("whole", "cut"))
    for a, b in zip(whole, cut, strict=True):
        for key in ("validation_loss", "parameters", "state_bytes"):
            assert a[key] == pytest.approx(b[key], rel=1e-6), key
        assert a["curve"][-1] == pytest.approx(b["curve"][-1], rel=1e-6)


def test_several_seeds_are_averaged() -> None:
    from fwzoo.evaluation.compare import Result

    runs = [Result("fa", seed, 100, 1.0 + seed, 2.0 + seed, 10.0, {"64": 5}, [[5, 3.0 + seed]]) for seed in (0, 1)]
    (row,) = summary(runs)
    assert (row["train_loss"], row["validation_loss"]) == (1.5, 2.5)
    assert row["validation_deviation"] == pytest.approx(0.5**0.5)
    assert row["curve"] == [[5, 3.5]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "TEXT: text source 'missing.txt' does not exist"),
        (["--layout", "fa", "--layout", "falcon9"], "layout 'falcon9', position 0"),
        (["--layout", "fa", "--layout", "fa"], "names a layout twice"),
        (["--layout", "fa", "--layout", "gdn+none@0,1"], "it must be within 2% of 'fa'"),
        (["--steps", "0"], "'0' is not allowed; allowed is a whole number, 1 or more"),
        (["--heads", "3"], "num_attention_heads is 3"),
        (["--tokenizer", "full"], "tokenizer 'full' does not load"),
        (["empty.txt"], "holds too little text"),
        (["--out", "full"], "'full' is not empty"),
    ],
)
def test_bad_input(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert command(monkeypatch, *arguments) == 2
    shown = capfd.readouterr()
    assert said in shown.err and len(shown.err.splitlines()) == 1, shown.err
    assert not list(tmp_path.glob("fwzoo-compare"))
