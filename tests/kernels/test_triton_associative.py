"""The Triton kernels of falcon1a, falcon2a, falcon3a and linear attention: vectors, shapes, masks, packings, and controls."""

from __future__ import annotations

from typing import Any

import falcon_cases
import pytest
import recurrence_cases
import torch
from torch import Tensor

from compare import error, too_large
from fwzoo.kernels import FalconState, explain, falcon, linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = ("falcon1a", "falcon2a", "falcon3a")
NAMES = (*RULES, "linear_attention", "linear_attention without decay", "linear_attention unnormalised")
triton, gpu = pytest.mark.triton, pytest.mark.gpu
names = pytest.mark.parametrize("name", NAMES)


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """The operator, and the options that `name` stands for."""
    if name.startswith("falcon"):
        return name, {"rule": name}
    return "linear_attention", {"normalize": not name.endswith("unnormalised")}


def run(name: str, given: dict[str, Tensor], dtype: torch.dtype, device: str, **options: Any) -> dict[str, Tensor]:
    """Outputs, state and all gradients, on the CPU."""
    operator, own = options_of(name)
    given = {key: x.to(device) for key, x in given.items() if not (name.endswith("decay") and key == "in.log_decay")}
    if name.startswith("falcon"):
        found = falcon_cases.run(given, {**own, **options}, dtype)
    else:
        found = recurrence_cases.run(operator, given, {**own, **options}, dtype)
    return {key: x.detach().cpu() for key, x in found.items()}


def draw(name: str, **sizes: Any) -> dict[str, Tensor]:
    return (
        falcon_cases.draw(name, **sizes)
        if name.startswith("falcon")
        else recurrence_cases.draw("linear_attention", **sizes)
    )


def as_given(name: str, arguments: dict[str, Tensor], state: Any = None) -> dict[str, Tensor]:
    if name.startswith("falcon"):
        given = falcon_cases.as_given(arguments, state=state)
        if state is not None:
            for field in ("key", "tail_x", "tail_v"):
                given[f"cotangent.{field}"] = torch.randn_like(getattr(state, field))
        return given
    return recurrence_cases.as_given("linear_attention", arguments, state=state)


def a_state(name: str, documents: int, **sizes: Any) -> Any:
    """A state after some tokens; the second document has not seen any key."""
    _, own = options_of(name)
    if not name.startswith("falcon"):
        return linear_attention(**draw(name, batch=documents, tokens=5, **sizes))[1]
    _, state = falcon(**draw(name, batch=documents, tokens=5, **sizes), **own)
    known = torch.arange(documents) != 1
    return state._replace(has_key=known, key=torch.where(known[:, None, None], state.key, 0))


