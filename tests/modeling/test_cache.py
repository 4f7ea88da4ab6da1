"""The cache: it round-trips, resets, follows its sequences, rewinds when it records, and does not grow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import ids, stream
from transformers.cache_utils import Cache

import fwzoo
from compare import error
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def proceed(model: Any, cache: fwzoo.FastWeightCache, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=True, **{CACHE_KEY: cache}).logits


@rows
def test_round_trip_through_safetensors_continues_identically(row: Row, tmp_path: Path) -> None:
    model = row.model()
    _, cache = stream(model, ids(2, 21), [4])
    save_file(cache.state_dict(), tmp_path / "memory.safetensors")
    loaded = fwzoo.FastWeightCache(model.config)
    loaded.load_state_dict(load_file(tmp_path / "memory.safetensors"))
    assert loaded.get_seq_length() == 21 and loaded.nbytes == cache.nbytes
    assert torch.equal(proceed(model, loaded, ids(2, 9, seed=1)), proceed(model, cache, ids(2, 9, seed=1)))


@rows
def test_a_poisoned_cache_is_as_new_after_reset(row: Row) -> None:
    model = row.model()
    _, cache = stream(model, ids(2, 11), [])
    for layer in cache.layers:
        layer.map(lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else torch.ones_like(x))
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0
    new = fwzoo.FastWeightCache(model.config)
    assert torch.equal(proceed(model, cache, ids(2, 11)), proceed(model, new, ids(2, 11)))


@rows
def test_sequences_are_reordered_repeated_and_selected_whole(row: Row) -> None:
    model = row.model()
    follow = ids(3, 7, seed=1)
    _, cache = stream(model, ids(3, 15), [])
    base = {i: proceed(model, one(cache, i), follow[i : i + 1]) for i in range(3)}
    order = torch.tensor([2, 0, 0])
    reordered = copy.deepcopy(cache)
    reordered.reorder_cache(order)
    logits = proceed(model, reordered, follow[order])
    assert all(error(logits[j : j + 1], base[int(i)]) < 1e-5 for j, i in enumerate(order))
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    logits = proceed(model, repeated, follow.repeat_interleave(2, 0))
    assert all(error(logits[j : j + 1], base[j // 2]) < 1e-5 for j in range(6))


def one(cache: fwzoo.FastWeightCache, index: int) -> fwzoo.FastWeightCache:
    own = copy.deepcopy(cache)
    own.batch_select_indices(torch.tensor([index]))
    assert own.batch_size == 1
    return own


@rows
def test_rewinding_equals_never_having_read(row: Row) -> None:
    model = row.model()
    tokens = ids(2, 40)
    cache = fwzoo.FastWeightCache(model.config)
    cache.activate_past_recording()
    assert cache.is_croppable
    for start, end in ((0, 20), (20, 26), (26, 27), (27, 28)):
        proceed(model, cache, tokens[:, start:end])
    for target in (28, 27, 24, 23, 20, 9):
        cache.crop(target - cache.get_seq_length())
        assert cache.get_seq_length() == target
        own = copy.deepcopy(cache)
        rest, whole = (
            proceed(model, own, tokens[:, target:]),
            proceed(model, fwzoo.FastWeightCache(model.config), tokens),
        )
        assert error(rest, whole[:, target:]) < 1e-5


def test_rewinding_needs_recording_and_stays_within_it() -> None:
    model = ROWS[0].model()
    cache = fwzoo.FastWeightCache(model.config)
    proceed(model, cache, ids(1, 5))
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    cache.activate_past_recording()
    proceed(model, cache, ids(1, 3))
    with pytest.raises(ValueError, match="last 3 tokens"):
        cache.crop(-4)
    cache.crop(-3)
    assert cache.get_seq_length() == 5


@rows
def test_size_does_not_grow_with_tokens(row: Row) -> None:
    """Only full attention keeps something for each token, always the same; FwPKM keeps the rows it has written."""
    model = row.model()
    sizes = [[layer.nbytes for layer in stream(model, ids(1, n), [])[1].layers] for n in (1, 10, 200)]
    assert sizes[0] == model.state_bytes()
    c = model.config
    for one_token, ten, many, mixer, feed_forward in zip(*sizes, c.mixers, c.feed_forwards, strict=True):
        grows = 0
        if mixer == "full_attention":
            grows = 4 * c.num_key_value_heads * (c.head_dim + c.value_head_dim)
        if feed_forward == "fwpkm":
            assert one_token <= ten <= many
        else:
            assert (ten - one_token, many - one_token) == (9 * grows, 199 * grows)


@rows
def test_a_length_counter_counts_tokens(row: Row) -> None:
    _, cache = stream(row.model(), ids(2, 13), [5, 6])
    assert [layer.get_seq_length() for layer in cache.layers] == [13] * len(cache.layers)
    assert cache.layers[0].get_mask_sizes(4) == (17, 0) and cache.get_max_length() == -1


def test_gradients_flow_through_the_cache_until_it_is_detached() -> None:
    model = ROWS[2].model()
    cache = fwzoo.FastWeightCache(model.config)
    model(ids(1, 20), use_cache=True, **{CACHE_KEY: cache})
    kept = cache.detach()
    model(ids(1, 20, 1), labels=ids(1, 20, 1), use_cache=True, **{CACHE_KEY: cache}).loss.backward()
    through = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(ids(1, 20, 1), labels=ids(1, 20, 1), use_cache=True, **{CACHE_KEY: kept}).loss.backward()
    assert any(not torch.equal(through[n], p.grad) for n, p in model.named_parameters())
    cache.detach_()
    assert not any(x.requires_grad for layer in cache.layers for x in layer.tensors.values())
    model(ids(1, 3), labels=ids(1, 3), use_cache=True, **{CACHE_KEY: cache}).loss.backward()


def test_it_is_a_transformers_cache_and_moves() -> None:
    model = ROWS[0].model()
    _, cache = stream(model, ids(1, 8), [])
    assert isinstance(cache, Cache) and not cache.is_compileable and len(cache) == 2
    assert cache.to("cpu") is cache
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert proceed(model, cache, ids(1, 2)).isfinite().all()


@torch.no_grad()
def test_packed_documents_each_get_their_row() -> None:
    model = ROWS[5].model()
    cache = fwzoo.FastWeightCache(model.config)
    tokens = ids(1, 30)
    model(tokens, cu_seq_lens_q=torch.tensor([0, 12, 12, 30]), use_cache=True, **{CACHE_KEY: cache})
    assert cache.batch_size == 3
    _, alone = stream(model, tokens[:, 12:], [])
    follow = ids(1, 5, seed=2)
    assert error(proceed(model, one(cache, 2), follow), proceed(model, alone, follow)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if not k.startswith("layers.1.")}, "layers"),
        (lambda s: {**s, "weights": s["layers.0.seen"]}, "weights"),
        (lambda s: {k: v for k, v in s.items() if not k.endswith("seen")}, "layers"),
        (lambda s: {**s, "layers.7.seen": s["layers.0.seen"]}, "layers"),
    ],
)
def test_a_foreign_state_dict_is_refused(change: Any, message: str) -> None:
    model = ROWS[0].model()
    _, cache = stream(model, ids(1, 8), [])
    with pytest.raises(ValueError, match=message):
        fwzoo.FastWeightCache(model.config).load_state_dict(change(cache.state_dict()))
