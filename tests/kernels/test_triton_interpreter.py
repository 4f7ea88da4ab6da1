"""Every Triton kernel under Triton's interpreter: the variable is read when a kernel is defined, so in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fwzoo.kernels import contract

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_triton_*.py") if path != Path(__file__))


@pytest.mark.skipif(
    contract.NO_TRITON is not None or contract.INTERPRETING, reason="needs triton, and a process to start from"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run on the GPU")
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        "triton",
        file,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
