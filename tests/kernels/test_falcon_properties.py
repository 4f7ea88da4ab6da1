"""Properties of the Falcon operator: gradients, identities, random cuts, masks and packings, and stress in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from falcon_cases import as_given, draw, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compare import error, floor, too_large
from fwzoo.kernels import FalconState, falcon
from fwzoo.kernels.falcon import RULES

ALL = tuple(RULES)
LEVELS = ("reference", "chunk")
REGRESSION = ("falcon1", "falcon2", "falcon3")


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return error(a, b) < tolerance


# --- gradients ---


@pytest.mark.parametrize("options", [{}, {"scale_coupled": True}, {"step": "eta"}, {"pairing": "same_step"}], ids=str)
@pytest.mark.parametrize("rule", ALL)
def test_gradcheck_of_the_reference(rule: str, options: dict[str, Any]) -> None:
    arguments = draw(rule, batch=1, tokens=6, heads=1, k_size=3, v_size=2)
    _, state = falcon(**draw(rule, batch=1, tokens=5, heads=1, k_size=3, v_size=2, seed=3), rule=rule)
    names = list(arguments)

    def call(S: Tensor, key: Tensor, tail_x: Tensor, tail_v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        own = FalconState(S, key, state.has_key, tail_x, tail_v, state.count)
        o, new = falcon(**dict(zip(names, tensors, strict=True)), rule=rule, state=own, level="reference", **options)
        return o, new.S, new.key, new.tail_x, new.tail_v

    if options.get("step") == "eta":
        arguments["beta"] = 0.3 * arguments["beta"]
    leaves = [
        x.detach().requires_grad_() for x in (state.S, state.key, state.tail_x, state.tail_v, *arguments.values())
    ]
    # the multiplier of the ridge is a statistic without gradient in the sliding rules, so k is not checked there
    if options.get("scale_coupled") and RULES[rule].sliding:
        leaves[5] = leaves[5].detach()
        names_of_k = names.index("k")
        leaves[4 + names_of_k] = leaves[4 + names_of_k].detach()
        for i in (1, 2):
            leaves[i] = leaves[i].detach()
    assert torch.autograd.gradcheck(call, leaves, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"scale_coupled": True}, {"step": "eta"}, {"timing": "read_before_write"}], ids=str
)
@pytest.mark.parametrize("rule", ALL)
def test_chunk_equals_reference_with_every_gradient(rule: str, options: dict[str, Any]) -> None:
    _, state = falcon(**draw(rule, tokens=5, seed=3), rule=rule)
    inputs = as_given(draw(rule, tokens=70), state=state)
    for name in ("key", "tail_x", "tail_v"):
        inputs[f"cotangent.{name}"] = torch.randn_like(getattr(state, name))
    exact = run(inputs, {"rule": rule, "level": "reference", **options}, torch.float64)
    found = run(inputs, {"rule": rule, "level": "chunk", **options}, torch.float64)
    assert {name: e for name, x in found.items() if not (e := error(x, exact[name])) < 1e-9} == {}


@pytest.mark.parametrize("rule", ALL)
def test_recomputed_segments_equal_the_reference(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments with recomputation in backward: outputs, state and gradients as in one."""
    monkeypatch.setattr("fwzoo.kernels.segments.TOKENS", 128)
    inputs = as_given(draw(rule, tokens=200))
    exact = run(inputs, {"rule": rule, "level": "reference"}, torch.float64)
    found = run(inputs, {"rule": rule, "level": "chunk"}, torch.float64)
    assert {name: e for name, x in found.items() if not (e := error(x, exact[name])) < 1e-9} == {}


