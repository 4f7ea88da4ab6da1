"""A pretrained attention model as the start of a hybrid: what the layout keeps is copied, what is new begins where it

changes nothing, as far as the mathematics allows, and a report says which is which for every tensor.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from .. import registry
from .._version import __version__
from ..configuration.base import FwzooConfig
from ..configuration.rotary import TYPES
from .card import render_card
from .lact_official import TOKENIZER_FILES, read_weights

SOURCES = ("llama", "mistral", "qwen2", "qwen3")
REPORT_FILE = "upcycle.json"
CARRIED_FILES = (*TOKENIZER_FILES, "chat_template*", "generation_config.json")
DOWNLOADED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *CARRIED_FILES)

# --- report ---


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the hybrid comes from.

    Attributes:
        how: "copied"; "repeated", each head of keys or values once for every query head of its group; "joined", three
            projections stacked; and for what is new "zero", "identity", "estimated" from other tensors, "initialised".
        sources: names of the source's tensors it is made of.
    """

    shape: tuple[int, ...]
    how: str
    sources: tuple[str, ...] = ()

    @property
    def new(self) -> bool:
        return self.how not in ("copied", "repeated", "joined")


@dataclass(frozen=True)
class Report:
    """What became of every tensor: those of the hybrid with their origin, and those of the source that it does not use."""

    source: str
    model_type: str
    layout: str
    tensors: dict[str, Origin]
    dropped: dict[str, str]

    def save(self, folder: Path) -> None:
        text = json.dumps({"fwzoo": __version__, **asdict(self)}, indent=2)
        (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str | Path) -> Report:
        """The report in a folder or Hub repository that `upcycle` wrote.

        Raises:
            ValueError: there is none.
        """
        try:
            path = Path(cached_file(str(name), REPORT_FILE))
        except OSError as error:
            raise ValueError(f"{str(name)!r} holds no {REPORT_FILE}; it must be what fwzoo upcycle wrote") from error
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields.pop("fwzoo")
        tensors = {
            k: Origin(tuple(x["shape"]), x["how"], tuple(x["sources"])) for k, x in fields.pop("tensors").items()
        }
        return cls(**fields, tensors=tensors)


def freeze_copied(model: nn.Module, report: Report | str | Path | None = None) -> list[str]:
    """Leave only what upcycling added trainable.

    Args:
        report: a report, or a folder or Hub name that holds it; None means where the model was loaded from.

    Returns: names of the parameters that are trained.
    """
    if not isinstance(report, Report):
        report = Report.load(report or model.name_or_path)
    for name, parameter in model.named_parameters():
        if name not in report.tensors:
            raise ValueError(f"the report has no {name}; it must be that of this model")
        parameter.requires_grad_(report.tensors[name].new)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def new_modules(model: nn.Module, report: Report | str | Path | None = None) -> list[str]:
    """Names of the modules that hold only new parameters: what `modules_to_save` of a PEFT configuration takes."""
    if not isinstance(report, Report):
        report = Report.load(report or model.name_or_path)
    names = []
    for name, module in model.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        if (
            own
            and not list(module.children())
            and all(report.tensors[leaf].new for leaf in own if leaf in report.tensors)
        ):
            names.append(name)
    return names


# --- configuration ---


