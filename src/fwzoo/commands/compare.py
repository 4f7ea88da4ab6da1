"""`fwzoo compare`: layouts trained under one budget on the user's text, as table, figure and JSON."""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from fwzoo.evaluation.compare import Result, plot, run_one, schedule_for, split_documents, summary
from fwzoo.evaluation.experiment import Mismatch, match_parameters
from fwzoo.training.data import Files, PackedRows, SourceError, Texts, load_tokenizer
from fwzoo.training.sample_text import pydoc_topics
from fwzoo.training.trainer import RunError, loss_unit

from .common import bad, blamed_on, empty_folder, layout_config, quiet_transformers, short, versions

OPTIONS_FILE = "compare_options.json"
SIZES = {"hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}


def run(
    sources: list[str],
    layouts: list[str],
    out: Path,
    sizes: dict[str, int],
    steps: int,
    sequence_length: int,
    batch_size: int,
    lr: float,
    seeds: int,
    contexts: list[int],
    tokenizer_name: str,
    eval_rows: int,
) -> None:
    """Train every layout with every seed, or go on where an earlier call with the same options stopped, and report."""
    quiet_transformers()
    console = Console()
    options = {
        "text": [str(Path(path).resolve()) for path in sources],
        "layout": layouts,
        **sizes,
        "steps": steps,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "lr": lr,
        "seeds": seeds,
        "context": contexts,
        "tokenizer": tokenizer_name,
        "eval_rows": eval_rows,
    }
    if len(set(layouts)) < len(layouts):
        raise bad("--layout", f"{layouts} names a layout twice; allowed is each one once.")
    with blamed_on("--tokenizer"):
        tokenizer = load_tokenizer(tokenizer_name)
    texts, held_out = _texts(sources)
    rows = list(islice(PackedRows(Texts(held_out), tokenizer, sequence_length), eval_rows))
    if not texts or not rows:
        raise bad("TEXT", f"{sources} holds too little text; allowed is text of which a tenth can be held out.")
    fields = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields |= {SIZES[name]: size for name, size in sizes.items()}
    fields["vocab_size"] = -(-len(tokenizer) // 64) * 64
    configs = [layout_config("--layout", name, **fields) for name in layouts]
    try:
        counts = match_parameters(configs, layouts)
    except Mismatch as error:
        raise bad("--layout", str(error)) from error
    digest = hashlib.sha256("\0".join([*texts, *held_out]).encode("utf-8", errors="replace")).hexdigest()
    _begin(out, {**options, "text_sha256": digest})

    tokens = steps * batch_size * sequence_length
    console.print(
        f"{len(layouts)} layouts, {min(counts):,} to {max(counts):,} parameters, {seeds} seed{'s' * (seeds > 1)}, "
        f"{tokens:,} tokens each, {sum(map(len, texts)):,} characters of text",
        soft_wrap=True,
    )
    results: list[Result] = []
    every = [(name, config, seed) for seed in range(seeds) for name, config in zip(layouts, configs, strict=True)]
    for i, (name, config, seed) in enumerate(every):
        console.print(f"[bold]{i + 1}/{len(every)}[/bold] {name}, seed {seed}", highlight=False)
        folder = out / f"{_file_name(name)}-seed{seed}"
        schedule = schedule_for(steps, batch_size, lr, seed)
        try:
            result = run_one(
                name, config, seed, folder, tokenizer, texts, rows, sequence_length, schedule, contexts, console
            )
        except (RunError, SourceError) as error:
            raise bad("compare", str(error)) from error
        if result is None:
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130)
        results.append(result)
    _report(console, out, options, results, loss_unit(tokenizer))


def _texts(sources: list[str]) -> tuple[list[str], list[str]]:
    """Text to train on and text held out: of the files given, or the sample text."""
    if not sources:
        sample = pydoc_topics()
        return sample.train, sample.held_out
    try:
        return split_documents(["".join(pieces) for pieces in Files(tuple(sources)).documents()])
    except SourceError as error:
        raise bad("TEXT", str(error)) from error


def _file_name(layout: str) -> str:
    return "".join(c if c.isalnum() or c in "-_@" else "_" for c in layout)


def _begin(out: Path, options: dict[str, Any]) -> None:
    """Keep the options of a comparison with it; a usage error when it was begun with others."""
    path = out / OPTIONS_FILE
    if not path.is_file():
        empty_folder("--out", out, "allowed is a new or empty folder, or that of the same comparison.")
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    if begun["text"] == options["text"] and begun["text_sha256"] != options["text_sha256"]:
        raise bad("TEXT", f"the text is not what the comparison in {str(out)!r} was begun with; give another --out.")
    for name, value in options.items():
        if begun.get(name) != value:
            raise bad(
                "TEXT" if name == "text" else f"--{name.replace('_', '-')}",
                f"{value!r} is not what the comparison in {str(out)!r} was begun with, {begun.get(name)!r}; give "
                "another --out, or the same options to go on with it.",
            )


def _report(console: Console, out: Path, options: dict[str, Any], results: list[Result], unit: str) -> None:
    rows = summary(results)
    found = {"options": options, "unit": unit, "versions": versions(), "layouts": rows}
    (out / "compare.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    label = unit.replace("_", " ")
    table = Table(title=f"losses in {label}, lower is better; @N: bytes of state after N tokens")
    table.add_column("layout", no_wrap=True)
    contexts = list(rows[0]["state_bytes"])
    for heading in ("size", "train", "valid", *(f"@{t}" for t in contexts), "tok/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = f" ± {row['validation_deviation']:.3f}" if options["seeds"] > 1 else ""
        table.add_row(
            row["layout"],
            short(row["parameters"]),
            f"{row['train_loss']:.3f}",
            f"{row['validation_loss']:.3f}{spread}",
            *(short(row["state_bytes"][t]) for t in contexts),
            short(row["tokens_a_second"]),
        )
    console.print(table)
    drawn = plot(out / "compare.png", rows, label)
    console.print(f"wrote {out / 'compare.json'}" + (f", {out / 'compare.png'}" if drawn else ""), soft_wrap=True)
    console.print(versions())
