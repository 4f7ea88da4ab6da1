"""The Triton kernels beside flash-linear-attention's, in one run on one GPU.

Run: python benchmarks/kernels.py [--rows falcon1a falcon3a] [--repeats 20] [--out runs/kernels] [--no-lengths] [--no-decoding]

For every operator at two shapes: median milliseconds of forward and of forward + backward, ratio to its peer (and what that
ratio may be at most), ratio to the floor (the larger of bytes over 4.28 TB/s, every input read and every output written once,
and FLOPs over 700 TFLOP/s), and peak memory; the decoding step, as a CUDA graph; and forward + backward against T, as a plot.
Inputs rotate, so that no run finds its own in the cache. The kernels are compiled on all cores before anything is timed.

flash-linear-attention refuses the backward of gated operators on Hopper with Triton 3.4 to 3.7.0. Its guard is patched away in
this process, and its gradients are compared with float64 references here; the table says what was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fwzoo.kernels import FalconState, GatedDeltaState, LinearAttentionState, falcon, gated_delta, linear_attention
from fwzoo.kernels.contract import overwriting_states

SHAPES = {"B4 T8192": (4, 8192, 16, 128), "B1 T32768": (1, 32768, 16, 128)}  # B, T, H, K = V
STEP = (64, 1, 16, 128)
WINDOW = 4
BANDWIDTH, RATE = 4.28e12, 700e12
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One operator.

    Attributes:
        inputs: (B, T, H, size) to its differentiable inputs.
        run: inputs to output.
        bars: name of another row, and the largest allowed ratio of times to it.
        flops: FLOPs of the forward pass a token and head, as a function of the size.
        exact: inputs in float64 to output, to compare a peer's gradients with.
    """

    inputs: Callable[..., Inputs]
    run: Callable[..., Tensor]
    bars: dict[str, float] | None = None
    flops: Callable[[int], float] = lambda size: 8.0 * size * size  # 2 C (K + V) in the chunk and 4 K V for the state
    exact: Callable[..., Tensor] | None = None


def qkv(batch: int, tokens: int, heads: int, size: int) -> Inputs:
    """Queries and keys of unit length, and values."""
    q, k, v = (torch.randn(batch, tokens, heads, size, device="cuda") for _ in range(3))
    return tuple(x.bfloat16() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def falcon_inputs(*shape: int) -> Inputs:
    """q, k, v, beta, ridge."""
    beta = 2 * torch.randn(shape[:3], device="cuda").sigmoid()
    return *qkv(*shape), beta, 0.05 * torch.randn(shape[:3], device="cuda").sigmoid()


def column_inputs(*shape: int) -> Inputs:
    """The same with a beta for every value column."""
    beta = 2 * torch.randn(shape, device="cuda").sigmoid()
    return *qkv(*shape), beta, 0.05 * torch.randn(shape[:3], device="cuda").sigmoid()


def scalar_gate(*shape: int) -> Inputs:
    """q, k, v, log-decay."""
    return *qkv(*shape), -0.05 * torch.rand(shape[:3], device="cuda")


def vector_gate(*shape: int) -> Inputs:
    """q, k, v, log-decay of every key column."""
    return *qkv(*shape), -0.05 * torch.rand(shape, device="cuda")


def delta_inputs(*shape: int) -> Inputs:
    """q, k, v, log-decay, beta."""
    return *scalar_gate(*shape), torch.rand(shape[:3], device="cuda")


def rule(name: str, **options: Any) -> Callable[..., Tensor]:
    """Output of a Falcon rule."""
    return lambda *tensors: falcon(*tensors, rule=name, level="triton", **options)[0]


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """flash-linear-attention's chunked linear attention with one decay a token."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]


def four_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Falcon-3A with W = 4 as its authors compose it: one linear attention for each place in the window."""
    o = simple_gla(q, k, v, g)
    for back in range(1, 4):
        shifted = (F.pad(x[:, :-back], (0, 0, 0, 0, back, 0)) for x in (k, v))
        o = o + simple_gla(q, *shifted, g)
    return o


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """flash-linear-attention's chunked linear attention with a decay for every key column."""
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, g=g, scale=1.0)[0]


