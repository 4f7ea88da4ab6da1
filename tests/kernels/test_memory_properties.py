"""Properties of the memories that no vector shows: brute force, exact recall, closed forms, cuts, isolation, copy on write."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compare import error
from fwzoo.kernels import FwmlpState, FwpkmState, fwmlp, fwmlp_flush, fwpkm, fwpkm_flush, pkm
from fwzoo.kernels.fwpkm.reference import step_reference

LEVELS = pytest.mark.parametrize("level", ["reference", "chunk"])
OPS = pytest.mark.parametrize("op", ["fwpkm", "fwmlp"])


def draw(
    op: str,
    batch: int = 2,
    tokens: int = 30,
    heads: int = 2,
    n: int = 6,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens (q, v, gate) and weights of an operator with K = 8 and V = 5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if op == "fwmlp":
        shapes = {"w_gate": (7, 8), "b_gate": (7,), "w_up": (7, 8), "b_up": (7,), "w_down": (5, 7), "b_down": (5,)}
        weights = {name: normal(*shape) / 3 for name, shape in shapes.items()}
        return {"q": normal(batch, tokens, 8), "v": normal(batch, tokens, 5)}, weights
    weights = {"keys": normal(2, heads, n, 4), "values": normal(n * n, 5)}
    tokens_ = {
        "q": normal(batch, tokens, heads, 8),
        "v": normal(batch, tokens, 5),
        "gate": normal(batch, tokens).sigmoid(),
    }
    return tokens_, weights


def call(op: str, tokens: dict[str, Tensor], weights: dict[str, Tensor], **options: Any) -> Any:
    defaults: dict[str, Any] = {"chunk_size": 4, "top_k": 3} if op == "fwpkm" else {"chunk_size": 4, "lr": 0.3}
    return {"fwpkm": fwpkm, "fwmlp": fwmlp}[op](**tokens, **weights, **{**defaults, **options})


def flush(op: str, state: Any, weights: dict[str, Tensor], **options: Any) -> Any:
    if op == "fwmlp":
        return fwmlp_flush(state, **{"chunk_size": 4, "lr": 0.3, **options})
    return fwpkm_flush(state, **weights, **{"chunk_size": 4, "top_k": 3, **options})


def part(tokens: dict[str, Tensor], *index: Any) -> dict[str, Tensor]:
    return {name: x[index] for name, x in tokens.items()}


def written_out(state: FwpkmState | FwmlpState, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of a state, with the table written out."""
    fields = state._asdict()
    if isinstance(state, FwpkmState):
        for name in ("where", "written", "shared_rows", "slots", "base"):
            fields.pop(name)
        fields["table"] = state.table(weights["values"])
    return fields


def same(a: Any, b: Any, weights: dict[str, Tensor], bound: float = 1e-12) -> bool:
    a, b = written_out(a, weights), written_out(b, weights)
    return all(error(a[name], b[name]) < bound for name in b)


# --- retrieval ---


@LEVELS
@pytest.mark.parametrize("score", ["dot", "idw"])
@settings(max_examples=15)
@given(seed=st.integers(0, 999), n=st.integers(1, 16), data=st.data())
def test_product_keys_equal_brute_force_with_ties(
    level: str, score: str, seed: int, n: int, data: st.DataObject
) -> None:
    """Small whole numbers: many equal scores, and sums without rounding."""
    k = data.draw(st.integers(1, n))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (1, 3, 2, 4), generator=generator).double()
    keys = torch.randint(-1, 2, (2, 2, n, 2), generator=generator).double()
    values = torch.randn(n * n, 3, generator=generator, dtype=torch.float64)
    v, slots, weights = pkm(q, keys, values, top_k=k, score=score, return_slots=True, level=level)
    halves = q.unflatten(-1, (2, 2))
    difference = halves[..., None, :] - keys.transpose(0, 1)
    scores = (halves[..., None, :] * keys.transpose(0, 1)).sum(-1)
    if score == "idw":
        scores = -(1e-3 + difference.square().sum(-1)).log()
    every = (scores[..., 0, :, None] + scores[..., 1, None, :]).flatten(-2)
    best = torch.sort(every, dim=-1, descending=True, stable=True)
    expected = best.indices[..., :k]
    # idw sums may round two different pairs apart or together: compare slots where sums differ by more than rounding
    if score == "dot":
        assert torch.equal(slots, expected)
    exact = best.values[..., :k].softmax(-1)
    assert error(weights, exact) < 1e-12
    assert error(v, (weights[..., None] * values[slots]).sum((2, 3))) < 1e-12


