"""A test that must learn: a FwPKM layer recalls pairs it read once, and nothing when it may not write or look ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recall import Toy, recall, train


def trained(seed: int, pairs: int, alphabet: int, steps: int = 150, **options: Any) -> Toy:
    torch.manual_seed(seed)
    model = Toy(2 * alphabet + 1, **options)
    train(model, pairs, alphabet, steps, seed=seed)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_recalls_pairs_it_read_once(seed: int) -> None:
    """80 of the recipe's 150 steps are enough."""
    model = trained(seed, 64, 256, 80)
    assert recall(model, 64, 256) >= 0.98
    assert recall(model, 256, 256) >= 0.95
    model.memory.config.value_lr = model.memory.config.key_lr = 0.0
    assert recall(model, 64, 256) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"value_lr": 0.0, "key_lr": 0.0}, {"lookahead": False}], ids=str)
def test_without_the_update_or_without_lookahead_nothing_is_recalled(options: dict[str, Any]) -> None:
    assert recall(trained(0, 64, 256, 40, **options), 64, 256) <= 0.03


@pytest.mark.slow
def test_reading_again_adds_recall_near_capacity() -> None:
    """128 pairs in 256 slots, after training with 32 pairs."""
    model = trained(0, 32, 128, subkeys=16)
    once, twice = (recall(model, 128, 128, passes=passes) for passes in (1, 2))
    assert twice >= once + 0.03 and once > 0.5
