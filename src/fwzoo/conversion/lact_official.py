"""LaCT checkpoints of the public code, to ours and back: configuration, names, and the report of every tensor.

Source: the language-model code of "Test-Time Training Done Right" (2025), model type `lact_swiglu`.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .. import registry
from ..configuration.lact import LactConfig

PUBLIC_TYPE = "lact_swiglu"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")

# --- configuration ---

# public name: (our name, the public class's default)
FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 2048),
    "num_hidden_layers": ("num_hidden_layers", 24),
    "num_attn_heads": ("num_attention_heads", 32),
    "num_lact_heads": ("num_lact_heads", 4),
    "inter_multi": ("lact_expansion", 1),
    "qkv_bias": ("lact_qkv_bias", False),
    "attn_qk_norm": ("lact_qk_norm", False),
    "lact_chunk_size": ("lact_chunk_size", 2048),
    "window_size": ("lact_window", 2048),
    "use_muon": ("lact_muon", False),
    "qkv_silu": ("lact_qkv_silu", True),
    "learnable_ttt_scale": ("lact_output_scale", True),
    "use_momentum": ("lact_momentum", True),
    "ttt_prenorm": ("lact_prenorm", False),
    "ttt_nope": ("lact_nope", False),
    "fw_init_gain": ("lact_init_gain", 0.5),
    "rope_theta": ("lact_rotary_base", 10000.0),
    "initializer_range": ("initializer_range", 0.006),
    "norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "use_cache": ("use_cache", True),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", None),
}
# public name: the values that mean what ours computes
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": (PUBLIC_TYPE,),
    "hidden_act": ("swish", "silu"),
    "lr_parameterization": ("mamba",),
    "ttt_loss_type": ("dot_product",),
    "elementwise_affine": (True, None),
    "attention_bias": (False,),
}
DERIVED = {"lr_dim": 1, "no_v_silu": False, "w0_w2_low_rank": -1, "hidden_ratio": 4, "intermediate_size": None}
# how the public code computes, or what transformers writes: no part of the function
IGNORED = frozenset(
    [
        "fuse_norm",
        "last_layer_fuse_norm",
        "fuse_swiglu",
        "fuse_cross_entropy",
        "use_fused_kernel",
        "fp32_states",
        "max_position_embeddings",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "is_encoder_decoder",
        "problem_type",
    ]
)


def fields_from_official(public: Mapping[str, Any]) -> dict[str, Any]:
    """Our configuration fields for a public config.json; what it leaves out has the public class's default.

    Raises:
        ValueError: a key is unknown, or a value means something that ours does not compute.
    """
    known = {*FIELDS, *FIXED, *DERIVED, *IGNORED}
    for name, value in public.items():
        if name not in known:
            raise ValueError(registry.unknown("a key of config.json", name, known - IGNORED))
        if name in FIXED and value not in FIXED[name]:
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, FIXED[name]))}")
    fields = {ours: public.get(name, default) for name, (ours, default) in FIELDS.items()}
    derived = {**DERIVED, **{name: public[name] for name in DERIVED if name in public}}
    width, size = fields["hidden_size"], fields["hidden_size"] // fields["num_lact_heads"]
    if derived["lr_dim"] not in (1, size):
        raise ValueError(f"lr_dim is {derived['lr_dim']!r}; it must be 1 or hidden_size / num_lact_heads = {size}")
    ratio = 4 if derived["hidden_ratio"] is None else derived["hidden_ratio"]
    return {
        **fields,
        "lact_rate_per_channel": derived["lr_dim"] != 1,
        "lact_v_silu": not derived["no_v_silu"],
        "lact_rank": max(derived["w0_w2_low_rank"], 0),
        "intermediate_size": derived["intermediate_size"] or -(-int(width * ratio * 2 / 3) // 256) * 256,
    }


def fields_to_official(config: Any) -> dict[str, Any]:
    """The public config.json for one of our configurations.

    Raises:
        ValueError: a layer is not LaCT with a SwiGLU feed-forward, which is all the public code knows.
    """
    for name, only in (("mixers", "lact"), ("feed_forwards", "mlp")):
        if other := set(getattr(config, name)) - {only}:
            raise ValueError(f"{name} holds {sorted(other)[0]!r}; the public layout has {only!r} in every layer")
    only_ours = {
        "head_dim": config.hidden_size // config.num_attention_heads,
        "lact_qk_norm_per_head": False,
        "lact_output_bias": False,
        "lact_rotary_scaling": None,
    }
    for name, value in only_ours.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {getattr(config, name)!r}; the public layout has {value!r} only")
    return {
        "architectures": ["LaCTForCausalLM"],
        **{name: values[0] for name, values in FIXED.items()},
        **{name: getattr(config, ours) for name, (ours, _) in FIELDS.items()},
        "lr_dim": config.hidden_size // config.num_lact_heads if config.lact_rate_per_channel else 1,
        "no_v_silu": not config.lact_v_silu,
        "w0_w2_low_rank": config.lact_rank or -1,
        "intermediate_size": config.intermediate_size,
    }


# --- tensors ---

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OUTER = {"model.embeddings.weight": "model.embed_tokens.weight"} | {
    name: name for name in ("model.norm.weight", "lm_head.weight")
}
INNER = {
    "attn_norm.weight": "mixer_norm.weight",
    "mlp_norm.weight": "feed_forward_norm.weight",
    **{f"mlp.{name}_proj.weight": f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")},
    "attn.qk_scale": "mixer.qk_scale",
    "attn.qk_offset": "mixer.qk_offset",
    **{f"attn.{name}.weight": f"mixer.{name}.weight" for name in ("q_norm", "k_norm", "o_proj")},
    "attn.ttt_norm.weight": "mixer.memory_norm.weight",
    **{
        f"attn.{public}.{part}": f"mixer.{ours}.{part}"
        for public, ours in (
            ("qkv", "qkv_proj"),
            ("lr_proj", "rate_proj"),
            ("momentum_proj.0", "momentum_proj"),
            ("ttt_scale_proj", "scale_proj"),
        )
        for part in ("weight", "bias")
    },
    **{f"attn.{name}": f"mixer.{name}.weight" for name in ("w0", "w1", "w2")},
    **{f"attn.{name}.w_{side}": f"mixer.{name}.{side}" for name in ("w0", "w2") for side in ("left", "right")},
}
TRANSPOSED = ("qk_scale", "qk_offset")  # public [D, 2], ours [2, D]


@dataclass(frozen=True)
class Mapped:
    """One tensor of the report: its two names and its shape at the target."""

    source: str
    target: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {list(self.shape)}"


def weights_from_official(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Mapped]]:
    """Tensors of a public checkpoint under our names, and the report. Raises ValueError for an unknown name."""
    return _rename(weights, OUTER, INNER)


def weights_to_official(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Mapped]]:
    """Tensors of one of our checkpoints under the public names, and the report. Raises ValueError for an unknown name."""
    return _rename(weights, *({ours: public for public, ours in table.items()} for table in (OUTER, INNER)))


def _rename(
    weights: Mapping[str, Tensor], outer: Mapping[str, str], inner: Mapping[str, str]
) -> tuple[dict[str, Tensor], list[Mapped]]:
    renamed, report = {}, []
    for name, x in weights.items():
        layer = LAYER.fullmatch(name)
        short, table = (layer[2], inner) if layer else (name, outer)
        if short not in table:
            raise ValueError(registry.unknown("a tensor of the checkpoint", name, _spelled(outer, inner, layer)))
        target = f"model.layers.{layer[1]}.{table[short]}" if layer else table[short]
        renamed[target] = x.T.contiguous() if name.endswith(TRANSPOSED) else x
        report.append(Mapped(name, target, tuple(renamed[target].shape)))
    return renamed, report


def _spelled(outer: Mapping[str, str], inner: Mapping[str, str], layer: re.Match[str] | None) -> list[str]:
    return [*outer, *(f"model.layers.{layer[1] if layer else 'i'}.{name}" for name in inner)]


# --- folders ---


def convert(source: Path, target: Path) -> list[Mapped]:
    """Convert the checkpoint in folder `source` into folder `target`: public to ours, or ours to public.

    Returns: the report, a line for every tensor.

    Raises:
        ValueError: the folder holds no LaCT checkpoint, a key is unknown, missing or of another shape.
    """
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{str(source)!r} has no config.json; it must be the folder of a LaCT checkpoint")
    fields = json.loads(path.read_text(encoding="utf-8"))
    model_type = fields.get("model_type")
    if model_type == PUBLIC_TYPE:
        report = _to_ours(fields, read_weights(source), target)
    elif model_type == LactConfig.model_type:
        report = _to_public(source, target)
    else:
        raise ValueError(
            f"model_type is {model_type!r}; allowed: {PUBLIC_TYPE!r} (public, becomes ours) and "
            f"{LactConfig.model_type!r} (ours, becomes public)"
        )
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, target / file.name)
    return report


def _to_ours(fields: Mapping[str, Any], weights: dict[str, Tensor], target: Path) -> list[Mapped]:
    config = LactConfig(**fields_from_official(fields))
    renamed, report = weights_from_official(weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_tensors(renamed, model, {mapped.target: mapped.source for mapped in report})
    if config.tie_word_embeddings:
        renamed.pop("lm_head.weight", None)
    model.load_state_dict(renamed, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    return report


def _to_public(source: Path, target: Path) -> list[Mapped]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    public = fields_to_official(model.config)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    renamed, report = weights_to_official(weights)
    target.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(renamed, target)
    (target / "config.json").write_text(json.dumps(public, indent=2) + "\n", encoding="utf-8")
    return report


def _check_tensors(weights: Mapping[str, Tensor], model: Any, public: Mapping[str, str]) -> None:
    """Raise unless the tensors are exactly the model's; the message has the public names."""
    expected = model.state_dict()
    tied = model.config.tie_word_embeddings
    if (
        tied
        and "lm_head.weight" in weights
        and not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    ):
        raise ValueError(
            "lm_head.weight differs from model.embeddings.weight; they must be equal as config.json ties them"
        )
    extra = sorted(set(weights) - set(expected))
    if extra:
        raise ValueError(f"the checkpoint holds {public[extra[0]]}; config.json describes a model without it")
    missing = sorted(set(expected) - set(weights) - ({"lm_head.weight"} if tied else set()))
    if missing:
        names, _ = weights_to_official({name: expected[name] for name in missing})
        raise ValueError(f"the checkpoint lacks {', '.join(list(names)[:3])}; config.json describes a model with it")
    for name, x in sorted(weights.items()):
        if x.shape != expected[name].shape:
            shape = expected[name].T.shape if name.endswith(TRANSPOSED) else expected[name].shape
            own = x.T.shape if name.endswith(TRANSPOSED) else x.shape
            raise ValueError(f"{public[name]} has shape {list(own)}; config.json asks for {list(shape)}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder: safetensors or torch files, whole or in shards.

    Raises:
        ValueError: there is no such file, or it holds more than tensors; the message names the file.
    """
    names = ("model.safetensors", "pytorch_model.bin")
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read_file(folder / name)
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return {key: x for shard in shards for key, x in _read_file(folder / shard).items()}
    raise ValueError(f"{str(folder)!r} holds no weights; allowed: {', '.join(names)}, or their shards with an index")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise ValueError(f"{str(path)!r} cannot be read ({reason}); it must hold tensors and nothing else") from error
