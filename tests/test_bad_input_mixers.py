"""Bad input of gated_delta, linear_attention, the mixers' options and layouts gets one sentence, as everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fwzoo
from fwzoo.kernels import FalconState, GatedDeltaState, LinearAttentionState, gated_delta, linear_attention

B, T, H, K, V = 2, 6, 2, 4, 3
GDN: dict[str, Any] = {
    "q": torch.rand(B, T, H, K),
    "k": torch.rand(B, T, H, K),
    "v": torch.rand(B, T, H, V),
    "log_decay": -torch.rand(B, T, H),
    "beta": torch.rand(B, T, H),
}
LA: dict[str, Any] = {name: GDN[name] for name in ("q", "k", "v", "log_decay")}
S, Z = torch.zeros(B, H, K, V), torch.zeros(B, H, K)


def delta(**changes: Any) -> Any:
    return gated_delta(**{**GDN, **changes})


def linear(**changes: Any) -> Any:
    return linear_attention(**{**LA, **changes})


def debugged(operator: Callable[..., Any], **changes: Any) -> Any:
    with fwzoo.debug():
        return operator(**changes)


def tiny(*mixers: str, **fields: Any) -> Any:
    return fwzoo.Falcon1Config.tiny(mixers=list(mixers), num_hidden_layers=len(mixers), **fields)


def from_layout(layout: Any, layers: int = 4, **fields: Any) -> Any:
    return fwzoo.FwzooConfig.from_layout(layout, num_hidden_layers=layers, **fields)


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# (what is called, exception, the argument named, what it was, what is allowed)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str, str, str]] = {
    "delta: key of another length": (lambda: delta(k=GDN["k"][:, :5]), ValueError, "k", "[2, 5, 2, 4]", "[2, 6, 2, 4]"),
    "delta: query without heads": (lambda: delta(q=GDN["q"][0]), ValueError, "q", "[6, 2, 4]", "4 axes"),
    "delta: value of another dtype": (lambda: delta(v=GDN["v"].double()), ValueError, "v", "float64", "float32"),
    "delta: no value column": (lambda: delta(v=GDN["v"][..., :0]), ValueError, "v", "[2, 6, 2, 0]", "at least 1"),
    "delta: decay of a column": (lambda: delta(log_decay=GDN["v"]), ValueError, "log_decay", "[2, 6, 2, 3]", "3 axes"),
    "delta: gain of one head": (lambda: delta(beta=GDN["beta"][..., :1]), ValueError, "beta", "[2, 6, 1]", "[2, 6, 2]"),
    "delta: gain of integers": (lambda: delta(beta=GDN["beta"].long()), ValueError, "beta", "int64", "floating"),
    "delta: no gain": (lambda: delta(beta=None), TypeError, "beta", "NoneType", "torch.Tensor"),
    "delta: gain elsewhere": (lambda: delta(beta=GDN["beta"].to("meta")), ValueError, "beta", "meta", "cpu"),
    "delta: scale that is a word": (lambda: delta(scale="auto"), TypeError, "scale", "'auto'", "a finite number"),
    "delta: infinite scale": (lambda: delta(scale=float("inf")), ValueError, "scale", "inf", "a finite number"),
    "delta: state of another kind": (
        lambda: delta(state=LinearAttentionState(S, Z)), TypeError, "state", "LinearAttentionState", "GatedDeltaState"),
    "delta: state of another batch": (
        lambda: delta(state=GatedDeltaState(S[:1])), ValueError, "state.S", "[1, 2, 4, 3]", "[2, 2, 4, 3]"),
    "delta: unknown level": (lambda: delta(level="fast"), ValueError, "level", "'fast'", "'chunk'"),
    "delta: level that cannot run": (lambda: delta(level="triton"), ValueError, "level", "'triton'", "'auto'"),
    "delta: mask of numbers": (lambda: delta(mask=torch.ones(B, T)), ValueError, "mask", "float32", "torch.bool"),
    "delta: boundaries of a batch": (
        lambda: delta(cu_seqlens=torch.tensor([0, T])), ValueError, "cu_seqlens", "batch size 2", "batch size 1"),
    "delta: growing decay": (
        lambda: debugged(delta, log_decay=-GDN["log_decay"]), ValueError, "log_decay", "maximum 0.", "at most 0"),
    "delta: key that is not finite": (
        lambda: debugged(delta, k=GDN["k"] / 0), ValueError, "k", "not finite", "must be finite"),
    "linear: value with other heads": (
        lambda: linear(v=LA["v"][:, :, :1]), ValueError, "v", "[2, 6, 1, 3]", "[2, 6, 2, 3]"),
    "linear: decay of a batch": (lambda: linear(log_decay=LA["v"][..., 0, 0]), ValueError, "log_decay", "[2, 6]", "3 axes"),
    "linear: normalize that is no bool": (lambda: linear(normalize="l1"), ValueError, "normalize", "'l1'", "True"),
    "linear: negative eps": (lambda: linear(eps=-1.0), ValueError, "eps", "-1.0", "at least 0"),
    "linear: eps that is no number": (lambda: linear(eps=None), TypeError, "eps", "None", "at least 0"),
    "linear: state of another kind": (
        lambda: linear(state=GatedDeltaState(S)), TypeError, "state", "GatedDeltaState", "LinearAttentionState"),
    "linear: state without heads": (
        lambda: linear(state=LinearAttentionState(S, Z[0])), ValueError, "state.z", "[2, 4]", "3 axes"),
    "linear: growing decay": (
        lambda: debugged(linear, log_decay=-LA["log_decay"]), ValueError, "log_decay", "maximum 0.", "at most 0"),
    "unknown mixer": (lambda: tiny("gated_dleta"), ValueError, "mixers[0]", "'gated_dleta'", "did you mean 'gated_delta'"),
    "no window": (lambda: tiny(SLIDING, attention_window=0), ValueError, "attention_window", "0", "at least 1"),
    "window of a half": (lambda: tiny(SLIDING, attention_window=2.5), TypeError, "attention_window", "2.5", "int"),
    "heads that do not divide": (
        lambda: tiny(FULL, num_attention_heads=4, num_key_value_heads=3), ValueError, "num_key_value_heads", "3", "divide num_attention_heads = 4"),
    "no key heads": (lambda: tiny(FULL, num_key_value_heads=0), ValueError, "num_key_value_heads", "0", "at least 1"),
    "odd heads": (lambda: tiny(FULL, head_dim=7), ValueError, "head_dim", "7", "even"),
    "rotary base": (lambda: tiny(FULL, rotary_base=1.0), ValueError, "rotary_base", "1.0", "greater than 1"),
    "rotary scaling that depends on the length": (
        lambda: tiny(FULL, rotary_scaling={"rope_type": "dynamic", "factor": 2.0}), ValueError, "rotary_scaling", "dynamic", "llama3"),
    "rotary scaling that lacks something": (
        lambda: tiny(FULL, rotary_scaling={"rope_type": "llama3", "factor": 2.0}), ValueError, "rotary_scaling", "2.0", "needs"),
    "bias": (lambda: tiny(FULL, attention_qkv_bias="yes"), ValueError, "attention_qkv_bias", "'yes'", "True"),
    "logit scaling": (lambda: tiny(FULL, logit_scaling="ln"), ValueError, "logit_scaling", "'ln'", "'ssmax'"),
    "training length": (lambda: tiny(FULL, training_length=1), ValueError, "training_length", "1", "at least 2"),
    "probability": (lambda: tiny(FULL, swa_probability=1.5), ValueError, "swa_probability", "1.5", "between 0 and 1"),
    "norm of queries": (lambda: tiny(FULL, attention_qk_norm="l2"), ValueError, "attention_qk_norm", "'l2'", "True"),
    "convolution": (lambda: tiny("gated_delta", short_conv_size=-1), ValueError, "short_conv_size", "-1", "at least 0"),
    "feature map": (lambda: tiny(LINEAR, linear_feature_map="exp"), ValueError, "linear_feature_map", "'exp'", "'elu1'"),
    "identity features, normalised": (
        lambda: tiny(LINEAR, linear_feature_map="identity"), ValueError, "linear_feature_map", "'identity'", "linear_normalize=False"),
    "identity state, normalised": (
        lambda: tiny(LINEAR, linear_initial_state="identity"), ValueError, "linear_initial_state", "'identity'", "linear_normalize=False"),
    "identity state that is not square": (
        lambda: tiny(LINEAR, linear_initial_state="identity", linear_normalize=False, value_head_dim=8),
        ValueError, "value_head_dim", "8", "head_dim = 16"),
    "initial state": (
        lambda: tiny(LINEAR, linear_initial_state="ones"), ValueError, "linear_initial_state", "'ones'", "'zeros'"),
    "decay": (lambda: tiny(LINEAR, linear_decay="yes"), ValueError, "linear_decay", "'yes'", "'head'"),
    "eps of the divisor": (lambda: tiny(LINEAR, linear_eps=-1.0), ValueError, "linear_eps", "-1.0", "at least 0"),
    "layout: unknown mixer": (lambda: from_layout("gdm"), ValueError, "layout", "'gdm'", "did you mean 'gdn'"),
    "layout: layer out of range": (
        lambda: from_layout("gdn+none@4"), ValueError, "position 9", "'4'", "a layer from 0 to 3"),
    "layout: two modules in one slot": (
        lambda: from_layout("gdn+none@1+mlp@0,1"), ValueError, "position 17", "mlp into layer 1", "has none there"),
    "layout: more layers than the model": (
        lambda: from_layout("gdn*3,swa", layers=2), ValueError, "position 4", "'3'", "from 1 to 2"),
    "layout: not text": (lambda: from_layout(["gdn"]), TypeError, "layout", "['gdn']", "string"),
    "layout: and mixers": (lambda: from_layout("gdn", mixers=["falcon1"] * 4), ValueError, "mixers", "falcon1", "only one"),
    "layout: no layers": (lambda: from_layout("gdn", layers=0), ValueError, "num_hidden_layers", "0", "at least 1"),
    "layout as a field": (lambda: tiny("falcon1", layout="gdn"), ValueError, "layout", "'gdn'", "from_layout"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    attempt, exception, argument, value, allowed = CASES[case]
    with pytest.raises(exception) as caught:
        attempt()
    message = str(caught.value)
    assert type(caught.value) is exception
    assert argument in message and value in message and allowed in message, message
    assert "\n" not in message and len(message) < 450


def test_what_the_cases_change_is_what_is_wrong() -> None:
    """Everything that the cases above share is good input."""
    with fwzoo.debug():
        delta(), linear(), delta(state=GatedDeltaState(S)), linear(state=LinearAttentionState(S, Z))
    tiny(FULL, SLIDING, LINEAR, "gated_delta")
    from_layout("gdn+none@3")


def test_an_unknown_option_is_a_type_error() -> None:
    for operator in (delta, linear):
        with pytest.raises(TypeError, match="window"):
            operator(window=3)
    with pytest.raises(TypeError, match="FalconState"):
        delta(state=FalconState(*([S] * 6)))
