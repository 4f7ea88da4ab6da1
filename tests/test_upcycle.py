"""Upcycling: every shape of source, equal first logits and greedy tokens, a complete report, and training of what is new."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

import fwzoo
from compare import error, floor
from fwzoo import cli
from fwzoo.conversion import freeze_copied, new_modules, upcycle
from fwzoo.conversion.upcycle import Report, hybrid, hybrid_config

module = sys.modules["fwzoo.conversion.upcycle"]

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama-with-biases-tied": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "llama3-rotary": LlamaConfig(
        **SIZES, rope_parameters={**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    ),
    "llama-linear-rotary": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
    ),
    "llama-yarn-wide-heads": LlamaConfig(
        **SIZES, head_dim=16, max_position_embeddings=64,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    ),
    "mistral-full": MistralConfig(**SIZES, sliding_window=None),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES, rms_norm_eps=1e-3),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-3),
    "qwen3-with-biases-tied": Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=True),
}  # fmt: skip
FWPKM = {"memory_key_dim": 8, "memory_value_dim": 8, "memory_chunk_size": 8, "fwpkm_subkeys": 8, "fwpkm_top_k": 3}
PKM = {"memory_key_dim": 8, "pkm_subkeys": 8, "pkm_top_k": 3}
MEMORIES = {**FWPKM, **PKM}
EVERYTHING = "lact,swa+fwpkm@0+pkm@1+fwmlp@2"
TOKENS = torch.randint(2, 384, (2, 40), generator=torch.Generator().manual_seed(0))

every = pytest.mark.parametrize("name", CONFIGS)


def source(name: str, **changes: Any) -> Any:
    """A random model in which biases and norms matter too."""
    torch.manual_seed(0)
    config = type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(p, float("norm" in name), 0.3)
    return model


def upcycled(model: Any, layout: str, **options: Any) -> tuple[Any, Report]:
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return hybrid(model.config, weights, hybrid_config(model.config, layout, **options))


@torch.no_grad()
def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens).logits


# --- the first function ---


@every
def test_first_logits_are_those_of_the_source(name: str) -> None:
    model = source(name)
    window = 9 if name == "mistral" else 40
    for layout in ("swa" if name == "mistral" else "fa", "lact", EVERYTHING):
        options = MEMORIES if layout == EVERYTHING else {}
        made, _ = upcycled(model, layout, window=window, **options)
        assert error(logits(made), logits(model)) < 1e-5, layout


def test_a_window_ends_the_equality_where_it_ends() -> None:
    model = source("llama")
    lact, _ = upcycled(model, "lact", window=9)
    sliding, _ = upcycled(model, "swa", window=9)
    expected = logits(model)
    assert error(logits(lact)[:, :9], expected[:, :9]) < 1e-5
    assert error(logits(lact)[:, 9:], expected[:, 9:]) > 1e-2
    assert error(logits(lact), logits(sliding)) < 1e-5


def test_the_window_of_the_source_is_kept_unless_another_is_given() -> None:
    assert hybrid_config(CONFIGS["mistral"], "swa").attention_window == 9
    assert hybrid_config(CONFIGS["mistral"], "lact").lact_window == 9
    assert hybrid_config(CONFIGS["llama"], "lact").lact_window == 2048
    assert hybrid_config(CONFIGS["mistral"], "swa", window=5).attention_window == 5


@pytest.mark.parametrize("name", ["llama-with-biases-tied", "qwen3"])
def test_heads_repeated_in_the_wrong_order_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = source(name)
    monkeypatch.setattr(
        module, "repeat_heads", lambda x, groups, repeats: torch.cat([x] * repeats)  # 0 1 0 1, not 0 0 1 1
    )  # fmt: skip
    made, _ = upcycled(model, "lact", window=40)
    assert error(logits(made), logits(model)) > 1e-2


@every
def test_cached_greedy_generation_is_that_of_the_source(name: str, tmp_path: Path) -> None:
    model = source(name)
    model.save_pretrained(tmp_path / "source")
    window = 9 if name == "mistral" else 40
    upcycle(tmp_path / "source", tmp_path / "hybrid", EVERYTHING, window=window, **MEMORIES)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = TOKENS[:, :20]
    assert torch.equal(made.generate(prompt, **options), model.generate(prompt, **options))
    prompt, mask = torch.cat([TOKENS[:, :1] * 0, prompt], 1), torch.ones(2, 21, dtype=torch.long)
    mask[:, 0] = 0
    padded = made.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(padded[:, 1:], model.generate(prompt[:, 1:], **options))


# --- the report ---


@every
@pytest.mark.parametrize(
    ("layout", "options"),
    [("swa,falcon3a,lact,gdn+none@1+fwpkm@2", FWPKM), ("la,falcon2,falcon1,lact+pkm@0", PKM)],
    ids=["one", "two"],
)
def test_the_report_accounts_for_every_tensor(name: str, layout: str, options: dict[str, Any]) -> None:
    model = source(name)
    old = model.state_dict()
    made, report = upcycled(model, layout, window=9, **options)
    new = made.state_dict()
    if model.config.tie_word_embeddings:
        assert made.lm_head.weight is made.model.embed_tokens.weight
        del old["lm_head.weight"], new["lm_head.weight"]
    assert {name: tuple(x.shape) for name, x in new.items()} == {n: o.shape for n, o in report.tensors.items()}
    used = {s for origin in report.tensors.values() if not origin.new for s in origin.sources}
    assert used | set(report.dropped) == set(old) and not used & set(report.dropped)
    assert all(x.isfinite().all() for x in new.values())
    for name, origin in report.tensors.items():
        if origin.how == "copied":
            assert torch.equal(new[name], old[origin.sources[0]])
        elif origin.how == "zero":
            assert not new[name].any()
        else:
            assert new[name].any() or name.endswith(("bias", "qk_offset", "b_gate", "b_up", "b_down"))
    kinds = {origin.how for origin in report.tensors.values()}
    assert {"copied", "repeated", "zero", "initialised"} <= kinds


def test_what_a_layer_cannot_hold_is_dropped_with_the_reason() -> None:
    made, report = upcycled(source("qwen3-with-biases-tied"), "fa+falcon1@2+none@1", window=9)
    assert made.config.layout == report.layout == "full_attention*2,falcon1+none@1"
    layer = {name: why for name, why in report.dropped.items() if "layers.2." in name}
    parts = [f"{x}_proj.bias" for x in "kqvo"] + ["q_norm.weight", "k_norm.weight"]
    assert set(layer) == {f"model.layers.2.self_attn.{part}" for part in parts}
    assert set(layer.values()) == {"falcon1 in layer 2 has no such tensor"}
    rest = {name: why for name, why in report.dropped.items() if name not in layer}
    parts = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")] + ["post_attention_layernorm.weight"]
    assert rest == {f"model.layers.1.{part}": "none in layer 1 has no such tensor" for part in parts}


# --- new parts ---


def test_gates_of_a_falcon_begin_in_their_middle() -> None:
    model = source("llama")
    made, _ = upcycled(model, "fa+falcon3a@1", short_conv_size=3)
    mixer = made.model.layers[1].mixer
    beta, ridge = mixer._gates(torch.randn(1, 5, 32))
    assert torch.equal(beta, torch.ones(1, 5, 4)) and torch.equal(
        ridge, torch.full_like(ridge, mixer.config.ridge_scale / 2)
    )
    assert torch.equal(mixer.conv.weight, torch.tensor([0.0, 0.0, 1.0]).expand(64 + 32 + 0, 3))
    assert mixer.config.pairing == "same_step"
    old = model.model.layers[1]
    x = torch.randn(20000, 32)
    values = old.self_attn.v_proj(old.input_layernorm(x)).unflatten(-1, (2, -1))
    size = values.square().mean((0, 1)).sqrt() * module.MEAN_OF_VALUES
    assert error(mixer.norm.weight, size) < 0.05


def test_every_new_part_can_learn() -> None:
    made, report = upcycled(source("llama"), EVERYTHING, window=9, lact_chunk_size=4, **MEMORIES)
    new = {name: p for name, p in made.named_parameters() if report.tensors[name].new}
    made.train()
    for step in range(2):  # what begins at 0 gets a gradient first, and the rest through it
        made(input_ids=TOKENS, labels=TOKENS).loss.backward()
        with torch.no_grad():
            for name, p in new.items():
                if step == 0 and report.tensors[name].how == "zero":
                    assert p.grad.any(), name
                    p.sub_(p.grad)
    without = {name for name, p in new.items() if p.grad is None or not p.grad.any()}
    assert not without


def examples(rows: int = 16) -> list[dict[str, Tensor]]:
    text = torch.arange(24).repeat(rows, 1) * 7 % 300 + torch.arange(rows)[:, None] + 2
    return [{"input_ids": row, "labels": row} for row in text]


def fit(model: Any, folder: Path, steps: int = 6) -> list[float]:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=0.02, logging_steps=1,
        lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def hybrid_folder(tmp_path: Path) -> Path:
    source("qwen2").save_pretrained(tmp_path / "source")
    upcycle(tmp_path / "source", tmp_path / "hybrid", EVERYTHING, window=6, lact_chunk_size=4, **MEMORIES)
    return tmp_path / "hybrid"


def test_trainer_trains_the_new_parts_only(hybrid_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(hybrid_folder)
    trained = freeze_copied(model)
    report = Report.load(hybrid_folder)
    names = {name for name, _ in model.named_parameters()}
    assert set(trained) == {name for name, origin in report.tensors.items() if origin.new and name in names}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = fit(model, tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], before[name]) for name in names - set(trained))
    still = {name for name in trained if torch.equal(after[name], before[name])}
    assert not still


def test_peft_adapts_the_copied_parts_and_trains_the_new_ones(hybrid_folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(hybrid_folder)
    before = logits(base)
    new = new_modules(base)
    assert "model.layers.0.mixer.scale_proj" in new and "model.layers.0.memory.o_proj" in new
    assert not any("feed_forward" in name or name.endswith(("qkv_proj", "mixer.o_proj")) for name in new)
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=new, modules_to_save=new, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    assert torch.equal(logits(model.eval()), before)
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted and not any(name.endswith(tuple(new)) for name in adapted)
    model.train()
    losses = fit(model, tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
    model.eval().save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hybrid_folder), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model)) and error(logits(again), before) > 1e-2


# --- folders ---


def test_the_folder_holds_all_that_belongs_to_the_source(tmp_path: Path) -> None:
    model = source("llama-with-biases-tied").to(torch.bfloat16)
    model.generation_config.update(temperature=0.7, do_sample=True)
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    ByT5Tokenizer().save_pretrained(tmp_path / "source")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    report = upcycle(tmp_path / "source", tmp_path / "hybrid", "fa+lact@1,3", window=8)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", dtype="auto").eval()
    assert made.dtype == torch.bfloat16 and type(made).__module__ == "fwzoo"
    limit = 2 * error(logits(model), logits(source("llama-with-biases-tied"))) + floor(torch.bfloat16)
    assert error(logits(made)[:, :8], logits(model)[:, :8]) < limit
    files = {
        name: (tmp_path / "hybrid" / name).read_bytes() for name in ("generation_config.json", "tokenizer_config.json")
    }
    assert all((tmp_path / "source" / name).read_bytes() == content for name, content in files.items())
    assert made.generation_config.temperature == 0.7
    assert AutoTokenizer.from_pretrained(tmp_path / "hybrid")("a").input_ids == ByT5Tokenizer()("a").input_ids
    assert Report.load(tmp_path / "hybrid") == report
    assert json.loads((tmp_path / "hybrid" / "upcycle.json").read_text())["fwzoo"] == fwzoo.__version__
    card = (tmp_path / "hybrid" / "README.md").read_text()
    assert "Upcycled from" in card and "not trained since" in card


def test_the_seed_decides_what_is_new(tmp_path: Path) -> None:
    model = source("llama")
    config = hybrid_config(model.config, "lact", window=8)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, other = (
        hybrid(model.config, model.state_dict(), config, seed)[0].state_dict() for seed in (0, 0, 1)
    )
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fwzoo", "upcycle", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    capsys.readouterr()  # what the test itself said so far
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source("qwen2").save_pretrained(tmp_path / "source")
    arguments = (tmp_path / "source", tmp_path / "hybrid", "--layout", "fa+lact@1,2+falcon1@3", "--window", 16)
    code, out, err = command(monkeypatch, capsys, *arguments, "--set", "lact_rank=3", "--set", "qk_norm=l2")
    assert code == 0, err
    config = fwzoo.LactConfig.from_pretrained(tmp_path / "hybrid")
    assert (config.lact_rank, config.qk_norm, config.lact_window) == (3, "l2", 16)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [
        "joined",
        "mixer.qkv_proj.weight",
        "1-2",
        "96 × 32",
        "self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight",
    ] in rows
    assert ["copied", "mixer_norm.weight", "0-3", "32", "input_layernorm.weight"] in rows
    assert ["dropped", "self_attn.q_proj.bias", "3", "", "falcon1 has no such tensor"] in rows
    assert "layout: full_attention,lact*2,falcon1" in out
    assert command(monkeypatch, capsys, "--help")[1].count("--layout") == 1


BAD: dict[str, tuple[Any, dict[str, Any], list[str], tuple[str, ...]]] = {
    "another architecture": ("llama", {"model_type": "gpt2"}, [], ("model_type", "'gpt2'", "llama, mistral, qwen2, qwen3")),
    "activation": ("llama", {"hidden_act": "gelu"}, [], ("hidden_act", "'gelu'", "'silu'")),
    "biases of the feed-forward": ("llama", {"mlp_bias": True}, [], ("mlp_bias", "True", "False")),
    "rotary by length": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, [], ("rope_parameters", "'dynamic'", "'llama3'")),
    "part of a head turned": (
        "llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}}, [],
        ("partial_rotary_factor", "0.5", "1.0")),
    "quantised": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, [], ("quantization_config", "gptq")),
    "tensor that config.json does not have": (
        "qwen2", {"model_type": "llama"}, [], ("model.layers.0.self_attn.", "bias", "a llama")),
    "tensor that is missing": ("llama", {"attention_bias": True}, [], ("lacks", "bias", "config.json")),
    "tensor of another shape": ("llama", {"intermediate_size": 64}, [], ("mlp", "[48, 32]", "[64, 32]")),
    "layer that there is not": ("llama", {}, ["--layout", "fa+lact@4"], ("'4'", "a layer from 0 to 3")),
    "more layers than there are": ("llama", {}, ["--layout", "fa*3,lact*2"], ("layout", "names 5 layers", "num_hidden_layers = 4")),
    "unknown mixer": ("llama", {}, ["--layout", "fa+lacct@1"], ("'lacct'", "did you mean 'lact'")),
    "full attention over a window": (
        "mistral", {}, ["--layout", "swa+fa@1"], ("full_attention in layer 1 sees all", "sliding_window = 9", "sliding_attention")),
    "a wider window": ("mistral", {}, ["--window", "10"], ("sees 10 tokens", "at most", "sliding_window = 9")),
    "a wider window for LaCT": ("mistral", {}, ["--set", "lact_window=12"], ("lact in layer 1 sees 12", "sliding_window = 9")),
    "unknown option": ("llama", {}, ["--set", "lact_ranks=4"], ("'lact_ranks'", "did you mean 'lact_rank'")),
    "option of a layer that is not there": ("llama", {}, ["--set", "fwpkm_heads=4"], ("'fwpkm_heads'", "allowed")),
    "option that the source sets": ("llama", {}, ["--set", "hidden_size=64"], ("hidden_size is 64", "source and layout set it")),
    "option with a bad value": ("llama", {}, ["--set", "lact_rank=-1"], ("lact_rank is -1", "at least 0")),
    "setting without a value": ("llama", {}, ["--set", "lact_rank"], ("--set", "'lact_rank'", "NAME=VALUE")),
    "window of nothing": ("llama", {}, ["--window", "0"], ("--window", "'0'", "1 or more")),
    "memory heads that do not divide": ("llama", {}, ["--set", "num_lact_heads=3"], ("num_lact_heads is 3", "= 32")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_in_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name, changes, options, words = BAD[case]
    source(name).save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    options = options if "--layout" in options else ["--layout", "swa+lact@1", *options]
    code, _, err = command(monkeypatch, capsys, path.parent, tmp_path / "hybrid", *options)
    assert code == 2 and err.startswith("fwzoo: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert not (tmp_path / "hybrid").exists()


def test_folders_that_do_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source("llama").save_pretrained(tmp_path / "source")
    for folder, target, words in (
        (tmp_path / "source", tmp_path / "source", ("TARGET", "is not empty")),
        (tmp_path, tmp_path / "new", ("has no config.json",)),
        ("no/such/model/anywhere", tmp_path / "new", ("'no/such/model/anywhere'", "neither a folder nor a model")),
    ):
        code, _, err = command(monkeypatch, capsys, folder, target, "--layout", "lact")
        assert code == 2 and all(word in err for word in words) and err.count("\n") == 1, err
    with pytest.raises(ValueError, match=r"holds no upcycle\.json"):
        freeze_copied(AutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    upcycle(tmp_path / "source", tmp_path / "hybrid", "lact", window=8)
    with pytest.raises(ValueError, match="the report has no"):
        freeze_copied(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), tmp_path / "hybrid")
