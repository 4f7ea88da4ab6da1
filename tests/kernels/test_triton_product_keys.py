"""The Triton kernels of product-key memories: search, read, and pkm with its gradients; vectors, shapes, ties, controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_cases
import pytest
import torch
from torch import Tensor

from compare import error, floor, too_large
from fwzoo.kernels import explain, pkm
from fwzoo.kernels.product_keys import select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton, gpu = pytest.mark.triton, pytest.mark.gpu
scores = pytest.mark.parametrize("score", ["idw", "dot"])
VECTORS = memory_cases.vectors("pkm")


def run(given: dict[str, Tensor], dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    found = memory_cases.run("pkm", {name: x.to(DEVICE) for name, x in given.items()}, options, dtype)
    return {name: x.detach() for name, x in found.items()}


def draw(batch: int, tokens: int, heads: int, size: int, n: int, value: int) -> dict[str, Tensor]:
    g = torch.Generator(DEVICE).manual_seed(tokens + n)
    shapes = {
        "in.q": (batch, tokens, heads, size),
        "in.keys": (2, heads, n, size // 2),
        "in.values": (n * n, value),
        "cotangent.o": (batch, tokens, value),
    }
    return {name: torch.randn(x, generator=g, dtype=torch.float64, device=DEVICE) for name, x in shapes.items()}


def check(given: dict[str, Tensor], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """At most twice as far from float64 as the chunk level in the same dtype; slots are the same."""
    given = {name: x.to(dtype).double() for name, x in given.items()}
    exact = run(given, torch.float64, level="chunk", **options)
    plain = run(given, dtype, level="chunk", **options)
    found = run(given, dtype, level="triton", **options)
    assert torch.equal(found.pop("slots"), exact.pop("slots"))
    plain.pop("slots")
    wrong = too_large(found, exact, plain, dtype)
    assert not wrong, wrong


# --- on a card: real sizes ---


def apart(given: dict[str, Tensor], top_k: int, score: str) -> dict[str, Tensor]:
    """The tokens without near-ties, as one row."""
    q, keys = given["in.q"].flatten(0, 1)[None], given["in.keys"][None]
    some = memory_cases.nearest_tie(q, keys, top_k, score, order=True)[0] > 2e-6
    return {name: x if name in ("in.keys", "in.values") else x.flatten(0, 1)[some][None] for name, x in given.items()}


READ, HEADS, MANY = (1, 600, 1, 512, 512, 512, 8), (2, 300, 4, 256, 512, 96, 32), (1, 100, 1, 128, 1024, 20, 64)


@gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "score"),
    [
        (READ, torch.float32, "idw"),
        (HEADS, torch.float32, "dot"),
        (READ, torch.bfloat16, "idw"),
        (HEADS, torch.float32, "idw"),
        (READ, torch.float16, "dot"),
        (MANY, torch.float32, "idw"),
    ],
    ids=str,
)
def test_real_sizes(shape: tuple[int, ...], dtype: torch.dtype, score: str) -> None:
    *sizes, top_k = shape
    rounded = {name: x.to(dtype).double() for name, x in draw(*sizes).items()}
    given = apart(rounded, top_k, score)
    assert given["in.q"].shape[1] > sizes[0] * sizes[1] / 8
    check(given, dtype, top_k=top_k, score=score)


@gpu
def test_two_runs_are_equal_to_the_bit() -> None:
    *sizes, top_k = HEADS
    one, two = (run(draw(*sizes), level="triton", top_k=top_k) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@gpu
def test_captured_in_a_graph_and_compiled() -> None:
    given = draw(1, 64, 2, 64, 64, 32)
    q, keys, values = (given[name].float().to(DEVICE) for name in ("in.q", "in.keys", "in.values"))

    def call(q: Tensor) -> Tensor:
        o = pkm(q, keys, values, top_k=8, level="triton")
        assert isinstance(o, Tensor)
        return o

    expected = call(q)
    assert torch.equal(torch.compile(call, fullgraph=True)(q), expected)
    call(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q)
    graph.replay()
    assert torch.equal(captured, expected)


# --- under the interpreter too ---


@triton
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    _, options, given, expected = memory_cases.load(path)
    expected = {name: x.to(DEVICE) for name, x in expected.items()}
    plain, found = (run(given, **options, level=level) for level in ("chunk", "triton"))
    assert torch.equal(found["slots"], expected["slots"].long())
    wrong = too_large(found, expected, plain, torch.float32)
    assert not wrong, wrong


SHAPES = [  # batch, tokens, heads, K, n, V, top_k
    (2, 3, 2, 6, 5, 4, 3),
    (1, 18, 1, 34, 9, 20, 8),
    (1, 2, 3, 8, 17, 5, 17),
    (1, 2, 1, 4, 7, 3, 7),
]


@triton
@scores
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], score: str) -> None:
    *sizes, top_k = shape
    check(draw(*sizes), top_k=top_k, score=score)


def check_search(q: Tensor, keys: Tensor, top_k: int, score: str) -> None:
    """Slots are those of float64; sub-keys, their scores and the weights are as near as the chunk level's."""
    from fwzoo.kernels import product_key_search as kernels

    q, keys = q.float().to(DEVICE), keys.float().to(DEVICE)
    found = kernels.search(q, keys, top_k, score, 1e-3)
    exact, plain = (select(q.to(dtype), keys.to(dtype), top_k, score, 1e-3) for dtype in (torch.float64, torch.float32))
    order = found.index.sort(-1)
    assert torch.equal(found.slots.long(), exact.slots)
    assert torch.equal(order.values.long(), exact.index)
    results = {"weights": found.weights, "half": found.half.gather(-1, order.indices)}
    others = ({name: getattr(x, name) for name in results} for x in (exact, plain))
    wrong = too_large(results, *others, torch.float32)
    assert not wrong, wrong


