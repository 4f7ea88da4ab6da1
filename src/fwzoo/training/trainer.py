"""A run of transformers' Trainer on packed rows: exact evaluation, checkpoints, interruption and resumption."""

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from .curve import write_curve
from .data import BYTE_OFFSET, IGNORED_LABEL, PackedRows, Place, Row, SourceError, collate
from .health import MemoryHealthCallback, plot_health
from .interrupt import DeferredInterrupt

PLACE_FILE = "data_place.safetensors"
PROBE_TOKENS = 256
REPORTS = ("tensorboard", "trackio")


@dataclass(frozen=True)
class Schedule:
    """How long a run is and how it steps.

    Attributes:
        steps: optimiser steps.
        minutes: stop after this wall-clock time even if steps are left; the learning rate then falls with the time. A
            run that the time ends is not reproducible.
        batch_size: rows a forward pass; `gradient_accumulation` passes make a step.
        lr: peak learning rate, reached after `warmup` steps, then along a cosine to a tenth of it.
        eval_every, save_every: in steps; 0 is never (a finished or interrupted run saves anyway).
        report_to: where the numbers go too: "tensorboard" (in the folder `runs`), "trackio".
        fsdp: shard weights, gradients and optimiser state over the processes (FSDP2) in place of copying them.
    """

    steps: int
    minutes: float | None = None
    batch_size: int = 8
    gradient_accumulation: int = 1
    lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 10
    bf16: bool = False
    gradient_checkpointing: bool = False
    report_to: tuple[str, ...] = ()
    fsdp: bool = False


class RunError(ValueError):
    """A run that cannot begin: a sentence with what is wrong and what is allowed."""


@dataclass(frozen=True)
class Outcome:
    """What a run left: the metrics of its last evaluation (if any), and the step and checkpoint it reached."""

    metrics: dict[str, float]
    step: int
    interrupted: bool
    checkpoint: Path | None
    seconds: float


def loss_unit(tokenizer: PreTrainedTokenizerBase) -> str:
    """`"bits_per_byte"` for bytes and `"nats_per_token"` otherwise: the unit in which losses are shown."""
    return "bits_per_byte" if isinstance(tokenizer, ByT5Tokenizer) else "nats_per_token"


class Evaluation(NamedTuple):
    """The metrics of the weights after `step` steps."""

    step: int
    metrics: dict[str, float]


