"""The decoding step in one kernel equals the token loop, with every option, state and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compare import errors, floor
from fwzoo.kernels import GatedDeltaState, LinearAttentionState, gated_delta, linear_attention
from fwzoo.kernels.contract import overwriting_states
from fwzoo.kernels.falcon import RULES, FalconState
from fwzoo.kernels.falcon.reference import falcon_reference
from fwzoo.kernels.falcon.rules import Options, empty_state

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, H = 2, 2


def options(rule: str, **changes: Any) -> Options:
    sliding = RULES[rule].sliding
    defaults = {"shifted": True, "read_after_write": True, "step": "beta", "scale_coupled": False}
    return Options(RULES[rule], 3 if sliding else 1, eps=1e-6, decay_floor=1e-4, **{**defaults, **changes})


def call(rule: Options, tokens: int, key_size: int = 20, value_size: int = 36) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    gain = (value_size,) if rule.rule.per_column else ()
    q, k = (F.normalize(torch.randn(N, tokens, H, key_size), dim=-1) for _ in range(2))
    v, beta = torch.randn(N, tokens, H, value_size), 2 * torch.rand(N, tokens, H, *gain)
    return tuple(x.to(DEVICE) for x in (q, k, v, beta, 0.3 * torch.rand(N, tokens, H)))


def started(rule: Options, known: str) -> FalconState:
    """A state that is new, that has seen five tokens, or that has seen them and lost the last key of the first sequence."""
    inputs = call(rule, 5)
    state = empty_state(N, inputs[0], inputs[2], rule.window, torch.float32)
    if known == "new":
        return state
    _, state = falcon_reference(*inputs, rule, state, None, None)
    if known == "no key":
        lost = torch.tensor([False, True], device=DEVICE)
        state = state._replace(has_key=lost, key=state.key * lost[:, None, None])
    return state


@pytest.fixture
def many(monkeypatch: Any) -> None:
    """A program goes through all columns of a head, as where there are many heads."""
    from fwzoo.kernels import step

    monkeypatch.setattr(step, "MANY", 1)


def results(o: Tensor, state: FalconState) -> dict[str, Tensor]:
    return {"o": o} | {name: x.float() for name, x in state._asdict().items()}


def assert_equal(rule: Options, inputs: tuple[Tensor, ...], state: FalconState, mask: Tensor | None = None) -> None:
    from fwzoo.kernels.step import falcon_steps

    found = results(*falcon_steps(*inputs, rule, state, mask))
    expected = results(*falcon_reference(*inputs, rule, state, mask, None))
    assert max(errors(found, expected).values()) <= floor(torch.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("known", ["new", "seen", "no key"])
def test_tokens_equal_the_loop(rule: str, known: str) -> None:
    for tokens in (1, 3):
        assert_equal(options(rule), call(options(rule), tokens), started(options(rule), known))


# where they are compiled, those that have a path of their own in the kernel
@pytest.mark.parametrize("rule", RULES if DEVICE == "cpu" else ["falcon2", "falcon3", "falcon3a"])
@pytest.mark.usefixtures("many")
def test_every_option(rule: str) -> None:
    other = {"shifted": False, "read_after_write": False, "step": "eta", "scale_coupled": True}
    for changes in ({name: value} for name, value in other.items()):
        chosen = options(rule, **changes)
        assert_equal(chosen, call(chosen, 1), started(chosen, "seen"))
    assert_equal(options(rule, **other), call(options(rule), 1), started(options(rule, **other), "seen"))


@pytest.mark.parametrize("rule", RULES if DEVICE == "cpu" else ["falcon1", "falcon3a"])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.usefixtures("many")
def test_a_masked_token_does_nothing_whatever_it_holds(rule: str, shifted: bool) -> None:
    chosen = options(rule, shifted=shifted)
    inputs = call(chosen, 1)
    for x in inputs:
        x[0] = float("nan")
    mask = torch.tensor([[False], [True]], device=DEVICE)
    assert_equal(chosen, inputs, started(chosen, "seen"), mask)
    assert_equal(chosen, inputs, started(chosen, "no key"), mask)


def test_the_state_is_overwritten_only_where_that_is_allowed() -> None:
    from fwzoo.kernels.step import falcon_steps

    chosen = options("falcon1")
    inputs, state = call(chosen, 1), started(chosen, "seen")
    before = state.S.clone()
    _, new = falcon_steps(*inputs, chosen, state, None)
    assert torch.equal(state.S, before)
    with overwriting_states():
        _, own = falcon_steps(*inputs, chosen, state, None)
    assert own.S.data_ptr() == state.S.data_ptr() and torch.equal(own.S, new.S) and not torch.equal(own.S, before)


def test_the_gated_delta_rule_and_a_wrong_variant() -> None:
    from fwzoo.kernels.step import steps

    q, k, v, beta, _ = call(options("falcon1"), 3)
    log_decay, S = -torch.rand(N, 3, H, device=DEVICE), torch.randn(N, H, 20, 36, device=DEVICE)
    o, (new,) = gated_delta(q, k, v, log_decay, beta / 2, state=GatedDeltaState(S), level="reference")
    expected = {"o": o, "S": new}
    found, wrong = (
        dict(
            zip(expected, steps(q, k, v, beta / 2, log_decay, S, None, scale=20**-0.5, regression=right), strict=False)
        )
        for right in (True, False)
    )
    assert max(errors(found, expected).values()) <= floor(torch.float32)
    assert min(errors(wrong, expected).values()) > 1e-2


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.usefixtures("many")
def test_linear_attention_and_its_normaliser(normalize: bool, decayed: bool) -> None:
    q, k, v, _, _ = call(options("falcon1"), 3)
    q, k, log_decay = q.abs(), k.abs(), -torch.rand(N, 3, H, device=DEVICE) if decayed else None
    state = LinearAttentionState(torch.randn(N, H, 20, 36, device=DEVICE), torch.rand(N, H, 20, device=DEVICE))
    mask = torch.tensor([[False], [True]], device=DEVICE)
    for tokens, real in ((3, None), (1, mask)):
        inputs = [x[:, :tokens].clone() for x in (q, k, v)] + [None if log_decay is None else log_decay[:, :tokens]]
        if real is not None:
            inputs[0][0] = float("nan")
        both = [
            linear_attention(*inputs, normalize=normalize, state=state, mask=real, level=level)
            for level in ("triton", "reference")
        ]
        found, expected = ({"o": o, **s._asdict()} for o, s in both)
        assert max(errors(found, expected).values()) <= floor(torch.float32)
