"""Whole models on a GPU: torch.compile gives what eager gives, without graph breaks, and new lengths compile no kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model import ids
from torch import Tensor
from transformers import AutoModelForCausalLM

from compare import error
from fwzoo import FwzooConfig

pytestmark = pytest.mark.gpu
LAYOUTS = ("falcon1,falcon1a,falcon2a", "falcon3a,gdn,la", "falcon3,falcon2")
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}


def made(layout: str) -> Any:
    torch.manual_seed(0)
    config = FwzooConfig.from_layout(layout, **SIZES, num_hidden_layers=layout.count(",") + 1)
    return AutoModelForCausalLM.from_config(config).cuda().train()


def gradients(model: Any, run: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients in bf16 autocast."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad.clone() for name, x in model.named_parameters()}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_eager(layout: str) -> None:
    model, tokens = made(layout), ids(2, 100).cuda() % 64
    eager = gradients(model, model, tokens)
    compiled = gradients(model, torch.compile(model, fullgraph=True), tokens)
    exact = gradients(model.float(), lambda **x: _in_float32(model, x), tokens)
    for name, x in exact.items():
        assert error(compiled[name], x) <= 2 * error(eager[name], x) + 0.02, name


def _in_float32(model: Any, arguments: dict[str, Any]) -> Any:
    with torch.autocast("cuda", enabled=False):
        return model(**arguments)


def test_twenty_new_lengths_compile_no_kernel() -> None:
    from triton import knobs

    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda **about: compiled.append(about["fn"].name)
    try:
        for layout in LAYOUTS:
            model = made(layout)
            for tokens in (300, 400, *range(401, 800, 20)):
                if tokens == 401:
                    compiled.clear()
                gradients(model, model, ids(2, tokens).cuda() % 64)
            assert not compiled, compiled
    finally:
        knobs.runtime.jit_cache_hook = None