def check(name: str, given: dict[str, Tensor], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """The kernels are at most twice as far from the float64 reference as the chunk level in the same dtype."""
    if dtype != torch.float32:  # what the operator gets is exact in this dtype
        narrow = {f"in.{key}" for key in "qkv"} | {f"state_in.{key}" for key in ("key", "tail_x", "tail_v")}
        given = {key: x.to(dtype).double() if key in narrow else x for key, x in given.items()}
    exact = run(name, given, torch.float64, DEVICE, **options, level="chunk" if DEVICE == "cuda" else "reference")
    plain = run(name, given, dtype, DEVICE, **options, level="chunk")
    found = run(name, given, dtype, DEVICE, **options, level="triton")
    wrong = too_large(found, exact, plain, dtype)
    assert not wrong, wrong


VECTORS = [
    path
    for path in falcon_cases.VECTORS + recurrence_cases.VECTORS
    if path.parent.name in (*RULES, "linear_attention")
    # under the interpreter, which is slow, one of each kind
    and (
        DEVICE == "cuda"
        or path.stem in ("packed_state", "mask_state", "state_unknown_key", "window7_state", "no_decay")
    )
]


@triton
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_vectors(path: Any) -> None:
    name = path.parent.name
    options, given, expected = falcon_cases.load(path)
    options = {key: value for key, value in options.items() if key != "rule"}
    plain = run(name, given, torch.float32, "cpu", **options, level="reference")
    found = run(name, given, torch.float32, DEVICE, **options, level="triton")
    wrong = too_large({n: found[n] for n in expected}, expected, {n: plain[n] for n in expected}, torch.float32)
    assert not wrong, wrong


@triton
@names
def test_several_chunks_with_state(name: str) -> None:
    sizes = {"heads": 1, "k_size": 5, "v_size": 18}
    check(name, as_given(name, draw(name, tokens=130, **sizes), a_state(name, 2, **sizes)))


@triton
@names
def test_packed_and_masked_with_state(name: str) -> None:
    sizes = {"heads": 1, "k_size": 4, "v_size": 3}
    arguments = draw(name, batch=1, tokens=100, **sizes)
    mask = torch.rand(1, 100, generator=torch.Generator().manual_seed(0)) > 0.2
    mask[:, 3:10] = False
    arguments = {n: torch.where(mask.view(1, 100, *[1] * (x.ndim - 2)), x, torch.nan) for n, x in arguments.items()}
    arguments |= {"cu_seqlens": torch.tensor([0, 0, 3, 10, 95, 100]), "mask": mask}
    given = as_given(name, arguments, a_state(name, 5, **sizes))
    given["cotangent.o"] = torch.where(mask[..., None, None], given["cotangent.o"], 0)
    check(name, given)


@triton
@pytest.mark.parametrize(
    "options",
    [{"timing": "read_before_write"}, {"step": "eta"}, {"scale_coupled": True}, {"pairing": "same_step"}],
    ids=str,
)
@pytest.mark.parametrize("name", RULES)
def test_options(name: str, options: dict[str, Any]) -> None:
    check(name, as_given(name, draw(name, batch=1, tokens=70, heads=1, k_size=4, v_size=3)), **options)


@triton
@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_windows(window: int) -> None:
    check(
        "falcon3a",
        as_given("falcon3a", draw("falcon3a", batch=1, tokens=130, heads=1, k_size=4, v_size=3)),
        window=window,
    )


@triton
@pytest.mark.parametrize("name", (*NAMES, "falcon2"))
def test_sixteen_bit(name: str) -> None:
    """Their gradients take another way than those of float32, so the errors are looked at beside bfloat16's own rounding."""
    sizes = {"heads": 1, "k_size": 5, "v_size": 3}
    arguments = draw(name, batch=1, tokens=70, **sizes)
    if name.startswith("falcon"):
        # a decay of 1/192 divides the gradient of beta
        arguments["ridge"][:], arguments["beta"][:, 9::7] = 2, 1.4921875
    given = as_given(name, arguments, a_state(name, 1, **sizes))
    narrow = {f"in.{key}" for key in ("q", "k", "v", "beta", "ridge")}
    narrow |= {f"state_in.{key}" for key in ("key", "tail_x", "tail_v")}
    given = {key: x.bfloat16().double() if key in narrow else x for key, x in given.items()}
    exact = run(name, given, torch.float64, "cpu", level="reference")
    found = run(name, given, torch.bfloat16, DEVICE, level="triton")
    for key, x in exact.items():
        if x.numel() and x.is_floating_point():
            assert (found[key].double() - x).abs().max() <= 0.03 * x.abs().max() + 1e-6, key


@triton
@pytest.mark.parametrize("name", ["falcon3a"])
def test_no_state_is_the_empty_state(name: str) -> None:
    """Where documents begin, no state is read: the same bits as with one of zeros."""
    arguments = {key: x.float().to(DEVICE) for key, x in draw(name, batch=2, tokens=20, heads=1).items()}
    empty = falcon(**{key: x[:, :0] for key, x in arguments.items()}, rule=name)[1]
    results = []
    for state in (None, empty):
        leaves = {key: x.clone().requires_grad_() for key, x in arguments.items()}
        o, new = falcon(**leaves, rule=name, state=state, level="triton")
        results.append([o, *new, *torch.autograd.grad(o.square().sum() + new.S.sum(), list(leaves.values()))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@triton
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("falcon2a", torch.float32),
        ("falcon3a", torch.bfloat16),
        ("linear_attention unnormalised", torch.bfloat16),
    ],
    ids=str,
)
def test_a_planned_call_gives_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """The third call of a shape goes by a plan; so does one in which two arguments are one tensor."""
    from fwzoo.kernels import plans

    monkeypatch.setattr(plans, "_plans", {})
    operator = falcon if name in RULES else linear_attention
    for turn in ("first", "recorded", "planned", "one tensor"):
        arguments = {key: x.to(dtype) for key, x in draw(name, batch=1, tokens=20, heads=1).items()}
        arguments = {key: (x if key in "qkv" else x.float()).to(DEVICE) for key, x in arguments.items()}
        if turn == "one tensor":
            arguments["q"] = arguments["k"]
        upstream = torch.randn(arguments["v"].shape, device=DEVICE)

        def results(arguments: dict[str, Tensor] = arguments, upstream: Tensor = upstream) -> list[Tensor]:
            leaves = {key: x.detach().requires_grad_() for key, x in arguments.items()}
            o, new = operator(**leaves, **options_of(name)[1], level="triton")
            return [o, new.S, *torch.autograd.grad(o, list(leaves.values()), upstream.to(o.dtype))]

        found = results()
        if turn == "planned":
            sums = name == "falcon2a"  # a reduction by torch is in its backward pass
            assert [type(plan) for plan in plans._plans.values()] == [plans.Plan, bool if sums else plans.Plan]
        kept = dict(plans._plans)
        plans._plans.clear()
        expected = results()
        plans._plans.clear()
        plans._plans.update(kept)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), turn


