"""Quantised Linear layers, through transformers' own quantisation by bitsandbytes: every matrix, and nothing but matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from compare import error
from rows import ROWS, Row

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed, or does not run on this machine"
)

SOME = [row for row in ROWS if row.name in (row.architecture, "every-mixer")]
TOKENS = torch.randint(2, 384, (2, 40), generator=torch.Generator().manual_seed(0))
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
EIGHT = {"load_in_8bit": True}


def left_out(model: nn.Module) -> list[str]:
    """The head, and matrices with fewer than 32 rows: gates, on which some processors' 4-bit kernels fail."""
    return ["lm_head", *(name for name, matrix in matrices(model).items() if matrix.out_features < 32)]


def save(row: Row, folder: Path) -> Any:
    """A model whose other matrices have sizes that those kernels take: multiples of 32 rows and 64 columns."""
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    if "memory_value_dim" in row.config().to_dict():
        sizes |= {"memory_key_dim": 64, "memory_value_dim": 64}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(row.config(**sizes)).eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32, **options).eval()


def matrices(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("row", SOME, ids=lambda row: row.name)
def test_four_bits_reach_every_matrix_and_change_nothing_else(row: Row, tmp_path: Path) -> None:
    model = save(row, tmp_path)
    config = BitsAndBytesConfig(**FOUR, llm_int8_skip_modules=left_out(model))
    quantised = load(tmp_path, quantization_config=config)
    before, after = model(TOKENS).logits, quantised(TOKENS).logits
    found = matrices(quantised)
    assert {name for name, x in found.items() if not isinstance(x, bitsandbytes.nn.Linear4bit)} == {*left_out(model)}
    assert found.keys() == matrices(model).keys()
    for name in found.keys() - {*left_out(model)}:
        weight = found[name].weight
        exact = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        matrices(model)[name].weight.data.copy_(exact)
    assert error(after, model(TOKENS).logits) < 1e-4 < error(after, before)
    assert quantised.generate(TOKENS, max_new_tokens=8, do_sample=False).shape == (2, 48)


@pytest.mark.parametrize("options", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_saved_and_loaded_and_tuned_with_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    plain = save(ROWS[5], tmp_path)
    config = BitsAndBytesConfig(**options, llm_int8_skip_modules=left_out(plain) if options is FOUR else None)
    quantised = load(tmp_path, quantization_config=config)
    expected = quantised(TOKENS).logits
    assert 1e-4 < error(expected, plain(TOKENS).logits) < 0.3
    quantised.save_pretrained(tmp_path / "quantised")
    assert torch.equal(load(tmp_path / "quantised")(TOKENS).logits, expected)
    count = len(matrices(quantised)) - 1
    tuned = get_peft_model(quantised, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    tuned(input_ids=TOKENS, labels=TOKENS).loss.backward()
    adapters = [module for module in tuned.modules() if isinstance(module, LoraLayer)]
    assert len(adapters) == count
    assert all(adapter.lora_B["default"].weight.grad.abs().max() > 0 for adapter in adapters)