def fla_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """flash-linear-attention's chunked gated delta rule."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0)[0]


def exact_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return linear_attention(q, k, v, g, normalize=False, level="chunk")[0]


def exact_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta(q, k, v, g, beta, scale=1.0, level="chunk")[0]


def exact_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The token loop: S_t = diag(exp g_t) S_{t-1} + k_t v_t^T."""
    S, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1)


ROWS: dict[str, Row] = {
    "fla simple GLA": Row(scalar_gate, simple_gla, exact=exact_simple_gla),
    "four fla simple GLA": Row(scalar_gate, four_simple_gla),
    "fla GLA": Row(vector_gate, gla, exact=exact_gla),
    "fla gated delta": Row(delta_inputs, fla_gated_delta, exact=exact_gated_delta),
    "falcon1a": Row(falcon_inputs, rule("falcon1a"), {"fla simple GLA": 0.9}),
    "linear_attention": Row(
        scalar_gate,
        lambda *x: linear_attention(*x, normalize=False, level="triton")[0],
        {"fla simple GLA": 0.9},
    ),
    "falcon2a": Row(column_inputs, rule("falcon2a"), {"fla GLA": 0.6}),
    "falcon3a": Row(falcon_inputs, rule("falcon3a"), {"four fla simple GLA": 0.25, "falcon1a": 1.3}),
    "gated_delta": Row(
        delta_inputs, lambda *x: gated_delta(*x, scale=1.0, level="triton")[0], {"fla gated delta": 0.9}
    ),
    "falcon1": Row(falcon_inputs, rule("falcon1"), {"fla gated delta": 0.9}),
    "falcon2": Row(column_inputs, rule("falcon2"), {"falcon1": 1.6}),
    "falcon3": Row(falcon_inputs, rule("falcon3"), {"falcon1": 3.0}),
}


# --- measuring ---


def timed(function: Callable[[int], object], repeats: int, turns: int) -> float:
    """Median milliseconds on the device over `repeats` runs; run i gets the number of the input set to use."""
    for i in range(2 * turns):
        function(i % turns)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        function(i % turns)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def measure(row: Row, shape: Sequence[int], repeats: int, turns: int = 3, backward: bool = True) -> dict[str, float]:
    """Milliseconds and peak MiB of the forward pass and (with `backward`) of forward + backward, and their floors."""
    sets = [tuple(x.requires_grad_() for x in row.inputs(*shape)) for _ in range(turns)]
    with torch.no_grad():  # what is compiled for a forward pass alone need not wait for the other
        upstream = torch.randn_like(row.run(*sets[0]))

    def forward(i: int) -> None:
        with torch.no_grad():
            row.run(*sets[i])

    def both(i: int) -> None:
        torch.autograd.grad(row.run(*sets[i]), sets[i], upstream)

    result: dict[str, float] = {}
    for name, function in (("forward", forward), ("both", both))[: 1 + backward]:
        result[name] = timed(function, repeats, turns)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        function(0)
        torch.cuda.synchronize()
        result[f"{name} MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    given = sum(x.numel() * x.element_size() for x in sets[0])
    out = upstream.numel() * upstream.element_size()
    work = row.flops(shape[3]) * shape[0] * shape[1] * shape[2]
    result["forward floor"] = 1e3 * max((given + out) / BANDWIDTH, work / RATE)
    result["both floor"] = 1e3 * max((3 * given + 2 * out) / BANDWIDTH, 3 * work / RATE)
    return result


def run_once(name: str) -> None:
    """Forward and backward at every shape (a peer's: at fewer tokens, which compiles the same kernels), and the step."""
    for batch, tokens, *rest in SHAPES.values():
        shape = (batch, 2048 if name.startswith("fla ") else tokens, *rest)
        inputs = [x.requires_grad_() for x in ROWS[name].inputs(*shape)]
        o = ROWS[name].run(*inputs)
        torch.autograd.grad(o, inputs, torch.randn_like(o))
    if name in STEPS:
        with torch.no_grad(), overwriting_states():
            one_step(name, STEPS[name](*STEP), state_of(name))
    torch.cuda.synchronize()


def gradient_error(row: Row) -> float:
    """Largest relative error of output and gradients against float64, on few tokens; the heads are those that are timed."""
    inputs = [x.requires_grad_() for x in row.inputs(1, 1024, *SHAPES["B4 T8192"][2:])]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    o, exact = row.run(*inputs), row.exact(*wide)  # type: ignore[misc]
    upstream = torch.randn_like(exact)
    found = (o, *torch.autograd.grad(o, inputs, upstream.to(o.dtype)))
    right = (exact, *torch.autograd.grad(exact, wide, upstream.to(o.dtype).double()))
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True))


