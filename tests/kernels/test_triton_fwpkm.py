"""The Triton kernels of FwPKM: vectors, cuts, masks, packings, copies, isolation, the same bits twice, and controls."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from memory_cases import load, nearest_tie, run, vectors
from test_memory_properties import call, draw, part, same, written_out
from torch import Tensor

from compare import error, floor, too_large
from fwzoo.kernels import FwpkmState, explain, fwpkm
from fwzoo.kernels.product_keys import watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton, gpu = pytest.mark.triton, pytest.mark.gpu

# under the interpreter, which is slow, some
VECTORS = [
    path
    for path in vectors("fwpkm")
    if DEVICE == "cuda" or path.stem in ("batch_packed_state", "sequence_no_row_averaging")
]


def put(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def single(op_draw: tuple[dict[str, Tensor], dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens and weights in float32 on the device."""
    tokens, weights = op_draw
    return put({n: x.float() for n, x in tokens.items()}), put({n: x.float() for n, x in weights.items()})


def small(batch: int, tokens: int, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As little as shows something: one head, 4 x 4 slots, of which three are read."""
    return single(draw("fwpkm", batch, tokens, **{"heads": 1, "n": 4, **options}))


@triton
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors(path: Any) -> None:
    op, options, given, expected = load(path)
    given, expected = put(given), put(expected)
    plain = run(op, given, {**options, "level": "reference"}, torch.float32)
    found = run(op, given, {**options, "level": "triton"}, torch.float32)
    wrong = too_large(found, expected, plain, torch.float32)
    assert not wrong, wrong


@triton
def test_a_wrong_switch_fails_the_comparison() -> None:
    """The comparison of this file can fail: what was written is not averaged."""
    tokens, weights = small(1, 6)
    _, plain = call("fwpkm", tokens, weights, level="chunk")
    _, found = call("fwpkm", tokens, weights, level="triton", row_averaging=False)
    assert not same(found, plain, weights, 1e-5)


@triton
@pytest.mark.parametrize(("scope", "lookahead", "score"), [("sequence", True, "dot"), ("batch", False, "idw")])
def test_cuts_and_single_tokens_with_masks_equal_one_call(scope: str, lookahead: bool, score: str) -> None:
    tokens, weights = small(2, 12)
    mask = (torch.rand(2, 12, generator=torch.Generator().manual_seed(3)) > 0.2).to(DEVICE)
    for x in tokens.values():
        x[~mask] = torch.nan
    options = {"scope": scope, "lookahead": lookahead, "score": score}
    whole, end = call("fwpkm", tokens, weights, mask=mask, level="chunk", **options)
    state, pieces = None, []
    with torch.no_grad():
        for a, b in itertools.pairwise([0, 0, 7, 10, 11, 12]):
            piece = part(tokens, slice(None), slice(a, b))
            o, state = call("fwpkm", piece, weights, mask=mask[:, a:b], state=state, level="triton", **options)
            pieces.append(o)
    assert error(torch.cat(pieces, 1), whole) < 1e-5 and not whole[~mask].any()
    assert same(state, end, weights, 1e-5)


@triton
def test_single_tokens_without_a_mask_never_ask_the_device_what_is_pending(monkeypatch: Any) -> None:
    tokens, weights = small(1, 6)
    whole, end = call("fwpkm", tokens, weights, level="chunk")
    monkeypatch.setattr(Tensor, "tolist", lambda x: 1 / 0)
    state, pieces = None, []
    with torch.no_grad():
        for i in range(6):
            o, state = call("fwpkm", part(tokens, slice(None), slice(i, i + 1)), weights, state=state, level="triton")
            pieces.append(o)
    assert error(torch.cat(pieces, 1), whole) < 1e-5 and same(state, end, weights, 1e-5)


@triton
def test_packed_documents_are_alone() -> None:
    tokens, weights = small(1, 12)
    bounds = torch.tensor([0, 5, 5, 6, 12])
    packed, state = call("fwpkm", tokens, weights, cu_seqlens=bounds, level="triton")
    plain, end = call("fwpkm", tokens, weights, cu_seqlens=bounds, level="chunk")
    assert error(packed, plain) < 1e-5 and same(state, end, weights, 1e-5)


@triton
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_the_gradient_of_q(scope: str) -> None:
    tokens, weights = small(2, 9, heads=2)
    grads = []
    for level in ("chunk", "triton"):
        leaves = {name: x.clone().requires_grad_() for name, x in tokens.items()}
        o, _ = call("fwpkm", leaves, weights, scope=scope, level=level)
        (o * torch.linspace(-1, 1, o.numel(), device=DEVICE).view(o.shape)).sum().backward()
        assert leaves["v"].grad is None and leaves["gate"].grad is None
        grads.append(leaves["q"].grad)
    assert error(grads[1], grads[0]) < 1e-5 and grads[0].abs().max() > 0.1


@triton
def test_a_row_never_sees_another_and_bits_repeat() -> None:
    tokens, weights = small(2, 6)
    outputs = []
    for change in (0.0, 0.0, 1e20, torch.nan):
        changed = {n: x.clone() for n, x in tokens.items()}
        changed["v"][1] += change
        changed["q"][1] *= 1 + change
        outputs.append(call("fwpkm", changed, weights, level="triton"))
    first, state = outputs[0]
    assert torch.equal(first, outputs[1][0]) and all(
        torch.equal(a, b) for a, b in zip(state, outputs[1][1], strict=True)
    )
    assert all(torch.equal(first[0], o[0]) for o, _ in outputs) and first.isfinite().all()


@triton
def test_copies_share_rows_until_they_write() -> None:
    tokens, weights = small(1, 9, n=8)
    _, state = call("fwpkm", tokens, weights, level="triton")
    rows = state.shared_rows.shape[0]
    assert rows == int((state.slots < 64).sum())
    beams = FwpkmState(*(x if n == "shared_rows" else x.repeat_interleave(3, 0) for n, x in state._asdict().items()))
    kept = [x.clone() for x in beams]
    follow, _ = small(3, 4, seed=5)
    together, moved = call("fwpkm", follow, weights, state=beams, level="triton")
    assert rows < moved.shared_rows.shape[0] < 3 * rows
    assert moved.shared_rows.shape[0] == moved.where[moved.where >= 0].unique().numel()
    assert all(torch.equal(a, b) for a, b in zip(kept, beams, strict=True))
    plain, end = call("fwpkm", follow, weights, state=beams, level="chunk")
    assert error(together, plain) < 1e-5 and same(moved, end, weights, 1e-5)


@triton
@pytest.mark.parametrize("sizes", [(32, 64, 32), (3, 3, 4)], ids=["together", "in pieces"])
def test_many_entries_of_one_slot(sizes: tuple[int, int, int], monkeypatch: Any) -> None:
    """Four slots and 16 tokens: every row is written many times, and a slot by both heads of a token."""
    for name, size in zip(("PIECE", "SUB_PIECE", "MOST"), sizes, strict=True):
        monkeypatch.setattr(importlib.import_module("fwzoo.kernels.fwpkm.table"), name, size)
    tokens, weights = small(2, 9, heads=2, n=2)
    options = {"top_k": 2, "chunk_size": 8, "scope": "batch"}
    plain, end = call("fwpkm", tokens, weights, level="chunk", **options)
    found, state = call("fwpkm", tokens, weights, level="triton", **options)
    assert error(found, plain) < 1e-5 and same(state, end, weights, 1e-5)


@triton
def test_a_pool_that_is_too_small_grows(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.import_module("fwzoo.kernels.fwpkm.table"), "ROOM", 0)
    tokens, weights = small(1, 13, n=8)
    with torch.no_grad():
        plain, end = call("fwpkm", tokens, weights, level="chunk")
        found, state = call("fwpkm", tokens, weights, level="triton")
    assert error(found, plain) < 1e-5 and same(state, end, weights, 1e-5)


@triton
def test_sixteen_bit_inputs_and_tables() -> None:
    tokens, weights = small(1, 6)
    narrow = {n: x if n == "gate" else x.bfloat16() for n, x in tokens.items()}
    table = {**weights, "values": weights["values"].bfloat16()}
    for given, held in ((narrow, weights), (tokens, table)):
        plain, end = call("fwpkm", given, held, level="chunk")
        found, state = call("fwpkm", given, held, level="triton")
        assert found.dtype == plain.dtype and error(found, plain) < floor(plain.dtype)
        assert same(state, end, held, 1e-4)


@triton
def test_what_is_read_can_be_watched() -> None:
    tokens, weights = small(1, 6)
    seen = []
    for level in ("chunk", "triton"):
        with watch() as reads:
            call("fwpkm", tokens, weights, level=level)
        seen.append(reads[0])
    (a, x), (b, y) = seen
    assert a.dtype == b.dtype == torch.int64 and torch.equal(a, b) and error(y, x) < 1e-5


@triton
def test_what_cannot_run_says_why() -> None:
    tokens, weights = single(draw("fwpkm", 1, 3))
    with pytest.raises(ValueError, match="max_slots is 20"):
        call("fwpkm", tokens, weights, max_slots=20, level="triton")
    wide = {n: x.double() for n, x in tokens.items()}
    with pytest.raises(ValueError, match="float64"):
        call("fwpkm", wide, {n: x.double() for n, x in weights.items()}, level="triton")
    assert explain("fwpkm", *tokens.values(), *weights.values()).level == ("triton" if DEVICE == "cuda" else "chunk")


# --- on a GPU ---

SHAPES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("reference setting", {"batch": 2, "tokens": 1300, "heads": 1, "n": 512, "k": 512, "v": 512}, {"chunk_size": 512}),
    (
        "shared",
        {"batch": 4, "tokens": 700, "heads": 2, "n": 128, "k": 64, "v": 48},
        {"scope": "batch", "chunk_size": 64},
    ),
    (
        "many slots",
        {"batch": 1, "tokens": 200, "heads": 1, "n": 1024, "k": 64, "v": 96},
        {"top_k": 64, "chunk_size": 64},
    ),
    ("few slots", {"batch": 2, "tokens": 2100, "heads": 1, "n": 8, "k": 512, "v": 512}, {"scope": "batch"}),
    ("wide rows", {"batch": 1, "tokens": 140, "heads": 1, "n": 32, "k": 32, "v": 1500}, {"chunk_size": 64}),
]


def sized(batch: int, tokens: int, heads: int, n: int, k: int, v: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").double()

    gate = normal(batch, tokens).sigmoid().float().double()
    return (
        {"q": normal(batch, tokens, heads, k), "v": normal(batch, tokens, v), "gate": gate},
        {"keys": normal(2, heads, n, k // 2), "values": normal(n * n, v)},
    )


def without_ties(
    tokens: dict[str, Tensor], weights: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tokens, with other queries where rounding could decide in which slots one reads."""
    module, asked = importlib.import_module("fwzoo.kernels.fwpkm.chunk"), []
    search = module.select

    def select(q: Tensor, keys: Tensor, top_k: int, score: str, eps: float) -> Any:
        asked.append(nearest_tie(q, keys, top_k, score, order=False).reshape(len(tokens["q"]), -1))
        return search(q, keys, top_k, score, eps)

    for _ in range(20):
        asked.clear()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(module, "select", select)
            fwpkm(**tokens, **weights, **options, level="chunk")
        near = torch.cat(asked, 1) < 3e-6
        if not near.any():
            return tokens
        tokens["q"][near] = torch.randn_like(tokens["q"][near]).to(dtype).double()
    raise AssertionError("ties everywhere")


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "options"), [x[1:] for x in SHAPES], ids=[x[0] for x in SHAPES])
def test_shapes(sizes: dict[str, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    """At most twice as far from the float64 chunk level as the chunk level in the same dtype; the same bits twice."""
    tokens, weights = sized(**sizes)
    tokens = {n: x if n == "gate" else x.to(dtype).double() for n, x in tokens.items()}
    tokens = without_ties(tokens, weights, options, dtype)

    def results(level: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], FwpkmState]:
        wide = torch.promote_types(dtype, torch.float32)
        given = {n: x.to(wide if n == "gate" else dtype) for n, x in tokens.items()}
        held = {n: x.to(wide) for n, x in weights.items()}
        q = given["q"].requires_grad_()
        o, state = fwpkm(**given, **held, **options, level=level)
        weight = torch.linspace(-1, 1, o.numel(), device="cuda", dtype=torch.float64).view(o.shape)
        (grad,) = torch.autograd.grad((o.double() * weight).sum(), q)
        return {"o": o.detach(), "q": grad, **written_out(state, held)}, state

    exact, _ = results("chunk", torch.float64)
    plain, _ = results("chunk", dtype)
    found, state = results("triton", dtype)
    wrong = too_large(found, exact, plain, dtype)
    assert not wrong, wrong
    again, other = results("triton", dtype)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@gpu
def test_a_step_in_a_cuda_graph_is_the_step() -> None:
    tokens, weights = single(sized(2, 40, 1, 64, 64, 64))
    with torch.no_grad():
        _, state = fwpkm(**part(tokens, slice(None), slice(0, 37)), **weights, chunk_size=32, level="triton")
        last = {n: x[:, 37:38].contiguous() for n, x in tokens.items()}
        expected, after = fwpkm(**last, **weights, chunk_size=32, state=state, level="triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, new = fwpkm(**last, **weights, chunk_size=32, state=state, level="triton")
        graph.replay()
    assert torch.equal(o, expected) and all(torch.equal(a, b) for a, b in zip(new, after, strict=True))
