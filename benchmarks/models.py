"""Training and decoding speed of whole models on one GPU, beside transformers' Llama and fla's Gated DeltaNet.

Every model has 12 layers of width 768, vocabulary 32,000 and tied embeddings, about 110 to 125 M parameters. Training
is forward, backward and a fused AdamW step in bf16 autocast over float32 weights, 32,768 tokens a step; decoding is
`generate` in bf16 at batch 1. All models are measured in one run, one after another; figures are medians.

    python benchmarks/models.py --models llama falcon1a falcon3a --tokens 1024 8192 --json models.json
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

import torch
import transformers

from fwzoo import FwzooConfig
from fwzoo.registry import architectures

VOCABULARY, WIDTH, LAYERS, TOKENS_A_STEP = 32000, 768, 12, 32768
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}


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


def train(name: str, tokens: int, *, compiled: bool, steps: int) -> dict[str, float]:
    """Tokens a second of training on sequences of `tokens` tokens, and the peak memory."""
    torch.manual_seed(0)
    model = build(name).cuda().train()
    size = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
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
    seconds = timed(step, steps)
    return {
        "parameters": size,
        "tokens_per_second": TOKENS_A_STEP / seconds,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "first_steps_s": first,
    }


def timed(step: Callable[[int], None], steps: int) -> float:
    """Median seconds of a step, each measured between device synchronisations."""
    seconds = []
    for i in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(i)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def decode(name: str, new_tokens: int, prompt: int) -> dict[str, float]:
    """Tokens a second of `generate` at batch 1 in bf16, prompt and all, and milliseconds a token."""
    torch.manual_seed(0)
    model = build(name).cuda().bfloat16().eval()
    ids = torch.randint(VOCABULARY, (1, prompt), device="cuda")
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, **{**options, "max_new_tokens": 4, "min_new_tokens": 4})
    seconds = timed(lambda i: model.generate(ids, **options), 3)
    return {"tokens_per_second": new_tokens / seconds, "ms_per_token": 1000 * seconds / new_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["llama", "fla-gated-deltanet", *architectures()])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 8192], help="training lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="also train without torch.compile")
    parser.add_argument("--new-tokens", type=int, default=128, help="0: do not decode")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    jobs: list[tuple[str, str, Callable[[], dict[str, float]]]] = []
    for name in options.models:
        for tokens in options.tokens:
            for compiled in (True, False) if options.eager else (True,):
                how = f"train T={tokens} {'compiled' if compiled else 'eager'}"
                jobs.append(
                    (name, how, lambda n=name, t=tokens, c=compiled: train(n, t, compiled=c, steps=options.steps))
                )
        if options.new_tokens:
            jobs.append(
                (name, f"generate after {options.prompt}", lambda n=name: decode(n, options.new_tokens, options.prompt))
            )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name, what, job in jobs:
        try:
            row = {"model": name, "what": what, **job()}
        except Exception as error:  # one model that fails must not lose the others' figures
            traceback.print_exc()
            row = {"model": name, "what": what, "error": str(error)[:200]}
        rows.append(row)
        against = [
            r for r in rows if r["what"] == what and r["model"] in ("llama", "fla-gated-deltanet") and "error" not in r
        ]
        ratios = "".join(
            f"  {row.get('tokens_per_second', 0) / r['tokens_per_second']:.2f}x {r['model']}" for r in against
        )
        figures = "  ".join(f"{k} {v:,.1f}" for k, v in row.items() if isinstance(v, (int, float)))
        print(f"{name:20} {what:24} {figures or row.get('error')}{ratios}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
