"""Memories as Triton kernels beside plain torch and beside what they replace, in one run on one GPU.

Run: python benchmarks/memory_kernels.py [--groups "fwpkm read"] [--repeats 20] [--out runs/memory_kernels] [--no-plots]

A group is one piece of work at several sizes, done by contenders one after another: medians of `--repeats` runs with inputs that
rotate, peak memory of a call, the floor (bytes that must move over 4.3 TB/s), and the ratio to the group's yardstick with what
it may be at most. "graph" is the time without what Python takes to launch kernels: the call captured in a CUDA graph. Where
both have one, the ratio of these decides.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fwzoo.kernels import fwpkm, pkm
from fwzoo.kernels.contract import discarding_states
from fwzoo.kernels.fwpkm.chunk import Memory
from fwzoo.kernels.fwpkm.overlay import Overlay
from fwzoo.kernels.fwpkm.state import Options, empty_state
from fwzoo.kernels.product_keys import select
from kernels import BANDWIDTH, timed, versions

Call = Callable[[int], object]  # does the work on input set i


@dataclass(frozen=True)
class Group:
    """One piece of work.

    Attributes:
        sizes: what to run it at, by title: keyword arguments of the contenders.
        contenders: name to a function of a size that makes the call.
        floor: bytes that must move, of a size.
        yardstick: the contender that others are compared with; most: by size, the largest allowed ratio of the group's last one.
        axis: the size on the plot's x axis, or None.
    """

    sizes: dict[str, dict[str, int]]
    contenders: dict[str, Callable[..., Call]]
    floor: Callable[..., float]
    yardstick: str
    most: dict[str, float] = field(default_factory=dict)
    axis: str | None = None


TURNS = 3


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device="cuda")


# --- the read of FwPKM: n 512, top-8, K = V = 512, float32, idw ---


@dataclass(frozen=True)
class Reading:
    """Inputs of a read: queries `[1, T, 1, K]`, sub-keys `[1, 2, 1, n, K / 2]`, a table `[n * n, V]`."""

    queries: list[Tensor]
    keys: Tensor
    table: Tensor
    top_k: int = 8

    @classmethod
    def draw(cls, T: int, n: int = 512, K: int = 512, V: int = 512) -> Reading:
        keys = 2 * torch.rand(1, 2, 1, n, K // 2, device="cuda") - 1
        return cls([draw(1, T, 1, K, scale=0.577) for _ in range(TURNS)], keys, draw(n * n, V, scale=0.02))


def chunk_read(**size: int) -> Call:
    """The chunk level's own functions."""
    given = Reading.draw(**size)

    def read(i: int) -> Tensor:
        found = select(given.queries[i], given.keys, given.top_k, "idw", 1e-3)
        return F.embedding_bag(found.slots[0, :, 0], given.table, per_sample_weights=found.weights[0, :, 0], mode="sum")

    return read


def plain_read(q: Tensor, keys: Tensor, table: Tensor, top_k: int) -> Tensor:
    """q `[2, T, F]`, keys `[2, n, F]`: scores by differences, two top-k, gather and sum; torch.compile fuses what it can."""
    n = keys.shape[1]
    scores = -(1e-3 + (q[:, :, None] - keys[:, None]).square().sum(-1)).log()
    best = scores.topk(top_k, -1)
    sums = (best.values[0][..., :, None] + best.values[1][..., None, :]).flatten(-2)
    rows = (best.indices[0][..., :, None] * n + best.indices[1][..., None, :]).flatten(-2)
    last = sums.topk(top_k, -1)
    weights, slots = last.values.softmax(-1), rows.gather(-1, last.indices)
    return (table[slots] * weights[..., None]).sum(1)


def compiled_read(**size: int) -> Call:
    given, run = Reading.draw(**size), torch.compile(plain_read)
    halves = [q[0, :, 0].unflatten(-1, (2, -1)).transpose(0, 1).contiguous() for q in given.queries]
    return lambda i: run(halves[i], given.keys[0, :, 0], given.table, given.top_k)


