"""Bad input gets one sentence that names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import fwzoo
from fwzoo.kernels import FalconState, explain, falcon
from rows import ROWS

B, T, H, K, V = 2, 6, 2, 4, 3


def call(**changes: Any) -> Any:
    """Call the operator with good arguments but for `changes`; a callable change gets the good value."""
    rule = changes.get("rule", "falcon1")
    columns = (V,) if rule in ("falcon2", "falcon2a") else ()
    good: dict[str, Any] = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "beta": torch.rand(B, T, H, *columns),
        "ridge": torch.rand(B, T, H),
    }
    for name, change in changes.items():
        good[name] = change(good[name]) if callable(change) else change
    return falcon(**good)


def state(**changes: Any) -> FalconState:
    _, good = falcon(
        *(torch.randn(B, T, H, n) for n in (K, K, V)), torch.rand(B, T, H), torch.rand(B, T, H), rule="falcon3"
    )
    return good._replace(**{name: change(getattr(good, name)) for name, change in changes.items()})


def debugged(**changes: Any) -> Any:
    with fwzoo.debug():
        return call(**changes)


def packed(bounds: list[int], batch: int = 1, **changes: Any) -> Any:
    return call(
        **{n: lambda x: x[:batch] for n in ("q", "k", "v", "beta", "ridge")}, cu_seqlens=torch.tensor(bounds), **changes
    )


def config(**fields: Any) -> Any:
    return fwzoo.Falcon3AConfig.tiny(**fields)


def forward(**arguments: Any) -> Any:
    return ROWS[0].model()(**{"input_ids": torch.ones(2, 5, dtype=torch.long), **arguments})


def other_cache() -> fwzoo.FastWeightCache:
    return fwzoo.FastWeightCache(config(num_hidden_layers=3))


def nan(x: Tensor) -> Tensor:
    x[0, 1] = torch.nan
    return x


# (what is called, exception, the argument named, what it was, what is allowed)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str, str, str]] = {
    "q is not a tensor": (lambda: call(q=[1.0]), TypeError, "q", "list", "torch.Tensor"),
    "q without heads": (lambda: call(q=lambda x: x[:, :, 0]), ValueError, "q", "[2, 6, 4]", "4 axes"),
    "q of integers": (lambda: call(q=lambda x: x.long()), ValueError, "q", "int64", "floating"),
    "k of another length": (lambda: call(k=lambda x: x[:, :5]), ValueError, "k", "[2, 5, 2, 4]", "[2, 6, 2, 4]"),
    "k of another size": (lambda: call(k=lambda x: x[..., :3]), ValueError, "k", "[2, 6, 2, 3]", "[2, 6, 2, 4]"),
    "k of another dtype": (lambda: call(k=lambda x: x.double()), ValueError, "k", "float64", "float32"),
    "k on another device": (lambda: call(k=lambda x: x.to("meta")), ValueError, "k", "meta", "cpu"),
    "v with other heads": (lambda: call(v=lambda x: x[:, :, :1]), ValueError, "v", "[2, 6, 1, 3]", "[2, 6, 2, 3]"),
    "v of another dtype": (lambda: call(v=lambda x: x.bfloat16()), ValueError, "v", "bfloat16", "float32"),
    "v without columns": (lambda: call(v=lambda x: x[..., :0]), ValueError, "v", "[2, 6, 2, 0]", "at least 1"),
    "gain a column for a scalar rule": (
        lambda: call(beta=torch.rand(B, T, H, V)), ValueError, "beta", "[2, 6, 2, 3]", "3 axes"),
    "gain a head for a column rule": (
        lambda: call(rule="falcon2", beta=torch.rand(B, T, H)), ValueError, "beta", "[2, 6, 2]", "4 axes"),
    "gain with a wrong number of columns": (
        lambda: call(rule="falcon2a", beta=torch.rand(B, T, H, V + 1)), ValueError, "beta", "[2, 6, 2, 4]", "[2, 6, 2, 3]"),
    "ridge of one head": (lambda: call(ridge=lambda x: x[..., :1]), ValueError, "ridge", "[2, 6, 1]", "[2, 6, 2]"),
    "unknown rule": (lambda: call(rule="falcon4"), ValueError, "rule", "'falcon4'", "'falcon3a'"),
    "negative window": (lambda: call(rule="falcon3", window=-1), ValueError, "window", "-1", "at least 1"),
    "no window": (lambda: call(rule="falcon3a", window=0), ValueError, "window", "0", "at least 1"),
    "window that is no int": (lambda: call(rule="falcon3", window=2.5), TypeError, "window", "2.5", "int"),
    "unknown pairing": (lambda: call(pairing="next"), ValueError, "pairing", "'next'", "'shifted'"),
    "unknown timing": (lambda: call(timing="now"), ValueError, "timing", "'now'", "'read_after_write'"),
    "unknown step": (lambda: call(step="gamma"), ValueError, "step", "'gamma'", "'eta'"),
    "scale_coupled that is no bool": (lambda: call(scale_coupled="yes"), ValueError, "scale_coupled", "'yes'", "True"),
    "negative eps": (lambda: call(eps=-1e-6), ValueError, "eps", "-1e-06", "at least 0"),
    "no decay floor": (lambda: call(decay_floor=0.0), ValueError, "decay_floor", "0.0", "greater than 0"),
    "decay floor above 1": (lambda: call(decay_floor=1.5), ValueError, "decay_floor", "1.5", "at most 1"),
    "unknown level": (lambda: call(level="fast"), ValueError, "level", "'fast'", "'chunk'"),
    "level that cannot run": (lambda: call(level="triton"), ValueError, "level", "'triton'", "'auto'"),
    "mask of the wrong length": (
        lambda: call(mask=torch.ones(B, T + 1, dtype=torch.bool)), ValueError, "mask", "[2, 7]", "[2, 6]"),
    "mask of numbers": (lambda: call(mask=torch.ones(B, T)), ValueError, "mask", "float32", "torch.bool"),
    "mask that is a list": (lambda: call(mask=[True] * T), TypeError, "mask", "list", "torch.Tensor"),
    "boundaries with a batch": (lambda: packed([0, 6], batch=2), ValueError, "cu_seqlens", "batch size 2", "batch size 1"),
    "boundaries that fall": (lambda: packed([0, 4, 2, 6]), ValueError, "cu_seqlens", "[0, 4, 2, 6]", "never decrease"),
    "boundaries that start late": (lambda: packed([1, 6]), ValueError, "cu_seqlens", "[1, 6]", "start with 0"),
    "boundaries that end early": (lambda: packed([0, 5]), ValueError, "cu_seqlens", "[0, 5]", "end with T = 6"),
    "boundaries that are floats": (
        lambda: call(cu_seqlens=torch.tensor([0.0, 6.0])), ValueError, "cu_seqlens", "float32", "int64"),
    "state that is a tuple": (lambda: call(state=(1, 2)), TypeError, "state", "tuple", "FalconState"),
    "state of another batch": (
        lambda: call(rule="falcon3", state=state(S=lambda x: x[:1])), ValueError, "state.S", "[1, 2, 4, 3]", "[2, 2, 4, 3]"),
    "state of another window": (
        lambda: call(rule="falcon3", window=3, state=state()), ValueError, "state.tail_x", "[2, 3, 2, 4]", "[2, 2, 2, 4]"),
    "state of a rule without a window": (
        lambda: call(rule="falcon1", state=state()), ValueError, "state.tail_x", "[2, 3, 2, 4]", "[2, 0, 2, 4]"),
    "state with a flag of numbers": (
        lambda: call(rule="falcon3", state=state(has_key=lambda x: x.long())), ValueError, "state.has_key", "int64", "bool"),
    "state for a packed call": (
        lambda: packed([0, 3, 6], rule="falcon3", state=state(S=lambda x: x[:1])), ValueError, "state.S", "[1, 2, 4, 3]", "[2, 2, 4, 3]"),
    "NaN under debug": (lambda: debugged(v=nan), ValueError, "v", "not finite", "finite"),
    "negative ridge under debug": (lambda: debugged(ridge=lambda x: -x - 0.1), ValueError, "ridge", "-", "at least 0"),
    "gain above 2 under debug": (lambda: debugged(beta=lambda x: x + 2), ValueError, "beta", "2.", "between 0 and 2"),
    "explain of an unknown operator": (lambda: explain("falcom", torch.ones(1, 2)), ValueError, "op", "'falcom'", "'falcon'"),
    "explain of nothing": (lambda: explain("falcon"), ValueError, "tensors", "0", "query"),
    "heads that do not divide": (lambda: config(num_attention_heads=5), ValueError, "num_attention_heads", "5", "divide"),
    "unknown mixer": (lambda: config(mixers=["falcon1", "falcon33"]), ValueError, "mixers[1]", "'falcon33'", "'falcon3'"),
    "too few mixers": (lambda: config(mixers=["falcon1"]), ValueError, "mixers", "['falcon1']", "num_hidden_layers = 2"),
    "unknown feed-forward": (
        lambda: config(feed_forwards=["mlp", "mpl"]), ValueError, "feed_forwards[1]", "'mpl'", "'mlp'"),
    "no layers": (lambda: config(num_hidden_layers=0), ValueError, "num_hidden_layers", "0", "at least 1"),
    "width that is no int": (lambda: config(hidden_size=32.5), TypeError, "hidden_size", "32.5", "int"),
    "empty vocabulary": (lambda: config(vocab_size=0), ValueError, "vocab_size", "0", "at least 1"),
    "config window": (lambda: config(window=-4), ValueError, "window", "-4", "at least 1"),
    "config norm": (lambda: config(qk_norm="layer"), ValueError, "qk_norm", "'layer'", "'rms'"),
    "config feature map": (lambda: config(feature_map="exp"), ValueError, "feature_map", "'exp'", "'elu1'"),
    "config ridge": (lambda: config(ridge_scale=-1.0), ValueError, "ridge_scale", "-1.0", "at least 0"),
    "config decay floor": (lambda: config(decay_floor=2.0), ValueError, "decay_floor", "2.0", "at most 1"),
    "config convolution": (lambda: config(short_conv_size=-1), ValueError, "short_conv_size", "-1", "at least 0"),
    "config level": (lambda: config(kernel_level="best"), ValueError, "kernel_level", "'best'", "'chunk'"),
    "layer_types by hand": (
        lambda: config(layer_types=["full_attention"] * 2), ValueError, "layer_types", "full_attention", "derived"),
    "ids and embeddings": (
        lambda: forward(inputs_embeds=torch.ones(2, 5, 32)), ValueError, "input_ids", "both", "exactly one"),
    "neither ids nor embeddings": (lambda: forward(input_ids=None), ValueError, "input_ids", "neither", "exactly one"),
    "ids without a batch": (
        lambda: forward(input_ids=torch.ones(5, dtype=torch.long)), ValueError, "input_ids", "[5]", "[B, T]"),
    "ids outside the vocabulary": (
        lambda: forward(input_ids=torch.full((2, 5), 384)), ValueError, "input_ids", "384", "0 to 383"),
    "ids that are floats": (lambda: forward(input_ids=torch.ones(2, 5)), ValueError, "input_ids", "float32", "int64"),
    "attention mask of another length": (
        lambda: forward(attention_mask=torch.ones(2, 4)), ValueError, "attention_mask", "[2, 4]", "[2, 5]"),
    "attention mask of four axes": (
        lambda: forward(attention_mask=torch.ones(2, 1, 5, 5)), ValueError, "attention_mask", "[2, 1, 5, 5]", "[2, 5]"),
    "labels of another length": (
        lambda: forward(labels=torch.ones(2, 4, dtype=torch.long)), ValueError, "labels", "[2, 4]", "[2, 5]"),
    "foreign cache": (
        lambda: forward(past_key_values=DynamicCache()), TypeError, "cache|past_key_values", "DynamicCache", "FastWeightCache"),
    "cache of another model": (
        lambda: forward(past_key_values=other_cache()), ValueError, "cache|past_key_values", "3 layers", "has 2"),
    "cache of another batch": (
        lambda: forward(past_key_values=used_cache(3)), ValueError, "cache|past_key_values", "3 sequences", "2"),
    "cache for nothing": (lambda: fwzoo.FastWeightCache("falcon1"), TypeError, "config", "str", "configuration"),
    "packed batch of two": (
        lambda: forward(cu_seq_lens_q=torch.tensor([0, 5])), ValueError, "cu_seqlens|cu_seq_lens_q", "2", "1"),
    "document numbers of a batch": (
        lambda: forward(seq_idx=torch.zeros(2, 5, dtype=torch.long)), ValueError, "seq_idx", "[2, 5]", "[1, T]"),
    "misspelled keyword": (lambda: forward(attention_masks=None), TypeError, "attention_masks", "not an argument", "forward"),
    "attention maps": (lambda: forward(output_attentions=True), ValueError, "output_attentions", "True", "False"),
}  # fmt: skip


def used_cache(batch: int) -> fwzoo.FastWeightCache:
    model = ROWS[0].model()
    cache = fwzoo.FastWeightCache(model.config)
    model(torch.ones(batch, 2, dtype=torch.long), use_cache=True, past_key_values=cache)
    return cache


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    attempt, exception, argument, value, allowed = CASES[case]
    with pytest.raises(exception) as caught:
        attempt()
    message = str(caught.value)
    assert type(caught.value) is exception
    assert any(name in message for name in argument.split("|")), message
    assert value in message and allowed in message, message
    assert "\n" not in message and len(message) < 400


def test_there_are_at_least_forty() -> None:
    assert len(CASES) >= 40


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="windows"):
        call(windows=3)


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean 'falcon3a'"):
        config(mixers=["falcon3a", "falcon-3a"])
