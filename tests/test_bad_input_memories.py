"""Bad input to the memories gets one sentence that names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fwzoo
from fwzoo.kernels import FwmlpState, FwpkmState, fwmlp, fwmlp_flush, fwpkm, fwpkm_flush, pkm
from fwzoo.modeling.cache import CACHE_KEY

B, T, H, K, V, N, M = 2, 6, 2, 4, 3, 5, 7


def arguments(op: str) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"q": torch.randn(B, T, H, K)}
    if op == "fwmlp":
        weights = {"w_gate": (M, K), "b_gate": (M,), "w_up": (M, K), "b_up": (M,), "w_down": (V, M), "b_down": (V,)}
        tokens = {"q": torch.randn(B, T, K), "v": torch.randn(B, T, V)}
        return {**tokens, **{name: torch.randn(shape) / 4 for name, shape in weights.items()}, "chunk_size": 4}
    tables = {"keys": torch.randn(2, H, N, K // 2), "values": torch.randn(N * N, V), "top_k": 3}
    if op == "pkm":
        return {**tokens, **tables}
    return {**tokens, "v": torch.randn(B, T, V), "gate": torch.rand(B, T), **tables, "chunk_size": 4}


def call(op: str, **changes: Any) -> Any:
    """Call an operator with good arguments but for `changes`; a callable change gets the good value."""
    good = arguments(op)
    for name, change in changes.items():
        good[name] = change(good[name]) if callable(change) else change
    return {"pkm": pkm, "fwpkm": fwpkm, "fwmlp": fwmlp}[op](**good)


def debugged(op: str, **changes: Any) -> Any:
    with fwzoo.debug():
        return call(op, **changes)


def state(op: str, **changes: Any) -> Any:
    good = call(op)[1]
    return good._replace(**{name: change(getattr(good, name)) for name, change in changes.items()})


def flush(**options: Any) -> FwpkmState:
    good = arguments("fwpkm")
    return fwpkm_flush(call("fwpkm")[1], good["keys"], good["values"], **{"top_k": 3, "chunk_size": 4, **options})


def pkm_config(**fields: Any) -> Any:
    return fwzoo.Falcon1Config.tiny(feed_forwards=["pkm", "mlp"], **{"pkm_subkeys": 4, "pkm_top_k": 2, **fields})


def forward_with(cache_of: Any, model: Any) -> Any:
    cache = fwzoo.FastWeightCache(cache_of.config)
    tokens = torch.ones(1, 12, dtype=torch.long)
    cache_of.eval()(tokens, use_cache=True, **{CACHE_KEY: cache})
    return model.eval()(tokens, use_cache=True, **{CACHE_KEY: cache})


def tiny(architecture: str = "fwpkm", seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = fwzoo.registry.architectures()[architecture].tiny(**fields)
    return AutoModelForCausalLM.from_config(config)


def poisoned(memory: str = "fwpkm", name: str = "keys") -> Any:
    model = tiny(feed_forwards=["mlp", memory])
    with torch.no_grad():
        model.model.layers[1].feed_forward.state_dict()[name].fill_(torch.nan)
    with fwzoo.debug():
        return model(torch.ones(1, 4, dtype=torch.long))


def reorder_shared() -> None:
    model = tiny().train()
    cache = fwzoo.FastWeightCache(model.config)
    model(torch.ones(2, 4, dtype=torch.long), use_cache=True, **{CACHE_KEY: cache})
    cache.reorder_cache(torch.tensor([1, 0]))


def nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 1] = torch.nan
    return x


# (what is called, exception, the argument named, what it was, what is allowed)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str, str, str]] = {
    "more slots than sub-keys": (lambda: call("pkm", top_k=6), ValueError, "top_k", "6", "at most n = 5"),
    "more slots than sub-keys, fast": (lambda: call("fwpkm", top_k=6), ValueError, "top_k", "6", "at most n = 5"),
    "no slots": (lambda: call("fwpkm", top_k=0), ValueError, "top_k", "0", "at least 1"),
    "slots that are no int": (lambda: call("pkm", top_k=2.0), TypeError, "top_k", "2.0", "int"),
    "no chunk": (lambda: call("fwpkm", chunk_size=0), ValueError, "chunk_size", "0", "at least 1"),
    "no chunk of the MLP": (lambda: call("fwmlp", chunk_size=-1), ValueError, "chunk_size", "-1", "at least 1"),
    "chunk that is no int": (lambda: call("fwmlp", chunk_size=4.0), TypeError, "chunk_size", "4.0", "int"),
    "gate of a feature axis": (lambda: call("fwpkm", gate=torch.rand(B, T, 1)), ValueError, "gate", "[2, 6, 1]", "2 axes"),
    "gate of another length": (lambda: call("fwpkm", gate=torch.rand(B, T + 1)), ValueError, "gate", "[2, 7]", "[2, 6]"),
    "gate that is a number": (lambda: call("fwpkm", gate=1.0), TypeError, "gate", "float", "torch.Tensor"),
    "table that is not square": (lambda: call("pkm", values=lambda x: x[:24]), ValueError, "values", "[24, 3]", "n * n = 25"),
    "table that is not square, fast": (
        lambda: call("fwpkm", values=lambda x: x[:24]), ValueError, "values", "[24, 3]", "n * n = 25"),
    "table of another width": (
        lambda: call("fwpkm", values=lambda x: x[:, :2]), ValueError, "values", "[25, 2]", "[25, 3]"),
    "table on another device": (lambda: call("pkm", values=lambda x: x.to("meta")), ValueError, "values", "meta", "cpu"),
    "odd query": (lambda: call("pkm", q=lambda x: x[..., :3]), ValueError, "q", "[2, 6, 2, 3]", "even"),
    "query without heads": (lambda: call("fwpkm", q=lambda x: x[:, :, 0]), ValueError, "q", "[2, 6, 4]", "4 axes"),
    "keys of other heads": (lambda: call("pkm", keys=lambda x: x[:, :1]), ValueError, "keys", "[2, 1, 5, 2]", "[2, 2, 5, 2]"),
    "keys of one half": (lambda: call("pkm", keys=lambda x: x[:1]), ValueError, "keys", "[1, 2, 5, 2]", "[2, 2, 5, 2]"),
    "keys without rows": (lambda: call("pkm", keys=lambda x: x[:, :, :0]), ValueError, "keys", "[2, 2, 0, 2]", "at least 1"),
    "value of another length": (lambda: call("fwpkm", v=lambda x: x[:, :5]), ValueError, "v", "[2, 5, 3]", "[2, 6, 3]"),
    "value of another dtype": (lambda: call("fwpkm", v=lambda x: x.double()), ValueError, "v", "float64", "float32"),
    "value of the MLP of another dtype": (lambda: call("fwmlp", v=lambda x: x.double()), ValueError, "v", "float64", "float32"),
    "unknown score": (lambda: call("fwpkm", score="cosine"), ValueError, "score", "'cosine'", "'idw'"),
    "no epsilon": (lambda: call("pkm", score_eps=0.0), ValueError, "score_eps", "0.0", "greater than 0"),
    "unknown scope": (lambda: call("fwpkm", scope="row"), ValueError, "scope", "'row'", "'sequence'"),
    "unknown scope of the MLP": (lambda: call("fwmlp", scope="row"), ValueError, "scope", "'row'", "'batch'"),
    "switch that is no bool": (lambda: call("fwpkm", lookahead="yes"), ValueError, "lookahead", "'yes'", "True"),
    "negative step": (lambda: call("fwpkm", value_lr=-1.0), ValueError, "value_lr", "-1.0", "at least 0"),
    "negative key step": (lambda: call("fwpkm", key_lr=-0.5), ValueError, "key_lr", "-0.5", "at least 0"),
    "negative rate": (lambda: call("fwmlp", lr=-0.5), ValueError, "lr", "-0.5", "at least 0"),
    "no room": (lambda: call("fwpkm", max_slots=0), ValueError, "max_slots", "0", "at least 1"),
    "too little room": (lambda: call("fwpkm", max_slots=2), ValueError, "max_slots", "2", "evict=True"),
    "ranks of a sequence": (lambda: call("fwpkm", group=object()), ValueError, "group", "'sequence'", "scope 'batch'"),
    "unknown level": (lambda: call("fwmlp", level="fast"), ValueError, "level", "'fast'", "'chunk'"),
    "level that cannot run": (lambda: call("pkm", level="triton"), ValueError, "level", "'triton'", "'auto'"),
    "mask of numbers": (lambda: call("fwpkm", mask=torch.ones(B, T)), ValueError, "mask", "float32", "torch.bool"),
    "boundaries of a batch": (
        lambda: call("fwmlp", cu_seqlens=torch.tensor([0, 6])), ValueError, "cu_seqlens", "2", "batch size 1"),
    "state of another operator": (lambda: call("fwpkm", state=state("fwmlp")), TypeError, "state", "FwmlpState", "FwpkmState"),
    "state of another operator, MLP": (lambda: call("fwmlp", state=state("fwpkm")), TypeError, "state", "FwpkmState", "FwmlpState"),
    "state of another batch": (
        lambda: call("fwpkm", state=state("fwpkm", keys=lambda x: x[:1])), ValueError, "state.keys", "[1, 2, 2, 5, 2]", "[2, 2, 2, 5, 2]"),
    "state of another chunk": (lambda: call("fwpkm", chunk_size=3, state=state("fwpkm")), ValueError, "state.q", "[2, 4, 2, 4]", "[2, 3, 2, 4]"),
    "state of another scope": (
        lambda: call("fwmlp", scope="batch", state=state("fwmlp")), ValueError, "state.w_gate", "[2, 7, 4]", "[1, 7, 4]"),
    "state with counts of floats": (
        lambda: call("fwmlp", state=state("fwmlp", count=lambda x: x.int())), ValueError, "state.count", "int32", "int64"),
    "state of another table": (
        lambda: call("fwpkm", values=lambda x: x + 1, state=state("fwpkm")), ValueError, "state", "made from", "keys and values"),
    "NaN query under debug": (lambda: debugged("fwpkm", q=nan), ValueError, "q", "not finite", "finite"),
    "NaN value under debug": (lambda: debugged("fwmlp", v=nan), ValueError, "v", "not finite", "finite"),
    "NaN sub-keys under debug": (lambda: debugged("fwpkm", keys=nan), ValueError, "keys", "not finite", "finite"),
    "NaN scores in a layer under debug": (poisoned, ValueError, "layer 1", "not finite", "finite"),
    "NaN sub-keys of a PKM layer under debug": (lambda: poisoned("pkm"), ValueError, "layer 1: keys", "not finite", "finite"),
    "NaN table of a PKM layer under debug": (lambda: poisoned("pkm", "values"), ValueError, "layer 1: values", "not finite", "finite"),
    "NaN query of a PKM layer under debug": (lambda: poisoned("pkm", "q_proj.weight"), ValueError, "layer 1: q", "not finite", "finite"),
    "unknown option of flush": (lambda: flush(chunks=3), TypeError, "chunks", "not an option", "fwpkm"),
    "flush of something else": (lambda: fwmlp_flush((1, 2)), TypeError, "state", "tuple", "FwmlpState"),  # type: ignore[arg-type]
    "weights of another width": (lambda: call("fwmlp", w_up=lambda x: x[:6]), ValueError, "w_up", "[6, 4]", "[7, 4]"),
    "bias of two axes": (lambda: call("fwmlp", b_down=lambda x: x[None]), ValueError, "b_down", "[1, 3]", "1 axes"),
    "config slots": (lambda: tiny(fwpkm_top_k=9), ValueError, "fwpkm_top_k", "9", "fwpkm_subkeys = 8"),
    "config slots of PKM": (lambda: pkm_config(pkm_top_k=9), ValueError, "pkm_top_k", "9", "pkm_subkeys = 4"),
    "config chunk": (lambda: tiny(memory_chunk_size=0), ValueError, "memory_chunk_size", "0", "at least 1"),
    "config gate": (lambda: tiny(gate_activation="tanh"), ValueError, "gate_activation", "'tanh'", "'identity'"),
    "config placement": (lambda: tiny(memory_placement="beside"), ValueError, "memory_placement", "'beside'", "'extra'"),
    "config scope": (lambda: tiny(training_scope="row"), ValueError, "training_scope", "'row'", "'batch'"),
    "config carry": (
        lambda: tiny(training_scope="sequence", carry_fast_weights=True), ValueError, "carry_fast_weights", "'sequence'", "'batch'"),
    "config key size": (lambda: tiny(memory_key_dim=15), ValueError, "memory_key_dim", "15", "even"),
    "config norm of queries": (lambda: pkm_config(pkm_query_norm="rms"), ValueError, "pkm_query_norm", "'rms'", "'batch'"),
    "config width of the MLP": (lambda: tiny("fwmlp", fwmlp_width=0), ValueError, "fwmlp_width", "0", "at least 1"),
    "config rate": (lambda: tiny("fwmlp", fwmlp_lr=-1.0), ValueError, "fwmlp_lr", "-1.0", "at least 0"),
    "config room": (lambda: tiny(fwpkm_max_slots=0), ValueError, "fwpkm_max_slots", "0", "at least 1"),
    "cache from another table": (lambda: forward_with(tiny(seed=1), tiny()), ValueError, "layer 1", "made from", "keys and values"),
    "reordering a shared memory": (reorder_shared, ValueError, "cache", "share one memory", "evaluation"),
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


@pytest.mark.parametrize("op", ["pkm", "fwpkm", "fwmlp"])
def test_an_unknown_option_is_a_type_error(op: str) -> None:
    with pytest.raises(TypeError, match="chunks"):
        call(op, chunks=3)


def test_good_arguments_are_good() -> None:
    assert isinstance(call("pkm"), Tensor)
    assert isinstance(call("fwpkm")[1], FwpkmState) and isinstance(call("fwmlp")[1], FwmlpState)
    assert flush().count.sum() == 0
