"""Training and decoding speed of whole models on one GPU, beside transformers' Llama and fla's Gated DeltaNet.

Every model has 12 layers of width 768, vocabulary 32,000 and tied embeddings, about 110 to 125 M parameters. Training
is forward, backward and a fused AdamW step in bf16 autocast over float32 weights, 32,768 tokens a step, under torch.compile and,
with --eager or where a peer may be faster so, without; decoding is `generate` in bf16 at batch 1. Figures are medians.

Every measurement has a process of its own. All of them compile at the same time; then, when all are ready, they measure one after
another, while the others wait.

    python benchmarks/models.py --models llama fla-gated-deltanet falcon1a falcon3a --out runs/models

What a memory costs: training beside the same layout without it, and decoding after a long context beside a short one.

    python benchmarks/models.py --models gdn gdn+fwpkm@2,6,10 --tokens 4096 --new-tokens 0 --contexts 1024 131072 --eager
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import torch._dynamo
import transformers

from fwzoo import FwzooConfig
from fwzoo.registry import architectures

VOCABULARY, WIDTH, LAYERS, TOKENS_A_STEP = 32000, 768, 12, 32768
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
PEERS = ("llama", "fla-gated-deltanet")
TOGETHER = 5  # models that are prepared for training at the same time: each takes some 20 GiB
MAYBE_EAGER = ("fla-gated-deltanet",)  # whose kernels torch.compile does not see into
READY = "ready"
BARS = {"train T=1024": ("llama", 0.95), "train T=8192": ("fla-gated-deltanet", 1.4), "generate": ("llama", 8.0)}
"""What a model of the zoo should reach, in tokens a second of a peer's fastest way."""
WITH_A_MEMORY = 0.8
"""Likewise what a layout with a memory should reach in training, of the same way without it."""
AFTER_A_LONG_CONTEXT = 1.1
"""Most that a token may take after the longest of the contexts, in times of after the shortest."""


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


Measure = Callable[[], dict[str, float]]


def train(name: str, tokens: int, compiled: bool, options: argparse.Namespace) -> Measure:
    """Two steps on sequences of `tokens` tokens, which compile the model; what is returned measures its tokens a second."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model
    batch = 2 if peers.SHARE in os.environ else TOKENS_A_STEP // tokens
    batches = [torch.randint(VOCABULARY, (batch, tokens), device="cuda") for _ in range(2)]

    def step(i: int) -> None:
        ids = batches[i % 2]
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    for i in range(2):
        patiently(lambda i=i: step(i))
    torch.cuda.synchronize()
    first = time.perf_counter() - start

    def measure() -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats()
        for i in range(3):
            step(i)
        seconds = timed(step, options.steps)
        if options.profile:
            kernels_of(lambda: step(0), options.out / f"{name}-{tokens}-{'compiled' if compiled else 'eager'}.txt")
        return {
            "parameters": sum(x.numel() for x in model.parameters()),
            "tokens_per_second": TOKENS_A_STEP / seconds,
            "ms_per_step": 1000 * seconds,
            "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
            "first_steps_s": first,
            "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        }

    return measure


def patiently(step: Callable[[], object]) -> None:
    """Run a step; other measurements prepare at the same time and may hold the card's memory for now."""
    for _ in range(60):
        try:
            step()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(2)
        else:
            return
    raise RuntimeError("the card has too little memory for the models that are measured together; name fewer --models")


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


