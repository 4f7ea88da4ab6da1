"""LaCT's GPU level beside the public torch.compile code, in one run on one GPU.

Run: python benchmarks/lact_kernels.py [--public LaCT] [--repeats 20] [--out runs/lact] [--no-lengths]

`--public` is a checkout of the public code (github.com/a1600012888/LaCT), which is not part of this repository; without it
there is no peer. Shape: 4 heads of size 512 (in the public code, 4 sequences), hidden 512, chunk 2,048, bf16, momentum.
Median milliseconds of forward and of forward + backward, ratios to the peer and what they may be, FLOPs against the card's rate,
and peak memory. Inputs rotate, so that no run finds its own in the cache. Values and gradients of both are compared with the
chunk level in float64 at a smaller shape; with Muon, Newton-Schulz amplifies rounding, so there the singular values are shown.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fwzoo.kernels import lact
from fwzoo.kernels.lact.muon import Orthogonal
from fwzoo.kernels.lact.rules import orthogonal as orthogonal_plainly
from kernels import Inputs, Row, measure, plot, versions

TOKENS, HEADS, SIZE, HIDDEN, CHUNK = 32768, 4, 512, 512, 2048
PARTS = ("forward", "both")
AT_MOST = {"lact": (0.7, 0.75), "lact, Muon": (0.4, None)}  # forward, forward + backward, of the public code


def inputs(batch: int, tokens: int, heads: int, size: int) -> Inputs:
    """q, k, v, three rates, momentum, three weights, as the operator takes them."""
    q, k, v = (torch.randn(batch, tokens, heads, size, device="cuda") for _ in range(3))
    rates = (0.01 * torch.rand(batch, tokens, heads, 1, device="cuda") for _ in range(3))
    momentum = torch.rand(batch, tokens, heads, device="cuda")
    weights = (torch.randn(heads, HIDDEN, size, device="cuda") * size**-0.5 for _ in range(3))
    q, k, v = (x.bfloat16() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    return q, k, v, *rates, momentum, *weights


def public_inputs(batch: int, tokens: int, heads: int, size: int) -> Inputs:
    """The same as the public code takes them: heads are sequences."""
    tensors = inputs(batch, tokens, heads, size)
    rows = tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors[:6])
    return *rows, tensors[6].transpose(1, 2).flatten(0, 1)[..., None].contiguous(), *tensors[7:]


def ours(*tensors: Tensor, level: str = "triton", **options: Any) -> Tensor:
    """Output of the operator."""
    *tokens, momentum, w0, w1, w2 = tensors
    return lact(*tokens, w0, w1, w2, momentum=momentum, chunk_size=CHUNK, level=level, **options)[0]


def public(function: Callable[..., Tensor], muon: bool) -> Callable[..., Tensor]:
    """The public function in our order of arguments."""

    def run(q: Tensor, k: Tensor, v: Tensor, lr0: Tensor, lr1: Tensor, lr2: Tensor, m: Tensor, *w: Tensor) -> Tensor:
        return function(*w, q, k, v, lr0, lr1, lr2, chunk_size=CHUNK, use_muon=muon, momentum=m)

    return run


def load(checkout: Path) -> Callable[..., Tensor]:
    """The function of the public language-model code."""
    path = checkout / "lact_llm" / "lact_model" / "ttt_operation.py"
    spec = importlib.util.spec_from_file_location("public_lact", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--public is {checkout}, which has no {path.relative_to(checkout)}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where torch.compile looks for it
    spec.loader.exec_module(module)
    return module.block_causal_lact_swiglu


def flops(muon: bool, size: int) -> float:
    """Of the forward pass a token and head."""
    steps = 5 * (4 * min(size, HIDDEN) ** 2 * max(size, HIDDEN) + 2 * min(size, HIDDEN) ** 3)
    return 18.0 * size * HIDDEN + (3 * steps / CHUNK if muon else 0)


def accuracy(make: Callable[..., Inputs], run: Callable[..., Tensor]) -> float:
    """Largest relative error of output and gradients against the chunk level in float64, three chunks and one of a rest."""
    shape = (1, 3 * CHUNK + 100, 1, SIZE)
    torch.manual_seed(0)
    given = [x.requires_grad_() for x in make(*shape)]
    torch.manual_seed(0)
    exact = [x.double().requires_grad_() for x in inputs(*shape)]
    o, right = run(*given), ours(*exact, level="chunk")
    upstream = torch.randn_like(right).to(o.dtype)
    found = (o, *torch.autograd.grad(o, given, upstream.reshape(o.shape)))
    right = (right, *torch.autograd.grad(right, exact, upstream.double()))
    return max(
        ((a.double().flatten() - b.flatten()).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)
    )


def singular_values() -> dict[str, list[float]]:
    """Smallest, median and largest singular value of the orthogonalised direction: bf16 products, and float64."""
    flat = torch.randn(2, 3 * HIDDEN * SIZE, device="cuda")
    directions = flat.bfloat16()
    narrow = Orthogonal(directions, SIZE, HIDDEN, directions[:0])(directions).float().view(-1, HIDDEN, SIZE)
    wide = orthogonal_plainly(flat.view(-1, HIDDEN, SIZE).double())
    values = {"bf16": torch.linalg.svdvals(narrow), "float64": torch.linalg.svdvals(wide)}
    return {name: [x.min().item(), x.median().item(), x.max().item()] for name, x in values.items()}


def of_public(name: str, times: dict[str, Any]) -> dict[str, float]:
    """Ratios of a row's times and peak memory to those of its peer, as far as both were measured."""
    peer = times.get(name.replace("lact", "public"), {}) if name in AT_MOST else {}
    return {
        key: times[name][key] / peer[key]
        for part in PARTS
        for key in (part, f"{part} MiB")
        if key in peer and key in times[name]
    }


