"""A memory as a folder: it continues identically, belongs to one model, and starts a new text in `generate`."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache import proceed
from test_model import ids
from transformers import AutoModelForCausalLM

import fwzoo
from fwzoo.modeling.cache import CACHE_KEY
from rows import ROWS, Row

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def memory_of(model: Any, tokens: torch.Tensor) -> fwzoo.FastWeightCache:
    cache = fwzoo.FastWeightCache(model.config)
    proceed(model, cache, tokens)
    return cache


@rows
@pytest.mark.parametrize("early", [True, False], ids=["model given", "model found at first use"])
def test_a_saved_memory_continues_identically(row: Row, early: bool, tmp_path: Path) -> None:
    model = row.model()
    cache = memory_of(model, ids(1, 30))
    cache.save_pretrained(tmp_path, source="Thirty numbers.")
    assert {path.name for path in tmp_path.iterdir()} == {"memory.safetensors", "memory.json", "README.md"}
    loaded = fwzoo.FastWeightCache.from_pretrained(tmp_path, model if early else None)
    assert loaded.get_seq_length() == 30 and loaded.nbytes == cache.nbytes
    assert torch.equal(proceed(model, loaded, ids(1, 9, 1)), proceed(model, cache, ids(1, 9, 1)))


@rows
def test_generate_reads_a_new_text_after_a_memory(row: Row, tmp_path: Path) -> None:
    """Greedy text after the memory of a book equals greedy text after the book itself, and goes on as usual then."""
    model = row.model()
    book, prompt = ids(1, 30), ids(1, 6, 1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.cat([book, prompt], 1), **options)[:, 30:]
    assert not torch.equal(model.generate(prompt, **options), expected)
    memory_of(model, book).save_pretrained(tmp_path)
    memory = fwzoo.FastWeightCache.from_pretrained(tmp_path, model)
    kept = copy.deepcopy(memory)
    found = model.generate(prompt, **{CACHE_KEY: memory}, **options)
    assert torch.equal(found, expected)
    more = torch.cat([found, ids(1, 3, 2)], 1)
    longer = model.generate(torch.cat([book, more], 1), **options)[:, 30:]
    assert torch.equal(model.generate(more, **{CACHE_KEY: memory}, **options), longer)
    kept.batch_repeat_interleave(3)  # one memory, three prompts
    prompts = ids(3, 6, 3)
    several = model.generate(prompts, **{CACHE_KEY: kept}, **options)
    alone = model.generate(torch.cat([book, prompts[2:]], 1), **options)[:, 30:]
    assert torch.equal(several[2:, : alone.shape[1]], alone)


def other(row: Row, change: str) -> Any:
    if change == "weights":
        model = row.model()
        with torch.no_grad():
            model.model.layers[1].mixer.k_proj.weight[0, 0] += 0.01
        return model
    return row.model(**{"options": {"timing": "read_before_write"}, "layers": {"num_hidden_layers": 3}}[change])


@pytest.mark.parametrize("change", ["weights", "options", "layers"])
@pytest.mark.parametrize("early", [True, False])
def test_a_memory_is_refused_by_another_model(change: str, early: bool, tmp_path: Path) -> None:
    model, stranger = ROWS[0].model(), other(ROWS[0], change)
    memory_of(model, ids(1, 30)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"fingerprint|layers") as refusal:
        if early:
            fwzoo.FastWeightCache.from_pretrained(tmp_path, stranger)
        else:
            proceed(stranger, fwzoo.FastWeightCache.from_pretrained(tmp_path), ids(1, 3))
    if early or change != "layers":
        assert model.fingerprint() in str(refusal.value) and stranger.fingerprint() in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_force_needs_the_same_shapes(tmp_path: Path) -> None:
    model = ROWS[0].model()
    memory_of(model, ids(1, 30)).save_pretrained(tmp_path)
    stranger = other(ROWS[0], "weights")
    forced = fwzoo.FastWeightCache.from_pretrained(tmp_path, stranger, force=True)
    assert proceed(stranger, forced, ids(1, 3)).isfinite().all()
    for misfit in (ROWS[0].model(value_head_dim=24), ROWS[0].model(short_conv_size=3), other(ROWS[0], "layers")):
        with pytest.raises(ValueError, match=r"does not fit this model|has 2 layers; this model has 3") as refusal:
            fwzoo.FastWeightCache.from_pretrained(tmp_path, misfit, force=True)
        assert "\n" not in str(refusal.value)


def test_the_fingerprint_is_of_weights_and_options_not_of_how_they_are_loaded(tmp_path: Path) -> None:
    model = ROWS[0].model()
    model.save_pretrained(tmp_path)
    first = model.fingerprint()
    assert first == model.model.fingerprint() and len(first) == 32
    assert AutoModelForCausalLM.from_pretrained(tmp_path).fingerprint() == first
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).fingerprint() == first
    assert AutoModelForCausalLM.from_pretrained(tmp_path, kernel_level="reference").fingerprint() == first
    different = {first, *(other(ROWS[0], change).fingerprint() for change in ("weights", "options", "layers"))}
    assert len({*different, ROWS[0].model(seed=1).fingerprint()}) == 5


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path: Path) -> None:
    model = ROWS[0].model()
    empty = fwzoo.FastWeightCache(model.config)
    with pytest.raises(ValueError, match="no model has used this cache"):
        empty.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="the cache is empty"):
        empty.save_pretrained(tmp_path / "none", model=model)
    with pytest.raises(OSError):
        fwzoo.FastWeightCache.from_pretrained(tmp_path / "none")
    memory_of(model, ids(1, 30)).save_pretrained(tmp_path)
    tensors = (tmp_path / "memory.safetensors").read_bytes()
    (tmp_path / "memory.safetensors").write_bytes(tensors[: len(tensors) // 2])
    with pytest.raises(ValueError, match=r"memory\.safetensors of .* is damaged"):
        fwzoo.FastWeightCache.from_pretrained(tmp_path)
    for text in ("{", "[]", json.dumps({"format": "fwzoo-memory-folder-9"})):
        (tmp_path / "memory.json").write_text(text)
        with pytest.raises(ValueError, match=r"memory\.json of .* is not the record of a memory"):
            fwzoo.FastWeightCache.from_pretrained(tmp_path)


def test_record_and_card_say_what_it_is(tmp_path: Path) -> None:
    model = ROWS[5].model()
    memory_of(model, ids(1, 30)).save_pretrained(tmp_path, source="A list of numbers.", base_model="someone/model")
    record = json.loads((tmp_path / "memory.json").read_text())
    assert record["model_type"] == "falcon3a" and record["tokens_seen"] == 30
    assert record["fingerprint"] == model.fingerprint() and record["source"] == "A list of numbers."
    card = (tmp_path / "README.md").read_text().splitlines()
    assert card[0] == "---" and "base_model: someone/model" in card and "- fast-weight-memory" in card
    assert any("30 tokens: A list of numbers." in line for line in card)


def test_a_cache_that_a_model_has_used_can_be_copied_and_pickled() -> None:
    model = ROWS[0].model()
    cache = memory_of(model, ids(1, 30))
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(proceed(model, copied, ids(1, 4, 1)), proceed(model, copy.deepcopy(cache), ids(1, 4, 1)))
