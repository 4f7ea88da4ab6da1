"""Training in two processes (gloo, CPU) is training in one: data parallel from the command line, and sharded by FSDP2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fwzoo.cli import app
from sharded_run import TEXTS, losses, trainer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHARDED = ["falcon3a", "fwpkm"]


def run(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(out: Path) -> dict:
    return json.loads((out / "loss.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different lengths, so that processes have very different numbers of targets."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    texts = [text for long in TEXTS for text in (long, "a", "b")]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_data_parallel_from_the_command_line(text: Path, tmp_path: Path) -> None:
    """Same losses and evaluations as one process; one process speaks; a resumed run ends in the same bits."""
    sizes = "--hidden-size 32 --layers 2 --heads 2 --sequence-length 48 --steps 4 --save-every 2 --eval-every 4"
    words = [text, *sizes.split(), "--lr", "0.01", "--eval-fraction", "0.1"]
    one, two = tmp_path / "one", tmp_path / "two"
    app([*map(str, ["train", *words, "--out", one, "--batch-size", "4"])], standalone_mode=False)
    said = run(*TORCHRUN, "-m", "fwzoo", "train", *words, "--out", two, "--batch-size", "2")
    assert said.count("parameters") == said.count("saved") == said.count("held-out") == 1
    for part in ("train", "eval"):
        assert [step for step, _ in curve(two)[part]] == [step for step, _ in curve(one)[part]]
        for (_, found), (_, expected) in zip(curve(two)[part], curve(one)[part], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)

    again = tmp_path / "again"
    again.mkdir()
    for name in ("training_options.json", "checkpoint-2"):
        (shutil.copytree if (two / name).is_dir() else shutil.copy)(two / name, again / name)
    run(*TORCHRUN, "-m", "fwzoo", "train", "--resume", "--out", again)
    assert curve(again) == curve(two)
    expected = AutoModelForCausalLM.from_pretrained(two).state_dict()
    for name, x in AutoModelForCausalLM.from_pretrained(again).state_dict().items():
        assert torch.equal(x, expected[name]), name


def test_sharded_by_fsdp2(tmp_path: Path) -> None:
    """Same losses as one process, and a full checkpoint that loads bit for bit (checked there, in both processes)."""
    run(*TORCHRUN, "sharded_run.py", tmp_path, *SHARDED)
    for name in SHARDED:
        found = torch.load(tmp_path / f"{name}.pt")
        alone = trainer(name, tmp_path / "alone", batch_size=4)
        alone.train()
        assert found["losses"] == pytest.approx(losses(alone), rel=1e-5), name
        for key, x in alone.model.state_dict().items():
            assert (found["weights"][key] - x).abs().max() < 2e-3, (name, key)  # Adam's first steps amplify rounding