# --- the decoding step ---


def state_of(name: str) -> Any:
    """The state of a batch of sequences in the middle of a text."""
    batch, _, heads, size = STEP
    S = torch.randn(batch, heads, size, size, device="cuda")
    if name == "gated_delta":
        return GatedDeltaState(S)
    if name == "linear_attention":
        return LinearAttentionState(S, torch.ones(batch, heads, size, device="cuda"))
    if not name.startswith("falcon"):
        return S
    tail = (WINDOW if name in ("falcon3", "falcon3a") else 1) - 1
    x, v = (torch.randn(batch, tail, heads, size, device="cuda").bfloat16() for _ in range(2))
    key, known = torch.randn(batch, heads, size, device="cuda").bfloat16(), torch.ones(batch, device="cuda").bool()
    return FalconState(
        S, F.normalize(key, dim=-1), known, F.normalize(x, dim=-1), v, torch.full_like(known, tail, dtype=torch.long)
    )


def one_step(name: str, inputs: Inputs, state: Any) -> None:
    """One token of every sequence."""
    if name.startswith("fla"):
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        q, k, v, g, beta = inputs
        fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
        )
    elif name == "gated_delta":
        gated_delta(*inputs, scale=1.0, state=state, level="triton")
    elif name == "linear_attention":
        linear_attention(*inputs, normalize=False, state=state, level="triton")
    else:
        falcon(*inputs, rule=name, state=state, level="triton")


STEPS = {"fla gated delta": delta_inputs, "gated_delta": delta_inputs, "linear_attention": scalar_gate} | {
    name: row.inputs for name, row in ROWS.items() if name.startswith("falcon")
}