class PackedTrainer(Trainer):
    """transformers' Trainer that never makes the logits of a batch, with our optimiser and an evaluation that weighs every
    token equally, however unequal the batches and the processes' shares are.

    Args:
        unit: see `loss_unit`. schedule, limit: what the optimiser follows.
        options: those of transformers' Trainer; `data_collator` joins rows, and `eval_dataset` is a sequence of them.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, unit: str, schedule: Schedule, limit: "TimeLimit | None" = None, **options: Any):
        super().__init__(**options)
        self.unit, self.schedule, self.limit = unit, schedule, limit
        self.evaluated = Evaluation(-1, {})

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = _parameter_groups(self.model if model is None else model, self.schedule.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=self.schedule.lr, betas=(0.9, 0.95))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(optimizer, _learning_rate(self.schedule, self.limit))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, {**inputs, "skip_logits": True}, *args, **options)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean cost of the held-out rows, logged and returned.

        Returns:
            `eval_loss` (nats a target token), and `eval_bits_per_byte` (all targets, ends of documents included,
            divided by the bytes among them) or `eval_nats_per_token` and `eval_perplexity`.
        """
        held_out = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model
        training = model.training
        model.eval()
        nats, targets, byte_targets = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        with torch.no_grad(), self.accelerator.autocast():
            for rows in self._own_share(held_out):
                batch = self._prepare_inputs(self.data_collator(rows or held_out[:1]))
                loss = model(**batch, use_cache=False, num_items_in_batch=1, skip_logits=True).loss
                if not rows:  # every process makes the same number of passes
                    continue
                nats += loss
                targets += (batch["labels"] != IGNORED_LABEL).sum()
                byte_targets += (batch["labels"] >= BYTE_OFFSET).sum()
        model.train(training)
        nats, targets, byte_targets = self.accelerator.reduce(torch.stack([nats, targets, byte_targets])).tolist()
        if targets == 0:
            raise SourceError("the evaluation text holds no token to predict; it must hold at least two bytes.")
        metrics = {"loss": nats / targets}
        if self.unit == "bits_per_byte":
            metrics["bits_per_byte"] = nats / math.log(2) / max(byte_targets, 1)
        else:
            metrics["nats_per_token"] = metrics["loss"]
            metrics["perplexity"] = math.exp(min(metrics["loss"], 700))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.evaluated = Evaluation(self.state.global_step, metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _own_share(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """This process's batches, as many as any other's; those behind the end are empty."""
        size, rank = self.args.per_device_eval_batch_size, self.args.process_index
        for first in range(0, len(rows), size * self.args.world_size):
            yield rows[first + rank * size : first + (rank + 1) * size]


class SaveOnInterrupt(TrainerCallback):
    """Ends a run, interrupted in any process, with a checkpoint after the step that was running.

    Attributes:
        stopped: whether it did; the same in every process.
    """

    def __init__(self, interrupt: DeferredInterrupt):
        self.interrupt = interrupt
        self.stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.world_size > 1:
            requested = torch.tensor(float(self.interrupt.requested), device=args.device)
            dist.all_reduce(requested, op=dist.ReduceOp.MAX)
            self.stopped = bool(requested)
        else:
            self.stopped = self.interrupt.requested
        if self.stopped:
            control.should_save = True
            control.should_training_stop = True


class TimeLimit(TrainerCallback):
    """Ends a run after `minutes` and says how much of its time is gone."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes
        self.began: float | None = None

    @property
    def share_used(self) -> float:
        return 0.0 if self.began is None else (time.monotonic() - self.began) / self.seconds

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.share_used >= 1:
            control.should_training_stop = True


class KeepPlace(TrainerCallback):
    """Saves the place in the data with every checkpoint."""

    def __init__(self, rows: PackedRows, first_step: int):
        self.rows, self.first_step = rows, first_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.epoch = state.global_step / state.max_steps  # the Trainer's own count begins anew where a run goes on

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        steps = state.global_step - self.first_step
        place = self.rows.place_after(self.rows.start.rows + steps * self.rows.remember_every)
        if place is not None and state.is_world_process_zero:
            place.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / PLACE_FILE)


class RichProgress(TrainerCallback):
    """A progress bar with the latest loss, and a line an evaluation."""

    def __init__(self, console: Console, unit: str):
        self.console = console
        self.unit = unit
        self.scale = 1 / math.log(2) if unit == "bits_per_byte" else 1.0
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    @property
    def label(self) -> str:
        return self.unit.replace("_", " ")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step, loss="")
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self.progress.update(self.task, loss=f"{logs['loss'] * self.scale:.3f} {self.label}")
        if f"eval_{self.unit}" in logs:
            perplexity = f", perplexity {logs['eval_perplexity']:.2f}" if "eval_perplexity" in logs else ""
            held_out = f"{logs[f'eval_{self.unit}']:.3f} {self.label}{perplexity}"
            self.console.print(f"step {state.global_step}: held-out {held_out}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.stop()


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, gate offsets) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _learning_rate(schedule: Schedule, limit: TimeLimit | None) -> Callable[[int], float]:
    """A linear warm-up followed by a cosine to a tenth, over the steps or the time, whichever is further."""

    def factor(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / (schedule.warmup + 1)
        share = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
        if limit is not None:
            share = max(share, limit.share_used)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, share))

    return factor


def first_process() -> bool:
    """Whether this is the process that prints and writes: the only one, or the first that torchrun started."""
    return int(os.environ.get("RANK", 0)) == 0


def probe(rows: PackedRows) -> torch.Tensor:
    """The beginning of a source's text, `[1, T]` of at most `PROBE_TOKENS`: what the memories are watched on."""
    row = next(iter(PackedRows(rows.source, rows.tokenizer, PROBE_TOKENS)), None)
    if row is None:
        raise SourceError("the text sources hold no text to train on.")
    return torch.from_numpy(row.ids)[None]


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedRows,
    out: Path,
    schedule: Schedule,
    eval_rows: Sequence[Row] = (),
    resume: bool = False,
    console: Console | None = None,
    lines: Mapping[str, float] | None = None,
) -> Outcome:
    """Train, evaluate, and write the model, the tokenizer, checkpoints and the loss curve into `out`.

    Under torchrun the processes share every batch: a step takes `batch_size` rows a process. The first process writes.

    Args:
        rows: endless, i.e. made with a seed.
        eval_rows: held-out rows; without any there is no evaluation.
        resume: go on from the newest checkpoint in `out`, at the row where it stopped.
        lines: values to draw into the loss curve, in its unit.

    Raises:
        RunError: there is no checkpoint to resume from or it has all the steps; the schedule asks for something that is not
            installed, or that the number of processes rules out.
        SourceError: a source cannot be read or holds no text.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if schedule.fsdp and (processes == 1 or not torch.cuda.is_available()):
        found = "1 process" if processes == 1 else "no GPU"
        raise RunError(f"fsdp shards a model over the GPUs of several processes, but there is {found}; leave it out.")
    if schedule.minutes is not None and processes > 1:
        raise RunError(f"minutes is {schedule.minutes}, but clocks of {processes} processes differ; give steps alone.")
    for name in schedule.report_to:
        if name not in REPORTS:
            raise RunError(f"report_to is {name!r}; allowed are {', '.join(map(repr, REPORTS))}.")
        if importlib.util.find_spec(name) is None:
            raise RunError(f"report_to is {name!r}, which is not installed: pip install 'fwzoo[track]'.")
    checkpoint, done = get_last_checkpoint(str(out)) if out.is_dir() else None, 0
    if resume:
        if checkpoint is None:
            raise RunError(f"out {str(out)!r} has no checkpoint to resume from.")
        done = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}").global_step
        if done >= schedule.steps:
            raise RunError(f"out {str(out)!r} is trained for {done} steps already; allowed are more steps than that.")
        if (place := Path(checkpoint) / PLACE_FILE).is_file():
            rows.start = Place.load(place)
    rows.remember_every = schedule.batch_size * schedule.gradient_accumulation * processes
    unit = loss_unit(tokenizer)
    console = console or Console(quiet=not first_process())
    limit = None if schedule.minutes is None else TimeLimit(schedule.minutes)
    interrupt = DeferredInterrupt(
        lambda: console.print("interrupted: finishing this step and saving; interrupt again to stop at once")
    )
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(out / "runs"))  # the one way to tell transformers
    try:
        arguments = TrainingArguments(
            output_dir=str(out),
            max_steps=schedule.steps,
            per_device_train_batch_size=schedule.batch_size,
            per_device_eval_batch_size=schedule.batch_size,
            gradient_accumulation_steps=schedule.gradient_accumulation,
            max_grad_norm=1.0,
            seed=schedule.seed,
            bf16=schedule.bf16,
            use_cpu=not torch.cuda.is_available(),
            eval_strategy="steps" if schedule.eval_every and eval_rows else "no",
            eval_steps=schedule.eval_every or None,
            save_strategy="steps" if schedule.save_every else "no",
            save_steps=schedule.save_every or 1,
            save_total_limit=3,
            logging_steps=schedule.log_every,
            remove_unused_columns=False,
            # Every process reads the rows and takes its own; slices of another process's batch would cut documents.
            accelerator_config={"dispatch_batches": False, "split_batches": False},
            dataloader_pin_memory=torch.cuda.is_available(),
            # A place in the data takes the Trainer there without reading; without one it reads what it skips.
            ignore_data_skip=rows.start.rows > 0,
            report_to=list(schedule.report_to) or "none",
            project=out.resolve().name,
            disable_tqdm=True,
            **({"fsdp": True, "fsdp_config": {"version": 2}} if schedule.fsdp else {}),
        )
    except ImportError as error:
        raise RunError("training needs the accelerate library: pip install 'fwzoo[train]'.") from error
    stopper = SaveOnInterrupt(interrupt)
    trainer = PackedTrainer(
        unit,
        schedule,
        limit,
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=eval_rows or None,
        processing_class=tokenizer,
        callbacks=[
            RichProgress(console, unit),
            stopper,
            KeepPlace(rows, done if rows.start.rows else 0),
        ]
        + ([limit] if limit else []),
    )
    trainer.remove_callback(PrinterCallback)
    MemoryHealthCallback(probe(rows)).report_first(trainer)
    if schedule.gradient_checkpointing:
        # The name is new in transformers 5.24; the older one warns there.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
    began = time.monotonic()
    with interrupt:
        trainer.train(resume_from_checkpoint=checkpoint if resume else None)
    seconds = time.monotonic() - began
    step = trainer.state.global_step
    if eval_rows and not stopper.stopped and trainer.evaluated.step != step:
        trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        write_curve(out, trainer.state.log_history, unit, lines)
        plot_health(out, trainer.state.log_history)
    newest = get_last_checkpoint(str(out))
    return Outcome(
        metrics=trainer.evaluated.metrics,
        step=step,
        interrupted=stopper.stopped,
        checkpoint=Path(newest) if newest else None,
        seconds=seconds,
    )
