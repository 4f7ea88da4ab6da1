"""Triton kernels of the delta family (falcon1, falcon2, falcon3, the gated delta rule) against float64, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import falcon_cases
import pytest
import recurrence_cases
import torch
from torch import Tensor

from compare import errors, too_large
from fwzoo.kernels import FalconState, GatedDeltaState

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = ["falcon1", "falcon2", "falcon3", "gated_delta"]
VECTORS = [path for path in falcon_cases.VECTORS if path.parent.name in RULES]
VECTORS += [path for path in recurrence_cases.VECTORS if path.parent.name in RULES]


def run(rule: str, given: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, state and gradients on the CPU, computed on the device."""
    given = {name: x.to(DEVICE) for name, x in given.items()}
    if rule == "gated_delta":
        found = recurrence_cases.run(rule, given, options, dtype)
    else:
        found = falcon_cases.run(given, {"rule": rule, **options}, dtype)
    return {name: x.cpu() for name, x in found.items()}


def compare(rule: str, given: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What is further from float64 than twice the chunk level in the same dtype."""
    exact = run(rule, given, {**options, "level": "chunk"}, torch.float64)
    plain = run(rule, given, {**options, "level": "chunk"}, dtype)
    found = run(rule, given, {**options, "level": "triton"}, dtype)
    return too_large(found, exact, plain, dtype)


def draw(
    rule: str, options: dict[str, Any], *, batch: int, tokens: int, heads: int, k_size: int, v_size: int, seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs with a carried state, as a vector names them."""
    size = {"batch": batch, "tokens": tokens, "heads": heads, "k_size": k_size, "v_size": v_size, "seed": seed}
    packed = options.pop("cu_seqlens", None)
    mask = options.pop("mask", None)
    documents = batch if packed is None else len(packed) - 1
    generator = torch.Generator().manual_seed(seed + 1)
    S = 0.3 * torch.randn(documents, heads, k_size, v_size, generator=generator, dtype=torch.float64)
    if rule == "gated_delta":
        arguments, state = recurrence_cases.draw(rule, **size), GatedDeltaState(S)
    else:
        arguments = falcon_cases.draw(rule, **size)
        known = torch.arange(documents) % 3 != 1
        key = torch.nn.functional.normalize(
            torch.randn(documents, heads, k_size, generator=generator, dtype=torch.float64), dim=-1
        )
        size = 3 if rule == "falcon3" else 0  # of the tail, with the default window
        count = (torch.arange(documents) + 1).clamp(max=size)

        def tail(features: int) -> Tensor:
            rows = torch.randn(documents, size, heads, features, generator=generator, dtype=torch.float64)
            real = torch.arange(size) >= size - count[:, None]
            return torch.where(real[..., None, None], torch.nn.functional.normalize(rows, dim=-1), 0)

        state = FalconState(
            S,
            torch.where(known[:, None, None], key, 0),
            known,
            tail(k_size),
            tail(v_size),
            count,
        )
    if packed is not None:
        arguments["cu_seqlens"] = torch.tensor(packed)
    if mask is not None:
        arguments["mask"] = torch.rand(batch, tokens, generator=generator) < mask
    if rule == "gated_delta":
        return recurrence_cases.as_given(rule, arguments, state=state)
    return falcon_cases.as_given(arguments, state=state)


PAIRINGS = [
    {"pairing": p, "timing": t} for p in ("shifted", "same_step") for t in ("read_after_write", "read_before_write")
]

# every line compiles the kernels of four rules; those of the lines before are compiled already where sizes and dtype are the same
SHAPES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {"tokens": 257, "k_size": 128, "v_size": 128}),
    (torch.bfloat16, {"tokens": 4096, "k_size": 128, "v_size": 128}),
    (torch.bfloat16, {"tokens": 1, "k_size": 128, "v_size": 128}),
    (torch.float32, {"tokens": 300, "batch": 2}),
    (torch.bfloat16, {"tokens": 700, "k_size": 96, "v_size": 48, "cu_seqlens": [0, 0, 7, 7, 105, 126, 700]}),
    (torch.float16, {"tokens": 500, "k_size": 32, "v_size": 128, "mask": 0.8, "batch": 2}),
    (torch.bfloat16, {"tokens": 200, "k_size": 256, "v_size": 256}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "dtype", "shape"),
    [pytest.param(rule, *case, id=f"{rule}-{case[0]}-{case[1]}") for case in SHAPES for rule in RULES],
)
def test_shapes(rule: str, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    shape = {"batch": 1, "heads": 3, "k_size": 64, "v_size": 64, **shape}
    given = draw(rule, shape, **{n: shape[n] for n in ("batch", "tokens", "heads", "k_size", "v_size")})
    # what a 16-bit call sees: inputs that are exact in its dtype
    given = {name: x.to(dtype).double() if x.is_floating_point() else x for name, x in given.items()}
    wrong = compare(rule, given, {}, dtype)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["falcon1", "falcon2", "falcon3"])
