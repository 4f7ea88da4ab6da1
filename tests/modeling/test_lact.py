"""The LaCT mixer: the public layers' numbers, decoding at every border, its window attention, and its configuration."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_model import ids, stream
from torch import Tensor

import fwzoo
from compare import error
from fwzoo.conversion.lact_official import fields_from_official, weights_from_official
from fwzoo.modeling.attention_ops import WindowPast, rotary, token_positions, window_attention
from fwzoo.modeling.cache import CACHE_KEY
from fwzoo.modeling.mixers.lact import LactMixer
from rows import ROWS, Row

LAYERS = sorted((Path(__file__).parents[1] / "data" / "lact_layer").glob("*.safetensors"))
rows = pytest.mark.parametrize("row", [row for row in ROWS if "lact" in row.name], ids=lambda row: row.name)


# --- the layer ---


@pytest.mark.parametrize("level", ["reference", "chunk"])
@pytest.mark.parametrize("path", LAYERS, ids=[path.stem for path in LAYERS])
def test_public_layers_in_float64(path: Path, level: str) -> None:
    with safe_open(path, "pt") as f:
        options = json.loads(f.metadata()["options"])
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    width = tensors["in.hidden"].shape[-1]
    fields = fields_from_official({"hidden_size": width, **options})
    mixer = LactMixer(fwzoo.LactConfig.tiny(**{**fields, "num_hidden_layers": 2, "kernel_level": level}), 0).double()
    public = {f"model.layers.0.attn.{n[6:]}": x for n, x in tensors.items() if n.startswith("param.")}
    named, _ = weights_from_official(public)
    mixer.load_state_dict({n.removeprefix("model.layers.0.mixer."): x for n, x in named.items()})
    hidden = tensors["in.hidden"].requires_grad_()
    o = mixer(hidden, None, tensors.get("in.mask"), tensors.get("in.cu_seqlens"))
    (grad,) = torch.autograd.grad((o * tensors["cotangent.o"]).sum(), hidden)
    assert error(o, tensors["out.o"]) < 1e-9 and error(grad, tensors["grad.hidden"]) < 1e-9


def test_public_layers_are_there() -> None:
    assert len(LAYERS) >= 4


# --- decoding after a prompt ---


def teachable(row: Row) -> Any:
    """A model whose first updates change the fast weights as much as late ones do after training."""
    model = row.model().double()
    with torch.no_grad():
        for block in model.model.layers:
            if isinstance(block.mixer, LactMixer):
                block.mixer.rate_proj.bias += 7
    return model


def borders(chunk: int) -> list[int]:
    return [1, chunk - 1, chunk, chunk + 1, 2 * chunk + 3]


def forgetful(model: Any, tokens: Tensor, n: int) -> Tensor:
    """Logits behind the first n tokens as the public code decodes: window and positions go on, fast weights do not."""
    cache = fwzoo.FastWeightCache(model.config)
    initial = fwzoo.FastWeightCache(model.config)
    logits = []
    with torch.no_grad():
        model(tokens[:, :1], use_cache=True, **{CACHE_KEY: initial})
        model(tokens[:, :n], use_cache=True, **{CACHE_KEY: cache})
        for t in range(n, tokens.shape[1]):
            for layer, new in zip(cache.layers, initial.layers, strict=True):
                kept = {name: x for name, x in layer.tensors.items() if "window" in name or "position" in name}
                fresh = {name: x for name, x in new.tensors.items() if name.startswith("mixer.") and name not in kept}
                layer.tensors = {**layer.tensors, **fresh, "mixer.count": torch.zeros_like(new.tensors["mixer.count"])}
            logits.append(model(tokens[:, t : t + 1], use_cache=True, **{CACHE_KEY: cache}).logits)
    return torch.cat(logits, 1)


@rows
def test_decoding_after_a_prompt_equals_one_forward_at_every_border(row: Row) -> None:
    """One token at a time and in one piece, with windows that are not the chunk."""
    config = row.config()
    chunk = config.lact_chunk_size
    assert chunk != config.lact_window
    model = teachable(row)
    for n, m in itertools.product(borders(chunk), borders(chunk)):
        tokens = ids(2, n + m)
        with torch.no_grad():
            whole = model(tokens).logits
        for cuts in ([n], list(range(n, n + m))):
            assert error(stream(model, tokens, cuts)[0], whole) < 1e-9


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.architecture == "lact" and "-falcon" not in row.name], ids=str
)
def test_forgetting_the_fast_weights_while_decoding_shows(row: Row) -> None:
    """Negative control: it agrees within the first chunk and fails the comparison above behind it."""
    model = teachable(row)
    chunk = model.config.lact_chunk_size
    tokens = ids(2, 2 * chunk + 3)
    with torch.no_grad():
        whole = model(tokens).logits
    assert error(forgetful(model, tokens[:, : chunk - 1], 1), whole[:, 1 : chunk - 1]) < 1e-9
    for n in (1, chunk, chunk + 1):
        assert error(forgetful(model, tokens, n)[:, -2:], whole[:, -2:]) > 1e-3


# --- window attention ---


def slow_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """One token after the other over `[T, H, F]`."""
    outputs = []
    for t in range(q.shape[0]):
        part = slice(max(0, t + 1 - window), t + 1)
        scores = torch.einsum("hf,shf->hs", q[t], k[part]) / q.shape[-1] ** 0.5
        outputs.append(torch.einsum("hs,shf->hf", scores.softmax(-1), v[part]))
    return torch.stack(outputs) if outputs else q


@settings(max_examples=60)
@given(data=st.data())
def test_window_attention_in_pieces_under_masks_and_packing(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 7))
    length = data.draw(st.one_of(st.integers(1, 12), st.integers(60, 150)))
    q, k, v = (torch.randn(2, length, 2, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, length) < data.draw(st.sampled_from([0.2, 0.8, 1.0]))
    expected = torch.zeros_like(v)
    for b in range(2):
        expected[b, mask[b]] = slow_attention(q[b, mask[b]], k[b, mask[b]], v[b, mask[b]], window)
    noisy = [torch.where(mask[..., None, None], x, torch.nan) for x in (q, k, v)]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=3)))
    outputs, past = [], None
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        piece = [x[:, start:end] for x in noisy]
        o, past = window_attention(*piece, window, past=past, mask=mask[:, start:end], keep=True)
        outputs.append(o)
    assert error(torch.cat(outputs, 1), expected) < 1e-12
    assert isinstance(past, WindowPast) and torch.equal(past.count, mask.sum(1))
    flat = [x.flatten(0, 1)[None] for x in noisy]
    bounds = [0, 0, length, 2 * length]
    for keep in (True, False):
        o, packed = window_attention(*flat, window, mask=mask.view(1, -1), bounds=bounds, keep=keep)
        assert error(o.view_as(expected), expected) < 1e-12
        if packed is not None:
            assert all(torch.equal(a[1:], b) for a, b in zip(packed, past, strict=True))


def test_positions_count_real_tokens_of_each_document() -> None:
    like = torch.zeros(2, 5)
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 0]]).bool()
    positions, total = token_positions(like, torch.tensor([10, 0]), mask, None)
    assert positions[mask].tolist() == [10, 11, 12, 0, 1, 2, 3] and total.tolist() == [13, 4]
    positions, total = token_positions(like[:1], torch.tensor([5, 7, 0]), None, [0, 2, 2, 5])
    assert positions.tolist() == [[5, 6, 0, 1, 2]] and total.tolist() == [7, 7, 3]


def test_rotary_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotary(q, torch.tensor([[t + 3]]), 1e4) * rotary(k, torch.tensor([[t]]), 1e4)).sum() for t in (0, 5, 1000)
    ]
    assert all(error(score, scores[0]) < 1e-10 for score in scores)
    assert torch.equal(rotary(q, torch.tensor([[0]]), 1e4), q)


# --- configuration and initial values ---


@pytest.mark.parametrize(("name", "parameters"), [("760m", (0.70e9, 0.85e9)), ("3b", (2.8e9, 3.3e9))])
def test_presets_have_the_published_shapes(name: str, parameters: tuple[float, float]) -> None:
    config = fwzoo.LactConfig.preset(name)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_lact_heads) == (24, 24, 4)
    assert (config.lact_chunk_size, config.lact_window, config.lact_rank) == (2048, 2048, 32)
    assert config.lact_rotary_base == 1e6 and config.vocab_size == 32000 and not config.tie_word_embeddings
    with torch.device("meta"):
        count = fwzoo.LactForCausalLM(config).num_parameters()
    assert parameters[0] < count < parameters[1]
    assert fwzoo.LactConfig.preset(name.upper(), lact_muon=True).lact_muon


def test_initial_fast_weights() -> None:
    config = fwzoo.LactConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=1, vocab_size=64, lact_rank=16)
    mixer = fwzoo.LactForCausalLM(config).model.layers[0].mixer
    size = 64
    low = mixer.w0() - torch.eye(size) / 2
    assert torch.linalg.matrix_rank(low).tolist() == [16] * 4
    assert abs(mixer.w0.left.std().item() - 0.5 / 4) < 0.01 and abs(mixer.w0.right.std().item() - 0.5 / 8) < 0.005
    assert abs(mixer.w1().std().item() - 1 / 8) < 0.005
    rates = mixer._rates(torch.zeros(1, 1, 256))
    assert all(error(rate, torch.full_like(rate, 0.001)) < 1e-8 for rate in rates)


def test_compiled_model_equals_eager() -> None:
    """One graph, no breaks, forward and backward, over three chunks."""
    row = next(row for row in ROWS if row.name == "lact")
    model, tokens = row.model(num_hidden_layers=1).train(), ids(2, 20)
    torch._dynamo.reset()
    grads = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        run(tokens, labels=tokens).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(error(grads[1][name], grad) < 1e-6 for name, grad in grads[0].items())