def decode(name: str, options: argparse.Namespace) -> Measure:
    """A short `generate`; what is returned measures tokens a second at batch 1 in bf16, prompt and all."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(name).bfloat16().eval()
    ids = torch.randint(VOCABULARY, (1, options.prompt), device="cuda")

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    generate(4)

    def measure() -> dict[str, float]:
        generate(16)
        seconds = timed(lambda i: generate(options.new_tokens), 3)
        if options.profile:
            kernels_of(lambda: generate(32), options.out / f"{name}-generate.txt")
        return {
            "tokens_per_second": options.new_tokens / seconds,
            "ms_per_token": 1000 * seconds / options.new_tokens,
        }

    return measure


def decode_after(name: str, context: int, options: argparse.Namespace) -> Measure:
    """What is returned measures the time of a token that follows `context` others, without that of reading these."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build(name).bfloat16().eval()
    ids = torch.randint(VOCABULARY, (1, context), device="cuda")
    few, many = 16, 16 + options.after

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def measure() -> dict[str, float]:
        generate(few)
        seconds = [timed(lambda i, tokens=tokens: generate(tokens), 2) for tokens in (few, many)]
        if options.profile:
            kernels_of(lambda: generate(64), options.out / f"{name}-after-{context}.txt")
        return {"ms_per_token": 1000 * (seconds[1] - seconds[0]) / (many - few), "ms_context": 1000 * seconds[0]}

    generate(few)
    return measure


