"""`fwzoo train`: train an architecture on text, with checkpoints that a run can go on from."""

import json
import os
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from fwzoo.training.data import Files, HubDataset, PackedRows, Row, Share, Source, SourceError, load_tokenizer
from fwzoo.training.trainer import RunError, Schedule, first_process, train

from .common import bad, blamed_on, empty_folder, known_architecture, make_config, quiet_transformers, read_config

OPTIONS_FILE = "training_options.json"
NEW_OPTIONS_FILE = "training_options.json.new"
CHANGEABLE = frozenset({"steps", "epochs", "eval_every", "save_every", "gradient_checkpointing", "report_to", "fsdp"})
"""What `--resume` may change; everything else is part of what the checkpoint means."""


@dataclass
class TrainOptions:
    """The options of a run, named as on the command line; they are saved with the run and read back by `--resume`."""

    out: str
    sources: list[str]
    dataset: str | None
    dataset_split: str
    text_column: str
    arch: str | None
    config: str | None
    hidden_size: int | None
    layers: int | None
    heads: int | None
    tokenizer: str
    steps: int | None
    epochs: float | None
    sequence_length: int
    batch_size: int
    gradient_accumulation: int
    lr: float
    warmup: int | None
    weight_decay: float
    seed: int
    eval_text: list[str]
    eval_fraction: float
    eval_rows: int
    eval_every: int | None
    save_every: int | None
    bf16: bool
    gradient_checkpointing: bool
    report_to: list[str] = field(default_factory=list)
    fsdp: bool = False

    def __post_init__(self) -> None:
        self.out = str(self.out)
        self.sources = [str(Path(path).resolve()) for path in self.sources]
        self.eval_text = [str(Path(path).resolve()) for path in self.eval_text]
        self.config = self.config and str(Path(self.config).resolve())


