"""Decoding as a CUDA graph gives the tokens of decoding without one, and leaves the same cache behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_model import ids
from torch import Tensor

from fwzoo.modeling import decoding
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.modeling.memories.base import generating
from rows import ROWS, Row

FIXED = [row for row in ROWS if row.model().model.steps_alike()]
ON_GPU = ("falcon1a", "falcon3", "identity-state")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}

rows = pytest.mark.parametrize("row", FIXED, ids=lambda row: row.name)


def without_a_graph(rehearse: Callable[[], None], advance: Callable[[], Tensor], device: torch.device) -> Any:
    """What `decoding.capture` returns where there is no CUDA: the same work on the same buffers, step by step."""
    rehearse()
    return lambda: advance().clone()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any, monkeypatch: Any) -> str:
    everywhere = request.function is test_tokens_and_cache_are_those_of_plain_decoding
    row = request.node.callspec.params.get("row")
    if request.param == "cuda" and not everywhere and row is not None and row.name not in ON_GPU:
        pytest.skip("every model compiles kernels of its own: on a GPU a few rows run this")
    if request.param == "cpu":
        monkeypatch.setattr(decoding, "DEVICES", ("cpu",))
        monkeypatch.setattr(decoding, "capture", without_a_graph)
        monkeypatch.setattr(decoding, "capturable", lambda model: True)
    return request.param


def captured(model: Any) -> bool:
    """Whether `generate`, which asks without gradients, captures the steps of this model here."""
    with torch.no_grad():
        return decoding.capturable(model)


def test_which_models_decode_in_steps_that_are_all_alike() -> None:
    names = {row.name for row in FIXED}
    assert {"falcon1", "falcon3a", "fwpkm", "lact"} <= names and "fwmlp" not in names


def test_a_step_that_writes_a_chunk_of_slots_is_no_part_of_a_graph(device: str, monkeypatch: Any) -> None:
    """FwPKM's steps are alike until one writes a chunk: that one runs as written, and another graph goes on behind it."""
    model, prompt = next(row for row in FIXED if row.name == "fwpkm").model().to(device), ids(1, 6).to(device)
    chunk, replayed, made = model.config.memory_chunk_size, [], []
    replay = decoding._Graph.replay
    monkeypatch.setattr(
        decoding._Graph, "replay", lambda *args: replayed.append(args[3].layers[0].seen) or replay(*args)
    )
    monkeypatch.setattr(decoding, "_Graph", lambda *args, new=decoding._Graph: made.append(new(*args)) or made[-1])
    options = {**GREEDY, "max_new_tokens": 3 * chunk}
    tokens = model.generate(prompt, **options)
    assert torch.equal(tokens, model.generate(prompt, disable_compile=True, **options))
    steps = range(prompt.shape[1], tokens.shape[1] - 1)  # how many tokens the cache holds before each
    assert replayed == [seen for seen in steps if captured(model) and (seen % chunk or not seen)]
    assert len(made) == len({seen // chunk for seen in replayed})


def test_a_chunk_that_becomes_full_is_no_part_of_a_graph(device: str, monkeypatch: Any) -> None:
    """LaCT's steps are alike until a token fills a chunk: that one runs as written, and the graph goes on behind it."""
    model, prompt = next(row for row in FIXED if row.name == "lact").model().to(device), ids(1, 6).to(device)
    chunk, replayed = model.config.lact_chunk_size, []
    replay = decoding._Graph.replay
    monkeypatch.setattr(
        decoding._Graph, "replay", lambda *args: replayed.append(args[3].layers[0].seen) or replay(*args)
    )
    tokens = model.generate(prompt, **{**GREEDY, "max_new_tokens": 3 * chunk})
    assert torch.equal(tokens, model.generate(prompt, disable_compile=True, **{**GREEDY, "max_new_tokens": 3 * chunk}))
    steps = range(prompt.shape[1], tokens.shape[1] - 1)  # how many tokens the cache holds before each
    assert replayed == [seen for seen in steps if (seen + 1) % chunk]


@rows
def test_tokens_and_cache_are_those_of_plain_decoding(row: Row, device: str, monkeypatch: Any) -> None:
    model, prompt = row.model().to(device), ids(2, 9).to(device)
    mask = torch.ones_like(prompt)
    mask[1, :4] = 0
    made = []
    monkeypatch.setattr(decoding, "_Graph", lambda *args, new=decoding._Graph: made.append(new(*args)) or made[-1])
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    graphed = model.generate(prompt, **options)
    plain = model.generate(prompt, disable_compile=True, **options)
    written = any("shared_rows" in name for layer in plain[CACHE_KEY].layers for name in layer.tensors)
    assert len(made) == captured(model) or written  # a graph for all steps of the first call, none in the second
    assert torch.equal(graphed.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(graphed.logits), torch.stack(plain.logits))
    ours, theirs = graphed[CACHE_KEY].state_dict(), plain[CACHE_KEY].state_dict()
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], msg=name)


@rows
@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=["beams", "sampled"]
)
def test_beams_and_samples(row: Row, device: str, mode: dict[str, Any]) -> None:
    model, prompt = row.model().to(device), ids(2, 9).to(device)
    drawn = []
    for plain in (False, True):
        torch.manual_seed(1)
        drawn.append(model.generate(prompt, disable_compile=plain, **{**GREEDY, **mode}))
    assert torch.equal(*drawn)


@rows
def test_a_cache_goes_on_after_a_graph_and_an_earlier_one_is_left_alone(row: Row, device: str) -> None:
    model, prompt = row.model().to(device), ids(1, 9).to(device)
    cache = model(prompt, use_cache=True)[CACHE_KEY]
    held = {name: x for layer in cache.layers for name, x in layer.tensors.items()}
    before = {name: x.clone() for name, x in held.items()}
    options = {**GREEDY, "return_dict_in_generate": True}
    first = model.generate(torch.cat([prompt, ids(1, 1, seed=5).to(device)], 1), **{CACHE_KEY: cache}, **options)
    assert all(torch.equal(x, before[name]) for name, x in held.items())
    more = torch.cat([first.sequences, ids(1, 3, seed=6).to(device)], 1)
    again = model.generate(more, **{CACHE_KEY: first[CACHE_KEY]}, **options)
    assert torch.equal(again.sequences, model.generate(more, disable_compile=True, **options).sequences)


def test_a_capture_that_fails_leaves_plain_decoding(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoding, "DEVICES", ("cpu",))
    monkeypatch.setattr(decoding, "capture", refuse)
    monkeypatch.setattr(decoding, "capturable", lambda model: True)
    model, prompt = FIXED[0].model(), ids(1, 9)
    assert torch.equal(model.generate(prompt, **GREEDY), model.generate(prompt, disable_compile=True, **GREEDY))


@rows
def test_a_plain_call_between_graphed_steps_is_seen(row: Row, device: str) -> None:
    """Steps one by one through the model, with a call of three tokens between them that no graph replays."""
    model, prompt = row.model().to(device), ids(1, 14).to(device)
    pieces = prompt.split([5, 1, 1, 3, 1, 1, 2], 1)
    found = {}
    for graphed in (True, False):
        cache, logits = None, []
        with torch.no_grad(), generating(), decoding.graphed_decoding(graphed):
            for piece in pieces:
                outputs = model(piece, use_cache=True, **{CACHE_KEY: cache})
                cache = outputs[CACHE_KEY]
                logits.append(outputs.logits)
        found[graphed] = torch.cat(logits, 1)
    torch.testing.assert_close(found[True], found[False])