def hybrid_config(source: Any, layout: str, window: int | None = None, **options: Any) -> FwzooConfig:
    """The configuration of the hybrid.

    Args:
        source: configuration of a Llama, Mistral, Qwen2 or Qwen3 model.
        layout: see `fwzoo.configuration.layout`.
        window: tokens that sliding attention and the window branch of LaCT see; None means the source's, else 2048.
        options: fields of the mixers and memories that the layout names.

    Raises:
        ValueError: the source has something that no mixer here computes, or layout or an option does not fit.
    """
    _check_source(source)
    own_window = next((source.sliding_window for kind in _kinds(source) if kind == "sliding_attention"), None)
    window = window or own_window or 2048
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    rope = dict(source.rope_parameters)
    base, scaling = rope.pop("rope_theta"), None if rope["rope_type"] == "default" else rope
    if scaling is not None and scaling["rope_type"] == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = source.max_position_embeddings / scaling["original_max_position_embeddings"]
    names = _shapes(source)
    qkv_bias, output_bias, qk_norm = (
        any(name.endswith(f"self_attn.{part}") for name in names)
        for part in ("q_proj.bias", "o_proj.bias", "q_norm.weight")
    )
    sizes = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": head_dim,
        "value_head_dim": head_dim,
        "norm_eps": source.rms_norm_eps,
        "tie_word_embeddings": source.tie_word_embeddings,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "attention_qkv_bias": qkv_bias,
        "attention_output_bias": output_bias,
        "attention_qk_norm": qk_norm,
        "lact_rotary_base": base,
        "lact_rotary_scaling": scaling,
        "lact_qkv_bias": qkv_bias,
        "lact_output_bias": output_bias,
        "lact_qk_norm": qk_norm,
        "lact_qk_norm_per_head": qk_norm,
        "lact_output_scale": True,  # which begins at 0
    }
    defaults = {
        "initializer_range": source.initializer_range,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.pad_token_id,
        "training_length": source.max_position_embeddings,
        "attention_window": window,
        "lact_window": window,
        "lact_chunk_size": options.get("lact_window", window),  # no token between the last update and the window
        "pairing": "same_step",  # as attention pairs them
        "short_conv_size": 0,
        "memory_placement": "extra",
    }
    trial = FwzooConfig.from_layout(layout, num_hidden_layers=source.num_hidden_layers, head_dim=2)
    families = [part for part in registry.parts(trial) if issubclass(part, FwzooConfig)]
    known = {name for name in FwzooConfig.__annotations__ if name in FwzooConfig.__dataclass_fields__}
    known |= {name for family in families for name in family.options()}
    for name in options:
        if name in sizes or name in ("mixers", "feed_forwards"):
            raise ValueError(f"the option {name} is {options[name]!r}; it cannot be chosen, source and layout set it")
        if name not in known:
            raise ValueError(registry.unknown("an option", name, known - set(sizes)))
    given = {name: value for name, value in {**sizes, **defaults}.items() if name in known}
    config = FwzooConfig.from_layout(layout, **{**given, **options})
    sees = {
        "full_attention": math.inf,
        "sliding_attention": getattr(config, "attention_window", 0),
        "lact": getattr(config, "lact_window", 0),
    }
    for i, (mixer, kind) in enumerate(zip(config.mixers or [], _kinds(source), strict=True)):
        if kind == "sliding_attention" and sees.get(mixer, 0) > (own_window or math.inf):
            seen = "all" if mixer == "full_attention" else sees[mixer]
            raise ValueError(
                f"{mixer} in layer {i} sees {seen} tokens; it must be at most the source's sliding_window = {own_window}, "
                "as with sliding_attention and no other window"
            )
    return config


def _check_source(source: Any) -> None:
    if source.model_type not in SOURCES:
        raise ValueError(registry.unknown("model_type of the source", source.model_type, SOURCES))
    rope = source.rope_parameters or {}
    kind = rope.get("rope_type")
    if kind not in ("default", *TYPES):
        raise ValueError(f"rope_parameters is {rope!r}; allowed are rope_type 'default', {', '.join(map(repr, TYPES))}")
    allowed = {"hidden_act": ("silu",), "mlp_bias": (False,), "quantization_config": (None,)}
    for name, values in allowed.items():
        value = getattr(source, name, values[0])
        if value not in values:
            raise ValueError(f"{name} of the source is {value!r}; allowed is {values[0]!r}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor of the source is {rope['partial_rotary_factor']!r}; allowed is 1.0")


