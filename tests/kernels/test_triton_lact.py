"""LaCT's GPU level against float64: outputs, state and every gradient, cuts, masks, packings, orthogonalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_cases import load
from lact_cases import VECTORS, WEIGHTS, beyond, draw, run, typical
from torch import Tensor

from compare import error, floor
from fwzoo.kernels import LactState, explain, lact

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [{}, {"prenorm": True}, {"muon": True}, {"muon": True, "prenorm": True}]
Named = dict[str, Tensor]


def on_device(tensors: Named) -> Named:
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def given(arguments: Named, state: LactState | None, options: dict[str, Any], **more: Tensor) -> Named:
    """Inputs as a vector names them, with a cotangent for the output and every field of the new state."""
    generator = torch.Generator().manual_seed(5)
    named = {f"in.{name}": x for name, x in {**arguments, **more}.items()}
    if state is not None:
        named.update({f"state_in.{name}": x for name, x in state._asdict().items()})
    _, new = lact(**arguments, **more, **options, state=state)
    for name, x in {"o": arguments["q"], **new._asdict()}.items():
        if x.is_floating_point():
            named[f"cotangent.{name}"] = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return named


def narrowed(named: Named, dtype: torch.dtype) -> Named:
    """What a call in `dtype` sees, on the device: inputs that are exact in it."""
    exact = {
        n: x.to(dtype).double() if n.startswith(("in.", "cot")) and x.is_floating_point() else x
        for n, x in named.items()
    }
    return on_device(exact)


def results(named: Named, options: dict[str, Any], dtype: torch.dtype) -> tuple[Named, Named, Named]:
    """The GPU level, float64, and the chunk level in the same dtype."""
    levels = (("triton", dtype), ("chunk", torch.float64), ("chunk", dtype))
    found, exact, plain = (run(named, {**options, "level": level}, own) for level, own in levels)
    return found, exact, plain


def compare(named: Named, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What is further from float64 than twice the chunk level in the same dtype."""
    return beyond(*results(named, options, dtype), dtype, options)


@pytest.mark.triton
@pytest.mark.parametrize("path", VECTORS, ids=[path.stem for path in VECTORS])
def test_vectors(path: Path) -> None:
    options, inputs, expected = load(path)
    inputs, expected = on_device(inputs), on_device(expected)
    plain = run(inputs, {**options, "level": "chunk"}, torch.float32)
    found = run(inputs, {**options, "level": "triton"}, torch.float32)
    found, plain = ({name: results[name] for name in expected} for results in (found, plain))
    assert not (wrong := beyond(found, expected, plain, torch.float32, options)), wrong


@pytest.mark.triton
@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("momentum", [True, False])
def test_with_a_state(kind: dict[str, Any], momentum: bool) -> None:
    options = {"chunk_size": 8, **kind}
    _, state = lact(**draw(tokens=19, seed=3, momentum=momentum, hidden=5), **options)
    inputs = narrowed(given(draw(tokens=29, momentum=momentum, hidden=5), state, options), torch.float32)
    assert not (wrong := compare(inputs, options, torch.float32)), wrong


@pytest.mark.triton
@pytest.mark.parametrize("kind", [{"prenorm": True}, {}], ids=str)
def test_packed_documents_with_holes(kind: dict[str, Any]) -> None:
    """Documents of no, less than one, one and several chunks."""
    options = {"chunk_size": 6, **kind}
    mask = torch.rand(1, 40, generator=torch.Generator().manual_seed(1)) < 0.9
    bounds = torch.tensor([0, 0, 4, 12, 40])
    inputs = given(draw(batch=1, tokens=40, hidden=3), None, options, mask=mask, cu_seqlens=bounds)
    assert not (wrong := compare(narrowed(inputs, torch.float32), options, torch.float32)), wrong