@torch.no_grad()
def measure_step(name: str, repeats: int, calls: int = 21) -> float:
    """Milliseconds of a step, in a CUDA graph of `calls` steps on three sets of inputs in turn, states overwritten."""
    sets = [(STEPS[name](*STEP), state_of(name)) for _ in range(3)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with overwriting_states():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one_step(name, *sets[0])
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            for i in range(calls):
                one_step(name, *sets[i % len(sets)])
    return timed(lambda _: graph.replay(), repeats, 1) / calls


def step_table(names: Iterable[str], repeats: int, console: Console) -> dict[str, float]:
    """Every operator's step beside the floor: its matrices read and written once."""
    batch, _, heads, size = STEP
    floor = 1e3 * 2 * 4 * batch * heads * size * size / BANDWIDTH
    table = Table(
        "operator", "µs", "of floor", "at most", "", title=f"decoding step, B{batch} H{heads} K=V={size} bf16"
    )
    found = {}
    for name in names:
        try:
            found[name] = time = measure_step(name, repeats)
        except Exception as error:
            console.print(f"step of {name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        own = not name.startswith("fla")
        verdict = ("ok" if time <= 1.5 * floor else "MISSED") if own else ""
        table.add_row(name, f"{1e3 * time:.1f}", f"{time / floor:.2f}", "1.50" if own else "", verdict)
    console.print(table)
    return found


def versions() -> dict[str, str]:
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name()}
    found["date"] = time.strftime("%Y-%m-%d")
    try:
        import fla

        found["flash-linear-attention"] = fla.__version__
    except ImportError:
        pass
    return found


def plot(lengths: dict[str, dict[int, float]], path: Path, title: str = "B1 H16 K=V=128, bf16") -> None:
    """Forward + backward against T."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, times in lengths.items():
        axes.plot(list(times), list(times.values()), marker="o", linestyle="--" if "fla" in name else "-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def measure_all(rows: dict[str, Row], args: argparse.Namespace, results: dict[str, Any], console: Console) -> None:
    """Fill `results`, print the tables, and write both."""
    for name, row in rows.items():
        if row.exact is None:
            continue
        try:
            error = results["gradients"][name] = gradient_error(row)
        except Exception as failure:
            console.print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
        else:
            verdict = "right" if error < 0.02 else "WRONG"
            console.print(f"{name}: output and gradients {verdict} (relative error {error:.1e}, guard patched)")
    for title, shape in SHAPES.items():
        found = results["shapes"][title] = {}
        for name, row in rows.items():
            try:
                found[name] = measure(row, shape, args.repeats)
                console.print(f"{title} {name}: {found[name]['forward']:.3f} {found[name]['both']:.3f} ms")
            except Exception as error:  # a row that cannot run does not take the others with it
                console.print(f"{title} {name}: {type(error).__name__}: {str(error)[:300]}")
            gc.collect()
            torch.cuda.empty_cache()
            (args.out / "kernels.json").write_text(json.dumps(results, indent=1))
        table = Table(
            "operator", "fwd ms", "fwd+bwd", "of floor", "", "MiB fwd", "fwd+bwd", "against", "fwd", "fwd+bwd", "at most", "",
            title=f"{title} H16 K=V=128 bf16",
        )  # fmt: skip
        for name, now in found.items():
            cells = [
                name,
                *(f"{now[part]:.3f}" for part in ("forward", "both")),
                *(f"{now[part] / now[f'{part} floor']:.1f}" for part in ("forward", "both")),
                *(f"{now[f'{part} MiB']:.0f}" for part in ("forward", "both")),
            ]
            bars = rows[name].bars or {}
            for peer, bar in bars.items():
                if peer not in found:
                    continue
                ratios = [now[part] / found[peer][part] for part in ("forward", "both")]
                now[f"of {peer}"] = ratios
                verdict = "ok" if max(ratios) <= bar else "MISSED"
                table.add_row(*cells, peer, *(f"{ratio:.2f}" for ratio in ratios), f"{bar:.2f}", verdict)
                cells = [""] * len(cells)
            if not bars:
                table.add_row(*cells)
        console.print(table)
    if not args.no_decoding:
        results["step"] = step_table([name for name in STEPS if name in rows], args.repeats, console)
    (args.out / "kernels.json").write_text(json.dumps(results, indent=1))
    if args.no_lengths:
        return
    for name, row in rows.items():
        times = results["lengths"][name] = {}
        for tokens in (1024, 4096, 16384, 65536):
            try:
                times[tokens] = measure(row, (1, tokens, 16, 128), args.repeats)["both"]
            except Exception as error:
                console.print(f"T{tokens} {name}: {type(error).__name__}: {str(error)[:300]}")
            gc.collect()
            torch.cuda.empty_cache()
        (args.out / "kernels.json").write_text(json.dumps(results, indent=1))
    plot(results["lengths"], args.out / "kernels.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), help="rows to measure, with the rows they are compared with"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"))
    parser.add_argument("--no-lengths", action="store_true", help="do not time other lengths, do not plot")
    parser.add_argument("--no-decoding", action="store_true", help="do not time the decoding step")
    parser.add_argument("--patience", type=float, default=600, help="seconds of compiling before anything is timed")
    parser.add_argument("--shares", type=int, help="processes that compile the peers' configurations")
    parser.add_argument("--fewer", action="store_true", help="leave out the peers' configurations of four stages")
    parser.add_argument("--compile", action="store_true", help="run each of the rows once, which compiles its kernels")
    args = parser.parse_args()
    if peers.installed():
        peers.without_guard()
        peers.prepare_autotuning(args.fewer)
    else:
        print("flash-linear-attention is not installed: its rows will fail, and nothing is compared with them")
    if args.compile:
        for name in args.rows:
            run_once(name)
        return
    wanted = {peer for name in args.rows for peer in (name, *(ROWS[name].bars or {}))}
    rows = {name: row for name, row in ROWS.items() if name in wanted}
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    results: dict[str, Any] = {"versions": versions(), "gradients": {}, "shapes": {}, "lengths": {}}
    console.print("  ".join(f"{name} {version}" for name, version in results["versions"].items()))
    start = time.perf_counter()
    ours, theirs = ([name for name in rows if name.startswith("fla ") == fla] for fla in (False, True))
    with peers.preparing():
        own = [["--compile", "--rows", name] for name in ours]
        peers.compile_on_all_cores(
            __file__, own, [["--compile", "--rows", *theirs]] if theirs else [], args.shares, args.patience
        )
    if args.fewer:
        console.print("flash-linear-attention without its configurations of four pipeline stages")
    console.print(f"compiled on {os.cpu_count()} cores in {time.perf_counter() - start:.0f} s")
    with peers.measuring():
        measure_all(rows, args, results, console)


if __name__ == "__main__":
    main()