def run(context: typer.Context) -> None:
    """Train as the command line says, or go on with the run in `--out` as it was begun."""
    quiet_transformers()
    console = Console(quiet=not first_process())
    given = {field.name: context.params[field.name] for field in fields(TrainOptions)}
    resume = context.params["resume"]
    options = _resumed(context, given) if resume else TrainOptions(**given)
    out = Path(options.out)
    if not resume:
        otherwise = "give another folder, or --resume to go on with the run in it."
        empty_folder("--out", out, otherwise, but=frozenset({OPTIONS_FILE, NEW_OPTIONS_FILE}))

    with blamed_on("--tokenizer"):
        tokenizer = load_tokenizer(options.tokenizer)
    config = _config(options, tokenizer)
    source, held_out = _sources(options)
    rows = PackedRows(source, tokenizer, options.sequence_length, seed=options.seed)
    try:
        schedule = _schedule(options, rows)
        eval_rows: list[Row] = []
        if held_out is not None:
            eval_rows = list(islice(PackedRows(held_out, tokenizer, options.sequence_length), options.eval_rows))
        if held_out is not None and not eval_rows:
            raise bad("--eval-fraction or --eval-text", "no document is held out; give more documents or --eval-text.")
        set_seed(options.seed)
        with blamed_on("--config" if options.config else "--arch"):
            model = AutoModelForCausalLM.from_config(config)
        if first_process():
            out.mkdir(parents=True, exist_ok=True)
            _write_whole(out / OPTIONS_FILE, json.dumps(asdict(options), indent=2) + "\n")
        console.print(f"{config.model_type}, {model.num_parameters():,} parameters, {schedule.steps:,} steps")
        outcome = train(model, tokenizer, rows, out, schedule, eval_rows, resume=resume, console=console)
    except SourceError as error:
        raise bad("SOURCES", str(error)) from error
    except RunError as error:
        raise bad("--resume" if resume else "train", str(error)) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    if outcome.interrupted:
        console.print(f"saved {outcome.checkpoint}; go on with: fwzoo train --resume --out {out}", soft_wrap=True)
        raise typer.Exit(130)
    console.print(f"saved {out} after {outcome.step:,} steps; try: fwzoo generate {out}", soft_wrap=True)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that another process may read at this moment: it finds the old text or the new."""
    new = path.with_name(NEW_OPTIONS_FILE)
    new.write_text(text)
    new.replace(path)


def _resumed(context: typer.Context, given: dict[str, Any]) -> TrainOptions:
    path = Path(given["out"]) / OPTIONS_FILE
    try:
        saved = json.loads(path.read_text())
    except OSError as error:
        raise bad("--resume", f"--out {str(given['out'])!r} holds no run of `fwzoo train` to go on with.") from error
    begun = TrainOptions(**{**saved, "out": given["out"]})
    now = asdict(TrainOptions(**given))
    for name in now.keys() - {"out"}:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or now[name] == getattr(begun, name):
            continue
        if name not in CHANGEABLE:
            raise bad(
                f"--{name.replace('_', '-')}",
                f"the run was begun with {getattr(begun, name)!r}, not {now[name]!r}; --resume can change only "
                f"{', '.join('--' + option.replace('_', '-') for option in sorted(CHANGEABLE))}.",
            )
        setattr(begun, name, now[name])
        if name in ("steps", "epochs"):
            setattr(begun, "epochs" if name == "steps" else "steps", None)
    return begun


def _config(options: TrainOptions, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The model's config: a file or an architecture's defaults, with the sizes given and the tokenizer's tokens."""
    if options.arch and options.config:
        raise bad("--config", f"{options.config!r} and --arch {options.arch!r} exclude each other; give one.")
    overrides: dict[str, Any] = read_config("--config", Path(options.config)) if options.config else {}
    model_type = overrides.pop("model_type", options.arch or "falcon3a")
    known_architecture("--arch", model_type)
    sizes = {
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
    }
    overrides |= {name: value for name, value in sizes.items() if value is not None}
    overrides.setdefault("vocab_size", -(-len(tokenizer) // 64) * 64)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        overrides[name] = getattr(tokenizer, name)
    config = make_config("--config" if options.config else "--arch", model_type, overrides)
    if config.vocab_size < len(tokenizer):
        raise bad(
            "--config", f"vocab_size {config.vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens."
        )
    return config


def _sources(options: TrainOptions) -> tuple[Source, Source | None]:
    """The documents to train on and the ones held out, if any."""
    if bool(options.sources) == bool(options.dataset):
        raise bad("SOURCES", "give text files or --dataset NAME, one of the two.")
    source: Source
    try:
        if options.dataset:
            source = HubDataset(options.dataset, options.dataset_split, options.text_column)
        else:
            source = Files(tuple(options.sources), options.text_column)
    except SourceError as error:
        raise bad("--dataset" if options.dataset else "SOURCES", str(error)) from error
    if options.eval_text:
        if options.eval_fraction:
            raise bad("--eval-fraction", f"{options.eval_fraction} and --eval-text exclude each other; give one.")
        with blamed_on("--eval-text"):
            return source, Files(tuple(options.eval_text), options.text_column)
    if options.eval_fraction:
        nth = round(1 / options.eval_fraction)
        return Share(source, nth, held_out=False), Share(source, nth, held_out=True)
    return source, None


def _schedule(options: TrainOptions, rows: PackedRows) -> Schedule:
    if options.steps is not None and options.epochs is not None:
        raise bad("--epochs", f"{options.epochs} and --steps {options.steps} exclude each other; give one.")
    if options.epochs is not None:
        rows_a_step = options.batch_size * options.gradient_accumulation * int(os.environ.get("WORLD_SIZE", 1))
        steps = max(1, round(options.epochs * rows.count_rows() / rows_a_step))
    else:
        steps = options.steps or 1000
    warmup = min(2000, steps // 10) if options.warmup is None else options.warmup
    every = max(1, steps // 10)
    return Schedule(
        steps=steps,
        batch_size=options.batch_size,
        gradient_accumulation=options.gradient_accumulation,
        lr=options.lr,
        warmup=warmup,
        weight_decay=options.weight_decay,
        seed=options.seed,
        eval_every=every if options.eval_every is None else options.eval_every,
        save_every=every if options.save_every is None else options.save_every,
        log_every=max(1, min(10, steps // 20)),
        bf16=options.bf16,
        gradient_checkpointing=options.gradient_checkpointing,
        report_to=tuple(options.report_to),
        fsdp=options.fsdp,
    )