def test_options(rule: str) -> None:
    """The other pairing and the other timing at once."""
    given = draw(rule, {}, batch=1, tokens=150, heads=3, k_size=128, v_size=128)
    given = {name: x.bfloat16().double() if x.is_floating_point() else x for name, x in given.items()}
    wrong = compare(rule, given, PAIRINGS[-1], torch.bfloat16)
    assert not wrong, wrong


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_strides_and_graph(rule: str) -> None:
    """Inputs that are not contiguous give the same, and a captured call replays."""
    given = draw(rule, {}, batch=2, tokens=130, heads=3, k_size=64, v_size=64)
    exact = run(rule, given, {"level": "triton"}, torch.float32)
    strided = {n: torch.stack([x, x], -1)[..., 0] if x.is_floating_point() else x for n, x in given.items()}
    again = run(rule, strided, {"level": "triton"}, torch.float32)
    assert max(errors(again, exact).values()) == 0
    operator = recurrence_cases.OPERATORS.get(rule, falcon_cases.falcon)
    arguments = {n.removeprefix("in."): x.float().cuda() for n, x in given.items() if n.startswith("in.")}
    arguments |= {"level": "triton"} if rule == "gated_delta" else {"level": "triton", "rule": rule}
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        before = operator(**arguments)[0].clone()
        with torch.cuda.graph(graph):
            o, _ = operator(**arguments)
        o.zero_()
        graph.replay()
    assert torch.equal(o, before)


SMALL: list[dict[str, Any]] = [
    {"tokens": 140},
    {"tokens": 70, "batch": 2, "heads": 2, "k_size": 5, "v_size": 3},
    {"tokens": 90, "batch": 2, "mask": 0.7},
    {"tokens": 150, "v_size": 20, "cu_seqlens": [0, 0, 7, 7, 105, 126, 150]},
    {"tokens": 150, "v_size": 20, "cu_seqlens": [0, 50, 150], "mask": 0.7},
]


@pytest.mark.triton
@pytest.mark.parametrize("rule", ["falcon1", "gated_delta"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small(rule: str, shape: dict[str, Any]) -> None:
    shape = {"batch": 1, "heads": 1, "k_size": 16, "v_size": 16, **shape}
    given = draw(rule, shape, **{n: shape[n] for n in ("batch", "tokens", "heads", "k_size", "v_size")})
    wrong = compare(rule, given, {}, torch.float32)
    assert not wrong, wrong


@pytest.mark.triton
@pytest.mark.parametrize("options", PAIRINGS[1:], ids=str)
def test_small_options(options: dict[str, Any]) -> None:
    given = draw("falcon1", {}, batch=1, tokens=70, heads=1, k_size=16, v_size=16)
    wrong = compare("falcon1", given, options, torch.float32)
    assert not wrong, wrong


@pytest.mark.triton
@pytest.mark.parametrize("options", [{}, {"step": "eta", "scale_coupled": True}, {"pairing": "same_step"}], ids=str)
def test_gates_of_16_bit_inputs(options: dict[str, Any]) -> None:
    """For them the kernel that solves a chunk makes falcon1's gates."""
    given = draw("falcon1", {}, batch=1, tokens=70, heads=1, k_size=16, v_size=16)
    given = {name: x.bfloat16().double() if x.is_floating_point() else x for name, x in given.items()}
    wrong = compare("falcon1", given, options, torch.bfloat16)
    assert not wrong, wrong


@pytest.mark.triton
@pytest.mark.parametrize("rule", ["falcon1", "gated_delta"])
def test_decay_at_the_floor(rule: str) -> None:
    """Alternate tokens wipe the state: nothing overflows and nothing cancels."""
    given = draw(rule, {}, batch=1, tokens=100, heads=1, k_size=16, v_size=16)
    name, value = ("in.log_decay", -9.2) if rule == "gated_delta" else ("in.ridge", 1e6)
    given[name][:, ::2] = value
    wrong = compare(rule, given, {}, torch.float32)
    assert not wrong, wrong


@pytest.mark.triton
def test_negative_control() -> None:
    """The comparison sees a key of the wrong token, and a state that was dropped."""
    given = draw("falcon1", {}, batch=1, tokens=70, heads=1, k_size=16, v_size=16)
    exact = run("falcon1", given, {"level": "chunk"}, torch.float64)
    for name in ("state_in.key", "state_in.S"):
        found = run("falcon1", {**given, name: given[name].roll(1, -1)}, {"level": "triton"}, torch.float32)
        assert max(errors(found, exact).values()) > 1e-3


# The interpreter is slow, and so is compiling: of falcon2 and falcon3 there few vectors, on a GPU those that share kernels.
INTERPRETED = {
    "falcon2": ["packed_state", "same_step_read_before_write"],
    "falcon3": ["packed_state", "same_step_state"],
}
COMPILED = {
    "falcon2": [
        "beta_extreme",
        "decay_floor",
        "mask_state",
        "scale_coupled_state",
        "state_unknown_key",
        "zero_keys_eps0",
    ],
    "falcon3": [
        "mask_state",
        "read_before_write",
        "repeated_keys",
        "scale_coupled_state",
        "state_short_history",
        "state_unknown_key",
        "strong_decay",
        "window2_state",
        "window7_packed",
        "zero_keys_eps0",
    ],
}


def _vectors(names: dict[str, list[str]], mark: pytest.MarkDecorator) -> list[Any]:
    chosen = [path for path in VECTORS if path.stem in names.get(path.parent.name, [])]
    return [pytest.param(path, marks=mark, id=f"{path.parent.name}-{path.stem}") for path in chosen]


EVERY = {rule: [path.stem for path in VECTORS if path.parent.name == rule] for rule in ("falcon1", "gated_delta")}


@pytest.mark.parametrize(
    "path", _vectors({**EVERY, **INTERPRETED}, pytest.mark.triton) + _vectors(COMPILED, pytest.mark.gpu)
)
def test_vectors(path: Path) -> None:
    options, given, expected = falcon_cases.load(path)
    rule = path.parent.name
    plain = run(rule, given, {**options, "level": "chunk"}, torch.float32)
    found = run(rule, given, {**options, "level": "triton"}, torch.float32)
    wrong = too_large({n: found[n] for n in expected}, expected, {n: plain[n] for n in expected}, torch.float32)
    assert not wrong, wrong
