"""Bad input to LaCT gets one sentence that names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fwzoo
from fwzoo.kernels import LactState, lact

B, T, H, D, M, C = 2, 6, 2, 4, 3, 4


def call(**changes: Any) -> Any:
    """Call the operator with good arguments but for `changes`; a callable change gets the good value."""
    good: dict[str, Any] = {
        **{name: torch.randn(B, T, H, D) for name in "qkv"},
        **{f"lr{i}": torch.rand(B, T, H, 1) for i in range(3)},
        "w0": torch.randn(H, M, D),
        "w1": torch.randn(H, D, M),
        "w2": torch.randn(H, M, D),
        "momentum": torch.rand(B, T, H),
        "chunk_size": C,
    }
    for name, change in changes.items():
        good[name] = change(good[name]) if callable(change) else change
    return lact(**good)


def state(**changes: Any) -> LactState:
    good = call()[1]
    return good._replace(**{name: change(getattr(good, name)) for name, change in changes.items()})


def debugged(**changes: Any) -> Any:
    with fwzoo.debug():
        return call(**changes)


def config(**fields: Any) -> Any:
    return fwzoo.LactConfig.tiny(**fields)


def nan(x: Tensor) -> Tensor:
    x[0, 1] = torch.nan
    return x


# (what is called, exception, the argument named, what it was, what is allowed)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str, str, str]] = {
    "q is not a tensor": (lambda: call(q=[1.0]), TypeError, "q", "list", "torch.Tensor"),
    "q without heads": (lambda: call(q=lambda x: x[:, :, 0]), ValueError, "q", "[2, 6, 4]", "4 axes"),
    "q of no size": (lambda: call(q=lambda x: x[..., :0]), ValueError, "q", "[2, 6, 2, 0]", "at least 1"),
    "k of another length": (lambda: call(k=lambda x: x[:, :5]), ValueError, "k", "[2, 5, 2, 4]", "[2, 6, 2, 4]"),
    "v of another dtype": (lambda: call(v=lambda x: x.double()), ValueError, "v", "float64", "float32"),
    "v on another device": (lambda: call(v=lambda x: x.to("meta")), ValueError, "v", "meta", "cpu"),
    "rate without its axis": (lambda: call(lr0=lambda x: x[..., 0]), ValueError, "lr0", "[2, 6, 2]", "4 axes"),
    "rate of another size": (
        lambda: call(lr0=lambda x: x.expand(-1, -1, -1, 3)), ValueError, "lr0", "[2, 6, 2, 3]", "[B, T, H, 1]"),
    "rates of two sizes": (
        lambda: call(lr2=lambda x: x.expand(-1, -1, -1, D)), ValueError, "lr2", "[2, 6, 2, 4]", "[2, 6, 2, 1]"),
    "rates a channel of another hidden size": (
        lambda: call(**{f"lr{i}": torch.rand(B, T, H, D) for i in range(3)}), ValueError, "lr0", "M = 3", "D = 4"),
    "momentum with an axis more": (
        lambda: call(momentum=lambda x: x[..., None]), ValueError, "momentum", "[2, 6, 2, 1]", "3 axes"),
    "momentum of one head": (lambda: call(momentum=lambda x: x[..., :1]), ValueError, "momentum", "[2, 6, 1]", "[2, 6, 2]"),
    "weights of a batch": (lambda: call(w0=lambda x: x[None]), ValueError, "w0", "[1, 2, 3, 4]", "3 axes"),
    "weights of other heads": (lambda: call(w0=lambda x: x[:1]), ValueError, "w0", "[1, 3, 4]", "[2, 3, 4]"),
    "weights not transposed": (lambda: call(w1=lambda x: x.mT), ValueError, "w1", "[2, 3, 4]", "[2, 4, 3]"),
    "weights of another hidden size": (lambda: call(w2=lambda x: x[:, :2]), ValueError, "w2", "[2, 2, 4]", "[2, 3, 4]"),
    "no chunk": (lambda: call(chunk_size=0), ValueError, "chunk_size", "0", "at least 1"),
    "chunk that is no int": (lambda: call(chunk_size=2.5), TypeError, "chunk_size", "2.5", "int"),
    "muon that is no bool": (lambda: call(muon="yes"), ValueError, "muon", "'yes'", "True"),
    "prenorm that is no bool": (lambda: call(prenorm=None), ValueError, "prenorm", "None", "False"),
    "level that cannot run": (lambda: call(level="triton"), ValueError, "level", "'triton'", "'auto'"),
    "mask of numbers": (lambda: call(mask=torch.ones(B, T)), ValueError, "mask", "float32", "torch.bool"),
    "boundaries with a batch": (
        lambda: call(cu_seqlens=torch.tensor([0, 6])), ValueError, "cu_seqlens", "batch size 2", "batch size 1"),
    "state that is a tuple": (lambda: call(state=(1, 2)), TypeError, "state", "tuple", "LactState"),
    "state of another batch": (
        lambda: call(state=state(w1=lambda x: x[:1])), ValueError, "state.w1", "[1, 2, 4, 3]", "[2, 2, 4, 3]"),
    "state of another chunk": (
        lambda: call(chunk_size=5, state=state()), ValueError, "state.pk", "[2, 4, 2, 4]", "[2, 5, 2, 4]"),
    "state with a count of numbers": (
        lambda: call(state=state(count=lambda x: x.int())), ValueError, "state.count", "int32", "int64"),
    "state with a full chunk pending": (
        lambda: call(state=state(count=lambda x: x + 2)), ValueError, "state.count", "[4, 4]", "chunk_size - 1 = 3"),
    "NaN under debug": (lambda: debugged(k=nan), ValueError, "k", "not finite", "finite"),
    "config without memory heads": (lambda: config(num_lact_heads=0), ValueError, "num_lact_heads", "0", "at least 1"),
    "memory heads that do not divide": (lambda: config(num_lact_heads=3), ValueError, "num_lact_heads", "3", "divide"),
    "memory heads that do not divide the channels": (
        lambda: config(num_attention_heads=3, head_dim=6, num_lact_heads=4), ValueError, "num_lact_heads", "4", "= 18"),
    "attention heads that do not divide": (
        lambda: config(num_attention_heads=3), ValueError, "num_attention_heads", "3", "divide"),
    "odd attention heads": (lambda: config(num_attention_heads=32), ValueError, "head_dim", "1", "even"),
    "config norm a head": (
        lambda: config(lact_qk_norm_per_head=True), ValueError, "lact_qk_norm_per_head", "True", "no norm"),
    "config scaling": (
        lambda: config(lact_rotary_scaling={"rope_type": "dynamic"}), ValueError, "lact_rotary_scaling", "dynamic", "yarn"),
    "config window": (lambda: config(lact_window=0), ValueError, "lact_window", "0", "at least 1"),
    "config chunk": (lambda: config(lact_chunk_size=-8), ValueError, "lact_chunk_size", "-8", "at least 1"),
    "config rank": (lambda: config(lact_rank=-1), ValueError, "lact_rank", "-1", "at least 0"),
    "config expansion": (lambda: config(lact_expansion=0), ValueError, "lact_expansion", "0", "at least"),
    "config rates": (
        lambda: config(lact_rate_per_channel=True, lact_expansion=2), ValueError, "lact_expansion", "2", "must be 1"),
    "config muon": (lambda: config(lact_muon="yes"), ValueError, "lact_muon", "'yes'", "True"),
    "config rotary": (lambda: config(lact_rotary_base=0), ValueError, "lact_rotary_base", "0", "greater than 0"),
    "unknown preset": (lambda: fwzoo.LactConfig.preset("760b"), ValueError, "name", "'760b'", "did you mean '760m'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    attempt, exception, argument, value, allowed = CASES[case]
    with pytest.raises(exception) as caught:
        attempt()
    message = str(caught.value)
    assert type(caught.value) is exception
    assert argument in message and value in message and allowed in message, message
    assert "\n" not in message and len(message) < 400


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="chunk"):
        call(chunk=3)