@pytest.mark.triton
@pytest.mark.parametrize("sizes", [{"rates": 6, "hidden": 6, "size": 6}, {"batch": 1}, {"heads": 1}], ids=str)
def test_rates_of_channels_and_tiles_that_are_views(sizes: dict[str, Any]) -> None:
    inputs = narrowed(given(draw(tokens=33, **sizes), None, {"chunk_size": 8}), torch.float32)
    assert not (wrong := compare(inputs, {"chunk_size": 8}, torch.float32)), wrong


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs(dtype: torch.dtype) -> None:
    inputs = narrowed(given(draw(batch=1, tokens=36, size=16, hidden=24), None, {"chunk_size": 16}), dtype)
    assert not (wrong := compare(inputs, {"chunk_size": 16}, dtype)), wrong


@pytest.mark.triton
@pytest.mark.parametrize("hidden", [3, 6, 9])
def test_muon_of_wide_square_and_tall_matrices(hidden: int) -> None:
    options = {"chunk_size": 8, "muon": True}
    draws = (draw(batch=1, tokens=19, heads=1, size=6, hidden=hidden, seed=seed) for seed in range(7))
    inputs = (narrowed(given(arguments, None, {"chunk_size": 8}), torch.float32) for arguments in draws)
    ours, theirs = typical(results(named, options, torch.float32) for named in inputs)
    assert ours <= 2 * theirs + floor(torch.float32)