@triton
@pytest.mark.parametrize("name", RULES)
def test_a_wrong_decay_fails_the_comparison(name: str) -> None:
    """The comparison of this file can fail: one decay of one token is left out."""
    arguments = draw(name, batch=1, tokens=70, heads=1)
    given, wrong = as_given(name, arguments), as_given(name, {**arguments, "ridge": arguments["ridge"].clone()})
    wrong["in.ridge"][0, 40] = 0
    exact = run(name, given, torch.float64, "cpu", level="reference")
    plain = run(name, given, torch.float32, "cpu", level="reference")
    assert too_large(run(name, wrong, torch.float32, DEVICE, level="triton"), exact, plain, torch.float32)


@triton
def test_what_cannot_run_says_why() -> None:
    x = torch.ones(1, 3, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="K is 300, and the Triton kernels take K up to 256"):
        linear_attention(x, x, x, level="triton")
    with pytest.raises(ValueError, match="float64"):
        linear_attention(x[..., :4].double(), x[..., :4].double(), x[..., :4].double(), level="triton")
    gate = torch.ones(1, 3, 1, device=DEVICE)
    with pytest.raises(ValueError, match="window is 9"):
        falcon(x[..., :4], x[..., :4], x[..., :4], gate, gate, rule="falcon3a", window=9, level="triton")
    columns = torch.ones(1, 70, 1, 4, device=DEVICE)
    with pytest.raises(ValueError, match="decay_floor is 1e-05"):
        falcon(columns, columns, columns, columns, columns[..., 0], rule="falcon2a", decay_floor=1e-5, level="triton")
    assert explain("linear_attention", x[..., :4]).level == ("triton" if DEVICE == "cuda" else "reference")


# --- on a GPU ---

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MAIN = (*RULES, "linear_attention")
CASES = [
    *((name, (1, 4096, 2, 128, 128), BF16) for name in NAMES),
    *((name, (2, 333, 3, 96, 64), dtype) for dtype in (BF16, F32, F16) for name in MAIN),
    *((name, (3, 65, 2, 256, 256), BF16) for name in MAIN),
    *((name, (2, 500, 2, 16, 256), BF16) for name in MAIN),
    *((name, (1, 300, 2, 256, 48), F32) for name in MAIN),
    *((name, (1, 1, 1, 96, 64), BF16) for name in MAIN),
]


