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
]
