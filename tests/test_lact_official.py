"""Public LaCT checkpoints: converted, they compute what an independent small re-statement of the public forward computes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from compare import error
from fwzoo import LactConfig, cli
from fwzoo.conversion.lact_official import convert, fields_from_official, read_weights

PUBLIC: dict[str, Any] = {
    "model_type": "lact_swiglu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attn_heads": 4,
    "num_lact_heads": 2,
    "lact_chunk_size": 5,
    "window_size": 7,
    "w0_w2_low_rank": 3,
    "rope_theta": 1000.0,
    "vocab_size": 48,
    "hidden_ratio": 4,
    "lr_parameterization": "mamba",
    "fuse_norm": True,
    "max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "muon": {"use_muon": True, "attn_qk_norm": True, "no_v_silu": True},
    "prenorm": {"ttt_prenorm": True, "ttt_nope": True, "use_momentum": False, "w0_w2_low_rank": -1, "qkv_bias": True},
    "channels": {"lr_dim": 16, "learnable_ttt_scale": False, "qkv_silu": False, "intermediate_size": 40},
    "wide": {"inter_multi": 2, "tie_word_embeddings": True},
}


def public_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the public names, large enough that every part shows."""
    torch.manual_seed(1)
    width, heads = config["hidden_size"], config["num_lact_heads"]
    size = width // heads
    hidden, rank = size * config.get("inter_multi", 1), config["w0_w2_low_rank"]
    slow = config.get("intermediate_size") or 256
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (48, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (48, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        own: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "mlp_norm.weight": (width,),
            "mlp.gate_proj.weight": (slow, width),
            "mlp.up_proj.weight": (slow, width),
            "mlp.down_proj.weight": (width, slow),
            "attn.qkv.weight": (3 * width, width),
            "attn.o_proj.weight": (width, width),
            "attn.qk_scale": (width, 2),
            "attn.qk_offset": (width, 2),
            "attn.w1": (heads, size, hidden),
            "attn.lr_proj.weight": (3 * heads * config.get("lr_dim", 1), width),
            "attn.lr_proj.bias": (3 * heads * config.get("lr_dim", 1),),
            "attn.ttt_norm.weight": (size,),
        }
        for name in ("w0", "w2"):
            if rank > 0:
                own |= {f"attn.{name}.w_left": (heads, hidden, rank), f"attn.{name}.w_right": (heads, rank, size)}
            else:
                own[f"attn.{name}"] = (heads, hidden, size)
        if config.get("use_momentum", True):
            own |= {"attn.momentum_proj.0.weight": (heads, width), "attn.momentum_proj.0.bias": (heads,)}
        if config.get("learnable_ttt_scale", True):
            own |= {"attn.ttt_scale_proj.weight": (heads, width), "attn.ttt_scale_proj.bias": (heads,)}
        if config.get("attn_qk_norm"):
            own |= {"attn.q_norm.weight": (width,), "attn.k_norm.weight": (width,)}
        if config.get("qkv_bias"):
            own["attn.qkv.bias"] = (3 * width,)
        shapes |= {layer + name: shape for name, shape in own.items()}
    weights = {name: torch.randn(shape) / max(shape[-1], 9) ** 0.5 for name, shape in shapes.items()}
    for name, x in weights.items():
        if "norm" in name or "qk_scale" in name:
            x.add_(1)
        if name.endswith("lr_proj.bias"):
            x.add_(5)  # updates that change the fast weights
    if config.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    return weights


# --- the public forward, stated again: full sequences, one loop over chunks, float64 ---


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, heads: int, theta: float) -> Tensor:
    """Rotary embedding of `[T, D]` cut into heads, as complex numbers."""
    x = x.view(x.shape[0], heads, -1)
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None].double() / theta ** (torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag], -1).flatten(1)