@pytest.mark.triton
def test_no_gradient_of_the_state() -> None:
    """Where only the output is used, the last update is not differentiated; autocast around the backward pass does nothing."""
    gradients = []
    for level in ("chunk", "triton"):
        leaves = {n: x.requires_grad_() for n, x in on_device(draw(tokens=24, dtype=torch.float32)).items()}
        o, _ = lact(**leaves, chunk_size=8, level=level)
        loss = o.square().sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=level == "triton"):
            gradients.append(torch.autograd.grad(loss, list(leaves.values())))
    assert all(error(a, b) < 1e-5 for a, b in zip(*gradients, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("cuts", [[5], [8, 24], [1, 2, 3, 30]])
def test_in_pieces_and_twice(cuts: list[int]) -> None:
    """Pieces give what one call gives, and two runs are bit-equal."""
    arguments = on_device(draw(tokens=37, dtype=torch.float32))
    options: dict[str, Any] = {"chunk_size": 8, "level": "triton"}
    expected, last = lact(**arguments, **options)
    again, _ = lact(**arguments, **options)
    assert torch.equal(expected, again)
    outputs, state = [], None
    with torch.no_grad():
        for start, end in zip([0, *cuts], [*cuts, 37], strict=True):
            piece = {name: x if name in WEIGHTS else x[:, start:end] for name, x in arguments.items()}
            o, state = lact(**piece, **options, state=state)
            outputs.append(o)
    assert state is not None and error(torch.cat(outputs, 1), expected) < 1e-5
    assert all(error(x, y) < 1e-5 for x, y in zip(state, last, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("batch", [1, 2])
def test_reading_a_few_chunks_at_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of what is read, of one chunk of all rows at a time and of up to four of one row."""
    from fwzoo.kernels.lact import triton

    arguments = {n: x.requires_grad_() for n, x in on_device(draw(batch=batch, tokens=37, dtype=torch.float32)).items()}

    def gradients(level: str) -> tuple[Tensor, ...]:
        o, _ = lact(**arguments, chunk_size=8, level=level)
        return torch.autograd.grad(o.square().sum(), list(arguments.values()))

    expected = gradients("chunk")
    for tokens in (8, 64):
        monkeypatch.setattr(triton, "READ_TOKENS", tokens)
        assert all(error(a, b) < 1e-5 for a, b in zip(gradients("triton"), expected, strict=True))


@pytest.mark.triton
def test_negative_control() -> None:
    """The comparison sees swapped rates, a lost momentum and a lost state."""
    options = {"chunk_size": 8}
    _, state = lact(**draw(tokens=19, seed=3), **options)
    inputs = narrowed(given(draw(tokens=29), state, options), torch.float32)
    exact = run(inputs, {**options, "level": "chunk"}, torch.float64)
    wrongs = (
        {**inputs, "in.lr0": inputs["in.lr2"], "in.lr2": inputs["in.lr0"]},
        {**inputs, "in.momentum": torch.zeros_like(inputs["in.momentum"])},
        {**inputs, "state_in.g1": torch.zeros_like(inputs["state_in.g1"])},
        {**inputs, "state_in.pk": inputs["state_in.pk"].roll(1, 1)},
    )
    for wrong in wrongs:
        found = run(wrong, {**options, "level": "triton"}, torch.float32)
        assert max(error(found[name], exact[name]) for name in ("o", "state.w0", "state.w1")) > 1e-3


@pytest.mark.triton
def test_what_cannot_run() -> None:
    x = torch.zeros(1, 4, 1, 8192 + 8, device=DEVICE)
    assert "K is 8200" in str(explain("lact", x, x, x))
    wide = draw(batch=1, tokens=2, heads=1, size=2, hidden=8200, dtype=torch.float32)
    with pytest.raises(ValueError, match="M is 8200"):
        lact(**on_device(wide), level="triton")


# --- larger, on a GPU ---

SHAPES: list[dict[str, Any]] = [
    {"tokens": 1000, "size": 64, "hidden": 64, "chunk": 256, "batch": 1},
    {"tokens": 700, "size": 128, "hidden": 128, "rates": 128, "chunk": 64, "batch": 1},
    {"tokens": 333, "size": 60, "hidden": 100, "chunk": 100},
    {"tokens": 4200, "size": 512, "hidden": 512, "chunk": 1024, "heads": 1, "rate": 0.02},
    {"tokens": 2048, "size": 384, "hidden": 768, "chunk": 512, "heads": 4, "rate": 0.05},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"chunk_size": shape["chunk"]}
    arguments = draw(**{n: x for n, x in shape.items() if n != "chunk"})
    inputs = narrowed(given(arguments, None, options), dtype)
    assert not (wrong := compare(inputs, options, dtype)), wrong
    first, second = (run(inputs, {**options, "level": "triton"}, dtype) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("size,hidden", [(256, 256), (128, 512)])
def test_singular_values_of_muon_in_bf16(size: int, hidden: int) -> None:
    """Newton-Schulz in bf16 products brings singular values where float64 brings them; negative control: one step fewer."""
    from fwzoo.kernels.lact import muon
    from fwzoo.kernels.lact.rules import orthogonal

    flat = torch.randn(2, 3 * size * hidden, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def values(step: Tensor) -> Tensor:
        return torch.linalg.svdvals(step.double()[:, : size * hidden].view(-1, hidden, size))

    def narrow() -> Tensor:
        directions = flat.bfloat16()
        return values(muon.Orthogonal(directions, size, hidden, directions[:0])(directions))

    wide = values(orthogonal(flat[:, : size * hidden].double().view(2, hidden, size)).flatten(1))
    assert error(narrow(), wide) < 0.01
    if size != hidden:  # a square one has singular values near 0
        assert narrow().min() > 0.9 and narrow().max() < 1.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "NEWTON_SCHULZ", muon.NEWTON_SCHULZ[:4])
        assert error(narrow(), wide) > 0.01


@pytest.mark.gpu
def test_compiled_and_captured() -> None:
    """torch.compile sees one operator, and a captured call replays."""
    arguments = {n: x.float() for n, x in on_device(draw(batch=1, tokens=100, size=32, hidden=32)).items()}
    options: dict[str, Any] = {"chunk_size": 32, "level": "triton"}
    expected, _ = lact(**arguments, **options)
    compiled, _ = torch.compile(lambda x: lact(**x, **options), fullgraph=True)(arguments)
    assert error(compiled, expected) < 1e-5
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            o, _ = lact(**arguments, **options)
        o.zero_()
        graph.replay()
    assert torch.equal(o, expected)
