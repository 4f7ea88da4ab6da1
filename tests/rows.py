"""One row an architecture (and hybrid): everything the shared model tests need to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import fwzoo


@dataclass(frozen=True)
class Row:
    """A model under test: its architecture and what differs from `tiny()`."""

    name: str
    architecture: str
    overrides: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> fwzoo.FwzooConfig:
        return fwzoo.registry.architectures()[self.architecture].tiny(**{**self.overrides, **more})

    def model(self, seed: int = 0, **more: Any) -> fwzoo.FwzooForCausalLM:
        """A model with weights large enough that every part of it shows in the logits."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self.config(initializer_range=0.2, **more)).eval()


def small_options() -> dict[str, Any]:
    """The options of every family, as small as in its architectures' `tiny()`."""
    options: dict[str, Any] = {"attention_window": 6, "training_length": 8, "pkm_subkeys": 8, "pkm_top_k": 3}
    for architecture in fwzoo.registry.architectures().values():
        tiny = architecture.tiny()
        options.update({name: getattr(tiny, name) for name in architecture.options()})
    return options


def every(names: list[str], count: int = 12) -> list[str]:
    """`count` layers in which each of the names is at least once, one after the other."""
    assert len(names) <= count
    return [names[i % len(names)] for i in range(count)]


ROWS = [
    Row("falcon1", "falcon1"),
    Row("falcon2", "falcon2"),
    Row("falcon3", "falcon3"),
    Row("falcon1a", "falcon1a"),
    Row("falcon2a", "falcon2a"),
    Row("falcon3a", "falcon3a"),
    Row("falcon3a-eta-gated", "falcon3a", {"step": "eta", "output_gate": True, "qk_norm": "l2", "feature_map": "elu1"}),
    Row("falcon1-ablations", "falcon1", {"pairing": "same_step", "timing": "read_before_write", "short_conv_size": 0}),
    Row(
        "every-falcon",
        "falcon3",
        {
            "num_hidden_layers": 4,
            "mixers": ["falcon3", "falcon2", "falcon1a", "falcon3a"],
            "feed_forwards": ["mlp", "none", "mlp", "mlp"],
            "tie_word_embeddings": False,
            "value_head_dim": 24,
        },
    ),
    Row("lact", "lact"),
    Row(
        "lact-muon-prenorm-dense",
        "lact",
        {
            "lact_muon": True,
            "lact_prenorm": True,
            "lact_rank": 0,
            "lact_rate_per_channel": True,
            "lact_qk_norm": True,
            "lact_qkv_bias": True,
            "lact_nope": True,
            "tie_word_embeddings": False,
        },
    ),
    Row(
        "lact-falcon3",
        "lact",
        {"mixers": ["lact", "falcon3"], "lact_window": 9, "lact_chunk_size": 5, "lact_expansion": 1.5, "window": 2},
    ),
    Row(
        "as-pretrained",
        "falcon1",
        {
            "mixers": ["lact", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "lact_qk_norm": True,
            "lact_qk_norm_per_head": True,
            "lact_qkv_bias": True,
            "lact_output_bias": True,
            "attention_qk_norm": True,
            "attention_qkv_bias": True,
            "attention_output_bias": True,
            "rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "lact_rotary_scaling": {"rope_type": "linear", "factor": 2.0},
            **{"num_lact_heads": 2, "lact_chunk_size": 8, "lact_window": 6, "lact_rank": 4},
        },
    ),
    Row("gated-delta", "falcon1", {"mixers": ["gated_delta"] * 2}),
    Row("linear-attention", "falcon1", {"mixers": ["linear_attention"] * 2, "linear_decay": "token"}),
    Row("full-attention", "falcon1", {"mixers": ["full_attention"] * 2}),
    Row("sliding-attention", "falcon1", {"mixers": ["sliding_attention"] * 2, "attention_window": 6}),
    Row(
        "identity-state",
        "falcon1",
        {
            "mixers": ["gated_delta", "linear_attention"],
            "linear_feature_map": "identity",
            "linear_normalize": False,
            "linear_initial_state": "identity",
            "linear_decay": "head",
            "short_conv_size": 0,
        },
    ),
    Row(
        "grouped-scaled-attention",
        "falcon1",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "value_head_dim": 12,
            "mixers": ["full_attention", "sliding_attention"],
            "attention_window": 5,
            "attention_qk_norm": True,
            "logit_scaling": "ssmax",
            "training_length": 16,
        },
    ),
    Row(
        "every-mixer",
        "falcon3a",
        {
            "num_hidden_layers": 4,
            "mixers": ["falcon3a", "gated_delta", "sliding_attention", "linear_attention"],
            "feed_forwards": ["mlp", "none", "mlp", "mlp"],
            "attention_window": 6,
            "linear_feature_map": "relu",
            "logit_scaling": "log_beyond",
            "training_length": 8,
        },
    ),
    Row(
        "everything",
        "falcon3a",
        {
            **small_options(),
            "num_hidden_layers": 12,
            "mixers": every(list(fwzoo.registry.mixer_options())),
            "feed_forwards": every(fwzoo.registry.feed_forward_names()),
            "linear_decay": "token",
            "logit_scaling": "ssmax",
            "fwmlp_lr": 0.2,
        },
    ),
    Row("fwpkm", "fwpkm"),
    Row("fwmlp", "fwmlp", {"fwmlp_lr": 0.2}),
    Row(
        "fwpkm-ablations",
        "fwpkm",
        {
            "feed_forwards": ["fwpkm", "none"],
            "memory_placement": "extra",
            "fwpkm_heads": 2,
            "gate_activation": "identity",
            "lookahead": False,
            "fwpkm_score": "dot",
            "address_loss": False,
            "training_scope": "sequence",
            "value_lr": 0.5,
        },
    ),
    Row(
        "falcon-with-every-memory",
        "falcon1a",
        {
            "num_hidden_layers": 3,
            "feed_forwards": ["pkm", "fwpkm", "fwmlp"],
            "memory_key_dim": 16,
            "memory_value_dim": 24,
            "memory_chunk_size": 8,
            "pkm_subkeys": 6,
            "pkm_top_k": 4,
            "pkm_query_norm": "layer",
            "fwpkm_subkeys": 6,
            "fwpkm_top_k": 4,
            "fwmlp_lr": 0.2,
        },
    ),
]