def triton_read(**size: int) -> Call:
    from fwzoo.kernels.product_key_search import search_and_read

    given = Reading.draw(**size)
    return lambda i: search_and_read(given.queries[i], given.keys, given.top_k, "idw", 1e-3, given.table)


def swiglu(T: int, **_: int) -> Call:
    """What a memory replaces: a SwiGLU MLP 768 -> 2048 -> 768 in bf16, forward."""
    x = [draw(T, 768).bfloat16() for _ in range(TURNS)]
    up, gate, down = (draw(*shape, scale=0.02).bfloat16() for shape in ((2048, 768), (2048, 768), (768, 2048)))

    def forward(i: int) -> Tensor:
        return F.linear(F.silu(F.linear(x[i], gate)) * F.linear(x[i], up), down)

    return forward


# --- the read of FwPKM and its write after it: a chunk of T tokens of one memory ---


def writing(T: int) -> tuple[Reading, Tensor, Tensor, Any, Any]:
    """Inputs of a read, values `[1, T, V]`, gates `[1, T]`, the state before and the options of a chunk of T tokens."""
    given = Reading.draw(T=T)
    v, gate = draw(1, T, given.table.shape[1]), torch.rand(1, T, device="cuda")
    options = Options(
        **{"chunk_size": T, "lookahead": False, "normalize_targets": True, "scope": "batch", "group": None},
        **{"top_k": given.top_k, "score": "idw", "score_eps": 1e-3, "row_averaging": True, "gate_weighting": True},
        **{"address_loss": True, "value_lr": 1.0, "key_lr": 1.0, "max_slots": None, "evict": False},
    )
    state = empty_state(1, given.queries[0], v, gate, given.keys[0], given.table, options, torch.float32)
    return given, v, gate, state, options


def chunk_write(T: int) -> Call:
    """The chunk level's own classes."""
    given, v, gate, state, options = writing(T)
    memory = Memory(state.keys, Overlay(given.table, state), options)
    real = torch.ones(1, T, dtype=torch.bool, device="cuda")

    def call(i: int) -> None:
        with torch.no_grad():
            v_hat, selection = memory.read(given.queries[i])
            memory.update(selection, v_hat, given.queries[i], v, gate, real, real)

    return call


def triton_write(T: int) -> Call:
    """The kernels of one chunk, of a row of `TURNS` in which a memory goes on: what these leave behind is cleared then."""
    from fwzoo.kernels.fwpkm.table import Chunk, Table
    from fwzoo.kernels.product_key_search import search

    given, v, gate, state, options = writing(T)
    table = Table(given.table, state, options, heads=1, updates=TURNS, tokens=T, keep=False)
    target, real = torch.arange(T, device="cuda")[None], torch.ones(1, T, dtype=torch.bool, device="cuda")
    number = torch.full((1,), T, dtype=torch.int32, device="cuda")
    chunk = Chunk(0, T, T, 0, T, v, gate, target, real, real, None, number)
    o = torch.empty_like(v)

    def call(i: int) -> Tensor:
        if i == 0:
            table.stamp = 0
            for counts in (table.cursors[:TURNS], table.use, table.sub_bounds):
                counts.zero_()
        q = given.queries[i]
        found = search(q, state.keys, options.top_k, options.score, options.score_eps)
        table.read(found, o, chunk, write=True)
        return table.write(found, q, state.keys, chunk)

    return call


def triton_call(T: int) -> Call:
    """The operator: the same, and what a call does once (a map of the slots, the clock), without a state to go on from."""
    given, v, gate, _, options = writing(T)
    keys = given.keys[0]  # one tensor for all calls: what tells its table from others is summed once
    named = {"chunk_size": T, "scope": "batch", "lookahead": False, "top_k": options.top_k, "level": "triton"}

    def call(i: int) -> Tensor:
        with torch.no_grad(), discarding_states():
            return fwpkm(given.queries[i], v, gate, keys, given.table, **named)[0]

    return call


