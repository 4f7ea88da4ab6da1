"""The experiments of `fwzoo eval` and `fwzoo ablate`: what they draw, what they measure, that they learn, and that they go on."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import fwzoo
from fwzoo import cli
from fwzoo.evaluation import addition, niah, perplexity, recall
from fwzoo.evaluation.experiment import Experiment, match_parameters, prepare
from fwzoo.evaluation.training import IGNORED, Interrupted, Schedule, Step, train
from fwzoo.training.sample_text import pydoc_topics

TINY = addition.Settings(
    digits=2, test_digits=3, hidden_size=32, layers=1, heads=2, steps=6, batch_size=8, problems=8, generate_every=2
)


@pytest.fixture
def text() -> np.ndarray:
    joined = "\n".join(pydoc_topics().train[:20]).encode()
    return np.frombuffer(joined, dtype=np.uint8).astype(np.int64) + 3


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(pydoc_topics().train[:20]), encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process; returns its exit code, standard output and standard error."""

    def command(*arguments: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["fwzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    monkeypatch.setenv("COLUMNS", "200")
    return command


# --- addition ---


def test_problems_are_sums() -> None:
    ids, answer = addition.problems(np.arange(1, 33).repeat(4), np.random.default_rng(0))
    for row, mask, n in zip(ids.tolist(), answer.tolist(), np.arange(1, 33).repeat(4).tolist(), strict=True):
        shown = "".join("0123456789+= ^$"[token] for token in row).rstrip()
        assert shown[0] == "^" and shown[-1] == "$"
        left, total = shown[1:-1].split("=")
        a, b = left.split("+")
        assert len(a) == len(b) == n and len(total) == n + 1
        assert int(a[::-1]) + int(b[::-1]) == int(total[::-1])
        assert [i for i, wanted in enumerate(mask) if wanted] == list(range(2 * n + 3, 3 * n + 5))


def test_training_batches_are_drawn_again_and_predict_the_sum_only() -> None:
    (ids, labels), (again, _) = (addition.training_batch(3, 64, 5, 7) for _ in range(2))
    assert torch.equal(ids, again) and not torch.equal(ids, addition.training_batch(4, 64, 5, 7)[0])
    assert ids.shape == (64, 20)
    for row, label in zip(ids, labels, strict=True):
        begin = (row == addition.EQUALS).nonzero().item() + 1
        wanted = (row != addition.PADDING) & (torch.arange(20) >= begin)
        assert torch.equal(label, torch.where(wanted, row, IGNORED))
    assert set((labels != IGNORED).sum(1).tolist()) == {3, 4, 5, 6, 7}


def test_widths_grow_and_a_batch_keeps_its_tokens() -> None:
    settings = addition.Settings(digits=16, steps=100, batch_size=40, growth=0.5)
    longest = [settings.longest(step) for step in range(100)]
    assert longest == sorted(longest) and sorted(set(longest)) == list(range(2, 17, 2)) and longest[49:51] == [16, 16]
    sizes = {tuple(settings.batch(step, 0)[0].shape) for step in range(100)}
    assert len(sizes) == 8 and all(0.9 * 40 * 53 <= rows * tokens <= 40 * 53 for rows, tokens in sizes)
    assert {addition.Settings(digits=16, growth=0.0).longest(step) for step in (0, 4999)} == {16}


@pytest.mark.slow
def test_addition_is_learned_in_a_reduced_form(tmp_path: Path) -> None:
    sizes = {"digits": 2, "test_digits": 3, "hidden_size": 64, "layers": 2, "heads": 4, "problems": 64}
    settings = addition.Settings(**sizes, steps=500, batch_size=64, lr=1e-2, growth=0.0)
    summary = addition.run(tmp_path, "addition", addition.variants(["falcon3a"]), settings, [0], Console())
    assert summary["falcon3a"]["in_distribution"][0] >= 0.95
    assert summary["falcon3a"]["longer"][0] < summary["falcon3a"]["in_distribution"][0]


def test_models_are_matched_in_widths_that_are_fast() -> None:
    models = addition.variants(addition.ARCHITECTURES)
    configs = [model.config(addition.Settings()) for model in models.values()]
    counts = match_parameters(configs, list(models), unit=8)
    assert len(set(counts)) > 2 and all(abs(count / counts[0] - 1) <= 0.02 for count in counts)
    assert all(config.intermediate_size % 8 == 0 for config in configs)


def test_the_ablation_has_four_models() -> None:
    fields = [(m.fields["timing"], m.fields["pairing"]) for m in addition.ablation("falcon1").values()]
    assert len(set(fields)) == 4
    configs = [m.config(TINY) for m in addition.ablation("falcon1").values()]
    assert {c.mixers[0] for c in configs} == {"falcon1"} and {c.timing for c in configs} == {
        "read_after_write",
        "read_before_write",
    }


def test_output_gates_begin_open_and_alike() -> None:
    config = addition.Variant("gated_delta", {}).config(addition.Settings(hidden_size=64, layers=2, heads=2))
    model, seen = prepare(AutoModelForCausalLM.from_config(config)), []
    for block in model.model.layers:
        block.mixer.gate_proj.register_forward_hook(lambda module, inputs, gate: seen.append(gate))
    model(input_ids=torch.arange(16)[None])
    assert len(seen) == 2 and all(1 < gate.mean() < 3 and gate.std() < 0.6 for gate in seen)


def test_short_convolutions_begin_as_delays() -> None:
    settings = addition.Settings(hidden_size=64, layers=1, heads=4)
    model = AutoModelForCausalLM.from_config(addition.variants(["gated_delta"])["gated_delta"].config(settings))
    mixer = model.model.layers[0].mixer
    drawn = mixer.conv.weight.detach().clone()
    addition.delay(model)
    mixer.conv.weight.data -= 0.2 * drawn  # what is left are the delays alone
    x = torch.randn(1, 20, 192)
    y, _ = mixer.conv(x, None, None, None)
    late = torch.nn.functional.silu(x)
    torch.testing.assert_close(y[..., :64], late[..., :64])
    torch.testing.assert_close(y[..., 128:], late[..., 128:])
    for head in range(4):
        own = slice(64 + 16 * head, 80 + 16 * head)
        torch.testing.assert_close(y[:, head:, own], late[:, : 20 - head, own])


# --- training ---


def small() -> Any:
    torch.manual_seed(0)
    return prepare(AutoModelForCausalLM.from_config(addition.variants(["falcon1a"])["falcon1a"].config(TINY)))


def test_interrupted_training_goes_on_exactly(tmp_path: Path) -> None:
    schedule = Schedule(steps=20, batch_size=8, lr=1e-2, warmup=2, save_every=1e9, muon=True)

    def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return addition.training_batch(step, 8, 2, 0)

    whole, cut = small(), small()
    curve = train(whole, draw, schedule, tmp_path / "whole.pt")
    steps = iter([False] * 12)
    with pytest.raises(Interrupted):
        train(cut, draw, schedule, tmp_path / "cut.pt", stop=lambda: next(steps, True))
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.zero_()  # the checkpoint holds all there is
    again = train(cut, draw, schedule, tmp_path / "cut.pt")
    assert len(curve) == 10 and curve[-1] < curve[0]
    assert again == pytest.approx(curve, abs=1e-6)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_is_that_of_torch_and_leaves_embeddings_and_head_to_adamw(tmp_path: Path) -> None:
    model, twin = small(), small()
    schedule = Schedule(steps=6, batch_size=8, lr=1e-2, warmup=2, muon=True)
    step = Step(model, schedule)
    matrices = [twin.get_parameter(name) for name, p in model.named_parameters() if any(p is m for m in step.matrices)]
    assert len(matrices) == 9 and not any(p is twin.lm_head.weight for p in matrices)
    start = [matrix.detach().clone() for matrix in matrices]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for number in range(6):
        step.put(*addition.training_batch(number, 8, 2, 0), schedule.lr_at(number))
        step.run()
        for own, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = own.grad.clone()
        muon.param_groups[0]["lr"] = schedule.lr_at(number)
        muon.step()
    for own, theirs, before in zip(step.matrices, matrices, start, strict=True):
        moved = (theirs - before).norm()
        assert moved > 0 and (own - theirs).norm() < 0.02 * moved  # both iterate in bfloat16
    step.save(tmp_path / "step.pt", 6)
    again = Step(small(), schedule)
    assert again.load(tmp_path / "step.pt") == 6
    for moments in zip(*(list(s.optimizers[1].state.values()) for s in (step, again)), strict=True):
        assert torch.equal(*(m["momentum"] for m in moments))


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [Schedule(steps=100, batch_size=1, lr=1.0, warmup=10).lr_at(step) for step in range(100)]
    held = [Schedule(steps=100, batch_size=1, lr=1.0, warmup=10, hold=0.5).lr_at(step) for step in range(100)]
    assert min(held[10:55]) == 1.0 > held[57] and held[-1] == pytest.approx(0.01, abs=0.01)
    assert rates[0] < 0.1 and max(rates) == pytest.approx(1.0, abs=0.01) and rates[-1] == pytest.approx(0.01, abs=0.01)


MEMORIES = ["sliding_attention+fwpkm@1", "sliding_attention+fwmlp@1", "lact"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout", ["full_attention", "sliding_attention", "gated_delta", "falcon1", "falcon1a", "falcon3a", *MEMORIES]
)
def test_a_captured_step_is_the_step(layout: str) -> None:
    settings, losses = recall.Settings(pairs=8, asked=8, symbols=16, hidden_size=64), []
    for captured in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(recall.config_of(layout, settings, 16, 0)).cuda().train()
        step = Step(model, Schedule(steps=12, batch_size=8, lr=1e-3))
        found = []
        for number in range(12):
            rng = np.random.default_rng(number)
            step.put(*recall.draw(rng.integers(1, 9, 8), 8, 8, 16, rng), 1e-3)
            if captured and number == 3:
                assert step.capture()
            step.run()
            found.append(step.loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_step_that_hands_its_memory_on_is_not_captured(capsys: pytest.CaptureFixture) -> None:
    model = fwzoo.FwmlpForCausalLM(fwzoo.FwmlpConfig.tiny(carry_fast_weights=True)).train()
    step = Step(model, Schedule(steps=2, batch_size=1, lr=1e-3))
    assert not step.capture() and "hands what it wrote on" in capsys.readouterr().out


# --- results on disk ---


def test_results_are_kept_and_belong_to_their_settings(tmp_path: Path) -> None:
    out, calls = tmp_path / "out", []
    with Experiment(out, "one", {"steps": 1}) as experiment:
        assert experiment.piece("a", lambda: calls.append(1) or [1]) == [1]
        experiment.interrupt.requested = True
        with pytest.raises(Interrupted):
            experiment.piece("b", lambda: 2)
    with Experiment(out, "one", {"steps": 1}) as experiment:
        assert experiment.piece("a", lambda: calls.append(1) or [2]) == [1] and len(calls) == 1
        assert experiment.piece("b", lambda: 2) == 2
    with pytest.raises(ValueError, match="steps = 1, not 2; give the same value or another folder"):
        Experiment(out, "one", {"steps": 2})
    with pytest.raises(ValueError, match="results of 'one'; give another folder for 'two'"):
        Experiment(out, "two", {"steps": 1})
    (out / "results.json").write_text("{")
    with pytest.raises(ValueError, match="holds no results"):
        Experiment(out, "one", {"steps": 1})


def test_processes_share_the_pieces_of_a_folder(tmp_path: Path) -> None:
    """Another process has a piece: the rest is done first; what it stores in the end is taken over."""
    with Experiment(tmp_path, "one", {}) as ours, Experiment(tmp_path, "one", {}) as theirs:
        done = []
        lock = theirs._lock("a")
        lock.acquire()

        def second() -> int:
            theirs._done("a", lambda: done.append("a by another") or 1)
            lock.release()
            done.append("b")
            return 2

        found = ours.pieces({"a": (lambda: done.append("a"),), "b": (second,)})
    assert found == {"a": 1, "b": 2} and done == ["a by another", "b"]
    assert json.loads((tmp_path / "results.json").read_text())["pieces"] == found


# --- recall ---


def test_recall_rows_ask_for_their_own_pairs() -> None:
    rng = np.random.default_rng(0)
    pairs = np.array([1, 3, 8, 8])
    ids, labels = recall.draw(pairs, 8, 6, 20, rng)
    assert ids.shape == labels.shape == (4, 2 * 8 + recall.GAP + 12)
    for row, label, n in zip(ids.tolist(), labels.tolist(), pairs.tolist(), strict=True):
        read = row[:16]
        assert read[: 16 - 2 * n] == [recall.FILLER] * (16 - 2 * n)
        known = dict(zip(read[16 - 2 * n :: 2], read[17 - 2 * n :: 2], strict=True))
        assert len(known) == n and all(1 <= k <= 20 < v <= 40 for k, v in known.items())
        asked = row[16 + recall.GAP :]
        assert all(known[k] == v for k, v in zip(asked[::2], asked[1::2], strict=True))
        assert len(set(asked[::2])) == min(n, 6)
        places = [i for i, x in enumerate(label) if x != IGNORED]
        assert places == list(range(17 + recall.GAP, len(row), 2)) and all(label[i] == row[i] for i in places)


@pytest.mark.parametrize("layout", ["gated_delta", "falcon3", "lact", "sliding_attention", "sliding_attention+fwpkm@1"])
def test_states_have_the_bytes_asked_for(layout: str) -> None:
    settings = recall.Settings(state_bytes=24_000, pairs=8, test_pairs=(8, 16), symbols=32, hidden_size=32)
    size, extra, held = recall.at_state_bytes(layout, settings)
    config = recall.config_of(layout, settings, size, extra)
    assert held == recall.bytes_held(config, settings.tokens)
    assert 0.9 * settings.state_bytes <= held <= settings.state_bytes


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="state_bytes is 100; 'falcon1' needs at least"):
        recall.at_state_bytes("falcon1", recall.Settings(state_bytes=100, hidden_size=32))


# --- needles ---


def test_rows_hide_needles_and_ask_for_them(text: np.ndarray) -> None:
    marks = niah.symbols(ByT5Tokenizer())
    training = niah.Training(length=300, needles=10, gap=40, text_share=0.25, batch_size=2)
    ids, labels = training.batch(5, text, marks, 0)
    assert ids.shape == labels.shape == (2, 300) and torch.equal(ids, training.batch(5, text, marks, 0)[0])
    for row, label in zip(ids.numpy(), labels.numpy(), strict=True):
        asked = row[-20:].reshape(10, 2)
        body = row[:-20]
        assert np.isin(body[-40:], marks).sum() == 0
        at = np.flatnonzero(np.isin(body, marks[:62]))
        assert {tuple(body[i : i + 2]) for i in at} == {tuple(pair) for pair in asked} and len(at) == 10
        assert (label[-20:].reshape(10, 2)[:, 0] == IGNORED).all() and (label[-19::2] == row[-19::2]).all()
        predicted = label[:-20] != IGNORED
        assert 0.1 < predicted.mean() < 0.4 and not np.isin(body[predicted], marks).any()


def test_haystacks_have_a_needle_at_every_depth(text: np.ndarray) -> None:
    marks = niah.symbols(ByT5Tokenizer())
    ids, pairs = niah.haystack(text, marks, 200, 5, np.random.default_rng(0))
    at = np.flatnonzero(np.isin(ids, pairs[:, 0]))
    assert len(ids) == 200 and ids[at].tolist() == pairs[:, 0].tolist() and ids[at + 1].tolist() == pairs[:, 1].tolist()
    assert at[0] == 0 and at[-1] >= 195 and np.ptp(np.diff(at)) <= 1
    with pytest.raises(ValueError, match=r"a haystack of .* needs"):
        niah.haystack(text, marks, len(text) + 100, 5, np.random.default_rng(0))


class Oracle:
    """Stands for a model and its cache: remembers the haystacks `[B, T]`, and finds a needle from its second reading on."""

    device, config = torch.device("cpu"), fwzoo.FwpkmConfig.tiny()

    def __init__(self, ids: torch.Tensor | None = None, passes: int = 0) -> None:
        self.ids, self.passes, self.nbytes = ids, passes, 8

    def eval(self) -> Oracle:
        return self

    def memorize(self, ids: torch.Tensor, cache: Oracle | None, piece_size: int, on_piece: Any) -> Oracle:
        return Oracle(ids, 1 if cache is None else cache.passes + 1)

    def batch_repeat_interleave(self, times: int) -> None:
        assert self.ids is not None
        self.ids = self.ids.repeat_interleave(times, 0)

    def __call__(self, rows: torch.Tensor, logits_to_keep: int, **cache: Any) -> Any:
        (held,) = (x for x in cache.values() if isinstance(x, Oracle))
        assert held.ids is not None and rows.shape[1] == logits_to_keep == 1
        place = (held.ids == rows).long().argmax(1)
        found = held.ids.gather(1, place[:, None] + (1 if held.passes > 1 else 0))
        return SimpleNamespace(logits=F.one_hot(found, 384).float())


def test_needles_are_counted_by_reading_and_depth(text: np.ndarray, tmp_path: Path) -> None:
    settings = niah.Settings(lengths=(100, 200), depths=4, passes=3, samples=5, batch_size=2)
    summary = niah.run(tmp_path, "oracle", Mover(), ByT5Tokenizer(), text, settings, Console())
    assert summary["writing"] == {"100": [0.0, 1.0, 1.0], "200": [0.0, 1.0, 1.0]}
    assert (tmp_path / "niah.png").exists()


class Mover(Oracle):
    config = SimpleNamespace(feed_forwards=["mlp"], to_dict=dict)  # type: ignore[assignment]

    def to(self, device: Any) -> Mover:
        return self


def test_frozen_updates_find_nothing_that_was_only_read(text: np.ndarray, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fwzoo.FwpkmForCausalLM(fwzoo.FwpkmConfig.tiny(mixers=["sliding_attention"] * 2, attention_window=2))
    settings = niah.Settings(lengths=(64,), depths=4, passes=2, samples=2, batch_size=2, piece=16)
    niah.run(tmp_path, "tiny", model, ByT5Tokenizer(), text, settings, Console())
    held = json.loads((tmp_path / "results.json").read_text())["pieces"]
    assert model.config.value_lr == model.config.key_lr == 1.0
    assert set(held) == {"writing 64 0-1", "frozen 64 0-1"}


# --- perplexity ---


def hybrid() -> Any:
    torch.manual_seed(0)
    config = fwzoo.FwzooConfig.from_layout(
        "falcon1,sliding_attention",
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_window=5,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def cost_of(model: Any, ids: torch.Tensor) -> np.ndarray:
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, ids[1:], reduction="none").double().numpy()


def test_every_reading_costs_what_it_says(text: np.ndarray, tmp_path: Path) -> None:
    model, ids, w = hybrid(), torch.from_numpy(text[:100]), 16
    settings = perplexity.Settings(window=w, batch_size=4)
    perplexity.run(tmp_path, "hybrid", model, ids, settings, Console())
    found = {m: piece["windows"] for m, piece in json.loads((tmp_path / "results.json").read_text())["pieces"].items()}
    full = cost_of(model, ids[:96])
    for k in range(6):
        begin, end = k * w, (k + 1) * w
        alone = cost_of(model, ids[begin:end])
        assert found["carried"][k] == pytest.approx(full[begin : end - 1].mean(), abs=1e-4)
        assert found["reset"][k] == pytest.approx(alone.mean(), abs=1e-4)
        if k:
            first = cost_of(model, ids[begin - w // 2 : end - w // 2])[w // 2 :]
            both = np.concatenate([first, alone[w // 2 - 1 :]])
            assert found["sliding"][k] == pytest.approx(both.mean(), abs=1e-4)
    assert abs(np.mean(found["carried"]) - np.mean(found["reset"])) > 1e-3
    assert (tmp_path / "perplexity.png").exists()


def test_an_interrupted_reading_goes_on(text: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, settings = hybrid(), torch.from_numpy(text[:200]), perplexity.Settings(window=16, batch_size=2)
    whole = perplexity.run(tmp_path / "whole", "hybrid", model, ids, settings, Console())
    windows, calls = perplexity._windows, iter(range(5))

    def stopping(*arguments: Any) -> torch.Tensor:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
        return windows(*arguments)

    monkeypatch.setattr(perplexity, "_windows", stopping)
    with pytest.raises(Interrupted):
        perplexity.run(tmp_path / "cut", "hybrid", model, ids, settings, Console())
    assert (tmp_path / "cut" / "carried.pt").exists()
    monkeypatch.setattr(perplexity, "_windows", windows)
    cut = perplexity.run(tmp_path / "cut", "hybrid", model, ids, settings, Console())
    assert cut["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-5)


def test_the_interval_holds_the_mean() -> None:
    drawn = np.random.default_rng(0).normal(0.3, 1, 400)
    mean, low, high = perplexity.gap(drawn)
    assert low < mean < high and high - low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15)


# --- the commands ---


def test_eval_addition_goes_on_and_refuses_other_settings(run: Any, tmp_path: Path) -> None:
    options = ["--layouts", "falcon1a; full_attention", "--digits", 2, "--test-digits", 3, "--hidden-size", 32]
    options += ["--layers", 1, "--heads", 2, "--batch-size", 8, "--problems", 8, "--out", tmp_path / "out"]
    code, out, _ = run("eval", "addition", *options, "--steps", 4)
    assert code == 0 and "falcon1a" in out and "full_attention" in out
    results = tmp_path / "out" / "results.json"
    first = json.loads(results.read_text())
    assert first["versions"]["torch"] == torch.__version__ and (tmp_path / "out" / "addition.png").exists()
    assert run("eval", "addition", *options, "--steps", 4, "--seeds", 2)[0] == 0
    second = json.loads(results.read_text())["pieces"]
    assert second["falcon1a seed 0"] == first["pieces"]["falcon1a seed 0"] and "falcon1a seed 1" in second
    code, _, err = run("eval", "addition", *options, "--steps", 5)
    assert code == 2 and "steps = 4, not 5" in err


def test_ablate_falcon(run: Any, tmp_path: Path) -> None:
    options = ["--digits", 2, "--test-digits", 3, "--hidden-size", 16, "--layers", 1, "--heads", 2, "--steps", 2]
    options += ["--batch-size", 4, "--problems", 4, "--seeds", 1, "--out", tmp_path / "out"]
    code, out, _ = run("ablate", "falcon", *options)
    assert code == 0 and out.count("same_step") >= 2


def test_eval_recall(run: Any, tmp_path: Path) -> None:
    options = [
        "--layouts",
        "falcon1; sliding_attention+fwmlp@1",
        "--state-bytes",
        20_000,
        "--pairs",
        4,
        "--symbols",
        16,
    ]
    options += ["--test-pairs", "2,8", "--hidden-size", 32, "--steps", 2, "--batch-size", 4, "--out", tmp_path / "out"]
    code, out, _ = run("eval", "recall", *options)
    assert code == 0 and "fwmlp" in out and (tmp_path / "out" / "recall.png").exists()


def test_eval_niah_and_ppl(run: Any, tmp_path: Path, book: Path) -> None:
    options = ["--text", book, "--train", book, "--lengths", "64,128", "--depths", 4, "--passes", 2, "--samples", 2]
    options += ["--train-length", 64, "--needles", 4, "--hidden-size", 16, "--subkeys", 16, "--chunk-size", 16]
    code, out, err = run("eval", "niah", *options, "--steps", 2, "--out", tmp_path / "niah")
    assert code == 0 and "frozen" in out, err
    model = tmp_path / "niah" / "model"
    code, out, _ = run(
        "eval", "niah", model, "--text", book, "--lengths", 64, "--depths", 4, "--out", tmp_path / "again"
    )
    assert code == 0
    code, out, _ = run("eval", "ppl", model, "--text", book, "--window", 32, "--tokens", 200, "--out", tmp_path / "ppl")
    assert code == 0 and "carried" in out and "reset" in out and "sliding" in out


def test_ablate_fwpkm(run: Any, tmp_path: Path, book: Path) -> None:
    options = [
        "--text",
        book,
        "--length",
        128,
        "--passes",
        2,
        "--train-length",
        64,
        "--needles",
        4,
        "--hidden-size",
        16,
    ]
    options += ["--subkeys", 16, "--chunk-size", 16, "--steps", 1, "--batch-size", 2, "--out", tmp_path / "out"]
    code, out, err = run("ablate", "fwpkm", *options)
    assert code == 0, err
    assert "no lookahead" in out and "no gate" in out and (tmp_path / "out" / "ablation.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "addition", "--layouts", "falcon9"], "did you mean"),
        (["eval", "addition", "--digits", 4, "--test-digits", 4], "--test-digits: 4 is not allowed"),
        (["eval", "addition", "--steps", "many"], "'many' is not allowed; allowed is a whole number"),
        (["ablate", "falcon", "--layout", "gdn"], "--layout: 'gdn' is not allowed"),
        (["eval", "recall", "--pairs", 300], "--symbols: 256 is not allowed"),
        (["eval", "recall", "--lr", "0.1,0"], "'0.1,0' is not allowed; allowed are numbers of more than 0"),
        (["eval", "recall", "--test-pairs", "4,x"], "'4,x' is not allowed"),
        (["eval", "recall", "--layouts", "falcon1", "--state-bytes", 5], "state_bytes is 5; 'falcon1' needs at least"),
        (["eval", "niah", "--text", "no.txt"], "give a model, or text to train one on (--train)"),
        (["eval", "niah", "--text", "no.txt", "--train", "no.txt"], "'no.txt' does not exist"),
        (["eval", "niah", "no/such/model", "--text", "no.txt"], "'no/such/model' is not a model folder"),
        (["eval", "ppl", "no/such/model", "--text", "no.txt"], "'no/such/model' is not a model folder"),
        (["ablate", "fwpkm", "--text", "no.txt"], "'no.txt' does not exist"),
        (["ablate", "fwpkm", "--text", "no.txt", "--train-length", 64], "--needles: 32 do not fit"),
        (["ablate", "falcon", "--layout", "falcon9"], "did you mean"),
    ],
)
def test_bad_input_is_one_sentence(run: Any, tmp_path: Path, arguments: list[Any], message: str) -> None:
    code, _, err = run(*arguments, "--out", tmp_path / "out")
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err