@triton
@pytest.mark.parametrize(
    ("heads", "n", "size", "top_k", "score"),
    [(2, 70, 40, 9, "dot"), (2, 100, 8, 2, "idw"), (1, 520, 8, 20, "dot"), (1, 66, 8, 64, "idw")],
)
def test_search(heads: int, n: int, size: int, top_k: int, score: str) -> None:
    torch.manual_seed(n)
    check_search(torch.randn(2, 3, 2, size), torch.randn(2, 2, 2, n, size // 2), top_k, score)


@triton
@scores
@pytest.mark.parametrize("case", ["equal", "pairs", "near", "far"])
def test_crowded(case: str, score: str) -> None:
    """Where approximate scores cannot tell the best: equal sub-keys, pairs of them, queries on sub-keys, a far centre."""
    torch.manual_seed(0)
    q, keys = torch.randn(1, 5, 1, 8), torch.randn(1, 2, 1, 40, 4)
    if case == "equal":
        keys.zero_()
    elif case == "pairs":
        keys = keys[..., torch.arange(40) // 2, :]
    elif case == "near":
        q = keys[0, :, 0, 5:10].transpose(0, 1).reshape(1, 5, 1, 8) + 1e-3 * q
    else:
        q, keys = q + 30, keys + 30
    check_search(q, keys, 4, score if case != "far" else "idw")


@triton
def test_what_is_not_marked_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: far from 0, approximate scores do not tell sub-keys apart; were they trusted, others would be read."""
    from fwzoo.kernels import product_key_search as kernels

    torch.manual_seed(0)
    q, keys = torch.full((1, 3, 1, 8), 30.0), 30 + torch.randn(1, 2, 1, 40, 4)
    check_search(q, keys, 4, "idw")
    monkeypatch.setattr(kernels, "UNSURE", -1.0)
    with pytest.raises(AssertionError):
        check_search(q, keys, 4, "idw")


@triton
@pytest.mark.parametrize("heads", [1, 2])
def test_read_takes_private_rows(heads: int) -> None:
    from fwzoo.kernels import product_key_search as kernels

    groups, tokens, n, top_k, size = 2, 5, 6, 3, 7
    torch.manual_seed(0)
    q = torch.randn(groups, tokens, heads, 8, device=DEVICE)
    keys, table = torch.randn(groups, 2, heads, n, 4, device=DEVICE), torch.randn(n * n, size, device=DEVICE)
    rows = torch.randn(9, size, device=DEVICE)
    place = torch.full((groups, n * n), -1, dtype=torch.int32, device=DEVICE)
    place[0, ::5], place[1, 1::5] = torch.arange(8, dtype=torch.int32, device=DEVICE), 8
    kept = torch.zeros(groups, tokens, heads * top_k, size, device=DEVICE)
    o, found = kernels.search_and_read(q, keys, top_k, "idw", 1e-3, table, rows, place, kept)
    expected = select(q, keys, top_k, "idw", 1e-3)
    full = torch.where((place >= 0)[..., None], rows[place.clamp(min=0).long()], table)
    read = torch.stack([full[g][expected.slots[g]] for g in range(groups)])
    assert torch.equal(found.slots.long(), expected.slots)
    assert torch.equal(kept, read.flatten(2, 3))
    weighted = (read * expected.weights[..., None]).sum((2, 3))
    assert error(o, weighted) <= floor(torch.float32)
    assert error(kernels.read(found.slots, found.weights, table), weighted) > 1e-2  # the private rows matter


@triton
def test_gradient_of_rows_kept_equals_that_of_the_table() -> None:
    from fwzoo.kernels import product_key_search as kernels

    torch.manual_seed(0)
    q, keys, table = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 6, 4), torch.randn(36, 5)
    q, keys, table = (x.to(DEVICE) for x in (q, keys, table))
    found = kernels.search(q, keys, 3, "idw", 1e-3)
    d_o, d_weights = torch.randn(1, 4, 5, device=DEVICE), torch.zeros_like(found.weights)
    rows = table[found.slots.flatten().long()]
    from_table = kernels.backward(q, keys, found, "idw", d_weights, d_o, table)
    for a, b in zip(from_table, kernels.backward(q, keys, found, "idw", d_weights, d_o, rows, kept=True), strict=True):
        assert torch.equal(a, b)


@triton
@scores
def test_sparse_gradient(score: str) -> None:
    given = draw(1, 5, 2, 8, 6, 5)
    q, keys, values, d_o = (given[name].float().to(DEVICE) for name in ("in.q", "in.keys", "in.values", "cotangent.o"))
    grads = []
    for sparse in (False, True):
        leaf = values.clone().requires_grad_()
        o = pkm(q, keys, leaf, top_k=3, score=score, sparse_grad=sparse, level="triton")
        assert isinstance(o, Tensor)
        grads.append(torch.autograd.grad(o, leaf, d_o)[0])
    assert grads[1].is_sparse and grads[1].is_coalesced() and grads[1]._nnz() < 36
    assert torch.equal(grads[1].to_dense(), grads[0])


@triton
def test_masked_tokens_may_hold_anything() -> None:
    """A token of NaN reads slots that exist, and takes nothing from the others."""
    given = draw(1, 6, 1, 8, 9, 3)
    q, keys, values = (given[name].float().to(DEVICE) for name in ("in.q", "in.keys", "in.values"))
    clean = pkm(q, keys, values, top_k=4, level="triton", return_slots=True)
    q[:, ::2] = float("nan")
    dirty = pkm(q, keys, values, top_k=4, level="triton", return_slots=True)
    assert ((dirty[1] >= 0) & (dirty[1] < 81)).all()
    assert torch.equal(clean[0][:, 1::2], dirty[0][:, 1::2])


@triton
def test_what_cannot_run() -> None:
    given = draw(1, 2, 1, 8, 70, 3)
    q, keys, values = (given[name].float().to(DEVICE) for name in ("in.q", "in.keys", "in.values"))
    with pytest.raises(ValueError, match="top_k is 65, and the Triton kernels take up to 64"):
        pkm(q, keys, values, top_k=65, level="triton")
    with pytest.raises(ValueError, match=r"a table is torch\.float64"):
        pkm(q, keys, values.double(), top_k=2, level="triton")
    wide = torch.zeros(1, 2, 1, 1026, device=DEVICE)
    with pytest.raises(ValueError, match="K is 1026, and the Triton kernels take K up to 1024"):
        pkm(wide, torch.zeros(2, 1, 4, 513, device=DEVICE), torch.zeros(16, 2, device=DEVICE), top_k=2, level="triton")
    assert "top_k is 65" in str(explain(pkm, q, keys, values, top_k=65))
