"""FwPKM on a CPU: read and write beside plain gather and scatter of the same maths, beside a SwiGLU, and cost against n.

Run: python benchmarks/memory_cpu.py [--threads 1] [--repeats 5]

Prints milliseconds per 1,000 tokens (medians; contenders take turns) and the ratios that matter. "write" updates rows that
the memory holds already, as plain scatter does in its one dense table; "first write" copies them from the checkpoint's table.
Timed are the memory's read and its update, not the whole call of the operator. For the memory it takes: memory_peak.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fwzoo.kernels import fwpkm
from fwzoo.kernels.fwpkm import empty_state
from fwzoo.kernels.fwpkm.chunk import Memory
from fwzoo.kernels.fwpkm.overlay import Overlay
from fwzoo.kernels.fwpkm.state import Options

EPS, TOP_K = 1e-3, 8
OPTIONS = Options(
    **{n: x for n, x in (fwpkm.__kwdefaults__ or {}).items() if n in Options.__dataclass_fields__ and n != "top_k"},
    top_k=TOP_K,
)


def tables(n: int, size: int, tokens: int) -> tuple[Tensor, ...]:
    """keys, values, and q, v, gate of one sequence."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = draw(2, 1, n, size // 2), 0.02 * draw(n * n, size)
    return keys, values, draw(1, tokens, 1, size), draw(1, tokens, size), draw(1, tokens).sigmoid()


# --- plain gather and scatter: one dense table ---


def plain_read(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Value read, slots, weights, and of each half the sub-keys kept and their scores."""
    n, halves = keys.shape[2], q[0, :, 0].unflatten(-1, (2, -1)).transpose(0, 1)
    distance = torch.cdist(halves, keys[:, 0], compute_mode="donot_use_mm_for_euclid_dist")
    half, index = (-(EPS + distance.square()).log()).topk(TOP_K, -1)
    sums = (half[0, :, :, None] + half[1, :, None, :]).flatten(1)
    rows = (index[0, :, :, None] * n + index[1, :, None, :]).flatten(1)
    best, at = sums.topk(TOP_K, -1)
    slots, weights = rows.gather(1, at), best.softmax(-1)
    return (values[slots] * weights[..., None]).sum(1), slots, weights, index, half


def plain_write(read: tuple[Tensor, ...], q: Tensor, v: Tensor, gate: Tensor, keys: Tensor, values: Tensor) -> None:
    """The same update, in place."""
    v_hat, slots, weights, index, half = read
    target = F.layer_norm(v[0], v.shape[-1:])
    reads = torch.zeros(values.shape[0]).index_add_(0, slots.flatten(), torch.ones(slots.numel()))
    weight = gate[0][:, None] * weights / reads[slots]
    values.index_add_(0, slots.flatten(), (weight[..., None] * (target - v_hat)[:, None]).flatten(0, 1))
    share = half.softmax(-1)
    for side in range(2):
        use = torch.zeros(keys.shape[2]).index_add_(0, index[side].flatten(), share[side].flatten()) / q.shape[1]
        log_use = use.clamp(min=1e-30).log()[index[side]]
        d = share[side] * (log_use - (share[side] * log_use).sum(-1, keepdim=True)) / q.shape[1]
        difference = q[0, :, 0].unflatten(-1, (2, -1))[:, side][:, None] - keys[side, 0][index[side]]
        step = (2 * d * half[side].exp())[..., None] * difference
        keys[side, 0].index_add_(0, index[side].flatten(), step.flatten(0, 1), alpha=-1)


# --- measuring ---


def turns(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of every contender, which take turns; each returns the seconds that count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for attempt in range(repeats + 1):
        for name, run in contenders.items():
            spent = run()
            if attempt:
                seconds[name].append(spent)
    return {name: statistics.median(x) for name, x in seconds.items()}


def contenders(n: int, size: int, tokens: int) -> dict[str, Callable[[], float]]:
    keys, values, q, v, gate = tables(n, size, tokens)
    state = empty_state(1, q, v, gate, keys, values, OPTIONS, torch.float32)
    everything = torch.ones(1, tokens, dtype=torch.bool)
    dense_keys, dense_values = keys.clone(), values.clone()
    plain = plain_read(q, keys, values)
    memory = Memory(state.keys, Overlay(values, state), OPTIONS)
    v_hat, selection = memory.read(q)
    equal = (v_hat[0] - plain[0]).abs().amax(-1) < 1e-5  # all but tokens whose eighth and ninth scores nearly tie
    assert equal.float().mean() > 0.97

    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def first_write() -> float:
        fresh = Memory(state.keys, Overlay(values, state), OPTIONS)
        return timed(lambda: fresh.update(selection, v_hat, q, v, gate, everything, everything))

    held = Memory(state.keys, Overlay(values, state), OPTIONS)
    return {
        "read": lambda: timed(lambda: memory.read(q)),
        "plain read": lambda: timed(lambda: plain_read(q, keys, values)),
        "first write": first_write,
        "write": lambda: timed(lambda: held.update(selection, v_hat, q, v, gate, everything, everything)),
        "plain write": lambda: timed(lambda: plain_write(plain, q, v, gate, dense_keys, dense_values)),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console, tokens = Console(width=110), 1000
    table = Table("table", "read", "plain read", "first write", "write", "plain write")
    table.title = "milliseconds per 1,000 tokens, top-8"
    shapes = {"512 x 512 rows of 512": (512, 512), "many tokens on few rows: 8 x 8 of 512": (8, 512)}
    found = {}
    for name, (n, size) in shapes.items():
        found[name] = turns(contenders(n, size, tokens), arguments.repeats)
        table.add_row(name, *(f"{1000 * x:.1f}" for x in found[name].values()))
    console.print(table)
    for name, x in found.items():
        read, write = x["plain read"] / x["read"], x["plain write"] / x["write"]
        first = x["plain write"] / x["first write"]
        console.print(
            f"{name}: read {read:.2f}, write {write:.2f} (rows not held before: {first:.2f}) times as fast as plain"
        )

    mlp = nn.ModuleList([nn.Linear(768, 2048), nn.Linear(768, 2048), nn.Linear(2048, 768)])
    hidden = torch.randn(tokens, 768)

    def swiglu() -> float:
        start = time.perf_counter()
        mlp[2](F.silu(mlp[0](hidden)) * mlp[1](hidden))
        return time.perf_counter() - start

    spent = turns({"swiglu": swiglu}, arguments.repeats)["swiglu"]
    console.print(f"the SwiGLU that the memory replaces (768 -> 2048 -> 768, float32): {1000 * spent:.1f} ms")

    table = Table("n", "slots", "read", "write", title="cost against n, rows of 128, milliseconds per 1,000 tokens")
    costs = []
    for n in (64, 128, 256, 512, 1024):
        own = {name: x for name, x in contenders(n, 128, tokens).items() if not name.startswith("plain")}
        costs.append(turns(own, arguments.repeats))
        table.add_row(str(n), f"{n * n:,}", f"{1000 * costs[-1]['read']:.1f}", f"{1000 * costs[-1]['write']:.1f}")
    console.print(table)
    for name in ("read", "write"):
        console.print(
            f"{name}: n grows 16 times, n * n 256 times, the cost {costs[-1][name] / costs[0][name]:.1f} times"
        )


if __name__ == "__main__":
    main()