def tasks_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Model and what is measured of it ("train T=1024 compiled", "generate 512"); of a peer only what others are compared with."""
    tasks: list[tuple[str, str]] = []
    for name in options.models:
        ways = ("compiled", "eager") if options.eager or name in MAYBE_EAGER else ("compiled",)
        tasks += [(name, f"train T={tokens} {way}") for tokens in options.tokens for way in ways]
        if options.new_tokens and name not in MAYBE_EAGER:
            tasks.append((name, f"generate {options.new_tokens}"))
        tasks += [(name, f"decode after {context}") for context in options.contexts]
    needed = {(peer, task) for task, (peer, _) in BARS.items()}
    return [
        (name, what)
        for name, what in tasks
        if name not in PEERS or any(name == peer and what.startswith(task) for peer, task in needed)
    ]


def work(name: str, what: str, options: argparse.Namespace) -> None:
    """One measurement, in its process: prepare, say so, wait for a line, measure, print the figures as JSON."""
    answers = os.fdopen(os.dup(1), "w")  # and what anything else prints goes to the log
    os.dup2(2, 1)
    kind, *words = what.split()
    if kind == "train":
        with peers.turn(TOGETHER):
            measure = train(name, int(words[0].removeprefix("T=")), words[1] == "compiled", options)
    elif kind == "decode":
        measure = decode_after(name, int(words[1]), options)
    else:
        measure = decode(name, options)
    if peers.SHARE in os.environ:
        return
    gc.collect()
    torch.cuda.empty_cache()
    print(READY, file=answers, flush=True)
    sys.stdin.readline()
    print(json.dumps(measure()), file=answers, flush=True)


class Worker:
    """A process that does `work`."""

    def __init__(self, name: str, what: str, options: argparse.Namespace) -> None:
        self.name, self.what = name, what
        self._log = options.out / f"{name}-{what.replace(' ', '-')}.log"
        arguments = ["--models", name, "--work", what, "--out", str(options.out), "--steps", str(options.steps)]
        arguments += ["--new-tokens", str(options.new_tokens), "--prompt", str(options.prompt)]
        arguments += ["--after", str(options.after)]
        arguments += ["--profile"] if options.profile else []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log.open("w"), "text": True}
        self._process = peers.start(__file__, arguments, **pipes)

    def ready(self, until: float) -> bool:
        """Wait until it can measure; False when it never will, or not before `until`."""
        output = self._process.stdout
        assert output is not None
        while select.select([output], [], [], max(0.0, until - time.perf_counter()))[0]:
            line = output.readline()
            if line.strip() == READY or not line:
                return bool(line)
        self._process.kill()
        return False

    def measure(self) -> dict[str, float]:
        """Its figures."""
        found, _ = self._process.communicate("go\n")
        return json.loads(found.strip().splitlines()[-1])

    def failure(self) -> str:
        """The last line that it said."""
        lines = self._log.read_text().strip().splitlines()
        return lines[-1][:200] if lines else "it was not ready in time"


def prepare(options: argparse.Namespace) -> list[Worker]:
    """Start every measurement and wait until it can begin; the peer's configurations are compiled on all cores first."""
    begin = time.perf_counter()
    tasks = tasks_of(options)
    workers = {task: Worker(*task, options) for task in tasks if task[0] not in MAYBE_EAGER}
    if theirs := [task for task in tasks if task[0] in MAYBE_EAGER]:
        share = ["--models", theirs[0][0], "--work", "train T=1024 eager"]
        peers.compile_on_all_cores(__file__, [], [share], options.shares, options.patience / 2)
        print(f"configurations compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        workers |= {task: Worker(*task, options) for task in theirs}
    able = [workers[task] for task in tasks if workers[task].ready(begin + options.patience)]
    for name, what in tasks:
        if (worker := workers[name, what]) not in able:
            print(f"{name:20} {what:24} failed: {worker.failure()}", flush=True)
    print(f"ready in {time.perf_counter() - begin:.0f} s", flush=True)
    return able


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The ratio to the peer's fastest way of the same, and whether it is enough."""
    for task, (peer, bar) in BARS.items():
        mine = row["what"].startswith(task) and row["model"] not in PEERS
        theirs = [r["tokens_per_second"] for r in rows if r["model"] == peer and r["what"].startswith(task)]
        if mine and theirs:
            ratio = row[f"of {peer}"] = row["tokens_per_second"] / max(theirs)
            return f"  {ratio:.2f}x {peer} (at least {bar}: {'ok' if ratio >= bar else 'MISSED'})"
    base, _, memory = row["model"].partition("+")
    for other in rows[:-1]:
        if memory and other["model"] == base and other["what"] == row["what"] and "tokens_per_second" in row:
            ratio = row[f"of {base}"] = row["tokens_per_second"] / other["tokens_per_second"]
            verdict = "ok" if ratio >= WITH_A_MEMORY else "MISSED"
            return f"  {ratio:.2f}x {base} (at least {WITH_A_MEMORY}: {verdict})"
        if row["what"].startswith("decode after") and other["model"] == row["model"] and "ms_context" in other:
            ratio = row[f"of {other['what']}"] = row["ms_per_token"] / other["ms_per_token"]
            verdict = "ok" if ratio <= AFTER_A_LONG_CONTEXT else "MISSED"
            return f"  {ratio:.2f}x {other['what']} (at most {AFTER_A_LONG_CONTEXT}: {verdict})"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*PEERS, *architectures()])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 8192], help="training lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="also train without torch.compile")
    parser.add_argument("--new-tokens", type=int, default=512, help="0: do not decode")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument(
        "--contexts", nargs="*", type=int, default=[], help="time a token after contexts of so many, the shortest first"
    )
    parser.add_argument("--after", type=int, default=512, help="tokens that are timed after a context")
    parser.add_argument("--profile", action="store_true", help="write the kernels of a step and of 32 tokens")
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds after which what is not compiled is left out"
    )
    parser.add_argument("--shares", type=int, help="processes that compile the peer's configurations")
    parser.add_argument("--fewer", action="store_true", help="leave out the peer's configurations of four stages")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/models"))
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.work:
        if options.models[0] in MAYBE_EAGER:
            peers.without_guard()
            peers.prepare_autotuning()  # with what the first process said of fewer
        work(options.models[0], options.work, options)
        return
    if not peers.installed():
        print("flash-linear-attention is not installed: its model is left out")
        options.models = [name for name in options.models if name not in MAYBE_EAGER]
    if options.fewer:
        os.environ[peers.FEWER] = "1"
        print("flash-linear-attention without its configurations of four pipeline stages")
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}",
        flush=True,
    )
    with peers.preparing():
        workers = prepare(options)
    with peers.measuring():
        for worker in workers:
            try:
                row = {"model": worker.name, "what": worker.what, **worker.measure()}
            except (IndexError, ValueError):  # it failed: the others go on
                print(f"{worker.name:20} {worker.what:24} failed: {worker.failure()}", flush=True)
                continue
            rows.append(row)
            ratios = compared(row, rows)
            figures = "  ".join(f"{k} {v:,.1f}" for k, v in row.items() if isinstance(v, (int, float)))
            print(f"{worker.name:20} {worker.what:24} {figures}{ratios}", flush=True)
            (options.out / "models.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
