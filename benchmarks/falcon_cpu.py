"""Falcon on a CPU: the chunk form beside the token loop, transformers' chunked gated delta rule and causal softmax attention.

Run: python benchmarks/falcon_cpu.py [--threads 2] [--repeats 7]

Prints medians and the ratios that matter; every line is measured in the same process, on the same shapes and threads.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fwzoo.kernels import falcon

RULES = ("falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a")


def inputs(rule: str, tokens: int, batch: int = 2, heads: int = 4, size: int = 64) -> tuple[Tensor, ...]:
    """q, k, v, beta, ridge for one rule, all requiring gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = (draw(batch, tokens, heads, size) for _ in range(3))
    columns = (size,) if rule.startswith("falcon2") else ()
    beta = 2 * draw(batch, tokens, heads, *columns).sigmoid()
    ridge = 0.3 * draw(batch, tokens, heads).sigmoid()
    return tuple(x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, ridge))


def run_falcon(rule: str, level: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """Output of one call."""
    return falcon(*tensors, rule=rule, level=level)[0]


def run_qwen(tensors: tuple[Tensor, ...]) -> Tensor:
    """transformers' torch chunked gated delta rule (Qwen3-Next)."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q, k, v, beta, ridge = tensors
    return qwen.torch_chunk_gated_delta_rule(q, k, v, g=-ridge, beta=beta / 2, use_qk_l2norm_in_kernel=True)[0]


def run_softmax(tensors: tuple[Tensor, ...]) -> Tensor:
    """torch's causal softmax attention."""
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` runs after one warm-up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def both(run: Callable[[tuple[Tensor, ...]], Tensor], tensors: tuple[Tensor, ...], repeats: int) -> tuple[float, float]:
    """Seconds of the forward pass without gradients, and of forward + backward."""
    upstream = torch.randn_like(run(tensors))

    def forward() -> None:
        with torch.no_grad():
            run(tensors)

    def forward_backward() -> None:
        torch.autograd.grad(run(tensors), list(tensors), upstream, allow_unused=True)

    return timed(forward, repeats), timed(forward_backward, repeats)


PEAK = """
import sys, torch
sys.path.insert(0, {root!r})
from benchmarks.falcon_cpu import inputs, run_falcon
def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
torch.set_num_threads(2)
run_falcon({rule!r}, "chunk", inputs({rule!r}, 64)).sum().backward()
tensors = inputs({rule!r}, {tokens})
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
run_falcon({rule!r}, "chunk", tensors).sum().backward()
print(status("VmHWM") - base)
"""


def peak_memory(rule: str, tokens: int) -> float:
    """MiB that one forward + backward adds to the resident memory of a process of its own (Linux)."""
    code = PEAK.format(root=str(Path(__file__).parents[1]), rule=rule, tokens=tokens)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console(width=120)
    console.print(
        f"torch {torch.__version__}, {args.threads} threads, B2 H4 K64 V64 T{args.tokens}, float32, window 4; medians in ms"
    )

    shared = inputs("falcon1", args.tokens)
    qwen = both(run_qwen, shared, args.repeats)
    softmax = both(run_softmax, shared, args.repeats)
    chunk = {
        rule: both(lambda t, r=rule: run_falcon(r, "chunk", t), inputs(rule, args.tokens), args.repeats)
        for rule in RULES
    }
    loop = {
        rule: both(
            lambda t, r=rule: run_falcon(r, "reference", t), inputs(rule, args.tokens), max(1, args.repeats // 4)
        )
        for rule in RULES
    }
    table = Table(
        "operator",
        "forward",
        "fwd+bwd",
        "token loop fwd",
        "fwd+bwd",
        "loop/chunk fwd+bwd",
        "of Qwen3-Next fwd+bwd",
        "of falcon1",
    )
    for name, pair in (("Qwen3-Next gated delta", qwen), ("softmax attention", softmax)):
        table.add_row(name, f"{pair[0] * 1e3:.1f}", f"{pair[1] * 1e3:.1f}", "", "", "", f"{pair[1] / qwen[1]:.2f}", "")
    for rule in RULES:
        ours, reference = chunk[rule], loop[rule]
        table.add_row(
            rule,
            f"{ours[0] * 1e3:.1f}",
            f"{ours[1] * 1e3:.1f}",
            f"{reference[0] * 1e3:.0f}",
            f"{reference[1] * 1e3:.0f}",
            f"{reference[1] / ours[1]:.1f}",
            f"{ours[1] / qwen[1]:.2f}",
            f"{ours[1] / chunk['falcon1'][1]:.2f}",
        )
    console.print(table)

    gc.collect()
    table = Table("T", *RULES, title="loop / chunk, fwd+bwd")
    for tokens in (64, 128, 256):
        ratios = []
        for rule in RULES:
            tensors = inputs(rule, tokens)
            slow = both(lambda t, r=rule: run_falcon(r, "reference", t), tensors, args.repeats)[1]
            fast = both(lambda t, r=rule: run_falcon(r, "chunk", t), tensors, args.repeats)[1]
            ratios.append(f"{slow / fast:.1f}")
        table.add_row(str(tokens), *ratios)
    console.print(table)

    if not args.no_memory:
        table = Table("rule", "T 4,096", "T 16,384", "ratio", title="peak memory of fwd+bwd, MiB")
        for rule in RULES:
            short, long = peak_memory(rule, 4096), peak_memory(rule, 16384)
            table.add_row(rule, f"{short:.0f}", f"{long:.0f}", f"{long / short:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