@gpu
@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=str)
def test_shapes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, tokens, heads, k_size, v_size = shape
    sizes = {"heads": heads, "k_size": k_size, "v_size": v_size}
    check(name, as_given(name, draw(name, batch=batch, tokens=tokens, **sizes), a_state(name, batch, **sizes)), dtype)


@gpu
@pytest.mark.parametrize(("name", "dtype"), [*((name, BF16) for name in MAIN), ("falcon3a", F32)], ids=str)
def test_ragged_packing_with_holes(name: str, dtype: torch.dtype) -> None:
    sizes = {"heads": 2, "k_size": 96, "v_size": 64}
    arguments = draw(name, batch=1, tokens=2000, **sizes)
    mask = torch.rand(1, 2000, generator=torch.Generator().manual_seed(0)) > 0.3
    arguments = {n: torch.where(mask.view(1, 2000, *[1] * (x.ndim - 2)), x, torch.nan) for n, x in arguments.items()}
    arguments |= {"cu_seqlens": torch.tensor([0, 1, 1, 60, 700, 701, 1900, 2000]), "mask": mask}
    given = as_given(name, arguments, a_state(name, 7, **sizes))
    given["cotangent.o"] = torch.where(mask[..., None, None], given["cotangent.o"], 0)
    check(name, given, dtype)


@gpu
@pytest.mark.parametrize(("window", "dtype"), [(2, BF16), (3, F32), (5, BF16), (8, BF16), (1, BF16)], ids=str)
def test_every_kind_of_window(window: int, dtype: torch.dtype) -> None:
    check("falcon3a", as_given("falcon3a", draw("falcon3a", tokens=200, k_size=96, v_size=64)), dtype, window=window)


@gpu
@pytest.mark.parametrize("options", [{"timing": "read_before_write"}, {"step": "eta"}], ids=str)
def test_options_of_columns_in_sixteen_bits(options: dict[str, Any]) -> None:
    check("falcon2a", as_given("falcon2a", draw("falcon2a", tokens=200, k_size=96, v_size=64)), BF16, **options)


