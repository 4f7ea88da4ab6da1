"""Training a model on batches drawn on the fly: one captured step on a GPU, checkpoints, exact resumption.

Batches have few shapes, so on a GPU the whole step (forward, backward, clipping, AdamW) is captured as a CUDA graph once a
shape and replayed: a small model would otherwise wait for launches most of the time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modeling.memories.base import FastMemory
from .muon import Muon

IGNORED = -100
"""The label of a token that is not to be predicted."""

Batch = tuple[Tensor, Tensor]
"""Token ids and labels, int64 `[B, T]`; the label at t is the token at t itself, or `IGNORED`."""

WARM_UP = 3  # steps of a shape before the capture


@dataclass(frozen=True)
class Schedule:
    """How a model is trained.

    Attributes:
        lr: peak learning rate, after `warmup` steps, for the share `hold` of the rest; then along a cosine to a hundredth of it.
        save_every: seconds between checkpoints.
        bf16: on a GPU, products are made in bfloat16 (autocast).
        muon: the matrices of the layers are trained by Muon, everything else by AdamW.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int = 100
    hold: float = 0.0
    weight_decay: float = 0.1
    seed: int = 0
    save_every: float = 30.0
    bf16: bool = False
    muon: bool = False

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        share = max(0.0, share - self.hold) / (1 - self.hold)
        return self.lr * (0.505 + 0.495 * math.cos(math.pi * min(1.0, share)))


class Interrupted(Exception):
    """Training was asked to stop; a checkpoint was saved."""


def train(
    model: nn.Module,
    draw: Callable[[int], Batch],
    schedule: Schedule,
    checkpoint: Path,
    *,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    stop: Callable[[], bool] = lambda: False,
    capture: bool = True,
) -> list[float]:
    """Train `model` in place and return the mean loss of every tenth of the run.

    Args:
        draw: the batch of a step, the same whenever it is asked for.
        checkpoint: a file to go on from where it exists; written every `schedule.save_every` seconds and at the end.
        progress: called with the steps done and the latest loss, at most every half second or so.
        stop: asked after every step; when True, a checkpoint is saved and `Interrupted` raised.
        capture: whether to capture a CUDA graph on a GPU.
    """
    step = Step(model, schedule)
    done = step.load(checkpoint)
    capture = capture and step.device.type == "cuda"
    saved = shown = time.monotonic()
    model.train()
    for number in range(done, schedule.steps):
        step.put(*draw(number), schedule.lr_at(number))
        if capture and step.warm:
            capture = step.capture()
        step.run()
        now = time.monotonic()
        if now - shown > 0.5 or number + 1 == schedule.steps:
            shown = now
            progress(number + 1, step.loss.item())
        if number + 1 == schedule.steps or now - saved > schedule.save_every or stop():
            saved = now
            step.save(checkpoint, number + 1)
            if stop():
                raise Interrupted
    return step.curve


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all projections, without embeddings and head."""
    head = model.get_output_embeddings()
    layers = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return [module.weight for module in layers if module.weight.requires_grad]


class Step:
    """One optimiser step on static buffers."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        cuda = self.device.type == "cuda"
        self.lr = torch.tensor(schedule.lr, device=self.device) if cuda else schedule.lr
        self.matrices = hidden_matrices(model) if schedule.muon else []
        others = [p for p in self.parameters if all(p is not matrix for matrix in self.matrices)]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": schedule.weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=self.lr,
                betas=(0.9, 0.95),
                fused=cuda,
                capturable=cuda,
            )
        ]
        if self.matrices:
            self.optimizers.append(Muon(self.matrices, self.lr, schedule.weight_decay))
        self.ids = self.labels = torch.empty(0, dtype=torch.long, device=self.device)
        self.count = torch.ones((), device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.total = torch.zeros(10, dtype=torch.float64, device=self.device)
        self.steps = torch.zeros(10, dtype=torch.float64)
        self.part = torch.zeros((), dtype=torch.long, device=self.device)
        self.graph: Any = None
        self.launched = 0  # steps of this shape
        self.stream = torch.cuda.Stream() if cuda else None

    def put(self, ids: Tensor, labels: Tensor, lr: float) -> None:
        """Set the batch and the learning rate of the next step."""
        number = min(9, int(self.steps.sum()) * 10 // self.schedule.steps)
        self.steps[number] += 1
        self.part.fill_(number)
        self.count.fill_(max(1, int((labels[:, 1:] != IGNORED).sum())))
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self._set_rate(lr)
        if self.ids.shape != ids.shape:
            self.graph, self.launched = None, 0
            self.ids, self.labels = ids.to(self.device), labels.to(self.device)
        else:
            self.ids.copy_(ids, non_blocking=True)
            self.labels.copy_(labels, non_blocking=True)

    @property
    def warm(self) -> bool:
        """Whether it is time to capture."""
        return self.graph is None and self.launched >= WARM_UP

    def compute(self) -> None:
        """Forward, backward, clipping, AdamW."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.bf16 and self.stream is not None):
            logits = self.model(input_ids=self.ids, use_cache=False).logits
        labels = self.labels[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
        loss = loss / self.count
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.loss.copy_(loss.detach())
        self.total.index_add_(0, self.part[None], self.loss.double()[None])

    def _set_rate(self, lr: float | Tensor) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def run(self) -> None:
        """The step, replayed where it was captured."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.launched += 1
        if self.stream is None:
            self.clear()
            self.compute()
            return
        # before a capture, everything runs on a stream of its own
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.clear()
            self.compute()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self) -> bool:
        """Capture the step; returns False, and says why, where the model cannot be captured."""
        if any(isinstance(module, FastMemory) and module.carries for module in self.model.modules()):
            print("no CUDA graph: a fast memory hands what it wrote on to the next step", flush=True)
            return False
        self.clear()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                self.compute()
        except Exception as error:  # whatever a model does that a graph cannot hold
            torch.cuda.set_stream(stream)
            torch.cuda.synchronize()
            self.clear()
            print(f"no CUDA graph, every step is launched anew ({str(error).splitlines()[0]})", flush=True)
            return False
        self.graph = graph
        return True

    @property
    def curve(self) -> list[float]:
        """Mean loss of every tenth of the run, as far as it has come."""
        return [total / n for total, n in zip(self.total.tolist(), self.steps.tolist(), strict=True) if n]

    def save(self, path: Path, done: int) -> None:
        """Write everything that a run goes on from; the file is whole or not there."""
        state = {
            "schedule": asdict(self.schedule),
            "done": done,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "total": self.total,
            "steps": self.steps,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> int:
        """The steps that a checkpoint has done, and its state put in place; 0 without a checkpoint."""
        if not path.exists():
            return 0
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, had in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(had)
        self._set_rate(self.lr)
        self.total.copy_(state["total"])
        self.steps.copy_(state["steps"])
        return int(state["done"])