@LEVELS
def test_gradients_of_pkm(level: str) -> None:
    tokens, weights = draw("fwpkm", 1, 3)
    leaves = [x.requires_grad_() for x in (tokens["q"], weights["keys"], weights["values"])]
    for score in ("dot", "idw"):
        assert torch.autograd.gradcheck(lambda *x, s=score: pkm(*x, top_k=3, score=s, level=level), leaves)


@LEVELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sparse_gradient_holds_the_rows_read_and_equals_the_dense_one(level: str, dtype: torch.dtype) -> None:
    tokens, weights = draw("fwpkm", 2, 9, n=12, dtype=dtype)
    grads = []
    for sparse in (False, True):
        leaves = [x.clone().requires_grad_() for x in (tokens["q"], weights["keys"], weights["values"])]
        v, slots, _ = pkm(*leaves, top_k=3, sparse_grad=sparse, return_slots=True, level=level)
        v.square().sum().backward()
        grads.append([x.grad for x in leaves])
    dense, sparse_grad = grads[0][2], grads[1][2]
    assert sparse_grad.layout == torch.sparse_coo and sparse_grad.dtype == dtype
    assert torch.equal(sparse_grad._indices()[0], slots.unique()) and slots.unique().numel() < 144
    assert error(sparse_grad.to_dense(), dense) < (1e-14 if dtype == torch.float64 else 1e-2)
    assert all(error(a, b) == 0 for a, b in zip(grads[0][:2], grads[1][:2], strict=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_a_sparse_gradient_allocates_no_second_table(sparse: bool) -> None:
    """The largest allocation of forward and backward; the control is the dense gradient."""
    q, keys = torch.randn(1, 64, 2, 16, requires_grad=True), torch.randn(2, 2, 128, 8, requires_grad=True)
    values = torch.randn(128 * 128, 64, requires_grad=True)
    pkm(q, keys, values, top_k=8, sparse_grad=sparse).sum()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pkm(q, keys, values, top_k=8, sparse_grad=sparse).sum().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    rows = values.grad._nnz() if sparse else 128 * 128
    alive = max(itertools.accumulate(event.nbytes() for event in events))
    assert (0 < alive < values.numel() * 4 / 2) == sparse and rows <= (64 * 2 * 8 if sparse else 128 * 128)


@LEVELS
@OPS
def test_gradients_reach_q_and_nothing_else(level: str, op: str) -> None:
    tokens, weights = draw(op, 1, 6)
    everything = {n: x.requires_grad_() for n, x in {**tokens, **weights}.items()}
    o, state = call(op, tokens, weights, level=level)
    o.square().sum().backward()
    assert {n for n, x in everything.items() if x.grad is not None and x.grad.any()} == {"q"}
    assert not any(x.requires_grad for x in state)
    q = tokens["q"].detach().requires_grad_()
    rest = {n: x.detach() for n, x in tokens.items() if n != "q"}
    fixed = {n: x.detach() for n, x in weights.items()}
    # a chunk of one call: the update does not enter, so finite differences see what autograd sees
    assert torch.autograd.gradcheck(lambda x: call(op, {"q": x, **rest}, fixed, level=level, chunk_size=8)[0], q)


# --- the update ---


@LEVELS
@pytest.mark.parametrize("row_averaging", [True, False])
def test_one_write_of_full_weight_is_read_back_exactly(level: str, row_averaging: bool) -> None:
    tokens, weights = draw("fwpkm", 1, 2, heads=1)
    q = tokens["q"][:, :1].expand(1, 2, 1, 8)
    tokens = {**tokens, "q": q, "gate": torch.ones(1, 2, dtype=torch.float64)}
    options = {"top_k": 1, "chunk_size": 1, "address_loss": False, "normalize_targets": False, "level": level}
    o, _ = call("fwpkm", tokens, weights, row_averaging=row_averaging, **options)
    assert error(o[:, 1], tokens["v"][:, 1]) < 1e-15
    o, _ = call("fwpkm", tokens, weights, **{**options, "normalize_targets": True})
    target = tokens["v"][:, 1]
    target = (target - target.mean()) / (target.var(unbiased=False) + 1e-5).sqrt()
    assert error(o[:, 1], target) < 1e-15


@LEVELS
def test_the_address_loss_raises_the_entropy_of_use(level: str) -> None:
    tokens, weights = draw("fwpkm", 1, 65, heads=1)

    def entropy(keys: Tensor) -> Tensor:
        """Mean use of the sub-keys of each half by the first 64 queries."""
        halves = tokens["q"][0, :64, 0].unflatten(-1, (2, 4)).transpose(0, 1)
        scores = -(1e-3 + (halves[:, :, None] - keys[:, 0][:, None]).square().sum(-1)).log()
        kept = scores.topk(3, -1)
        use = torch.zeros_like(scores).scatter(-1, kept.indices, kept.values.softmax(-1)).mean(1)
        return -torch.special.xlogy(use, use).sum(-1)

    for rate in (0.05, 0.2):
        _, state = call("fwpkm", tokens, weights, chunk_size=64, key_lr=rate, level=level)
        assert (entropy(state.keys[0]) > entropy(weights["keys"])).all()
    _, frozen = call("fwpkm", tokens, weights, chunk_size=64, address_loss=False, level=level)
    assert torch.equal(frozen.keys[0], weights["keys"])


def test_closed_forms_equal_autograd() -> None:
    """One update of one chunk, keys and values, for every switch."""
    for score, averaging, gating in itertools.product(("idw", "dot"), (True, False), (True, False)):
        tokens, weights = draw("fwpkm", 1, 7)
        options = {"score": score, "row_averaging": averaging, "gate_weighting": gating, "chunk_size": 6}
        states = [call("fwpkm", tokens, weights, level=level, **options)[1] for level in ("reference", "chunk")]
        assert same(states[1], states[0], weights)
    assert step_reference.__doc__


@LEVELS
@OPS
def test_one_gradient_step_of_fwmlp_lowers_its_loss(level: str, op: str) -> None:
    """Reading the same tokens again predicts their targets better, by either memory."""
    tokens, weights = draw(op, 1, 5)
    target = torch.nn.functional.layer_norm(tokens["v"][:, 1:], (5,))
    options = {"lr": 0.2} if op == "fwmlp" else {"address_loss": False}
    before, state = call(op, tokens, weights, level=level, **options)
    after, _ = call(op, part(tokens, slice(None), slice(0, 4)), weights, level=level, state=state, **options)
    if op == "fwpkm":  # the pending fifth token reads with the four again: compare the reads of the new weights
        after = call(op, part(tokens, slice(None), slice(0, 3)), weights, level=level, state=state, **options)[0]
        assert (after - target[:, :3]).square().sum() < (before[:, :3] - target[:, :3]).square().sum()
    else:
        assert (after[:, :3] - target[:, :3]).square().sum() < (before[:, :3] - target[:, :3]).square().sum()


# --- streams ---


@OPS
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("lookahead", [True, False])
@settings(max_examples=12)
@given(data=st.data())
def test_any_cut_with_any_mask_equals_one_call(op: str, scope: str, lookahead: bool, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 22))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    rows = st.lists(st.booleans(), min_size=count, max_size=count)
    mask = torch.tensor(data.draw(st.lists(rows, min_size=2, max_size=2)), dtype=torch.bool).view(2, count)
    tokens, weights = draw(op, 2, count, seed=data.draw(st.integers(0, 99)))
    for x in tokens.values():
        x[~mask] = torch.nan
    options = {"scope": scope, "lookahead": lookahead}
    whole, end = call(op, tokens, weights, mask=mask, level="reference", **options)
    state, pieces = None, []
    for a, b in itertools.pairwise([0, *cuts, count]):
        piece = part(tokens, slice(None), slice(a, b))
        o, state = call(op, piece, weights, mask=mask[:, a:b], state=state, level="chunk", **options)
        pieces.append(o)
    assert error(torch.cat(pieces, 1), whole) < 1e-12
    assert not whole[~mask].any() and same(state, end, weights)


@OPS
@LEVELS
def test_packed_documents_are_alone(op: str, level: str) -> None:
    tokens, weights = draw(op, 1, 30)
    bounds = [0, 9, 9, 10, 30]
    o, state = call(op, tokens, weights, cu_seqlens=torch.tensor(bounds), level=level)
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        alone, own = call(op, part(tokens, slice(None), slice(a, b)), weights, level=level)
        assert error(o[:, a:b], alone) < 1e-12
        mine = {n: x[i : i + 1] for n, x in written_out(state, weights).items()}
        assert all(error(mine[n], x) < 1e-12 for n, x in written_out(own, weights).items())


@OPS
def test_a_batch_of_documents_is_a_padded_batch_under_scope_batch(op: str) -> None:
    tokens, weights = draw(op, 1, 20)
    bounds, longest = [0, 7, 20], 13
    packed, a = call(op, tokens, weights, cu_seqlens=torch.tensor(bounds), scope="batch")
    rows = {n: x.new_zeros(2, longest, *x.shape[2:]) for n, x in tokens.items()}
    mask = torch.zeros(2, longest, dtype=torch.bool)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        mask[i, : end - start] = True
        for n, x in tokens.items():
            rows[n][i, : end - start] = x[0, start:end]
    padded, b = call(op, rows, weights, mask=mask, scope="batch")
    assert error(packed[0], padded[mask]) < 1e-12 and same(a, b, weights)


@OPS
def test_one_sequence_is_the_same_under_both_scopes(op: str) -> None:
    tokens, weights = draw(op, 1, 23)
    (a, x), (b, y) = (call(op, tokens, weights, scope=scope) for scope in ("sequence", "batch"))
    assert error(a, b) < 1e-12 and same(x, y, weights)


@OPS
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_flush_is_the_update_of_a_shorter_chunk(op: str, scope: str) -> None:
    """Pending t tokens: the first t - 1 have a target, as in a chunk of t - 1 with lookahead."""
    tokens, weights = draw(op, 2, 6)
    _, state = call(op, tokens, weights, chunk_size=8, scope=scope)
    _, shorter = call(op, tokens, weights, chunk_size=5, scope=scope)
    flushed = flush(op, state, weights, chunk_size=8, scope=scope)
    a, b = written_out(flushed, weights), written_out(shorter, weights)
    names = ["keys", "table"] if op == "fwpkm" else ["w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down"]
    assert all(error(a[name], b[name]) < 1e-12 for name in names)
    assert not flushed.count.any() and not flushed.real.any()
    assert not same(flushed, state, weights)
    again = flush(op, flushed, weights, chunk_size=8, scope=scope)
    assert same(again, flushed, weights, 1e-15)


# --- isolation and copy on write ---


@OPS
@pytest.mark.parametrize("seed", range(3))
def test_a_row_never_sees_another(op: str, seed: int) -> None:
    """Bit for bit, float32, five chunks, over two calls; the other row's values may even be huge or NaN."""
    tokens, weights = draw(op, 2, 40, dtype=torch.float32, seed=seed)
    outputs = []
    for change in (0.0, 1.0, 1e20, torch.nan):
        changed = {n: x.clone() for n, x in tokens.items()}
        changed["v"][1] += change
        changed["q"][1] *= 1 + change
        o, state = call(op, part(changed, slice(None), slice(0, 18)), weights)
        o2, state = call(op, part(changed, slice(None), slice(18, 40)), weights, state=state)
        outputs.append(torch.cat([o[0], o2[0]]))
    assert outputs[0].isfinite().all() and all(torch.equal(outputs[0], x) for x in outputs[1:])


def test_only_rows_that_were_written_are_held() -> None:
    tokens, weights = draw("fwpkm", 3, 41, n=64)
    weights["values"].requires_grad_(False)
    before = weights["values"].clone()
    _, state = call("fwpkm", tokens, weights)
    slots = torch.where(state.slots < 64 * 64, state.slots, -1)
    table = state.table(weights["values"])
    for g in range(3):
        differs = torch.nonzero((table[g] != before).any(-1))[:, 0]
        own = slots[g][slots[g] >= 0]
        assert torch.equal(own, own.unique()) and set(differs.tolist()) <= set(own.tolist())
        assert own.numel() <= 40 * 2 * 3
    assert state.shared_rows.shape[0] == int((slots >= 0).sum())
    assert torch.equal(weights["values"], before)


PEAK = """
import importlib, sys, torch
from fwzoo.kernels import fwpkm
overlay = importlib.import_module("fwzoo.kernels.fwpkm.overlay")
overlay.PAGE = int(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
n, V, batch, tokens = 256, 256, 8, 1024
keys, values = 2 * torch.rand(2, 1, n, 32) - 1, 0.02 * torch.randn(n * n, V)
q, v, gate = torch.randn(batch, tokens, 1, 64) / 2, torch.randn(batch, tokens, V), torch.rand(batch, tokens)
def resident(name):  # not ru_maxrss, which a process takes over from the one that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
with torch.no_grad():  # loads the code that it runs
    fwpkm(q[:, :130], v[:, :130], gate[:, :130], keys, values, chunk_size=64)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = resident("VmRSS")
with torch.no_grad():
    o, state = fwpkm(q, v, gate, keys, values, chunk_size=64)
peak = resident("VmHWM") - before
written = int((state.slots < n * n).sum())
print(peak * 1024, written, state.shared_rows.shape[0], values.numel() * 4, sum(x.numel() * x.element_size() for x in state))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures resident memory as Linux counts it")
@pytest.mark.parametrize("page", [2 << 20, 1 << 40], ids=["pages", "moved as a whole"])
def test_the_peak_is_the_rows_written_and_never_a_second_table(page: int) -> None:
    """Resident memory of a process: a batch of 8, a pool of many pages; the control moves the whole pool when it grows."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", PEAK, str(page)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    peak, written, rows, table, state = map(int, said.split())
    row = 256 * 4
    assert rows == written and table // 2 < rows * row < table
    assert state <= rows * row + 8 * 3 * 8 * 8192 + 4 * (
        1 << 20
    )  # slot lists of at most 8,192 places; keys and pending
    # in flight: what was read and the same as one tensor, a page, and a chunk's scores and changes
    limit = rows * row + 2 * 8 * 1024 * row + 8 * (1 << 20)
    assert peak > rows * row // 2, peak  # the rows themselves are seen
    assert (peak < limit) == (page == 2 << 20), (peak, limit)


def test_a_pool_of_many_pages_is_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of three rows: growing, sharing, evicting and any cut of calls give what one page gives."""
    tokens, weights = draw("fwpkm", 3, 41, n=12)
    results = []
    for page in (64 << 20, 3 * 5 * 8):
        for name in ("PAGE", "BLOCK"):
            monkeypatch.setattr(importlib.import_module("fwzoo.kernels.fwpkm.overlay"), name, page)
        for options in ({}, {"max_slots": 20, "evict": True}):
            whole, state = call("fwpkm", tokens, weights, **options)
            a, half = call("fwpkm", part(tokens, slice(None), slice(0, 18)), weights, **options)
            b, pieces = call("fwpkm", part(tokens, slice(None), slice(18, 41)), weights, state=half, **options)
            assert error(torch.cat([a, b], 1), whole) < 1e-12 and same(pieces, state, weights)
            assert state.shared_rows.shape[0] == int((state.slots < 144).sum())
            results.append((whole, state))
    for (o, state), (other, paged) in zip(results[:2], results[2:], strict=True):
        assert error(other, o) < 1e-12 and same(paged, state, weights)


def test_copies_share_rows_until_they_write() -> None:
    tokens, weights = draw("fwpkm", 1, 21, n=32)
    _, state = call("fwpkm", tokens, weights)
    rows = state.shared_rows.shape[0]
    beams = FwpkmState(*(x if n == "shared_rows" else x.repeat_interleave(3, 0) for n, x in state._asdict().items()))
    follow, _ = draw("fwpkm", 3, 3, seed=5)
    _, quiet = call("fwpkm", follow, weights, state=beams)
    assert quiet.shared_rows.shape[0] == rows
    follow, _ = draw("fwpkm", 3, 9, seed=5)
    together, moved = call("fwpkm", follow, weights, state=beams)
    assert moved.shared_rows.shape[0] < 3 * rows
    for i in range(3):
        alone, own = call("fwpkm", part(follow, slice(i, i + 1)), weights, state=state)
        assert error(together[i : i + 1], alone) < 1e-12
        assert error(moved.table(weights["values"])[i : i + 1], own.table(weights["values"])) < 1e-12


@LEVELS
def test_a_full_memory_refuses_or_forgets_what_it_wrote_longest_ago(level: str) -> None:
    tokens, weights = draw("fwpkm", 1, 41, heads=1, n=16)
    with pytest.raises(ValueError, match="max_slots is 20; memory 0"):
        call("fwpkm", tokens, weights, max_slots=20, level=level)
    _, free = call("fwpkm", tokens, weights, level=level)
    _, state = call("fwpkm", tokens, weights, max_slots=20, evict=True, level=level)
    held = state.slots[state.slots < 256]
    assert held.numel() == 20 and set(held.tolist()) <= set(free.slots.flatten().tolist())
    assert state.written[state.slots < 256].min() >= free.written[free.slots < 256].sort().values[-20:].min()
    dropped = torch.ones(256, dtype=torch.bool)
    dropped[held] = False
    assert torch.equal(state.table(weights["values"])[0][dropped], weights["values"][dropped])
    _, pieces = call("fwpkm", part(tokens, slice(None), slice(0, 17)), weights, max_slots=20, evict=True, level=level)
    rest = part(tokens, slice(None), slice(17, 41))
    _, pieces = call("fwpkm", rest, weights, max_slots=20, evict=True, level=level, state=pieces)
    assert same(pieces, state, weights)


@OPS
def test_a_state_is_not_written_by_the_call_that_takes_it(op: str) -> None:
    tokens, weights = draw(op, 2, 18)
    _, state = call(op, tokens, weights)
    kept = [x.clone() for x in state]
    call(op, tokens, weights, state=state)
    flush(op, state, weights)
    assert all(torch.equal(a, b) for a, b in zip(kept, state, strict=True))


def test_calls_of_fwmlp_without_a_mask_never_ask_the_device_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph can hold them, the first one too."""
    tokens, weights = draw("fwmlp", 2, 18)
    whole, end = call("fwmlp", tokens, weights)
    monkeypatch.setattr(Tensor, "tolist", lambda x: 1 / 0)
    o, state = call("fwmlp", part(tokens, slice(None), slice(0, 7)), weights)
    more, state = call("fwmlp", part(tokens, slice(None), slice(7, 18)), weights, state=state)
    assert error(torch.cat([o, more], 1), whole) < 1e-12 and same(state, end, weights)


@OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_computed_in_float32(op: str, dtype: torch.dtype) -> None:
    tokens, weights = draw(op, 2, 12, dtype=dtype)
    o, state = call(op, tokens, weights)
    assert o.dtype == dtype
    wide, other = call(op, {n: x.float() for n, x in tokens.items()}, {n: x.float() for n, x in weights.items()})
    assert torch.equal(o, wide.to(dtype)) or error(o.float(), wide) < 1e-2
    name = "keys" if op == "fwpkm" else "w_gate"
    assert getattr(state, name).dtype == torch.float32
    assert error(getattr(state, name), getattr(other, name)) < 1e-5