def _kinds(source: Any) -> list[str]:
    """What attention every layer of the source has, in transformers' words."""
    kinds = getattr(source, "layer_types", None)
    if kinds is None:
        sliding = getattr(source, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * source.num_hidden_layers
    return list(kinds)


# --- tensors ---

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
BLOCK = {
    "mixer_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
ATTENTION = tuple(f"mixer.{name}_{kind}." for name in "qkvo" for kind in ("proj", "norm"))
MEAN_OF_VALUES = 0.25  # size of a mean of values over that of a value; measured, see benchmarks/RESULTS.md
FALCONS = tuple(f"falcon{rule}" for rule in ("1", "2", "3", "1a", "2a", "3a"))
# mixer or memory: what begins at 0, so that the layer is the old one, or its gates are in their middle
ZERO = {
    "lact": ("mixer.scale_proj.weight", "mixer.scale_proj.bias"),
    **dict.fromkeys(FALCONS, ("mixer.beta_proj.weight", "mixer.ridge_proj.weight")),
    "pkm": ("memory.values",),
    "fwpkm": ("memory.o_proj.weight",),
    "fwmlp": ("memory.o_proj.weight",),
}


def plan(source: Any, config: FwzooConfig) -> Report:
    """The origin of every tensor of the hybrid, from the two configurations alone."""
    old, new = _shapes(source), _shapes(config)
    tensors = {name: Origin(shape, *_origin(name, shape, old, config)) for name, shape in new.items()}
    used = {name for origin in tensors.values() if not origin.new for name in origin.sources}
    kept = (config.mixers or [], config.feed_forwards or [])
    dropped = {}
    for name in sorted(set(old) - used):
        layer = LAYER.fullmatch(name)
        assert layer, name
        module = kept[layer[2].startswith(("mlp.", "post_attention"))][int(layer[1])]
        dropped[name] = f"{module} in layer {layer[1]} has no such tensor"
    return Report("", source.model_type, config.layout, tensors, dropped)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, tied ones once."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(x.shape) for name, x in state.items()}


def _origin(
    name: str, shape: tuple[int, ...], old: Mapping[str, tuple[int, ...]], config: Any
) -> tuple[str, tuple[str, ...]]:
    layer = LAYER.fullmatch(name)
    if layer is None:
        return "copied", (name,)
    prefix, part = f"model.layers.{layer[1]}.", layer[2]
    mixer, feed_forward = config.mixers[int(layer[1])], config.feed_forwards[int(layer[1])]
    if part in BLOCK:
        return "copied", (prefix + BLOCK[part],)
    if part.startswith("mixer.qkv_proj."):
        leaf = part.rpartition(".")[2]
        return "joined", tuple(f"{prefix}self_attn.{x}_proj.{leaf}" for x in "qkv")
    source = prefix + part.replace("mixer.", "self_attn.")
    if part.startswith(ATTENTION) and source in old:
        return "copied" if old[source] == shape else "repeated", (source,)
    if part in ZERO.get(mixer, ()) or part in ZERO.get(feed_forward, ()):
        return "zero", ()
    if part == "mixer.conv.weight":
        return "identity", ()
    if part == "mixer.norm.weight":
        return "estimated", (f"{prefix}input_layernorm.weight", f"{prefix}self_attn.v_proj.weight")
    return "initialised", ()


def repeat_heads(x: Tensor, groups: int, repeats: int) -> Tensor:
    """Every head of `[G F, ..]` once for each of the query heads that share it, next to each other: `[G repeats F, ..]`."""
    return x.unflatten(0, (groups, -1)).repeat_interleave(repeats, 0).flatten(0, 1)


def hybrid(source: Any, weights: Mapping[str, Tensor], config: FwzooConfig, seed: int = 0) -> tuple[Any, Report]:
    """The hybrid model of a source's configuration and tensors, which it takes over where they are only copied.

    Args:
        config: from `hybrid_config`. seed: of what is initialised at random.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape or not of floating point.
    """
    report = plan(source, config)
    extra = _check_tensors(source, weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=weights["model.embed_tokens.weight"].dtype)
    made = {
        name: _make(origin, weights, source.num_key_value_heads)
        for name, origin in report.tensors.items()
        if not origin.new
    }
    model.load_state_dict(made, strict=False, assign=True)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = not tensor.is_meta
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for leaf, x in table.items():
                if x is not None and x.is_meta:
                    table[leaf] = torch.empty_like(x, device="cpu")
                    if table is module._parameters:
                        table[leaf] = nn.Parameter(table[leaf])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model.apply(model._init_weights)
        state = model.state_dict()
        for name, origin in report.tensors.items():
            if origin.how == "zero":
                state[name].zero_()
            elif origin.how == "identity":
                state[name].zero_()[:, -1] = 1
            elif origin.how == "estimated":
                norm, v_proj = (weights[x] for x in origin.sources)
                state[name].copy_(_read_size(norm, v_proj, source.num_key_value_heads))
    return model.eval(), replace(report, dropped={**report.dropped, **extra})


def _make(origin: Origin, weights: Mapping[str, Tensor], groups: int) -> Tensor:
    parts = [weights[name] for name in origin.sources]
    if origin.how == "copied":
        return parts[0]
    if origin.how == "joined":
        rows = parts[0].shape[0]
        return torch.cat([x if len(x) == rows else repeat_heads(x, groups, rows // len(x)) for x in parts])
    return repeat_heads(parts[0], groups, origin.shape[0] // len(parts[0]))


def _read_size(norm: Tensor, v_proj: Tensor, heads: int) -> Tensor:
    """Expected size of every channel of what softmax attention reads, over heads, for normed inputs whose channels are

    independent: `[F]`. A mean of many values is smaller than a value.
    """
    return MEAN_OF_VALUES * (v_proj.float() * norm.float()).square().sum(1).unflatten(0, (heads, -1)).mean(0).sqrt()


def _check_tensors(source: Any, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Raise unless the tensors are the source's; returns those without effect in it, with the reason."""
    expected = _shapes(source)
    ignored = {}
    for name, x in weights.items():
        if name.endswith("rotary_emb.inv_freq"):
            ignored[name] = "it is computed from the configuration"
        elif name == "lm_head.weight" and name not in expected:
            if not torch.equal(x, weights["model.embed_tokens.weight"]):
                raise ValueError(
                    f"{name} differs from model.embed_tokens.weight; tie_word_embeddings says they are equal"
                )
            ignored[name] = "it is tied to model.embed_tokens.weight"
        elif name not in expected:
            raise ValueError(f"the source holds {name}, which a {source.model_type} of its config.json does not have")
    for name, shape in expected.items():
        if name not in weights:
            raise ValueError(f"the source lacks {name}; its config.json describes a {source.model_type} with it")
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(weights[name].shape)}; config.json asks for {list(shape)}")
        if not weights[name].is_floating_point():
            raise ValueError(f"{name} has dtype {weights[name].dtype}; it must be a floating-point type")
    return ignored


# --- folders ---


def upcycle(
    source: str | Path, target: Path, layout: str, *, window: int | None = None, seed: int = 0, **options: Any
) -> Report:
    """Turn a pretrained model into a hybrid, and write it with its tokenizer, generation settings, card and report.

    Copied tensors are not held in memory: they go from the source's files to the target's.

    Args:
        source: a folder or Hub name. target: a folder. layout, window, options: see `hybrid_config`.
        seed: of what is initialised at random.
    """
    folder = _fetch(source)
    source_config = AutoConfig.from_pretrained(folder)
    config = hybrid_config(source_config, layout, window, **options)
    model, report = hybrid(source_config, read_weights(folder), config, seed)
    report = replace(report, source=str(source))
    model.save_pretrained(target)
    for pattern in CARRIED_FILES:
        for file in folder.glob(pattern):
            shutil.copy2(file, target / file.name)
    report.save(target)
    new = sum(1 for origin in report.tensors.values() if origin.new)
    about = f"Upcycled from {source} with the layout `{report.layout}`, not trained since: {new} of {len(report.tensors)} tensors are new."
    base_model = None if folder == Path(source) else str(source)
    (target / "README.md").write_text(
        render_card(model, str(target), about=about, base_model=base_model), encoding="utf-8"
    )
    return report


def _fetch(source: str | Path) -> Path:
    """The folder of the source, downloaded where it is a Hub name."""
    folder = Path(source)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(source), allow_patterns=list(DOWNLOADED)))
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{str(source)!r} is neither a folder nor a model of the Hub ({reason})") from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(source)!r} has no config.json; it must be the folder of a pretrained model")
    return folder
