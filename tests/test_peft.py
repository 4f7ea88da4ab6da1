"""LoRA through PEFT reaches every matrix of every architecture, and nothing it does is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import Trainer, TrainingArguments

import fwzoo
from compare import error, floor
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
TOKENS = torch.randint(2, 384, (2, 40), generator=torch.Generator().manual_seed(0))


def adapted(row: Row, seed: int = 0, **options: Any) -> PeftModel:
    """A row's model with rank-2 adapters on all linear layers, initially without effect."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return get_peft_model(row.model(), config).eval()


def disturb(model: PeftModel, adapter: str = "default", seed: int = 0) -> None:
    """Give every adapter an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            weight = layer.lora_B[adapter].weight
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


@rows
def test_every_matrix_is_reached_and_every_adapter_changes_the_output(row: Row) -> None:
    plain = row.model()
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    model = adapted(row)
    layers = lora_layers(model)
    assert {name.removeprefix("base_model.model.") for name in layers} == linear
    before, generator = logits(model), torch.Generator().manual_seed(0)
    assert torch.equal(before, logits(plain))
    for name, layer in layers.items():
        weight = layer.lora_B["default"].weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator))
            assert error(logits(model), before) > 10 * floor(torch.float32), f"the adapter on {name} changes nothing"
            weight.zero_()


def bare_parameters(model: nn.Module) -> dict[str, str]:
    """Last part of the name to asks for, and the class to be named in an answer, of what LoRA leaves out: not in a linear
    layer, norm or embedding. Filters of convolutions and LaCT's initial fast weights are modules; others are parameters of
    a mixer, and the initial fast weights of memories are buffers.
    """
    owners, found = dict(model.named_modules()), {}
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        path, _, last = name.rpartition(".")
        if not isinstance(owners[path], (nn.Linear, nn.RMSNorm, nn.Embedding)):
            leaf = not list(owners[path].children())
            found[path.rpartition(".")[2] if leaf else last] = type(owners[path]).__name__ if leaf else last
    return found


@rows
def test_what_is_no_matrix_is_refused_by_name(row: Row) -> None:
    for name, named in bare_parameters(row.model()).items():
        with pytest.raises(ValueError, match=named):
            get_peft_model(row.model(), LoraConfig(target_modules=[name]))


@rows
def test_initial_fast_weights_and_filters_train_as_modules_to_save(row: Row, tmp_path: Path) -> None:
    modules = [name for name, named in bare_parameters(row.model()).items() if name != named]
    if not modules:
        return
    model = adapted(row, modules_to_save=modules)
    before = logits(model)
    trained = {n: p for n, p in model.named_parameters() if "modules_to_save" in n}
    assert all(any(f".{name}." in n for n in trained) for name in modules)
    assert all(p.requires_grad for p in trained.values())
    with torch.no_grad():
        for p in trained.values():
            p.mul_(1.5)
    changed = logits(model)
    assert error(changed, before) > 1e-4
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(row.model(), tmp_path).eval()), changed)


@rows
def test_merged_equals_unmerged(row: Row) -> None:
    model = adapted(row)
    disturb(model)
    before, plain = logits(model), logits(row.model())
    assert error(before, plain) > 1e-2
    merged = model.merge_and_unload()
    assert not lora_layers(merged) and error(logits(merged), before) < 1e-4


@rows
def test_adapters_are_saved_loaded_and_stacked(row: Row, tmp_path: Path) -> None:
    expected = {}
    for number, name in enumerate(("first", "second")):
        model = adapted(row, seed=number)
        disturb(model, seed=number)
        expected[name] = logits(model)
        model.save_pretrained(tmp_path / name)
    assert error(expected["first"], expected["second"]) > 1e-2
    model = PeftModel.from_pretrained(row.model(), tmp_path / "first", adapter_name="first").eval()
    assert torch.equal(logits(model), expected["first"])
    model.load_adapter(tmp_path / "second", "second")
    model.set_adapter("second")
    assert torch.equal(logits(model), expected["second"])
    model.base_model.set_adapter(["first", "second"])
    both = logits(model)
    assert min(error(both, one) for one in expected.values()) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(row.model()))
    model.merge_adapter(["first", "second"])
    assert error(logits(model), both) < 1e-4


@rows
def test_generation_with_an_adapter_uses_the_cache_rightly(row: Row) -> None:
    model = adapted(row)
    disturb(model)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(input_ids=TOKENS, **options)
    assert torch.equal(cached, model.generate(input_ids=TOKENS, use_cache=False, **options))
    assert not torch.equal(cached, row.model().generate(TOKENS, **options))


def test_a_memory_belongs_to_the_model_with_its_adapter(tmp_path: Path) -> None:
    model = adapted(ROWS[0])
    disturb(model)
    cache = fwzoo.FastWeightCache(model.config)
    with torch.no_grad():
        model(input_ids=TOKENS, past_key_values=cache, use_cache=True)
    cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fingerprint"):
        fwzoo.FastWeightCache.from_pretrained(tmp_path, ROWS[0].model())
    assert fwzoo.FastWeightCache.from_pretrained(tmp_path, model).nbytes == cache.nbytes


def train(
    row: Row, folder: Path, steps: int, checkpointing: bool = False, resume: bool = False
) -> tuple[Any, list[float]]:
    """Fine-tune adapters for `steps` steps of four planned; returns the model and the losses."""
    model = adapted(row).train()
    data = [
        {"input_ids": row_, "labels": row_}
        for row_ in torch.randint(2, 384, (8, 24), generator=torch.Generator().manual_seed(1))
    ]
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=0.05, save_steps=2, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    if steps < 4:
        trainer.args.max_steps = steps
    trainer.train(resume_from_checkpoint=resume)
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.name in ("falcon3", "lact", "falcon-with-every-memory")],
    ids=lambda row: row.name,
)
def test_training_adapters_with_checkpointing_and_resuming(row: Row, tmp_path: Path) -> None:
    whole, losses = train(row, tmp_path / "whole", 4)
    assert all(layer.lora_B["default"].weight.abs().max() > 0.01 for layer in lora_layers(whole).values())
    frozen = dict(row.model().named_parameters())
    trained = {n.removeprefix("base_model.model.").replace(".base_layer", ""): p for n, p in whole.named_parameters()}
    assert all(torch.equal(trained[name], p) for name, p in frozen.items())
    _, recomputed = train(row, tmp_path / "recomputed", 4, checkpointing=True)
    assert recomputed == pytest.approx(losses, abs=1e-4)
    train(row, tmp_path / "part", 2)
    resumed, rest = train(row, tmp_path / "part", 4, resume=True)
    assert rest == losses
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name
