"""Shared test set-up."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fwzoo.kernels.contract import INTERPRETING

settings.register_profile("fwzoo", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fwzoo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this process cannot run: `gpu` needs a CUDA device, `triton` one or the interpreter."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("triton") and not INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="run by test_triton_interpreter.py in a process of its own"))


@pytest.fixture(autouse=True)
def gpu_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves its process with a CUDA error (or in a broken capture) ends the process, not the tests after it."""
    yield
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.manual_seed(0)
    except RuntimeError as error:
        message = f"{request.node.nodeid} left the GPU in an error: {error}"
        if hasattr(request.config, "workerinput"):  # pytest-xdist names the test and starts another process
            os.write(2, f"{message}\n".encode())
            os._exit(1)
        pytest.exit(message, returncode=1)


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """One seed, deterministic algorithms, and `torch.empty` filled with NaN, so that a row nobody wrote shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
