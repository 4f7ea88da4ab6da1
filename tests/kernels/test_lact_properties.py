"""Properties of the LaCT operator: gradients, the formulas, random cuts, masks and packings, memory, and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lact_cases import WEIGHTS, as_given, beyond, draw, run, typical
from torch import Tensor

from compare import error, floor
from fwzoo.kernels import LactState, lact
from fwzoo.kernels.lact import chunk as chunk_form
from fwzoo.kernels.lact.rules import orthogonal, update

LEVELS = ("reference", "chunk")
KINDS = [{}, {"prenorm": True}, {"muon": True}, {"muon": True, "prenorm": True}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return error(a, b) < tolerance


# --- gradients ---


@kinds
@pytest.mark.parametrize("momentum", [True, False])
def test_gradcheck_of_the_reference(kind: dict[str, Any], momentum: bool) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "size": 2, "hidden": 3, "momentum": momentum}
    options: dict[str, Any] = {"chunk_size": 3, "level": "reference", **kind}
    _, state = lact(**draw(tokens=5, seed=3, **sizes), **options)
    arguments = draw(tokens=5, **sizes)
    floating = [x.detach().requires_grad_() for x in state[:-1]]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        own = LactState(*tensors[: len(floating)], state.count)
        o, new = lact(**dict(zip(arguments, tensors[len(floating) :], strict=True)), state=own, **options)
        return o, *new[:-1]

    leaves = [*floating, *(x.requires_grad_() for x in arguments.values())]
    assert torch.autograd.gradcheck(call, leaves, atol=1e-6)


@pytest.mark.parametrize("momentum", [True, False])
@kinds
def test_chunk_equals_reference_with_every_gradient(kind: dict[str, Any], momentum: bool) -> None:
    _, state = lact(**draw(tokens=19, seed=3, momentum=momentum), chunk_size=8, **kind)
    inputs = as_given(draw(tokens=45, momentum=momentum), state=state)
    exact = run(inputs, {"chunk_size": 8, "level": "reference", **kind}, torch.float64)
    found = run(inputs, {"chunk_size": 8, "level": "chunk", **kind}, torch.float64)
    assert {name: e for name, x in found.items() if not (e := error(x, exact[name])) < 1e-9} == {}


@kinds
def test_the_direction_is_the_gradient_of_the_inner_product(kind: dict[str, Any]) -> None:
    """One chunk, every rate 1: the update is autograd's gradient of the sum of <f(k), v>."""
    arguments = draw(batch=1, tokens=8, heads=1, momentum=False)
    arguments.update({f"lr{i}": torch.ones_like(arguments["lr0"]) for i in range(3)})
    w0, w1, w2 = weights = [arguments[name][0].clone().requires_grad_() for name in WEIGHTS]
    k, v = arguments["k"][0, :, 0], arguments["v"][0, :, 0]
    f = (F.silu(k @ w0.T) * (k @ w2.T)) @ w1.T
    steps = torch.autograd.grad((f * v).sum(), weights)
    if kind.get("muon"):
        steps = tuple(orthogonal(step) for step in steps)
    _, state = lact(**arguments, chunk_size=8, **kind)
    for i, (weight, step) in enumerate(zip(weights, steps, strict=True)):
        moved = weight + step
        scaled = moved / (moved.norm(dim=1, keepdim=True) + 1e-5) * weight.norm(dim=1, keepdim=True)
        assert close(state[i][0, 0], scaled)
        assert close(state[3 + i][0, 0], moved if kind.get("prenorm") else scaled)


def test_orthogonalisation_brings_singular_values_near_one() -> None:
    for shape in ((6, 10), (10, 6), (8, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape, dtype=torch.float64)))
        assert values.min() > 0.5 and values.max() < 1.5


def test_a_chunk_reads_the_weights_from_before_it() -> None:
    arguments = draw(tokens=24)
    for level in LEVELS:
        o, _ = lact(**arguments, chunk_size=8, level=level)
        still, _ = lact(**arguments, chunk_size=1000, level=level)
        assert close(o[:, :8], still[:, :8]) and error(o[:, 8:16], still[:, 8:16]) > 1e-2


# --- cuts, masks, packings ---


