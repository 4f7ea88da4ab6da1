"""Loss of a small LaCT model with Muon over 200 steps: the GPU level in bf16 beside the chunk level in float32 and bf16.

Run: python benchmarks/lact_muon_curve.py [--text FILE ...] [--steps 200] [--out runs/lact-curve]

Newton-Schulz amplifies rounding, so single numbers of two levels differ; what has to agree is how a model learns. Same weights,
same batches of bytes (by default of this repository's documentation); the spread between two seeds says what a difference is worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import fwzoo

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("model_cards/*.md"))]
BATCH, TOKENS = 8, 1024


def losses(text: torch.Tensor, level: str, dtype: torch.dtype, steps: int, seed: int) -> list[float]:
    """Training loss of every step, nats a byte."""
    torch.manual_seed(seed)
    config = fwzoo.LactConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, head_dim=64, num_lact_heads=2, lact_chunk_size=128,
        lact_window=64, lact_muon=True, lact_momentum=True, kernel_level=level,
    )  # fmt: skip
    model = fwzoo.LactForCausalLM(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20)
        starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=draw)
        ids = torch.stack([text[start : start + TOKENS] for start in starts]).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach())
        if step % 50 == 49:
            print(f"{level}, {dtype}, step {step + 1}: loss {loss.item():.3f}", flush=True)
    return torch.stack(found).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, nargs="*", default=TEXTS)
    parser.add_argument("--runs", nargs="*", help="names of runs, None for all")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/lact-curve"))
    args = parser.parse_args()
    text = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in args.text)), dtype=torch.uint8).long()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {
        "triton, bf16": ("triton", torch.bfloat16, 0),
        "chunk, bf16 inputs": ("chunk", torch.bfloat16, 0),
        "chunk, float32": ("chunk", torch.float32, 0),
        "triton, bf16, seed 1": ("triton", torch.bfloat16, 1),
    }
    curves: dict[str, list[float]] = {}
    for name, run in runs.items():
        if args.runs and name not in args.runs:
            continue
        level, dtype, seed = run
        curves[name] = losses(text, level, dtype, args.steps, seed)
        tenths = [sum(part) / len(part) for part in zip(*[iter(curves[name])] * max(1, args.steps // 10), strict=False)]
        print(f"{name}: {' '.join(f'{x:.3f}' for x in tenths)}", flush=True)
        (args.out / "curve.json").write_text(json.dumps(curves, indent=1))


if __name__ == "__main__":
    main()
