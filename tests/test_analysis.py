"""Reading a context into a memory, baking it into a checkpoint, and reports of what memories do."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import fwzoo
from compare import error
from fwzoo import cli
from fwzoo.analysis import memory_report
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS, Row

EVERY = next(row for row in ROWS if row.name == "falcon-with-every-memory")
fast = pytest.mark.parametrize("architecture", ["fwpkm", "fwmlp"])


def build(architecture: str) -> Any:
    return Row(architecture, architecture, {"fwmlp_lr": 0.2} if architecture == "fwmlp" else {}).model()


def ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 384, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: Any, tokens: torch.Tensor, cache: fwzoo.FastWeightCache | None = None) -> torch.Tensor:
    return model(tokens, use_cache=cache is not None, **{CACHE_KEY: cache}).logits


@fast
def test_memorize_reads_the_context_and_leaves_nothing_pending(architecture: str) -> None:
    model, context, follow = build(architecture), ids(2, 21), ids(2, 9, seed=1)
    cache = model.memorize(context, passes=3)
    tensors = cache.layers[1].tensors
    assert cache.get_seq_length() == 63 and not tensors["feed_forward.count"].any()
    by_hand = fwzoo.FastWeightCache(model.config)
    for _ in range(3):
        read(model, context, by_hand)
    assert by_hand.layers[1].tensors["feed_forward.count"].all()
    other = model.memorize(context, passes=1, cache=model.memorize(context, passes=1))
    assert other.get_seq_length() == 42
    model.train()
    in_training = model.memorize(context, passes=3)  # every sequence has its own memory, in training mode too
    model.eval()
    assert torch.equal(read(model, follow, cache), read(model, follow, in_training))
    assert not torch.equal(read(model, follow, by_hand), read(model, follow, in_training))


@fast
def test_a_memory_becomes_the_checkpoints(architecture: str, tmp_path: Path) -> None:
    """A new sequence of a baked model starts where the memory was; only the mixer starts anew."""
    model, follow = build(architecture), ids(1, 20, seed=1)
    memory = model.model.layers[1].feed_forward
    cache = model.memorize(ids(1, 21))
    hidden = torch.randn(1, 20, 32)
    with torch.no_grad():
        expected = memory(hidden, cache.layers[1].memory("feed_forward"))
        fresh = memory(hidden)
        before = read(model, follow)
        cache = model.memorize(ids(1, 21))
        model.fast_weights_to_checkpoint(cache)
        assert error(memory(hidden), expected) < 1e-6 and not torch.equal(fresh, expected)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(read(loaded, follow), read(model, follow)) and not torch.equal(read(loaded, follow), before)
    if architecture == "fwpkm":
        with pytest.raises(ValueError, match="made from other tables"):
            read(model, follow, cache)


@pytest.mark.parametrize(
    ("attempt", "exception", "message"),
    [
        (lambda m: m.memorize(ids(1, 4), passes=0), ValueError, "passes is 0"),
        (lambda m: m.memorize(ids(1, 4), passes=1.5), TypeError, "passes is 1.5"),
        (lambda m: m.fast_weights_to_checkpoint(None), TypeError, "NoneType"),
        (lambda m: m.fast_weights_to_checkpoint(m.memorize(ids(2, 4))), ValueError, "2 sequences"),
        (lambda m: m.fast_weights_to_checkpoint(fwzoo.FastWeightCache(m.config)), ValueError, "0 sequences"),
        (lambda m: memory_report(m, ids(2, 4)), ValueError, r"\[2, 4\]"),
        (lambda m: memory_report(ROWS[0].model(), ids(1, 4)), ValueError, "must have a memory"),
        (lambda m: memory_report(m, ids(1, 4)).save("unused", ["a"]), ValueError, "1 entries"),
    ],
)
def test_bad_input(attempt: Any, exception: type[Exception], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(exception, match=message):
        attempt(build("fwpkm"))


def test_a_report_says_what_the_memories_read(tmp_path: Path) -> None:
    model, tokens = EVERY.model().train(), ids(1, 30)
    report = memory_report(model, tokens)
    assert model.training and report.tokens == 30
    assert [(i, x.kind) for i, x in report.layers.items()] == [(0, "pkm"), (1, "fwpkm"), (2, "fwmlp")]
    for index, heads in ((0, 4), (1, 1)):
        layer = report.layers[index]
        assert layer.slots == 36 and layer.top_slots is not None and layer.top_weights is not None and layer.growth
        distinct = {slot for row in layer.top_slots for slot in row}
        assert layer.used == len(distinct) / 36 and layer.growth == sorted(layer.growth)
        if layer.kind == "pkm":
            assert layer.growth[-1] == len(distinct) and layer.growth[0] == len(set(layer.top_slots[0]))
        assert abs(layer.collisions - (1 - len(distinct) / (30 * heads * 4))) < 1e-9
        assert all(abs(sum(row) - heads) < 1e-5 and row == sorted(row, reverse=True) for row in layer.top_weights)
        assert 0 < layer.entropy <= torch.tensor(36.0).log().item() + 1e-6
    with torch.no_grad():
        hidden = model.eval()(tokens, output_hidden_states=True).hidden_states[2]
        block = model.model.layers[2]
        hidden = hidden + block.mixer(block.mixer_norm(hidden))
        gate = block.feed_forward.g_proj(block.feed_forward.g_norm(hidden)).sigmoid()[0, :, 0]
    assert error(torch.tensor(report.layers[2].gate), gate) < 1e-6
    written = report.save(tmp_path / "report", ["<b>"] * 30)
    assert [path.name for path in written] == ["memory.json", "gates.html", "gates.png", "slots.png"]
    saved = json.loads(written[0].read_text())
    assert saved["1"]["growth"] == report.layers[1].growth
    strip = written[1].read_text()
    assert strip.count("&lt;b&gt;") == 60 and "<b>" not in strip and "layer 2, fwmlp" in strip
    assert all(path.stat().st_size > 5000 for path in written[2:])
    assert "slots used" in str(report) and "mean gate" in str(report)


@pytest.mark.parametrize("lookahead", [True, False])
def test_growth_is_the_rows_that_a_cache_holds(lookahead: bool) -> None:
    model, tokens = Row("fwpkm", "fwpkm", {"lookahead": lookahead}).model(), ids(1, 30)
    layer = memory_report(model, tokens).layers[1]
    slots, growth = layer.slots, layer.growth
    held = []
    for t in range(1, 31):
        cache = fwzoo.FastWeightCache(model.config)
        read(model, tokens[:, :t], cache)
        tensors = cache.layers[1].tensors
        held.append(int((tensors["feed_forward.slots"] < slots).sum()))
    assert growth == held and held[0] == 0 < held[-1]


@pytest.mark.parametrize("architecture", ["fwpkm", "fwmlp"])
def test_a_report_is_the_same_at_every_level(architecture: str) -> None:
    reports = []
    for level in ("chunk", "reference"):
        model = build(architecture).double()
        model.config.kernel_level = level
        reports.append(memory_report(model, ids(1, 30)).layers[1])
    assert reports[0].top_slots == reports[1].top_slots and reports[0].growth == reports[1].growth
    assert (reports[0].top_slots is None) == (architecture == "fwmlp")
    assert reports[0].gate == pytest.approx(reports[1].gate)


def test_a_level_that_does_not_tell_what_it_reads_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.import_module("fwzoo.kernels.fwpkm.chunk"), "watching", lambda: False)
    with pytest.raises(ValueError, match="kernel_level is 'auto', which does not tell what it reads"):
        memory_report(build("fwpkm"), ids(1, 30))


def test_inspect_writes_the_report_folder(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fwzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())  # type: ignore[return-value]

    folder, text = tmp_path / "model", tmp_path / "text.txt"
    build("fwpkm").save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    text.write_text("A memory writes while it reads. " * 4, encoding="utf-8")
    code, out, _ = command("inspect", folder, "--text", text, "--out", tmp_path / "report", "--tokens", 50)
    assert code == 0 and "50 tokens" in out and "layer 1 fwpkm" in out
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"memory.json", "gates.html", "gates.png", "slots.png"}
    code, _, err = command("inspect", folder, "--text", tmp_path / "none.txt", "--out", tmp_path / "other")
    assert code == 2 and "none.txt" in err and "Traceback" not in err
    code, _, err = command("inspect", folder, "--text", text, "--out", tmp_path / "report")
    assert code == 2 and "not empty" in err
