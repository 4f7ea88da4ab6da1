"""Training and decoding speed of whole models on one GPU, beside transformers' Llama and fla's Gated DeltaNet.

Every model has 12 layers of width 768, vocabulary 32,000 and tied embeddings, about 110 to 125 M parameters. Training
is forward, backward and a fused AdamW step in bf16 autocast over float32 weights, 32,768 tokens a step, under torch.compile and,
with --eager or where a peer may be faster so, without; decoding is `generate` in bf16 at batch 1. All models are measured in one
run, one after another; figures are medians. Everything is compiled on all cores before it is timed.

    python benchmarks/models.py --models llama fla-gated-deltanet falcon1a falcon3a --out runs/models
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import transformers

from fwzoo import FwzooConfig
from fwzoo.registry import architectures

VOCABULARY, WIDTH, LAYERS, TOKENS_A_STEP = 32000, 768, 12, 32768
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
PEERS = ("llama", "fla-gated-deltanet")
BARS = {"train T=1024": ("llama", 0.95), "train T=8192": ("fla-gated-deltanet", 1.4), "generate": ("llama", 8.0)}
"""What a model of the zoo should reach, in tokens a second of a peer's fastest way."""


def build(name: str) -> torch.nn.Module:
    """A peer by its name, or a model of the zoo by its layout."""
    if name == "llama":
        config = transformers.LlamaConfig(
            **SIZES,
            intermediate_size=2048,
            num_attention_heads=12,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
        )
        return transformers.LlamaForCausalLM(config)
    if name == "fla-gated-deltanet":
        from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

        config = GatedDeltaNetConfig(
            **SIZES, intermediate_size=2048, num_heads=6, head_dim=128, expand_v=1, tie_word_embeddings=True
        )
        return GatedDeltaNetForCausalLM(config)
    config = FwzooConfig.from_layout(name, **SIZES, num_attention_heads=6, head_dim=128)
    return transformers.AutoModelForCausalLM.from_config(config)


def train(name: str, tokens: int, *, compiled: bool, steps: int, profile: Path | None = None) -> dict[str, float]:
    """Tokens a second of training on sequences of `tokens` tokens, and the peak memory. No steps: only compile."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(name).train()
    size = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch._dynamo.utils.counters.clear()
    run = torch.compile(model) if compiled else model
    batches = [torch.randint(VOCABULARY, (TOKENS_A_STEP // tokens, tokens), device="cuda") for _ in range(2)]
    torch.cuda.reset_peak_memory_stats()

    def step(i: int) -> None:
        ids = batches[i % 2]
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    for i in range(2):
        step(i)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    if not steps:
        return {"first_steps_s": first}
    for i in range(3):
        step(i)
    seconds = timed(step, steps)
    if profile is not None:
        kernels_of(lambda: step(0), profile)
    return {
        "parameters": size,
        "tokens_per_second": TOKENS_A_STEP / seconds,
        "ms_per_step": 1000 * seconds,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "first_steps_s": first,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }


def timed(step: Callable[[int], object], steps: int) -> float:
    """Median seconds of a step, each measured between device synchronisations."""
    seconds = []
    for i in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(i)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def kernels_of(call: Callable[[], object], path: Path) -> None:
    """Write the device time of every kernel of a call, the slowest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    rows = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    rows.sort(key=lambda x: -x.self_device_time_total)
    lines = [f"{x.self_device_time_total / 1000:9.3f} ms {x.count:5d}  {x.key[:150]}" for x in rows]
    total = sum(x.self_device_time_total for x in rows) / 1000
    path.write_text("\n".join([f"{total:9.3f} ms in all", *lines]) + "\n")


