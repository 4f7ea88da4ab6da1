"""Whether the memories of a model work while it trains: gates, half-lives, norms and slots, logged with the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

PREFIX = "memory/"
NAMES = {
    "gate": "mean gate",
    "half_life": "half-life, tokens",
    "state_norm": "norm of what was written",
    "slots_used": "slots written",
}


@torch.no_grad()
def memory_health(model: nn.Module, input_ids: Tensor) -> dict[str, float]:
    """Let a causal language model read a text and ask every module that has a method `health` what its memory did.

    Args:
        input_ids: int64 `[B, T]`; a few hundred tokens are enough.

    Returns:
        `memory/{name}/{layer}`, with the names of `NAMES`: the mean of what gates (or scales, or is the gain of) a memory;
        the tokens after which half of a write is left, in the median head; the norm of what the text wrote; and the number
        of slots it wrote. A module without the method, or a number it does not have, is left out.
    """
    found: dict[str, float] = {}

    def ask(index: int) -> Any:
        def hook(module: Any, inputs: Sequence[Any], output: Tensor) -> None:
            for name, value in module.health(inputs[0], inputs[1].read()).items():
                if value.isfinite():
                    found[f"{PREFIX}{name}/{index}"] = value.item()

        return hook

    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    blocks: Any = max(lists, key=len, default=())
    healthy = [(i, module) for i, block in enumerate(blocks) for module in block.modules() if hasattr(module, "health")]
    hooks = [module.register_forward_hook(ask(i)) for i, module in healthy]
    training = model.training
    try:
        model.eval()(input_ids=input_ids, use_cache=True, logits_to_keep=1)
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()
    return found


class MemoryHealthCallback(TrainerCallback):
    """Adds `memory_health` of a text to the losses that transformers' Trainer logs.

    It costs one forward pass of the text whenever a loss is logged, and changes nothing that is trained.

    Args:
        input_ids: the text, int64 `[B, T]`; the same one through the whole run, so that the numbers can be compared.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[MemoryHealthCallback(input_ids)])
    """

    def __init__(self, input_ids: Tensor):
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.numel() == 0:
            shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"input_ids is {shape}; it must be a tensor [B, T] of at least one token")
        self.input_ids = input_ids

    def report_first(self, trainer: Trainer) -> None:
        """Move to the front of a trainer's callbacks, so that TensorBoard and its like get the numbers too."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs and model is not None:
            health = memory_health(model, self.input_ids.to(args.device))
            logs.update(health)
            state.log_history[-1].update(health)


def plot_health(folder: Path, log_history: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw what `MemoryHealthCallback` logged as `memory.png`, a line a layer, where there is any and matplotlib is installed.

    Returns:
        The files written.
    """
    lines: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for record in log_history:
        for key in record:
            if key.startswith(PREFIX):
                name, layer = key.removeprefix(PREFIX).split("/")
                lines.setdefault(name, {}).setdefault(int(layer), []).append((record["step"], record[key]))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    if not lines:
        return []
    figure = Figure(figsize=(4 * len(lines), 3.2), layout="constrained")
    for axes, (name, layers) in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines.items(), strict=True):
        for index, points in sorted(layers.items()):
            axes.plot(*zip(*points, strict=True), label=f"layer {index}", marker="." if len(points) == 1 else None)
        axes.set(xlabel="step", ylabel=NAMES.get(name, name))
        if name == "half_life":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(folder / "memory.png", dpi=120)
    return [folder / "memory.png"]
