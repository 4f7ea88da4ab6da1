"""Properties of gated_delta and linear_attention: gradients, identities, random cuts, masks and packings, long streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import OPERATORS, STATES, as_given, draw, run
from torch import Tensor

from compare import error, too_large
from fwzoo.kernels import falcon, gated_delta, linear_attention

LEVELS = ("reference", "chunk")
ALL = [("gated_delta", {}), ("linear_attention", {}), ("linear_attention", {"normalize": False})]
operators = pytest.mark.parametrize(("name", "options"), ALL, ids=str)
levels = pytest.mark.parametrize("level", LEVELS)


@operators
def test_gradcheck_of_the_reference(name: str, options: dict[str, Any]) -> None:
    operator, arguments = OPERATORS[name], draw(name, batch=1, tokens=5, heads=1, k_size=3, v_size=2)
    _, state = operator(**draw(name, batch=1, tokens=4, heads=1, k_size=3, v_size=2, seed=3))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(arguments, tensors[len(state) :], strict=True))
        o, new = operator(**own, state=type(state)(*tensors[: len(state)]), level="reference", **options)
        return o, *new

    assert torch.autograd.gradcheck(call, [x.detach().requires_grad_() for x in (*state, *arguments.values())])


@operators
def test_chunk_equals_reference_with_every_gradient(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state = OPERATORS[name](**draw(name, tokens=5, seed=3))
    inputs = as_given(name, draw(name, tokens=200), state=state)
    exact = run(name, inputs, {"level": "reference", **options}, torch.float64)
    for tokens in (16384, 128):  # one segment, and several that backward recomputes
        monkeypatch.setattr("fwzoo.kernels.segments.TOKENS", tokens)
        found = run(name, inputs, {"level": "chunk", **options}, torch.float64)
        assert {key: e for key, x in found.items() if not (e := error(x, exact[key])) < 1e-9} == {}


@operators
@pytest.mark.parametrize("tokens", [*range(18), 31, 32, 33, 63, 64, 65, 131])
def test_chunk_equals_reference_at_every_length(name: str, options: dict[str, Any], tokens: int) -> None:
    arguments = draw(name, batch=1, tokens=tokens, heads=1)
    (a, a_state), (b, b_state) = (OPERATORS[name](**arguments, level=level, **options) for level in LEVELS)
    assert error(a, b) < 1e-9 and all(error(x, y) < 1e-9 for x, y in zip(a_state, b_state, strict=True))


@settings(max_examples=40)
@given(data=st.data())
@levels
@operators
def test_any_cut_any_mask_any_packing(name: str, options: dict[str, Any], level: str, data: st.DataObject) -> None:
    """Pieces of a masked batch, and the same rows packed, all equal the bare rows run one by one."""
    operator = OPERATORS[name]
    tokens = data.draw(st.one_of(st.integers(1, 17), st.sampled_from([15, 16, 17, 35, 63, 64, 65, 131])))
    arguments = draw(name, tokens=tokens, heads=1, seed=data.draw(st.integers(0, 5)))
    row = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    mask = torch.tensor(data.draw(st.lists(row, min_size=2, max_size=2)))
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    noisy = {
        key: torch.where(mask.view(*mask.shape, *[1] * (x.ndim - 2)), x, torch.nan) for key, x in arguments.items()
    }
    rows = [
        operator(**{key: x[b : b + 1, mask[b]] for key, x in arguments.items()}, level="reference", **options)
        for b in range(2)
    ]
    expected_state = [torch.cat(fields) for fields in zip(*(row[1] for row in rows), strict=True)]
    expected = torch.zeros_like(arguments["v"])
    for b in range(2):
        expected[b, mask[b]] = rows[b][0][0]

    outputs, state = [], None
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        piece = {key: x[:, start:end] for key, x in noisy.items()}
        o, state = operator(**piece, mask=mask[:, start:end], state=state, level=level, **options)
        outputs.append(o)
    o = torch.cat(outputs, 1)
    assert error(o, expected) < 1e-9 and not o[~mask].any()
    assert state is not None and all(error(x, y) < 1e-9 for x, y in zip(state, expected_state, strict=True))

    # packed, with empty documents before, between and behind
    packed = {key: x.reshape(1, 2 * tokens, *x.shape[2:]) for key, x in noisy.items()}
    bounds = torch.tensor([0, 0, tokens, tokens, 2 * tokens, 2 * tokens])
    o, state = operator(**packed, mask=mask.reshape(1, -1), cu_seqlens=bounds, level=level, **options)
    assert error(o.view_as(expected), expected) < 1e-9
    assert all(
        error(x[[1, 3]], y) < 1e-9 and not x[[0, 2, 4]].any() for x, y in zip(state, expected_state, strict=True)
    )


@operators
@levels
def test_masked_tokens_get_no_gradient_and_give_none(name: str, options: dict[str, Any], level: str) -> None:
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:12] = False
    grads = []
    for filler in (0.0, torch.nan):
        arguments = {
            key: torch.where(mask.view(2, 24, *[1] * (x.ndim - 2)), x, filler).requires_grad_()
            for key, x in draw(name, tokens=24).items()
        }
        o, state = OPERATORS[name](**arguments, mask=mask, level=level, **options)
        grads.append(torch.autograd.grad(o.sum() + state.S.sum(), list(arguments.values())))
        assert all(not g[~mask].any() for g in grads[-1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@operators
@levels
def test_the_future_does_not_leak(name: str, options: dict[str, Any], level: str) -> None:
    arguments = draw(name, tokens=70, dtype=torch.float32)
    before, _ = OPERATORS[name](**arguments, level=level, **options)
    for t in (1, 16, 40, 69):
        changed = {key: x.clone() for key, x in arguments.items()}
        for x in changed.values():
            x[:, t] = x[:, t] - 0.25
        after, _ = OPERATORS[name](**changed, level=level, **options)
        assert torch.equal(before[:, :t], after[:, :t]) and not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@operators
def test_sixteen_bit_inputs_are_computed_in_float32(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    narrow = {
        key: x.float() if key in ("beta", "log_decay") else x.to(dtype) for key, x in draw(name, tokens=40).items()
    }
    wide = {key: x.float() for key, x in narrow.items()}
    for level in LEVELS:
        (o, state), (o32, state32) = (OPERATORS[name](**x, level=level, **options) for x in (narrow, wide))
        assert o.dtype == dtype and all(x.dtype == torch.float32 for x in state)
        assert torch.equal(o, o32.to(dtype)) and all(torch.equal(x, y) for x, y in zip(state, state32, strict=True))


STRESS = ["strong decay on alternate tokens", "equal keys", "zero keys", "largest gain", "scale 1e-4", "scale 1e4"]


@pytest.mark.parametrize("stress", STRESS)
@operators
def test_stress_in_float32(name: str, options: dict[str, Any], stress: str) -> None:
    arguments = draw(name, batch=1, tokens=200, heads=1, k_size=16, v_size=8, dtype=torch.float32)
    if stress == "strong decay on alternate tokens":
        arguments["log_decay"][:, ::2] = -50.0
    elif stress == "equal keys":
        arguments["k"][:] = arguments["k"][:, :1]
    elif stress == "zero keys":
        arguments["k"][:, 3::4] = 0
    elif stress == "largest gain" and "beta" in arguments:
        arguments["beta"][:] = 2 - 1e-6
    elif stress == "scale 1e-4":
        arguments["v"] *= 1e-4
    elif stress == "scale 1e4":
        arguments["v"] *= 1e4
    inputs = as_given(name, arguments)
    exact = run(name, inputs, {"level": "reference", **options}, torch.float64)
    plain = run(name, inputs, {"level": "reference", **options}, torch.float32)
    found = run(name, inputs, {"level": "chunk", **options}, torch.float32)
    wrong = too_large(found, exact, plain, torch.float32)
    assert not wrong, wrong


# --- gated_delta ---


@levels
def test_falcon1_is_the_gated_delta_rule_on_shifted_pairs(level: str) -> None:
    """Scale 1, key x, value gamma v, decay gamma and gain eta / gamma; the first token, which has no pair, writes nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, beta, ridge = (torch.rand(2, 70, 2, *n, generator=generator).double() for n in ((5,), (5,), (3,), (), ()))
    x = F.pad(k, (0, 0, 0, 0, 1, -1))
    energy = x.square().sum(-1)
    eta = F.pad((beta / (energy + ridge + 1e-6))[:, 1:], (0, 0, 1, 0))
    gamma = F.pad((1 - eta * ridge)[:, 1:], (0, 0, 1, 0), value=1)
    expected, state = falcon(q, k, v, beta, ridge, rule="falcon1", level=level)
    o, new = gated_delta(q, x, gamma[..., None] * v, gamma.log(), eta / gamma, scale=1.0, level=level)
    assert error(o, expected) < 1e-9 and error(new.S, state.S) < 1e-9


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_equals_transformers_own(form: str) -> None:
    """transformers computes in float32, so ours may be as far from float64 as theirs is, and no further."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    theirs = getattr(modeling_qwen3_next, form)
    theirs = getattr(theirs, "__wrapped__", theirs)
    arguments = draw("gated_delta", tokens=150, k_size=16, v_size=8, dtype=torch.float32)
    S = torch.randn(2, 2, 16, 8)
    o, final = theirs(
        *(arguments[name] for name in ("q", "k", "v")),
        g=arguments["log_decay"],
        beta=arguments["beta"],
        initial_state=S,
        output_final_state=True,
    )
    wide = {name: x.double() for name, x in arguments.items()}
    exact, state = gated_delta(**wide, state=STATES["gated_delta"](S.double()), level="reference")
    assert error(o, exact) < 1e-5 and error(final, state.S) < 1e-5
    found, new = gated_delta(**arguments, state=STATES["gated_delta"](S), level="chunk")
    wrong = too_large({"o": found, "S": new.S}, {"o": exact, "S": state.S}, {"o": o, "S": final}, torch.float32)
    assert not wrong, wrong


def test_full_gain_without_decay_stores_the_value_exactly() -> None:
    arguments = draw("gated_delta", tokens=12)
    arguments.update(beta=torch.ones(2, 12, 2).double(), log_decay=torch.zeros(2, 12, 2).double(), q=arguments["k"])
    for level in LEVELS:
        assert error(gated_delta(**arguments, scale=1.0, level=level)[0], arguments["v"]) < 1e-12


# --- linear_attention ---


@levels
def test_linear_attention_is_a_weighted_mean_of_values(level: str) -> None:
    arguments = draw("linear_attention", tokens=70)
    q, k, v, log_decay = arguments.values()
    u = log_decay.cumsum(1)
    weight = torch.einsum("bthk,bshk->bhts", q, k) * (u[:, :, None] - u[:, None]).permute(0, 3, 1, 2).exp()
    weight = weight.tril()
    expected = torch.einsum("bhts,bshv->bthv", weight / weight.sum(-1, keepdim=True), v)
    assert error(linear_attention(**arguments, eps=0.0, level=level)[0], expected) < 1e-9


def test_a_million_streamed_tokens_stay_near_float64() -> None:
    """Without decay the sums grow for ever; in float32 they must keep their digits."""
    tokens, piece = 1_000_000, 50_000
    generator = torch.Generator().manual_seed(0)
    states: dict[torch.dtype, Any] = {torch.float32: None, torch.float64: None}
    outputs: dict[torch.dtype, Tensor] = {}
    for _ in range(tokens // piece):
        q, k, v = (torch.randn(1, piece, 1, 8, generator=generator) for _ in range(3))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        for dtype in states:
            outputs[dtype], states[dtype] = linear_attention(
                *(x.to(dtype) for x in (q, k, v)), state=states[dtype], level="chunk"
            )
        assert outputs[torch.float32].isfinite().all()
        assert error(outputs[torch.float32], outputs[torch.float64]) < 1e-4
    found, exact = states[torch.float32], states[torch.float64]
    largest = exact.z.abs().max()
    assert largest > 5e5
    assert (found.z - exact.z).abs().max() / largest < 1e-4
    assert (found.S - exact.S).abs().max() / largest < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@operators
def test_chunk_on_a_gpu(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = as_given(name, draw(name, tokens=300, k_size=32, v_size=16))
    inputs = {n: (x.to(dtype).double() if n[3:] in ("q", "k", "v") else x.float().double()) for n, x in inputs.items()}
    exact = run(name, inputs, {"level": "reference", **options}, torch.float64)
    plain = run(name, inputs, {"level": "reference", **options}, dtype)
    found = run(name, {n: x.cuda() for n, x in inputs.items()}, {"level": "chunk", **options}, dtype)
    wrong = too_large({n: x.cpu() for n, x in found.items()}, exact, plain, dtype)
    assert not wrong, wrong