def decode(name: str, new_tokens: int, prompt: int, profile: Path | None = None) -> dict[str, float]:
    """Tokens a second of `generate` at batch 1 in bf16, prompt and all, and milliseconds a token."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(name).bfloat16().eval()
    ids = torch.randint(VOCABULARY, (1, prompt), device="cuda")
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, **{**options, "max_new_tokens": 4, "min_new_tokens": 4})
    seconds = timed(lambda i: model.generate(ids, **options), 3)
    if profile is not None:
        kernels_of(lambda: model.generate(ids, **{**options, "max_new_tokens": 32, "min_new_tokens": 32}), profile)
    return {"tokens_per_second": new_tokens / seconds, "ms_per_token": 1000 * seconds / new_tokens}


def jobs_of(options: argparse.Namespace) -> list[tuple[str, str, Callable[[], dict[str, float]]]]:
    """Model, what is measured of it, and how."""

    def path(*words: Any) -> Path | None:
        return options.out / ("-".join(map(str, words)) + ".txt") if options.profile else None

    jobs: list[tuple[str, str, Callable[[], dict[str, float]]]] = []
    for name in options.models:
        ways = (True, False) if options.eager or name.startswith("fla") else (True,)
        for tokens in options.tokens:
            for compiled in ways:
                how = f"train T={tokens} {'compiled' if compiled else 'eager'}"
                call = lambda n=name, t=tokens, c=compiled: train(  # noqa: E731
                    n, t, compiled=c, steps=options.steps, profile=path(n, t, "compiled" if c else "eager")
                )
                jobs.append((name, how, call))
        if options.new_tokens and not name.startswith("fla"):
            call = lambda n=name: decode(n, options.new_tokens, options.prompt, path(n, "generate"))  # noqa: E731
            jobs.append((name, f"generate {options.new_tokens}", call))
    return jobs


def compile_all(options: argparse.Namespace) -> None:
    """Every training step twice in a process of its own, all at once; the peer's configurations on all cores."""
    start = time.perf_counter()
    calls = [["--compile", "--models", n, "--tokens", str(t)] for n in options.models for t in options.tokens]
    own = [call for call in calls if not call[2].startswith("fla")]
    peers.compile_on_all_cores(__file__, own, [call for call in calls if call[2].startswith("fla")][:1])
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The ratio to the peers' fastest way of the same, and whether it is enough."""
    found = []
    for task, (peer, bar) in BARS.items():
        if not row["what"].startswith(task) or row["model"] in PEERS or "error" in row:
            continue
        best = max(
            (
                r["tokens_per_second"]
                for r in rows
                if r["model"] == peer and r["what"].startswith(task) and "error" not in r
            ),
            default=None,
        )
        if best is not None:
            row[f"of {peer}"] = row["tokens_per_second"] / best
            verdict = "ok" if row[f"of {peer}"] >= bar else "MISSED"
            found.append(f"  {row[f'of {peer}']:.2f}x {peer} (at least {bar}: {verdict})")
    return "".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*PEERS, *architectures()])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 8192], help="training lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="also train without torch.compile")
    parser.add_argument("--new-tokens", type=int, default=512, help="0: do not decode")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="write the kernels of a step and of 32 tokens")
    parser.add_argument("--compile", action="store_true", help="run the training steps twice each, which compiles them")
    parser.add_argument("--no-compile", action="store_true", help="do not compile on all cores first")
    parser.add_argument("--out", type=Path, default=Path("runs/models"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if peers.installed() and any(name.startswith("fla") for name in options.models):
        peers.without_guard()
        peers.prepare_autotuning()
    if options.compile:
        for name in options.models:
            for tokens in options.tokens:
                train(name, tokens, compiled=not name.startswith("fla"), steps=0)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.no_compile:
        compile_all(options)
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, what, job in jobs_of(options):
        try:
            row = {"model": name, "what": what, **job()}
        except Exception as error:  # one model that fails must not lose the others' figures
            traceback.print_exc()
            row = {"model": name, "what": what, "error": str(error)[:200]}
        rows.append(row)
        ratios = compared(row, rows)
        figures = "  ".join(f"{k} {v:,.1f}" for k, v in row.items() if isinstance(v, (int, float)))
        print(f"{name:20} {what:24} {figures or row.get('error')}{ratios}", flush=True)
        (options.out / "models.json").write_text(json.dumps(rows, indent=1))
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