# --- identities of the recurrence ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rule", "simple"), [("falcon3", "falcon1"), ("falcon3a", "falcon1a")])
def test_a_window_of_one_is_the_simple_rule(rule: str, simple: str, level: str) -> None:
    inputs = as_given(draw(rule, tokens=30))
    one = run(inputs, {"rule": rule, "window": 1, "level": level}, torch.float64)
    other = run(inputs, {"rule": simple, "level": level}, torch.float64)
    assert all(close(one[name], other[name]) for name in other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rule", "simple"), [("falcon2", "falcon1"), ("falcon2a", "falcon1a")])
def test_equal_columns_are_the_simple_rule(rule: str, simple: str, level: str) -> None:
    arguments = draw(simple, tokens=30)
    columns = {**arguments, "beta": arguments["beta"][..., None].expand(*arguments["v"].shape).contiguous()}
    one, other = as_given(columns), as_given(arguments)
    found = run(one, {"rule": rule, "level": level}, torch.float64)
    exact = run(other, {"rule": simple, "level": level}, torch.float64)
    assert close(found["grad.beta"].sum(-1), exact["grad.beta"])
    assert all(close(found[name], exact[name]) for name in exact if name != "grad.beta")


@pytest.mark.parametrize("level", LEVELS)
def test_full_gain_without_ridge_stores_the_value_exactly(level: str) -> None:
    arguments = draw("falcon1", tokens=12)
    arguments["beta"], arguments["ridge"] = torch.ones_like(arguments["beta"]), torch.zeros_like(arguments["ridge"])
    arguments["q"] = arguments["k"].roll(1, 1)  # read at the shifted key
    o, _ = falcon(**arguments, rule="falcon1", eps=0.0, level=level)
    assert close(o[:, 1:], arguments["v"][:, 1:])


def test_falcon1_is_the_gated_delta_rule() -> None:
    arguments = draw("falcon1", tokens=15)
    q, k, v, beta, ridge = arguments.values()
    S, outputs = torch.zeros(2, 2, 5, 3, dtype=torch.float64), []
    for t in range(15):
        if t:
            x = k[:, t - 1]
            eta = beta[:, t] / (x.square().sum(-1) + ridge[:, t] + 1e-6)
            gamma = 1 - eta * ridge[:, t]
            decayed = gamma[..., None, None] * S
            strength = (eta / gamma)[..., None]
            residual = gamma[..., None] * v[:, t] - torch.einsum("bhk,bhkv->bhv", x, decayed)
            S = decayed + torch.einsum("bhk,bhv->bhkv", x, strength * residual)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    for level in LEVELS:
        assert close(falcon(**arguments, rule="falcon1", level=level)[0], torch.stack(outputs, 1))


def test_falcon1a_is_decayed_linear_attention() -> None:
    arguments = draw("falcon1a", tokens=15)
    q, k, v, beta, ridge = arguments.values()
    x = F.pad(k, (0, 0, 0, 0, 1, -1))
    eta = beta / (x.square().sum(-1) + ridge + 1e-6)
    log_gamma = torch.log(1 - eta * ridge)
    eta, log_gamma = (F.pad(g[:, 1:], (0, 0, 1, 0)) for g in (eta, log_gamma))
    u = log_gamma.cumsum(1)
    scores = (
        torch.einsum("bthk,bshk->bhts", q, eta[..., None] * x) * (u[:, :, None] - u[:, None]).permute(0, 3, 1, 2).exp()
    )
    o = torch.einsum("bhts,bshv->bthv", scores.tril(), v)
    for level in LEVELS:
        assert close(falcon(**arguments, rule="falcon1a", level=level)[0], o)


@pytest.mark.parametrize("rule", ["falcon1", "falcon3"])
def test_every_step_descends_the_ridge_loss(rule: str) -> None:
    arguments = draw(rule, batch=1, tokens=40, heads=1)
    _q, k, v, _beta, ridge = arguments.values()
    window = 4 if rule == "falcon3" else 1
    states = [falcon(*(x[:, :t] for x in arguments.values()), rule=rule, eps=0.0)[1].S[0, 0] for t in range(1, 41)]
    for t in range(1, 40):
        first = max(1, t - window + 1)
        x, values = k[0, first - 1 : t, 0], v[0, first : t + 1, 0]

        def loss(S: Tensor, x: Tensor = x, values: Tensor = values, t: int = t) -> Tensor:
            return (values - x @ S).square().mean(0).sum() + ridge[0, t, 0] * S.square().sum()

        assert loss(states[t]) <= loss(states[t - 1]) + 1e-12


# --- cuts, masks, packings ---


def cut_run(
    arguments: dict[str, Tensor], cuts: list[int], mask: Tensor | None, **options: Any
) -> tuple[Tensor, FalconState]:
    """Outputs and state of a sequence given in pieces."""
    tokens = arguments["q"].shape[1]
    outputs, state = [], None
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        piece = {name: x[:, start:end] for name, x in arguments.items()}
        o, state = falcon(**piece, mask=None if mask is None else mask[:, start:end], state=state, **options)
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, 1), state


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", ALL)
def test_any_cut_any_mask_any_packing(rule: str, level: str, data: st.DataObject) -> None:
    """Pieces of a masked batch, and the same rows packed, all equal the bare rows run one by one."""
    chunk = 16
    tokens = data.draw(st.one_of(st.integers(1, 17), st.sampled_from([chunk - 1, chunk, chunk + 1, 2 * chunk + 3])))
    window = data.draw(st.integers(1, 5))
    pairing = data.draw(st.sampled_from(["shifted", "same_step"]))
    options: dict[str, Any] = {"rule": rule, "window": window, "pairing": pairing, "level": level}
    arguments = draw(rule, batch=2, tokens=tokens, heads=1, seed=data.draw(st.integers(0, 5)))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=2, max_size=2))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    noisy = {
        name: torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, torch.nan) for name, x in arguments.items()
    }

    rows = []
    for b in range(2):
        bare = {name: x[b : b + 1, mask[b]] for name, x in arguments.items()}
        rows.append(falcon(**bare, **{**options, "level": "reference"}))
    expected_state = FalconState(*(torch.cat(fields) for fields in zip(*(row[1] for row in rows), strict=True)))
    expected = torch.zeros_like(arguments["v"])
    for b in range(2):
        expected[b, mask[b]] = rows[b][0][0]

    o, state = cut_run(noisy, cuts, mask, **options)
    assert close(o, expected)
    assert all(close(x, y) for x, y in zip(state, expected_state, strict=True))
    assert torch.equal(o[~mask], torch.zeros_like(o[~mask]))

    # packed, with empty documents before, between and behind
    packed = {name: x.reshape(1, 2 * tokens, *x.shape[2:]) for name, x in noisy.items()}
    bounds = torch.tensor([0, 0, tokens, tokens, 2 * tokens, 2 * tokens])
    o, state = falcon(**packed, **options, mask=mask.reshape(1, -1), cu_seqlens=bounds)
    assert close(o.view_as(expected), expected)
    assert all(close(x[[1, 3]], y) for x, y in zip(state, expected_state, strict=True))
    assert not state.has_key[[0, 2, 4]].any() and not state.S[[0, 2, 4]].any()


