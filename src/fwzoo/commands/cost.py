"""`fwzoo cost`: what a layout costs, layer by layer, beside softmax attention."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from fwzoo.analysis.cost import LayerCost, ModelCost, achieved_flops, empty_model, model_cost, plot_costs

from .common import device, empty_folder, layout_config, quiet_transformers, short, versions

BESIDE = "full_attention"
SPAN = [2**i for i in range(8, 18)]  # contexts of the plot


def run(layout: str, lengths: list[int], sizes: dict[str, Any], float32: bool, out: Path | None, as_json: bool) -> None:
    """Show, print or write the cost of `layout` at every length; with a GPU, also the FLOP/s that it achieves."""
    quiet_transformers()
    if out is not None:
        empty_folder("--out", out, "allowed is a new or empty folder.", but=frozenset({"cost.json", "cost.png"}))
    dtype = torch.float32 if float32 else torch.bfloat16
    config = layout_config("LAYOUT", layout, **sizes)
    model, attention = empty_model(config, dtype), empty_model(layout_config("LAYOUT", BESIDE, **sizes), dtype)
    costs = [model_cost(model, tokens) for tokens in sorted(set(lengths))]
    beside = [model_cost(attention, cost.tokens) for cost in costs]
    achieved = measure("cuda", config, dtype, costs) if device() == "cuda" else {}
    found = {
        "layout": config.layout,
        "dtype": str(dtype).removeprefix("torch."),
        "lengths": [cost.as_dict() for cost in costs],
        BESIDE: [cost.as_dict()["total"] for cost in beside],
        "achieved_flops_a_second": achieved,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "cost.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        span = sorted({*SPAN, *lengths})
        curves = {config.layout: model, BESIDE: attention}
        plotted = plot_costs(
            out / "cost.png", {name: [model_cost(x, tokens) for tokens in span] for name, x in curves.items()}
        )
        Console(stderr=True).print(f"wrote {out / 'cost.json'}" + (f", {out / 'cost.png'}" if plotted else ""))
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    for cost, other in zip(costs, beside, strict=True):
        console.print(_table(config.layout, cost, other))
    for tokens, speed in achieved.items():
        what = "out of memory" if speed is None else f"{short(speed)}FLOP/s"
        console.print(f"achieved at {int(tokens):,} tokens on {torch.cuda.get_device_name()}: {what}")
    console.print(
        f"slow: learned parameters ({found['dtype']}); fast: parameters that are written while reading. FLOPs: a token, "
        "forward, of matrix products, two a multiply-add; attention's whole rectangle, of which a causal kernel does half. "
        "moved: weights and state that one more token reads and writes. state: of a sequence; fwpkm's is the most it can be.",
        soft_wrap=True,
    )
    console.print(versions())


def measure(where: str, config: Any, dtype: torch.dtype, costs: list[ModelCost]) -> dict[str, float | None]:
    """FLOP/s of a device by context length, None where its memory is too small."""
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    achieved: dict[str, float | None] = {}
    for cost in costs:
        try:
            achieved[str(cost.tokens)] = achieved_flops(model, cost.tokens)
        except torch.OutOfMemoryError:
            achieved[str(cost.tokens)] = None
    return achieved


def _table(layout: str, cost: ModelCost, other: ModelCost) -> Table:
    table = Table(title=f"{layout} at {cost.tokens:,} tokens")
    for heading in ("layer", "mixer", "feed-forward"):
        table.add_column(heading)
    for heading in ("slow", "fast", "FLOPs", "moved", "state"):
        table.add_column(heading, justify="right")
    *layers, last = cost.layers
    for x in layers:
        table.add_row(str(x.layer), x.mixer, x.feed_forward, *_numbers(x))
    table.add_row("", "embedding, head", "", *_numbers(last), end_section=True)
    table.add_row("", "all", "", *_numbers(cost.total))
    table.add_row("", "fa instead", "", *_numbers(other.total))
    return table


def _numbers(x: LayerCost) -> list[str]:
    return [short(x.slow), short(x.fast), short(x.flops), short(x.moved, "B"), short(x.state_bytes, "B")]
