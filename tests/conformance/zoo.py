# Copyright 2026: transformers 5.17 checks initial values only of models whose file says so.
"""The zoo under transformers' own ModelTesterMixin. Copied by `run.py` into the unpacked source distribution."""

from __future__ import annotations

import copy
import unittest
from typing import ClassVar
from unittest import mock

import torch
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    Mamba2Model,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3NextModel,
)
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device

import fwzoo
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from ...test_training_mixin import TrainingTesterMixin


class Tester:
    """What the mixins ask of a model tester."""

    batch_size, seq_length, hidden_size, num_attention_heads = 3, 13, 32, 2
    is_training = True

    def __init__(self, parent: unittest.TestCase, make_config) -> None:
        self.parent, self.get_config = parent, make_config
        self.vocab_size, self.num_hidden_layers = make_config().vocab_size, make_config().num_hidden_layers
        self.causal_lm_class = parent.all_model_classes[1]

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        return self.get_config(), {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "attention_mask": random_attention_mask(shape),
        }


class Common(ModelTesterMixin, TrainingTesterMixin):
    """Every model here is a causal language model with a base model."""

    has_attentions = False

    config_sizes: ClassVar[dict[str, int]] = {"hidden_size": 32, "num_attention_heads": 2}

    def setUp(self) -> None:
        self.model_tester = Tester(self, self.make_config)
        self.config_tester = ConfigTester(
            self, config_class=self.all_model_classes[0].config_class, has_text_modality=True, **self.config_sizes
        )

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = copy.deepcopy(inputs_dict)
        if return_labels and model_class is self.all_model_classes[1]:
            inputs["labels"] = torch.zeros(inputs["input_ids"].shape, dtype=torch.long, device=torch_device)
        return inputs

    def test_init_weights_can_init_buffers(self) -> None:
        """Fast weights begin with random values; the mixin gives random buffers a spread of 0 for this comparison."""

        def without_spread(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            return init.zeros_(tensor)

        with mock.patch.multiple(init, normal_=without_spread, uniform_=without_spread):
            super().test_init_weights_can_init_buffers()

    @unittest.skip("the generation mixin is not part of the source distribution; see tests/modeling/test_generation.py")
    def test_generation_tester_mixin_inheritance(self) -> None:
        pass


class Ours(Common):
    """What the mixin asks of transformers' own caches and of its own test models, asked of ours."""

    def test_bc_cache_name_forward(self) -> None:
        """Both names of the cache are taken, and the output has it under transformers' name."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class(config).to(torch_device).eval()
            expected = model(**inputs)[0]
            for name in ("past_key_values", "cache"):
                cache = fwzoo.FastWeightCache(config)
                output = model(**inputs, use_cache=True, **{name: cache})
                self.assertIs(output[CACHE_KEY], cache)
                torch.testing.assert_close(output[0], expected)

    def test_can_init_all_missing_weights(self) -> None:
        with mock.patch("inspect.getfile", return_value=__file__):
            super().test_can_init_all_missing_weights()

    def test_num_layers_is_small(self) -> None:
        """Two layers, or one for every mixer where all are in one model."""
        config = self.model_tester.get_config()
        mixers = len(set(config.mixers))
        self.assertLessEqual(config.num_hidden_layers, mixers + 1)


def add(name: str, base: type, causal: type, make_config, mixin: type = Common, **attributes) -> None:
    """Define the test class `<name>Test`."""
    body = {"all_model_classes": (base, causal), "make_config": staticmethod(make_config), **attributes}
    globals()[f"{name}Test"] = type(f"{name}Test", (mixin, unittest.TestCase), body)


for model_type, config_class in fwzoo.registry.architectures().items():
    stem = config_class.__name__.removesuffix("Config")
    classes = getattr(fwzoo, f"{stem}Model"), getattr(fwzoo, f"{stem}ForCausalLM")
    MODEL_MAPPING_NAMES[model_type] = classes[0].__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = classes[1].__name__
    add(stem, *classes, config_class.tiny, Ours)

(everything,) = (row for row in ROWS if row.name == "everything")  # every mixer and every feed-forward module
add("Everything", fwzoo.Falcon3AModel, fwzoo.Falcon3AForCausalLM, everything.config, Ours)

add(
    "Mamba2",
    Mamba2Model,
    Mamba2ForCausalLM,
    lambda: Mamba2Config(
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=1,
        chunk_size=8,
    ),
    config_sizes={"hidden_size": 32, "num_heads": 8, "head_dim": 8},
)
add(
    "Qwen3Next",
    Qwen3NextModel,
    Qwen3NextForCausalLM,
    lambda: Qwen3NextConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
)