@pytest.mark.parametrize("tokens", [*range(18), 31, 32, 33, 63, 64, 65, 131])
@pytest.mark.parametrize("rule", ALL)
def test_chunk_equals_reference_at_every_length(rule: str, tokens: int) -> None:
    arguments = draw(rule, batch=1, tokens=tokens, heads=1)
    a, b = (falcon(**arguments, rule=rule, level=level) for level in LEVELS)
    assert close(a[0], b[0])
    assert all(close(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("rule", ALL)
def test_masked_tokens_get_no_gradient_and_give_none(rule: str) -> None:
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:12] = False
    grads = []
    for filler in (0.0, torch.nan):
        arguments = {
            name: torch.where(mask.view(2, 24, *[1] * (x.ndim - 2)), x, filler).requires_grad_()
            for name, x in draw(rule, tokens=24).items()
        }
        o, state = falcon(**arguments, rule=rule, mask=mask, level="chunk")
        grads.append(torch.autograd.grad(o.sum() + state.S.sum(), list(arguments.values())))
        assert all(not g[~mask].any() for g in grads[-1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", ALL)
def test_the_future_does_not_leak(rule: str, level: str) -> None:
    arguments = draw(rule, tokens=70, dtype=torch.float32)
    before, _ = falcon(**arguments, rule=rule, level=level)
    for t in (1, 16, 40, 69):
        changed = {name: x.clone() for name, x in arguments.items()}
        for x in changed.values():
            x[:, t] = x[:, t] + 0.25
        after, _ = falcon(**changed, rule=rule, level=level)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


# --- numbers ---


def stressed(name: str, rule: str) -> dict[str, Tensor]:
    arguments = draw(rule, batch=1, tokens=200, heads=1, k_size=16, v_size=8, dtype=torch.float32)
    if name == "floor on alternate tokens":
        arguments["beta"][:, ::2], arguments["ridge"][:, ::2] = 1.0, 1e6
    elif name == "equal keys":
        arguments["k"][:] = arguments["k"][:, :1]
    elif name == "zero keys":
        arguments["k"][:, 3::4] = 0
    elif name == "smallest gain":
        arguments["beta"][:] = 1e-6
    elif name == "largest gain":
        arguments["beta"][:] = 2 - 1e-6
    elif name == "scale 1e-4":
        arguments.update({n: arguments[n] * 1e-4 for n in "qkv"})
    elif name == "scale 1e4":
        arguments.update({n: arguments[n] * 1e4 for n in "qkv"})
    return arguments


STRESS = [
    "floor on alternate tokens",
    "equal keys",
    "zero keys",
    "smallest gain",
    "largest gain",
    "scale 1e-4",
    "scale 1e4",
]


@pytest.mark.parametrize("stress", STRESS)
@pytest.mark.parametrize("rule", ALL)
def test_stress_in_float32(rule: str, stress: str) -> None:
    inputs = as_given(stressed(stress, rule))
    exact = run(inputs, {"rule": rule, "level": "reference"}, torch.float64)
    plain = run(inputs, {"rule": rule, "level": "reference"}, torch.float32)
    found = run(inputs, {"rule": rule, "level": "chunk"}, torch.float32)
    assert all(x.isfinite().all() for x in found.values())
    wrong = too_large(found, exact, plain, torch.float32)
    assert not wrong, wrong


@pytest.mark.parametrize("rule", ALL)
def test_a_hundred_thousand_tokens(rule: str) -> None:
    """Streaming one small head in float32 for 100,000 tokens stays near float64."""
    tokens, piece = 100_000, 10_000
    arguments = draw(rule, batch=1, tokens=tokens, heads=1, k_size=4, v_size=4, dtype=torch.float32)
    found, exact = None, None
    worst = 0.0
    with torch.no_grad():
        for start in range(0, tokens, piece):
            part = {name: x[:, start : start + piece] for name, x in arguments.items()}
            o, found = falcon(**part, rule=rule, state=found, level="chunk")
            wide = {name: x.double() for name, x in part.items()}
            o64, exact = falcon(**wide, rule=rule, state=exact, level="chunk")
            worst = max(worst, error(o, o64))
        # the plain path in the same dtype, on the last piece
        last = {name: x[:, -2000:] for name, x in arguments.items()}
        plain, _ = falcon(**last, rule=rule, level="reference")
        plain64, _ = falcon(**{name: x.double() for name, x in last.items()}, rule=rule, level="reference")
    assert worst <= 2 * error(plain, plain64) + floor(torch.float32)
    assert all(error(a, b) < 1e-5 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ALL)
def test_sixteen_bit_inputs_are_computed_in_float32(rule: str, dtype: torch.dtype) -> None:
    narrow = draw(rule, tokens=40, dtype=dtype)
    for name in ("beta", "ridge"):
        narrow[name] = narrow[name].float()
    wide = {name: x.float() for name, x in narrow.items()}
    for level in LEVELS:
        o, state = falcon(**narrow, rule=rule, level=level)
        o32, state32 = falcon(**wide, rule=rule, level=level)
        assert o.dtype == dtype and state.S.dtype == torch.float32 and state.key.dtype == state.tail_x.dtype == dtype
        assert torch.equal(o, o32.to(dtype)) and torch.equal(state.S, state32.S)


def test_repeated_top_eigenvalue_has_a_finite_gradient() -> None:
    k = torch.eye(4, dtype=torch.float64)[None, :, None].repeat(1, 3, 1, 1).requires_grad_()
    arguments = {**draw("falcon3", batch=1, tokens=12, heads=1, k_size=4), "k": k}
    for level in LEVELS:
        o, _ = falcon(**arguments, rule="falcon3", level=level)
        assert torch.autograd.grad(o.square().sum(), k)[0].isfinite().all()


def test_memory_of_the_state_does_not_grow() -> None:
    sizes = []
    for tokens in (10, 1000):
        _, state = falcon(**draw("falcon3a", batch=1, tokens=tokens), rule="falcon3a")
        sizes.append(sum(x.numel() * x.element_size() for x in state))
    assert sizes[0] == sizes[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ALL)
def test_chunk_on_a_gpu(rule: str, dtype: torch.dtype) -> None:
    inputs = as_given(draw(rule, tokens=300, heads=2, k_size=32, v_size=16))
    inputs = {n: (x.to(dtype).double() if n[3:] in ("q", "k", "v") else x.float().double()) for n, x in inputs.items()}
    exact = run(inputs, {"rule": rule, "level": "reference"}, torch.float64)
    plain = run(inputs, {"rule": rule, "level": "reference"}, dtype)
    found = run({n: x.cuda() for n, x in inputs.items()}, {"rule": rule, "level": "chunk"}, dtype)
    wrong = too_large({n: x.cpu() for n, x in found.items()}, exact, plain, dtype)
    assert not wrong, wrong