# --- PKM: 4 heads x top-32, n 512, forward and backward ---


def plain_pkm(q: Tensor, keys: Tensor, values: Tensor, top_k: int) -> Tensor:
    """Product keys as they are commonly written: products, two top-k, `embedding_bag`."""
    n = keys.shape[2]
    halves = q[0].unflatten(-1, (2, -1)).permute(2, 1, 0, 3)
    best = (halves @ keys.transpose(-1, -2)).topk(top_k, -1)
    sums = (best.values[0][..., :, None] + best.values[1][..., None, :]).flatten(-2)
    rows = (best.indices[0][..., :, None] * n + best.indices[1][..., None, :]).flatten(-2)
    last = sums.topk(top_k, -1)
    slots, weights = (x.transpose(0, 1).flatten(1) for x in (rows.gather(-1, last.indices), last.values.softmax(-1)))
    return F.embedding_bag(slots, values, per_sample_weights=weights, mode="sum")[None]


def learning(read: Callable[..., Any]) -> Callable[..., Call]:
    """Forward and backward of `read(q, keys, values)`."""

    def make(T: int, H: int = 4, n: int = 512, K: int = 512, V: int = 768) -> Call:
        queries = [draw(1, T, H, K).requires_grad_() for _ in range(TURNS)]
        keys, values = draw(2, H, n, K // 2).requires_grad_(), draw(n * n, V, scale=0.02).requires_grad_()
        upstream = draw(1, T, V)
        return lambda i: torch.autograd.grad(read(queries[i], keys, values), (queries[i], keys, values), upstream)

    return make


def our_pkm(**options: Any) -> Callable[..., Call]:
    return learning(lambda q, keys, values: pkm(q, keys, values, top_k=32, level="triton", **options))


LENGTHS = {f"T {T}": {"T": T} for T in (512, 4096, 32768)}
GROUPS: dict[str, Group] = {
    "fwpkm read": Group(
        LENGTHS,
        {"swiglu mlp": swiglu, "chunk level": chunk_read, "compiled": compiled_read, "triton": triton_read},
        lambda T, V=512, **_: 4.0 * T * V * (8 + 1 + 1),  # rows, queries, outputs
        "compiled",
        axis="T",
    ),
    "fwpkm read by n": Group(
        {f"n {n}": {"T": 4096, "n": n} for n in (128, 256, 512, 1024)},
        {"compiled": compiled_read, "triton": triton_read},
        lambda T, V=512, **_: 4.0 * T * V * (8 + 1 + 1),
        "compiled",
        axis="n",
    ),
    "fwpkm read + write": Group(
        LENGTHS,
        {"swiglu mlp": swiglu, "chunk level": chunk_write, "triton call": triton_call, "triton": triton_write},
        # read rows, queries and outputs; then the residuals of a token's slots, and at least the rows once more in and out
        lambda T, V=512, **_: 4.0 * T * V * (8 + 1 + 1) + 4.0 * V * (T + 2 * min(8 * T, 512 * 512)),
        "swiglu mlp",
        {"T 512": 2.2, "T 4096": 1.0, "T 32768": 1.0},
        axis="T",
    ),
    "pkm forward + backward": Group(
        {"T 8192": {"T": 8192}, "T 512": {"T": 512}},  # the second: what is read of the table is a quarter of it
        {
            "embedding_bag": learning(lambda *x: plain_pkm(*x, 32)),
            "chunk level": learning(lambda *x: pkm(*x, top_k=32, level="chunk")),
            "triton": our_pkm(),
            "triton idw": our_pkm(score="idw"),
            "triton sparse": our_pkm(sparse_grad=True),
        },
        lambda T, V=768, **_: 4.0 * T * V * 128 * 2 + 4.0 * 512 * 512 * V,  # rows twice, the table's gradient once
        "embedding_bag",
        {"T 8192": 0.25},
    ),
}


# --- measuring ---


def graph_time(call: Call, repeats: int) -> float:
    """Milliseconds a call without launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(i) for i in range(TURNS)]
    found = timed(lambda _: graph.replay(), repeats, 1) / TURNS
    del kept
    return found


def captured(name: str, contender: str) -> bool:
    """Whether a graph holds it: a capture that fails, as of what waits for the device, leaves torch's generators unusable."""
    return "backward" not in name and contender.startswith(("triton", "swiglu"))


def measure(make: Callable[..., Call], size: dict[str, int], repeats: int, graph: bool) -> dict[str, float | None]:
    """Median milliseconds, the same from a graph, and peak MiB."""
    call = make(**size)
    result: dict[str, float | None] = {"ms": timed(call, repeats, TURNS)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    result["MiB"] = (torch.cuda.max_memory_allocated() - base) / 2**20
    result["graph ms"] = graph_time(call, repeats) if graph else None
    return result


def plot(name: str, group: Group, found: dict[str, dict[str, Any]], path: Path) -> None:
    """Milliseconds of every contender against the group's axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for contender in group.contenders:
        points = [
            (size[group.axis], found[title][contender]["ms"])  # type: ignore[index]
            for title, size in group.sizes.items()
            if "ms" in found[title].get(contender, {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=contender)
    axes.plot(
        [size[group.axis] for size in group.sizes.values()],  # type: ignore[index]
        [found[title]["floor ms"] for title in group.sizes],
        linestyle=":",
        color="gray",
        label="floor",
    )
    axes.set(xscale="log", yscale="log", xlabel=group.axis, ylabel="ms", title=name)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/memory_kernels"))
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)
    results: dict[str, Any] = {"versions": versions()}
    console.print("  ".join(f"{name} {version}" for name, version in results["versions"].items()))
    for name in args.groups:
        group = GROUPS[name]
        found = results[name] = {}
        table = Table("size", "contender", "ms", "graph ms", "MiB", "of floor", f"of {group.yardstick}", "", title=name)
        for title, size in group.sizes.items():
            rows = found[title] = {"floor ms": 1e3 * group.floor(**size) / BANDWIDTH}
            for contender, make in group.contenders.items():
                try:
                    rows[contender] = measure(make, size, args.repeats, captured(name, contender))
                except Exception as error:  # a contender that cannot run does not take the others with it
                    console.print(f"{name} {title} {contender}: {type(error).__name__}: {str(error)[:300]}")
                gc.collect()
                torch.cuda.empty_cache()
            for contender in group.contenders:
                if contender not in rows:
                    continue
                now, verdict = rows[contender], ""
                if group.yardstick in rows:
                    other = rows[group.yardstick]
                    kind = "graph ms" if now["graph ms"] and other["graph ms"] else "ms"
                    ratio = now["ratio"] = now[kind] / other[kind]
                    if contender.startswith("triton") and title in group.most:
                        verdict = f"at most {group.most[title]}: {'ok' if ratio <= group.most[title] else 'MISSED'}"
                graph_ms = "" if now["graph ms"] is None else f"{now['graph ms']:.3f}"
                table.add_row(
                    title,
                    contender,
                    f"{now['ms']:.3f}",
                    graph_ms,
                    f"{now['MiB']:.0f}",
                    f"{now['ms'] / rows['floor ms']:.1f}",
                    f"{now['ratio']:.2f}" if "ratio" in now else "",
                    verdict,
                )
            (args.out / "memory_kernels.json").write_text(json.dumps(results, indent=1))
        console.print(table)
        if group.axis and not args.no_plots:
            plot(name, group, found, args.out / f"{name.replace(' ', '_')}.png")


if __name__ == "__main__":
    main()
