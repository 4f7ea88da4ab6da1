"""Which level a call on a GPU runs, asked of tensors that only say that they are on one."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fwzoo import Falcon1Config, Falcon2Config, Falcon3AConfig, Falcon3Config, FwzooConfig, explain
from fwzoo.kernels import contract, falcon
from fwzoo.kernels.falcon import FALCON
from fwzoo.modeling.decoding import capturable


@pytest.fixture
def on_gpu(monkeypatch: Any) -> None:
    """Every tensor says that it is on a GPU, and Triton is as if it were installed."""
    monkeypatch.setattr(contract, "NO_TRITON", None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def probe(tokens: int, size: int = 64, gradients: bool = False) -> torch.Tensor:
    return torch.empty(1, tokens, 2, size, requires_grad=gradients)


@pytest.mark.parametrize(
    ("tokens", "gradients", "size", "options", "level", "why"),
    [
        (100, True, 64, {"rule": "falcon1"}, "triton", "CUDA"),
        (1, True, 64, {"rule": "falcon2"}, "triton", "CUDA"),
        (100, True, 64, {"rule": "falcon3"}, "triton", "CUDA"),
        (100, False, 64, {"rule": "falcon2", "decay_floor": 1e-6}, "chunk", "decay_floor is 1e-06"),
        (16, False, 64, {"rule": "falcon2", "decay_floor": 1e-6}, "triton", "CUDA"),
        (1, False, 64, {"rule": "falcon3a", "window": 8}, "triton", "CUDA"),
        (100, False, 64, {"rule": "falcon3a", "window": 9}, "chunk", "window is 9"),
        (100, False, 64, {"rule": "falcon1", "window": 9}, "triton", "CUDA"),
        (100, False, 300, {}, "chunk", "K is 300"),
    ],
)
def test_what_auto_takes_on_a_gpu(
    on_gpu: None, tokens: int, gradients: bool, size: int, options: dict[str, Any], level: str, why: str
) -> None:
    q, v = probe(tokens, size, gradients), probe(tokens)
    found = explain(falcon, q, q, v, **options)
    assert found.level == level and why in str(found)
    assert "level='triton' runs when asked for" not in str(found)


def test_what_cannot_run_says_why(on_gpu: None) -> None:
    q = probe(100)
    assert FALCON.resolve("triton", 100, (q, q, q)).args[0] is FALCON.levels["triton"]
    with pytest.raises(ValueError, match="window is 9"):
        FALCON.resolve("triton", 100, (q, q, q), FALCON.limit(False, rule="falcon3", window=9))


@pytest.mark.parametrize(
    ("config", "levels", "captured"),
    [
        (Falcon1Config.tiny(), {"training": "triton", "reading": "triton"}, True),
        (Falcon2Config.tiny(), {"training": "triton", "reading": "triton"}, True),
        (Falcon3Config.tiny(), {"training": "triton", "reading": "triton"}, True),
        (Falcon3AConfig.tiny(window=9), {"training": "chunk", "reading": "chunk"}, False),
        (Falcon1Config.tiny(head_dim=300), {"training": "chunk", "reading": "chunk"}, False),
        (Falcon1Config.tiny(kernel_level="chunk"), {"training": "chunk", "reading": "chunk"}, False),
    ],
    ids=["falcon1", "falcon2", "falcon3", "window 9", "K 300", "chunk"],
)
def test_the_report_and_the_graph_of_a_model_know_its_options(
    on_gpu: None, config: FwzooConfig, levels: dict[str, str], captured: bool
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    assert {row[2] for row in model.kernel_report()} == {levels["training"]}
    with torch.no_grad():
        assert {row[2] for row in model.kernel_report()} == {levels["reading"]}
        assert capturable(model) == captured


@pytest.mark.parametrize(
    ("version", "usable"), [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1", True), ("2.3", False)]
)
def test_an_old_triton_is_named(version: str, usable: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(contract.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    why = contract._no_triton()
    assert (why is None) == usable
    assert why is None or (version in why and "3.6" in why)