def cut_run(
    arguments: dict[str, Tensor], cuts: list[int], mask: Tensor | None, **options: Any
) -> tuple[Tensor, LactState]:
    """Outputs and state of a sequence given in pieces."""
    tokens = arguments["q"].shape[1]
    outputs, state = [], None
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        piece = {name: x if name in WEIGHTS else x[:, start:end] for name, x in arguments.items()}
        o, state = lact(**piece, mask=None if mask is None else mask[:, start:end], state=state, **options)
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, 1), state


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("level", LEVELS)
def test_any_cut_any_mask_any_packing(level: str, data: st.DataObject) -> None:
    """Pieces of a masked batch, and the same rows packed, all equal the bare rows run one by one."""
    chunk = data.draw(st.integers(1, 6))
    tokens = data.draw(st.integers(1, 17))
    options: dict[str, Any] = {"chunk_size": chunk, "level": level, **data.draw(st.sampled_from(KINDS))}
    arguments = draw(
        batch=2, tokens=tokens, heads=1, seed=data.draw(st.integers(0, 5)), momentum=data.draw(st.booleans())
    )
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=2, max_size=2))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    weights = {name: arguments.pop(name) for name in WEIGHTS}
    noisy = {
        name: torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, torch.nan) for name, x in arguments.items()
    }

    rows = []
    for b in range(2):
        bare = {name: x[b : b + 1, mask[b]] for name, x in arguments.items()}
        rows.append(lact(**bare, **weights, **{**options, "level": "reference"}))
    expected_state = LactState(*(torch.cat(fields) for fields in zip(*(row[1] for row in rows), strict=True)))
    expected = torch.zeros_like(arguments["v"])
    for b in range(2):
        expected[b, mask[b]] = rows[b][0][0]

    o, state = cut_run({**noisy, **weights}, cuts, mask, **options)
    assert close(o, expected)
    assert all(close(x, y) for x, y in zip(state, expected_state, strict=True))
    assert torch.equal(o[~mask], torch.zeros_like(o[~mask]))

    # packed, with empty documents before, between and behind; then more tokens for each
    packed = {name: x.reshape(1, 2 * tokens, *x.shape[2:]) for name, x in noisy.items()}
    bounds = torch.tensor([0, 0, tokens, tokens, 2 * tokens, 2 * tokens])
    first = lact(**packed, **weights, **options, mask=mask.reshape(1, -1), cu_seqlens=bounds)
    assert close(first[0].view_as(expected), expected)
    assert all(close(x[[1, 3]], y) for x, y in zip(first[1], expected_state, strict=True))
    assert not first[1].count[[0, 2, 4]].any() and not first[1].pk[[0, 2, 4]].any()
    again = lact(**packed, **weights, **options, mask=mask.reshape(1, -1), cu_seqlens=bounds, state=first[1])
    o, state = lact(**noisy, **weights, **options, mask=mask, state=expected_state)
    assert close(again[0].view_as(o), o)
    assert all(close(x[[1, 3]], y) for x, y in zip(again[1], state, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 19])