def newton_schulz(g: Tensor) -> Tensor:
    flip = g.shape[0] > g.shape[1]
    x = g.T if flip else g
    x = x / (x.norm() + 1e-7)
    for a, b, c in (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if flip else x


def public_layer(p: dict[str, Tensor], c: dict[str, Any], h: Tensor) -> Tensor:
    """One public layer over one sequence `[T, D]`; autograd gives the direction of every update."""
    length, heads = h.shape[0], c["num_lact_heads"]
    q, k, v = (h @ p["qkv.weight"].T + p.get("qkv.bias", 0)).chunk(3, -1)
    if c.get("attn_qk_norm"):
        q, k = rms(q, p["q_norm.weight"], 1e-5), rms(k, p["k_norm.weight"], 1e-5)
    attention_heads = c["num_attn_heads"]
    cut = (
        x.view(length, attention_heads, -1)
        for x in (turn(q, attention_heads, c["rope_theta"]), turn(k, attention_heads, c["rope_theta"]), v)
    )
    window_q, window_k, window_v = cut
    scores = torch.einsum("thf,shf->hts", window_q, window_k) / math.sqrt(window_q.shape[-1])
    age = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((age < 0) | (age >= c["window_size"]), -torch.inf)
    attended = torch.einsum("hts,shf->thf", scores.softmax(-1), window_v).flatten(1)

    def prepared(x: Tensor, i: int) -> Tensor:
        x = x * p["qk_scale"][:, i] + p["qk_offset"][:, i]
        x = F.silu(x) if c.get("qkv_silu", True) else x
        x = x.view(length, heads, -1)
        x = (x / (x.norm(dim=-1, keepdim=True) + 1e-5)).flatten(1)
        x = x if c.get("ttt_nope") else turn(x, attention_heads, c["rope_theta"])
        return x.view(length, heads, -1)

    fast_q, fast_k = prepared(q, 0), prepared(k, 1)
    fast_v = (F.silu(v) if c.get("qkv_silu", True) and not c.get("no_v_silu") else v).view(length, heads, -1)
    rates = F.softplus(h @ p["lr_proj.weight"].T + p["lr_proj.bias"] + math.log(math.expm1(0.001)))
    rates = rates.view(length, heads, 3, -1)
    momentum = None
    if c.get("use_momentum", True):
        momentum = (h @ p["momentum_proj.0.weight"].T + p["momentum_proj.0.bias"]).sigmoid()
    outputs = []
    for head in range(heads):
        start = [initial(p, name)[head] for name in ("w0", "w1", "w2")]
        outputs.append(
            fast_swiglu(
                start,
                fast_q[:, head],
                fast_k[:, head],
                fast_v[:, head],
                rates[:, head],
                None if momentum is None else momentum[:, head],
                c,
            )
        )
    remembered = rms(torch.stack(outputs, 1), p["ttt_norm.weight"], 1e-5)
    if c.get("learnable_ttt_scale", True):
        remembered = remembered * F.silu(h @ p["ttt_scale_proj.weight"].T + p["ttt_scale_proj.bias"])[..., None]
    return (attended + remembered.flatten(1)) @ p["o_proj.weight"].T


def initial(p: dict[str, Tensor], name: str) -> Tensor:
    if name in p:
        return p[name]
    product = p[f"{name}.w_left"] @ p[f"{name}.w_right"]
    return product + 0.5 * torch.eye(*product.shape[1:], dtype=product.dtype)


def fast_swiglu(
    start: list[Tensor], q: Tensor, k: Tensor, v: Tensor, rates: Tensor, momentum: Tensor | None, c: dict[str, Any]
) -> Tensor:
    norms = [w.norm(dim=1, keepdim=True) for w in start]
    weights, sums, last, outputs = start, start, [torch.zeros_like(w) for w in start], []
    for begin in range(0, q.shape[0], c["lact_chunk_size"]):
        part = slice(begin, begin + c["lact_chunk_size"])
        w0, w1, w2 = weights
        outputs.append((F.silu(q[part] @ w0.T) * (q[part] @ w2.T)) @ w1.T)
        if part.stop > q.shape[0]:
            break
        keys, values = k[part], v[part]
        gate, up, back = keys @ w0.T, keys @ w2.T, values @ w1
        gate_slope = torch.autograd.functional.jvp(F.silu, gate, torch.ones_like(gate))[1]
        steps = [
            torch.einsum("tm,td->md", gate_slope * back * up, rates[part, 0] * keys),
            torch.einsum("td,tm->dm", values, rates[part, 1] * F.silu(gate) * up),
            torch.einsum("tm,td->md", back * F.silu(gate), rates[part, 2] * keys),
        ]
        if momentum is not None:
            steps = last = [g + momentum[part].mean() * old for g, old in zip(steps, last, strict=True)]
        if c.get("use_muon"):
            steps = [newton_schulz(g) for g in steps]
        base = sums if c.get("ttt_prenorm") else weights
        sums = [w + g for w, g in zip(base, steps, strict=True)]
        weights = [w / (w.norm(dim=1, keepdim=True) + 1e-5) * n for w, n in zip(sums, norms, strict=True)]
    return torch.cat(outputs)


def public_forward(weights: dict[str, Tensor], c: dict[str, Any], tokens: Tensor) -> Tensor:
    w = {name: x.double() for name, x in weights.items()}
    h = w["model.embeddings.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        p = {
            name.removeprefix(f"model.layers.{i}."): x for name, x in w.items() if name.startswith(f"model.layers.{i}.")
        }
        attention = {name.removeprefix("attn."): x for name, x in p.items() if name.startswith("attn.")}
        h = h + public_layer(attention, c, rms(h, p["attn_norm.weight"], 1e-6))
        x = rms(h, p["mlp_norm.weight"], 1e-6)
        h = (
            h
            + (F.silu(x @ p["mlp.gate_proj.weight"].T) * (x @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        )
    return rms(h, w["model.norm.weight"], 1e-6) @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


# --- the tests ---


def write_public(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], how: str = "safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if how == "safetensors":
        save_file(weights, folder / "model.safetensors")
    elif how == "torch":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        names = sorted(weights)
        shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for shard, own in shards.items():
            save_file({name: weights[name] for name in own}, folder / shard)
        index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_checkpoint_computes_the_public_forward(variant: str, tmp_path: Path) -> None:
    config = {**PUBLIC, **VARIANTS[variant]}
    weights = public_weights(config)
    source = write_public(tmp_path / "public", config, weights)
    report = convert(source, tmp_path / "ours")
    assert sorted(mapped.source for mapped in report) == sorted(weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").double()
    assert sorted(mapped.target for mapped in report) == sorted(dict(model.named_parameters()))
    tokens = torch.randint(0, 48, (2, 23))
    with torch.no_grad():
        logits = model(tokens).logits
    expected = torch.stack([public_forward(weights, config, row) for row in tokens])
    assert error(logits, expected) < 1e-9
    # and the fast weights matter: without the updates the numbers are others
    frozen = torch.stack([public_forward(weights, {**config, "lact_chunk_size": 1000}, row) for row in tokens])
    assert error(frozen, expected) > 1e-2

    convert(tmp_path / "ours", tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert set(again) == set(weights) and all(torch.equal(again[name], x) for name, x in weights.items())
    public = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields_from_official(public) == fields_from_official(config)
    assert {name: public[name] for name in VARIANTS[variant]} == VARIANTS[variant]


@pytest.mark.parametrize("how", ["torch", "shards"])
def test_other_files_hold_the_same(how: str, tmp_path: Path) -> None:
    weights = public_weights(PUBLIC)
    convert(write_public(tmp_path / "a", PUBLIC, weights), tmp_path / "ours-a")
    convert(write_public(tmp_path / "b", PUBLIC, weights, how), tmp_path / "ours-b")
    a, b = (read_weights(tmp_path / name) for name in ("ours-a", "ours-b"))
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    weights = {name: x.bfloat16() for name, x in public_weights(PUBLIC).items()}
    convert(write_public(tmp_path / "public", PUBLIC, weights), tmp_path / "ours")
    assert {x.dtype for x in read_weights(tmp_path / "ours").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").dtype == torch.bfloat16
    convert(tmp_path / "ours", tmp_path / "back")
    assert all(torch.equal(x, weights[name]) for name, x in read_weights(tmp_path / "back").items())


def test_the_published_configuration_is_our_preset() -> None:
    published = {
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "fuse_cross_entropy": True, "fuse_norm": True,
        "hidden_act": "swish", "hidden_size": 1536, "num_attn_heads": 24, "num_hidden_layers": 24, "initializer_range": 0.02,
        "max_position_embeddings": 32768, "model_type": "lact_swiglu", "num_lact_heads": 4, "inter_multi": 1, "qkv_bias": False,
        "attn_qk_norm": False, "qkv_silu": True, "lact_chunk_size": 2048, "window_size": 2048, "use_muon": False, "lr_dim": 1,
        "lr_parameterization": "mamba", "learnable_ttt_scale": True, "w0_w2_low_rank": 32, "fw_init_gain": 0.5,
        "use_momentum": True, "rope_theta": 1000000, "norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True,
        "vocab_size": 32000,
    }  # fmt: skip
    assert LactConfig(**fields_from_official(published)).to_dict() == LactConfig.preset("760m").to_dict()
    wide = {**published, "hidden_size": 3072}
    assert LactConfig(**fields_from_official(wide)).to_dict() == LactConfig.preset("3b").to_dict()


def renamed(old: str, new: str) -> Any:
    return lambda config, weights: (config, {name.replace(old, new): x for name, x in weights.items()})


def without(name: str) -> Any:
    return lambda config, weights: (config, {n: x for n, x in weights.items() if not n.endswith(name)})


def configured(**fields: Any) -> Any:
    return lambda config, weights: ({**config, **fields}, weights)


# (what is changed, what the message says)
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "an unknown tensor": (renamed("ttt_norm", "ttt_nrom"), ["attn.ttt_nrom.weight", "did you mean", "ttt_norm"]),
    "a missing tensor": (without("layers.1.attn.w1"), ["lacks model.layers.1.attn.w1"]),
    "a tensor the config does not know": (configured(use_momentum=False), ["momentum_proj.0", "without it"]),
    "another shape": (configured(w0_w2_low_rank=4), ["w0.w_left has shape [2, 16, 3]", "[2, 16, 4]"]),
    "another width of the MLP": (
        configured(intermediate_size=40),
        ["mlp.down_proj.weight has shape [32, 256]", "[32, 40]"],
    ),
    "an unknown key": (configured(window_sizes=3), ["'window_sizes'", "did you mean 'window_size'"]),
    "another loss": (configured(ttt_loss_type="l2"), ["ttt_loss_type is 'l2'", "'dot_product'"]),
    "another activation": (configured(hidden_act="gelu"), ["hidden_act is 'gelu'", "'swish'"]),
    "rates of another size": (configured(lr_dim=3), ["lr_dim is 3", "16"]),
    "no window": (configured(window_size=None), ["window", "None", "at least 1"]),
    "heads that do not divide": (configured(num_attn_heads=5), ["num_attention_heads is 5", "divide"]),
    "tied weights that differ": (configured(tie_word_embeddings=True), ["lm_head.weight differs"]),
    "another model": (configured(model_type="llama"), ["model_type is 'llama'", "'lact_swiglu'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    change, parts = REFUSED[case]
    config, weights = change(PUBLIC, public_weights(PUBLIC))
    source = write_public(tmp_path / "public", config, weights)
    with pytest.raises((ValueError, TypeError)) as caught:
        convert(source, tmp_path / "ours")
    message = str(caught.value)
    assert all(part in message for part in parts) and "\n" not in message, message
    assert not (tmp_path / "ours").exists()


def test_a_hybrid_has_no_public_layout(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LactConfig.tiny(mixers=["lact", "falcon1"])).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="mixers holds 'falcon1'"):
        convert(tmp_path / "ours", tmp_path / "public")


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert(tmp_path, tmp_path / "x")
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC))
    with pytest.raises(ValueError, match="holds no weights"):
        convert(tmp_path, tmp_path / "x")
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "pytorch_model.bin")  # more than tensors
    with pytest.raises(ValueError, match=r"pytorch_model\.bin' cannot be read"):
        convert(tmp_path, tmp_path / "x")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors' cannot be read"):
        convert(tmp_path, tmp_path / "x")


def test_the_command_reports_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    weights = public_weights(PUBLIC)
    source = write_public(tmp_path / "public", PUBLIC, weights)
    ByT5Tokenizer().save_pretrained(source)

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fwzoo", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    code, out, _ = run("lact-official", source, tmp_path / "ours")
    lines = out.strip().split("\n")
    assert code == 0 and lines[-1].endswith(f"{len(weights)} tensors")
    assert "model.layers.1.attn.qk_scale -> model.layers.1.mixer.qk_scale [2, 32]" in lines
    assert {line.split(" -> ")[0] for line in lines[:-1]} == set(weights)
    assert (tmp_path / "ours" / "tokenizer_config.json").is_file()
    code, _, err = run("lact-oficial", source, tmp_path / "x")
    assert code == 2 and "lact-official" in err and err.count("\n") == 1
    code, _, err = run("lact-official", source, tmp_path / "ours")
    assert code == 2 and "not empty" in err and err.count("\n") == 1
    code, _, err = run("lact-official", tmp_path / "nothing", tmp_path / "x")
    assert code == 2 and "config.json" in err and err.count("\n") == 1
