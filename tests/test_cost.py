"""`fwzoo cost`: formulas against torch's FLOP counter and the cache's own bytes, on every row."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fwzoo
from fwzoo import cli
from fwzoo.analysis.cost import empty_model, linear_flops, model_cost
from fwzoo.commands.common import short
from fwzoo.commands.cost import measure
from rows import ROWS, Row

LENGTHS = (5, 37, 150)


def plain(row: Row) -> fwzoo.FwzooForCausalLM:
    """The row with product keys scored by products, which the counter counts; distances do not reach it."""
    with_keys = "fwpkm_score" in vars(row.config())
    return row.model(**({"fwpkm_score": "dot"} if with_keys else {}))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_flops_are_those_that_torch_counts(row: Row) -> None:
    model = plain(row)
    for tokens in LENGTHS:
        ids = torch.randint(2, 384, (1, tokens))
        # the counter does not know the CPU's attention kernel, so attention runs as products
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(ids, use_cache=False)
        cost = model_cost(model, tokens)
        assert round(cost.total.flops * tokens) == counter.get_total_flops(), tokens
        counts = counter.get_flop_counts()
        for layer in cost.layers[:-1]:
            counted = sum(counts[f"{type(model).__name__}.model.layers.{layer.layer}"].values())
            assert round(layer.flops * tokens) == counted, (tokens, layer)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_bytes_are_those_of_the_cache(row: Row, dtype: torch.dtype) -> None:
    model = row.model().to(dtype)
    for tokens in LENGTHS:
        cache = fwzoo.FastWeightCache(model.config)
        with torch.no_grad():
            model(torch.randint(2, 384, (1, tokens)), past_key_values=cache, use_cache=True)
        for layer, held in zip(model_cost(model, tokens).layers, cache.layers, strict=False):
            if layer.feed_forward == "fwpkm" and tokens > 8:  # how many rows it wrote depends on the values
                assert 0.5 * layer.state_bytes < held.nbytes <= layer.state_bytes, (tokens, layer)
            else:
                assert layer.state_bytes == held.nbytes, (tokens, layer)


def test_fwpkm_holds_at_most_the_rows_it_can_have_written() -> None:
    """In a large table two tokens may write the same row, so the formula is a bound there."""
    model = fwzoo.FwpkmForCausalLM(fwzoo.FwpkmConfig.tiny(fwpkm_subkeys=64)).eval()
    cache = fwzoo.FastWeightCache(model.config)
    with torch.no_grad():
        model(torch.randint(2, 384, (1, 200)), past_key_values=cache, use_cache=True)
    most = model_cost(model, 200).total.state_bytes
    assert 0.3 * most < cache.nbytes <= most


def test_parameters_and_bytes() -> None:
    model = fwzoo.Falcon1ForCausalLM(fwzoo.Falcon1Config.tiny())
    cost = model_cost(model, 64)
    assert cost.total.slow == model.num_parameters()
    assert cost.total.fast == 2 * 2 * 16 * 16
    first, head = cost.layers[0], cost.layers[-1]
    weights = 4 * sum(x.numel() for x in model.model.layers[0].parameters()) - 4 * 2 * 32  # without the block's norms
    assert first.moved == weights + 2 * first.state_bytes
    assert head.flops == 2 * 32 * 384 and head.moved == 4 * 32 * 384
    assert linear_flops(model.model.layers[0].feed_forward) == 2 * 3 * 32 * 64


def test_a_product_key_memory_moves_the_rows_it_reads() -> None:
    small, large = (
        model_cost(
            empty_model(
                fwzoo.FwzooConfig.from_layout(
                    "gdn+pkm@0", num_hidden_layers=1, hidden_size=64, num_attention_heads=1, pkm_subkeys=n
                )
            ),
            64,
        ).total
        for n in (32, 64)
    )
    assert large.slow - small.slow > 64 * (64**2 - 32**2)
    assert large.moved - small.moved == 4 * 2 * 4 * 32 * 256  # more sub-keys; as many rows


def test_attention_grows_and_fast_weights_do_not() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 384}
    attention, falcon, window = (
        [model_cost(empty_model(fwzoo.FwzooConfig.from_layout(name, **sizes)), t).total for t in (4096, 65536)]
        for name in ("fa", "falcon3a", "swa")
    )
    assert attention[1].flops > 5 * attention[0].flops and attention[1].state_bytes > 15 * attention[0].state_bytes
    for near, far in (falcon, window):
        assert (near.flops, near.moved, near.state_bytes) == (far.flops, far.moved, far.state_bytes)


def test_a_length_that_the_token_loop_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 4; it must be at least 5"):
        model_cost(empty_model(fwzoo.Falcon1Config.tiny()), 4)


@pytest.mark.gpu
def test_the_command_measures_the_gpu(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert not command(monkeypatch, "falcon3a", *SMALL, "--length", 512, "--json")
    assert json.loads(capfd.readouterr().out)["achieved_flops_a_second"]["512"] > 0


def test_achieved_flops_are_positive() -> None:
    config = fwzoo.Falcon1Config.tiny()
    costs = [model_cost(empty_model(config), tokens) for tokens in (64, 128)]
    found = measure("cpu", config, torch.bfloat16, costs)
    assert found.keys() == {"64", "128"} and all(speed is not None and speed > 0 for speed in found.values())


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (123456, "123k"), (7.7e6, "7.7M"), (1.5e12, "1.5T")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text and short(number, "B").replace(" ", "") == f"{text}B"


# --- the command ---


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["fwzoo", "cost", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


SMALL = ("--layers", 2, "--hidden-size", 64, "--heads", 2)


def test_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path) -> None:
    layout = "gdn,la+fwpkm@1:linear_decay=head:fwpkm_subkeys=16"
    arguments = (layout, *SMALL, "--length", 512, "--length", 64, "--out", tmp_path / "a", "--json")
    assert not command(monkeypatch, *arguments)
    found = json.loads(capfd.readouterr().out)
    assert found["layout"] == "gated_delta,linear_attention+fwpkm@1" and found["dtype"] == "bfloat16"
    assert [x["tokens"] for x in found["lengths"]] == [64, 512]
    assert found["full_attention"][1]["state_bytes"] == 2 * (512 * 2 * 64 * 2 + 8)
    assert json.loads((tmp_path / "a" / "cost.json").read_text()) == found
    assert (tmp_path / "a" / "cost.png").stat().st_size > 10_000


def test_table(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert not command(monkeypatch, "falcon3a", *SMALL)
    shown = capfd.readouterr().out
    assert "falcon3a at 4,096 tokens" in shown and "fa instead" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("falcon9",), "layout 'falcon9', position 0: name is 'falcon9'"),
        (("gdn:short_conv=3",), "the option behind 'gdn' is 'short_conv'"),
        (("gdn:short_conv_size",), "'short_conv_size' of 'gdn:short_conv_size' is not allowed"),
        (("la:linear_decay=often",), "linear_decay is 'often'; allowed: 'none', 'head', 'token'"),
        (("gdn", "--length", 4), "'4' is not allowed; allowed is a whole number, 5 or more"),
        (("gdn", "--heads", 5), "num_attention_heads is 5; it must divide hidden_size = 768"),
        ((), "Missing argument 'layout'"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert command(monkeypatch, *arguments) == 2
    shown = capfd.readouterr()
    assert said in shown.err and len(shown.err.splitlines()) == 1 and not shown.out