@gpu
@pytest.mark.parametrize("options", [{}, {"timing": "read_before_write"}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", (*RULES, "falcon2"))
def test_low_decays_in_sixteen_bits(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Segments of several chunks, of which some have decays just above the floor."""
    arguments = draw(name, batch=1, tokens=3000, heads=12, k_size=64, v_size=128)
    arguments["ridge"][:, 500:], arguments["beta"][:, 501::20] = 2, 1.4921875
    arguments["beta"], arguments["ridge"] = (arguments[x].to(dtype).double() for x in ("beta", "ridge"))
    check(name, as_given(name, arguments), dtype, **options)


@gpu
@pytest.mark.parametrize(
    "stress",
    [
        "floor on alternate tokens",
        "equal keys",
        "zero keys",
        "smallest gain",
        "largest gain",
        "scale 1e-4",
        "scale 1e4",
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_stress(name: str, stress: str) -> None:
    from test_falcon_properties import stressed

    given = falcon_cases.as_given(stressed(stress, name))
    found = run(name, given, torch.float32, DEVICE, level="triton")
    assert all(x.isfinite().all() for x in found.values())
    check(name, given)


@gpu
@pytest.mark.parametrize("name", MAIN)
def test_non_contiguous_inputs_and_gradients(name: str) -> None:
    _, own = options_of(name)
    arguments = {n: x.bfloat16().cuda() for n, x in draw(name, tokens=200, k_size=96, v_size=64).items()}
    if name.endswith("decay"):
        del arguments["log_decay"]
    call = falcon if name in RULES else linear_attention
    results = []
    for spread in (False, True):
        leaves = {
            n: (x.transpose(0, 1).contiguous().transpose(0, 1) if spread else x).requires_grad_()
            for n, x in arguments.items()
        }
        o, _ = call(**leaves, **own, level="triton")
        upstream = torch.linspace(-1, 1, o.numel(), device="cuda").view(o.shape)
        if spread:
            upstream = upstream.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
        results.append([o, *torch.autograd.grad(o, list(leaves.values()), upstream)])
    assert all(error(a, b) < 1e-6 for a, b in zip(*results, strict=True))


@gpu
@pytest.mark.parametrize("name", MAIN)
def test_in_a_cuda_graph(name: str) -> None:
    _, own = options_of(name)
    arguments = {n: x.bfloat16().cuda() for n, x in draw(name, tokens=300, k_size=96, v_size=64).items()}
    if name.endswith("decay"):
        del arguments["log_decay"]
    call = falcon if name in RULES else linear_attention
    with torch.no_grad():
        expected, _ = call(**arguments, **own, level="triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = call(**arguments, **own, level="triton")
        graph.replay()
    assert torch.equal(o, expected)


@gpu
@pytest.mark.parametrize("name", MAIN)
def test_compiled_without_a_break(name: str) -> None:
    _, own = options_of(name)
    arguments = {n: x.bfloat16().cuda() for n, x in draw(name, tokens=150, k_size=96, v_size=64).items()}
    arguments = {n: x.requires_grad_() for n, x in arguments.items()}
    if name.endswith("decay"):
        del arguments["log_decay"]
    call = falcon if name in RULES else linear_attention

    def run_it(**tensors: Tensor) -> Tensor:
        o, state = call(**tensors, **own, level="triton")
        return o.float().square().sum() + state.S.sum()

    eager = torch.autograd.grad(run_it(**arguments), list(arguments.values()))
    compiled = torch.autograd.grad(torch.compile(run_it, fullgraph=True)(**arguments), list(arguments.values()))
    assert all(error(a, b) < 0.01 for a, b in zip(compiled, eager, strict=True))


@gpu
def test_new_lengths_compile_nothing() -> None:
    from fwzoo.kernels import associative

    compiled = []
    for tokens in (1000, *range(1001, 1200, 10)):
        arguments = {
            n: x.bfloat16().cuda().requires_grad_()
            for n, x in draw("falcon3a", tokens=tokens, k_size=96, v_size=64).items()
        }
        falcon(**arguments, rule="falcon3a", level="triton")[0].sum().backward()
        compiled.append(
            sum(
                len(cache[0])
                for kernel in (associative._walk, associative._walk_back)
                for cache in kernel.device_caches.values()
            )
        )
    assert compiled[0] == compiled[-1], compiled


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_the_device_that_is_not_current() -> None:
    arguments = {n: x.float() for n, x in draw("falcon3a", tokens=100).items()}
    here, there = (
        falcon(**{n: x.to(d) for n, x in arguments.items()}, rule="falcon3a", level="triton")[0]
        for d in ("cuda:0", "cuda:1")
    )
    assert there.device.index == 1 and error(there.cpu(), here.cpu()) < 1e-6


@gpu
def test_beyond_two_to_the_31_elements() -> None:
    """The last rows of a long call equal the same rows continued from the state before them."""
    tokens, heads, size = 2**31 // (64 * 128) + 4096, 64, 128
    shape = (1, tokens, heads, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gate = torch.rand(shape[:3], device="cuda")
    with torch.no_grad():
        cut = tokens - 2048
        pieces = [tuple(x[:, a:b] for x in (q, k, v, gate, 0.1 * gate)) for a, b in ((0, cut), (cut, tokens))]
        _, state = falcon(*pieces[0], rule="falcon3a", level="triton")
        expected, _ = falcon(*pieces[1], rule="falcon3a", state=FalconState(*state), level="triton")
        found, _ = falcon(q, k, v, gate, 0.1 * gate, rule="falcon3a", level="triton")
        assert error(found[:, cut:], expected) < 0.02