def test_chunk_equals_reference_at_every_length(tokens: int) -> None:
    a, b = (lact(**draw(tokens=tokens), chunk_size=8, level=level) for level in LEVELS)
    assert close(a[0], b[0])
    assert all(close(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_masked_tokens_get_no_gradient_and_give_none() -> None:
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:12] = False
    for chunk in (8, 100):
        grads = []
        for filler in (0.0, torch.nan):
            arguments = {
                name: x if name in WEIGHTS else torch.where(mask.view(2, 24, *[1] * (x.ndim - 2)), x, filler)
                for name, x in draw(tokens=24).items()
            }
            leaves = [x.requires_grad_() for name, x in arguments.items() if name not in WEIGHTS]
            o, state = lact(**arguments, mask=mask, level="chunk", chunk_size=chunk)
            loss = o.sum() + state.w0.square().sum() + state.pk.sum() + state.pm.sum()
            grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
            assert all(g is None or not g[~mask].any() for g in grads[-1])
        assert all(a is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_the_future_does_not_leak(level: str) -> None:
    arguments = draw(tokens=40, dtype=torch.float32)
    before, _ = lact(**arguments, chunk_size=8, level=level)
    for t in (0, 7, 8, 20, 39):
        changed = {name: x.clone() for name, x in arguments.items()}
        for name, x in changed.items():
            if name not in WEIGHTS:
                x[:, t] = x[:, t] + 0.25
        after, _ = lact(**changed, chunk_size=8, level=level)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


# --- memory and numbers ---


def test_backward_recomputes_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the passes nothing of a chunk's inside is kept: no saved tensor depends on the hidden size times tokens."""
    calls = []
    monkeypatch.setattr(chunk_form, "update", lambda *args: (calls.append(1), update(*args))[1])
    saved: list[int] = []
    arguments = {name: x.requires_grad_() for name, x in draw(tokens=64, hidden=96).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        o, _ = lact(**arguments, chunk_size=8, level="chunk")
    assert len(calls) == 8
    assert max(saved, default=0) < 2 * 8 * 2 * 96  # batch, chunk, heads, hidden
    o.sum().backward()
    assert len(calls) == 8 + 7  # the last update does not reach the output


@kinds
@pytest.mark.parametrize("stress", ["equal keys", "zero keys", "zero rates", "large values", "small values"])
def test_stress_in_float32(stress: str, kind: dict[str, Any]) -> None:
    arguments = draw(batch=1, tokens=60, size=8, hidden=8, dtype=torch.float32)
    if stress == "equal keys":
        arguments["k"][:] = arguments["k"][:, :1]
    elif stress == "zero keys":
        arguments["k"][:] = 0
    elif stress == "zero rates":
        arguments.update({f"lr{i}": torch.zeros_like(arguments["lr0"]) for i in range(3)})
    else:
        arguments["v"] *= 1e4 if stress == "large values" else 1e-4
    inputs = as_given(arguments)
    exact = run(inputs, {"chunk_size": 8, "level": "reference", **kind}, torch.float64)
    plain = run(inputs, {"chunk_size": 8, "level": "reference", **kind}, torch.float32)
    found = run(inputs, {"chunk_size": 8, "level": "chunk", **kind}, torch.float32)
    assert all(x.isfinite().all() for x in found.values())
    assert not (wrong := beyond(found, exact, plain, torch.float32, kind)), wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    narrow = draw(tokens=40, dtype=dtype)
    wide = {name: x.float() for name, x in narrow.items()}
    for level in LEVELS:
        o, state = lact(**narrow, chunk_size=16, level=level)
        o32, state32 = lact(**wide, chunk_size=16, level=level)
        assert o.dtype == state.pk.dtype == state.pv.dtype == dtype
        assert state.w0.dtype == state.n1.dtype == state.g2.dtype == state.plr0.dtype == state.pm.dtype == torch.float32
        assert torch.equal(o, o32.to(dtype)) and torch.equal(state.w1, state32.w1)


@kinds
@pytest.mark.parametrize("level", LEVELS)
def test_autocast_does_not_reach_the_operator(level: str, kind: dict[str, Any]) -> None:
    inputs = as_given(draw(tokens=40, dtype=torch.float32))
    options = {"chunk_size": 8, "level": level, **kind}

    def operator(**arguments: Any) -> tuple[Tensor, LactState]:
        with torch.autocast("cpu", torch.bfloat16):
            return lact(**arguments)

    expected = run(inputs, options, torch.float32)
    found = run(inputs, options, torch.float32, operator)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_memory_of_the_state_does_not_grow() -> None:
    sizes = {
        sum(x.numel() * x.element_size() for x in lact(**draw(tokens=tokens), chunk_size=8)[1])
        for tokens in (1, 8, 100)
    }
    assert len(sizes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds
def test_chunk_on_a_gpu(kind: dict[str, Any], dtype: torch.dtype) -> None:
    options, triples = {"chunk_size": 64, **kind}, []
    for seed in range(5 if kind.get("muon") else 1):
        inputs = as_given(draw(tokens=300, size=32, hidden=32, seed=seed))
        inputs = {n: x.to(dtype).double() if n.startswith(("in.", "cot")) else x for n, x in inputs.items()}
        exact = run(inputs, {**options, "level": "reference"}, torch.float64)
        plain = run(inputs, {**options, "level": "reference"}, dtype)
        found = run({n: x.cuda() for n, x in inputs.items()}, {**options, "level": "chunk"}, dtype)
        triples.append(({n: x.cpu() for n, x in found.items()}, exact, plain))
    if kind.get("muon"):
        ours, theirs = typical(triples)
        assert ours <= 2 * theirs + floor(dtype)
    else:
        assert not (wrong := beyond(*triples[0], dtype, kind)), wrong
