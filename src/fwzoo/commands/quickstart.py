"""`fwzoo quickstart`: the whole way from text to a model that generates, in a few minutes on a CPU."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from fwzoo.conversion.card import Measured, render_card
from fwzoo.training.baselines import ByteModel
from fwzoo.training.data import PackedRows, Texts, encode, load_tokenizer
from fwzoo.training.sample_text import pydoc_topics
from fwzoo.training.trainer import Outcome, RunError, Schedule, train

from .common import bad, empty_folder, quiet_transformers

ARCHITECTURE = "falcon3a"
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 384}
SEQUENCE_LENGTH = 256
PROMPT = "The following methods "
NEW_TOKENS = 120


def run(out: Path, steps: int, minutes: float, seed: int) -> None:
    """Train, compare with the baselines, save, load, generate and describe; exit code 1 if a promise is not kept."""
    quiet_transformers()
    console = Console()
    if not (out / "loss.json").exists():  # what an earlier quickstart wrote is replaced
        empty_folder("--out", out, "give another folder.")

    text = pydoc_topics()
    baselines = {
        name: ByteModel(text.train, order).bits_per_byte(text.held_out)
        for name, order in (("byte unigram", 1), ("byte bigram", 2))
    }
    tokenizer = load_tokenizer("bytes")
    set_seed(seed)
    config = AutoConfig.for_model(
        ARCHITECTURE, **SIZES, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model = AutoModelForCausalLM.from_config(config)
    console.print(
        f"{ARCHITECTURE}, {model.num_parameters():,} parameters, on {sum(map(len, text.train)):,} characters of "
        f"CPython's help topics; at most {steps} steps or {minutes:g} minutes",
        soft_wrap=True,
    )
    try:
        outcome = train(
            model,
            tokenizer,
            PackedRows(Texts(text.train), tokenizer, SEQUENCE_LENGTH, seed=seed),
            out,
            Schedule(
                steps=steps,
                minutes=minutes,
                batch_size=4,
                lr=4e-3,
                warmup=min(20, steps // 10),
                seed=seed,
                eval_every=max(1, steps // 4),
                log_every=max(1, min(10, steps // 10)),
            ),
            list(PackedRows(Texts(text.held_out), tokenizer, SEQUENCE_LENGTH)),
            console=console,
            lines=baselines,
        )
    except RunError as error:
        raise bad("quickstart", str(error)) from error
    if outcome.interrupted:
        console.print("stopped before the end; nothing to compare")
        raise typer.Exit(130)

    bits = outcome.metrics["eval_bits_per_byte"]
    results = Table("held-out text", "bits per byte", title="lower is better")
    for name, value in {**baselines, ARCHITECTURE: bits}.items():
        results.add_row(name, f"{value:.3f}")
    console.print(results)

    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    reloaded_tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = torch.from_numpy(encode(reloaded_tokenizer, PROMPT))[None]
    cached, uncached = (_greedy(loaded, prompt, use_cache) for use_cache in (True, False))
    sampled = loaded.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2 * NEW_TOKENS, do_sample=True, temperature=0.7
    )[0]
    for title, tokens in (("greedy, with the fast-weight cache", cached), ("sampled at temperature 0.7", sampled)):
        console.print(f"[bold]the saved and loaded model goes on, {title}:[/bold]")
        console.print(reloaded_tokenizer.decode(tokens, skip_special_tokens=True), markup=False, highlight=False)
    same = torch.equal(cached, uncached)
    console.print(f"the greedy text is the same without the cache: {'yes' if same else 'NO'}")

    (out / "README.md").write_text(_card(loaded, out, baselines, outcome, bits), encoding="utf-8")
    console.print(f"wrote {out}: model, tokenizer, README.md (model card), loss.json, loss.png", soft_wrap=True)
    fwzoo = "fwzoo" if shutil.which("fwzoo") else os.path.relpath(sys.argv[0])  # as a reader can type it
    hints = {
        f"{fwzoo} generate {out}": "type lines, the model goes on",
        f"{fwzoo} info {out}": "layers, parameters, bytes of memory",
        f"{fwzoo} train FILE.txt --out DIR": f"your own text; see `{fwzoo} train --help`",
        f"{fwzoo} archs": "what else there is",
    }
    width = max(map(len, hints))
    console.print("try next:")
    for command, effect in hints.items():
        console.print(f"  {command:{width}}  {effect}", soft_wrap=True, highlight=False)
    if bits >= baselines["byte bigram"]:
        console.print("the model does not beat the bigram baseline: train longer (--minutes, --steps)")
        raise typer.Exit(1)
    if not same:
        raise typer.Exit(1)


def _greedy(model: Any, prompt: torch.Tensor, use_cache: bool) -> torch.Tensor:
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
    )[0]


def _card(model: Any, out: Path, baselines: dict[str, float], outcome: Outcome, bits: float) -> str:
    results = Measured(
        "held-out topics",
        "bits per byte",
        {**baselines, f"{ARCHITECTURE} (this model)": bits},
        "The baselines are fitted on the same training text. The held-out text is whole topics the model has not seen.",
    )
    return render_card(
        model,
        str(out),
        title=f"A small byte-level {ARCHITECTURE}",
        about=f"Trained by `fwzoo quickstart` for {outcome.step} steps ({outcome.seconds:.0f} s) on the help topics that ship "
        "with CPython. It shows that the library works; it is too small and trained too briefly to be useful.",
        measured=[results],
        license="apache-2.0",
        language="en",
    )