def say(name: str, times: dict[str, Any]) -> str:
    """A row's figures and, where it is known, what they or those of our row are of the public code."""
    figures = ", ".join(
        f"{part} {times[name][part]:.3f} ms {times[name][f'{part} MiB']:.0f} MiB"
        for part in PARTS
        if part in times[name]
    )
    own = name.replace("public", "lact")
    ratios = of_public(own, times) if own in times else {}
    return f"{name}: {figures}" + "".join(f"; {own} is {key} {x:.2f} of public" for key, x in ratios.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--public", type=Path, help="checkout of the public code")
    parser.add_argument("--rows", nargs="*", help="rows to measure, all by default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/lact"))
    parser.add_argument("--no-lengths", action="store_true", help="do not time other lengths, do not plot")
    parser.add_argument("--only-times", action="store_true", help="compare no values")
    parser.add_argument("--no-plain", action="store_true", help="leave the chunk level out")
    args = parser.parse_args()
    console = Console(width=150)
    rows = {
        "lact": Row(inputs, ours, flops=functools.partial(flops, False)),
        "lact, Muon": Row(inputs, functools.partial(ours, muon=True), flops=functools.partial(flops, True)),
    }
    if not args.no_plain:
        plain = functools.partial(ours, level="chunk")
        rows["chunk level (float32)"] = Row(inputs, plain, flops=functools.partial(flops, False))
    if args.public is None:
        console.print("the public code: not given")
    else:
        function = load(args.public)
        for name, muon in (("public", False), ("public, Muon", True)):
            rows[name] = Row(public_inputs, public(function, muon), flops=functools.partial(flops, muon))
    rows = {name: row for name, row in rows.items() if args.rows is None or name in args.rows}
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"versions": versions(), "errors": {}, "times": {}, "lengths": {}}
    console.print("  ".join(f"{name} {version}" for name, version in results["versions"].items()))
    for name, row in rows.items():
        if "Muon" not in name and not args.only_times:
            torch.compiler.reset()  # what was compiled for one length is not taken for another
            results["errors"][name] = accuracy(row.inputs, row.run)
            console.print(f"{name}: relative error of output and gradients {results['errors'][name]:.1e}")
            torch.compiler.reset()
    results["singular values"] = singular_values()
    console.print(f"singular values after Newton-Schulz (least, median, largest): {results['singular values']}")
    times = results["times"]
    jobs = [
        (name, backward)
        for muon in (False, True)
        for backward in (False, True)
        for name in rows
        if ("Muon" in name) == muon and (name, backward) != ("public, Muon", True)  # which takes minutes to compile
    ]
    for name, backward in jobs:  # what takes longer to compile comes later
        begin = time.monotonic()
        try:
            times[name] = measure(rows[name], (1, TOKENS, HEADS, SIZE), args.repeats, backward=backward)
            console.print(say(name, times), f"({time.monotonic() - begin:.0f} s)")
        except Exception as error:  # a row that cannot run does not take the others with it
            console.print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        torch.cuda.empty_cache()
        (args.out / "lact.json").write_text(json.dumps(results, indent=1))
    title = f"H{HEADS} T{TOKENS} D{SIZE} M{HIDDEN} C{CHUNK}, bf16, momentum"
    table = Table(
        "", "fwd ms", "fwd+bwd", "of floor", "", "MiB fwd", "fwd+bwd", "of public", "", "at most", "", title=title
    )
    for name, now in times.items():
        now["of public"] = of_public(name, times)
        cells = [f"{now[part]:.3f}" if part in now else "" for part in PARTS]
        cells += [f"{now[part] / now[f'{part} floor']:.1f}" if part in now else "" for part in PARTS]
        cells += [f"{now[f'{part} MiB']:.0f}" if part in now else "" for part in PARTS]
        cells += [f"{now['of public'][part]:.2f}" if part in now["of public"] else "" for part in PARTS]
        cells += ["" if bar is None else f"{bar:.2f}" for bar in AT_MOST.get(name, (None, None))]
        table.add_row(name, *cells)
    console.print(table)
    (args.out / "lact.json").write_text(json.dumps(results, indent=1))
    if args.no_lengths:
        return
    for name, row in rows.items():
        if "Muon" in name or name == "public":  # which unrolls its chunks: every length is compiled anew
            continue
        lengths = results["lengths"][name] = {}
        for tokens in (4096, 16384, 65536, 262144):
            try:
                lengths[tokens] = measure(row, (1, tokens, HEADS, SIZE), args.repeats, turns=2)["both"]
            except Exception as error:
                console.print(f"T{tokens} {name}: {type(error).__name__}: {str(error)[:300]}")
            gc.collect()
            torch.cuda.empty_cache()
        (args.out / "lact.json").write_text(json.dumps(results, indent=1))
    plot(results["lengths"], args.out / "lact.png", title)


if __name__ == "__main__":
    main()
