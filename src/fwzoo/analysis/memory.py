"""What the memories of a model did with a text: slots, gates, collisions, growth; as numbers, plots and a coloured strip."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.product_keys import watch
from ..modeling.memories.base import FastMemory

LETTERS = 1024  # tokens whose text is drawn into the picture of the gates; the colours of all are


@dataclass
class LayerReport:
    """One layer's memory while it read a text of T tokens.

    Attributes:
        kind: "pkm", "fwpkm" or "fwmlp" (which has a gate, but no slots).
        slots: number of slots of the table. used: share of them that was read at least once.
        entropy: entropy of the slots' weights in nats; `log(slots)` when all are used alike.
        collisions: share of reads of a slot that the text had read before.
        gate: the gate at every token.
        top_slots: slots that every token read, the heaviest first. top_weights: their weights.
        growth: rows that the memory had written after t tokens, for every t; of a "pkm", which writes none, different slots
            read.
    """

    kind: str
    slots: int = 0
    used: float = 0.0
    entropy: float = 0.0
    collisions: float = 0.0
    gate: list[float] | None = None
    top_slots: list[list[int]] | None = None
    top_weights: list[list[float]] | None = None
    growth: list[int] | None = None


@dataclass
class MemoryReport:
    """What `memory_report` found: `layers` by layer number, for `tokens` tokens."""

    tokens: int
    layers: dict[int, LayerReport]

    def __str__(self) -> str:
        lines = [f"{self.tokens} tokens"]
        for index, layer in self.layers.items():
            parts = [f"layer {index} {layer.kind}:"]
            if layer.slots:
                most = math.log(layer.slots)
                parts.append(
                    f"{layer.used:.1%} of {layer.slots:,} slots used, entropy {layer.entropy:.2f} of {most:.2f},"
                )
                parts.append(f"{layer.collisions:.1%} of reads on a slot read before")
            if layer.gate:
                parts.append(f"mean gate {sum(layer.gate) / len(layer.gate):.2f}")
            lines.append(" ".join(parts))
        return "\n".join(lines)

    def save(self, folder: str | Path, texts: Sequence[str] | None = None) -> list[Path]:
        """Write the report into `folder` (made where missing): JSON, an HTML strip of gates and, with matplotlib, plots.

        Args:
            texts: the text of every token, for the strips; token numbers where not given.

        Returns:
            The files written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = [str(i) for i in range(self.tokens)] if texts is None else list(texts)
        if len(texts) != self.tokens:
            raise ValueError(f"texts has {len(texts)} entries; it must have one for each of the {self.tokens} tokens")
        written = [folder / "memory.json", folder / "gates.html"]
        written[0].write_text(json.dumps({str(i): asdict(x) for i, x in self.layers.items()}) + "\n", encoding="utf-8")
        written[1].write_text(self._strip(texts), encoding="utf-8")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return written
        return [*written, *self._plots(Figure, folder, texts)]

    def _strip(self, texts: Sequence[str]) -> str:
        """The text once for every layer with a gate, each token on the colour of its gate, its slots in the tooltip."""
        parts = ["<!doctype html><meta charset='utf-8'><title>gates</title>"]
        parts.append("<style>body{font:15px/1.9 monospace;margin:2em}span{white-space:pre-wrap}</style>")
        for index, layer in self.layers.items():
            if layer.gate is None:
                continue
            parts.append(f"<h2>layer {index}, {layer.kind}</h2><p>")
            for t, (text, gate) in enumerate(zip(texts, layer.gate, strict=True)):
                title = f"gate {gate:.3f}"
                if layer.top_slots is not None and layer.top_weights is not None:
                    pairs = zip(layer.top_slots[t], layer.top_weights[t], strict=True)
                    title += ", slots " + " ".join(f"{slot}:{weight:.2f}" for slot, weight in pairs)
                strength = min(max(gate, 0.0), 1.0)
                colour = f"rgba(230,80,20,{strength:.3f})"
                parts.append(f"<span title='{title}' style='background:{colour}'>{html.escape(text)}</span>")
            parts.append("</p>")
        return "".join(parts) + "\n"

    def _plots(self, figure_class: Any, folder: Path, texts: Sequence[str]) -> list[Path]:
        written = []
        gated = {i: x for i, x in self.layers.items() if x.gate}
        slotted = {i: x for i, x in self.layers.items() if x.slots}
        if gated:
            shown = [text[:12] if text.isprintable() and text.isascii() else "·" for text in texts]
            columns = min(max(96 // max(map(len, shown)), 8), self.tokens)
            lines = -(-self.tokens // columns)
            figure = figure_class(figsize=(13, len(gated) * (0.6 + 0.24 * lines)), layout="constrained")
            for axes, (index, layer) in zip(
                figure.subplots(len(gated), squeeze=False)[:, 0], gated.items(), strict=True
            ):
                gates = [*(layer.gate or []), *[math.nan] * (lines * columns - self.tokens)]
                rows = [gates[i : i + columns] for i in range(0, len(gates), columns)]
                image = axes.imshow(rows, aspect="auto", cmap="Oranges", vmin=0, vmax=1, interpolation="nearest")
                axes.set_title(f"layer {index}, {layer.kind}", loc="left", fontsize=9)
                axes.set_xticks([])
                axes.set_yticks(range(lines), [str(i * columns) for i in range(lines)], fontsize=6)
                for t, text in enumerate(shown[:LETTERS]):
                    colour = "white" if gates[t] > 0.6 else "black"
                    style = {"fontsize": 7, "family": "monospace", "color": colour, "parse_math": False}
                    axes.text(t % columns, t // columns, text, ha="center", va="center", **style)
            figure.colorbar(image, ax=figure.axes, label="gate", aspect=30)
            written.append(folder / "gates.png")
            figure.savefig(written[-1], dpi=120)
        if slotted:
            figure = figure_class(figsize=(13, 3.5), layout="constrained")
            left, middle, again, right = figure.subplots(1, 4)
            names = [str(i) for i in slotted]
            left.bar(names, [100 * x.used for x in slotted.values()])
            left.set(xlabel="layer", ylabel="slots used, %")
            middle.bar(names, [x.entropy / math.log(max(x.slots, 2)) for x in slotted.values()])
            middle.set(xlabel="layer", ylabel="entropy of use, share of the largest", ylim=(0, 1))
            again.bar(names, [100 * x.collisions for x in slotted.values()])
            again.set(xlabel="layer", ylabel="reads on a slot read before, %", ylim=(0, 100))
            for i, x in slotted.items():
                right.plot(range(1, self.tokens + 1), x.growth or [], label=f"layer {i}")
            right.set(xlabel="tokens read", ylabel="rows written (pkm: different slots read)")
            right.legend()
            written.append(folder / "slots.png")
            figure.savefig(written[-1], dpi=120)
        return written


@torch.no_grad()
def memory_report(model: Any, input_ids: Tensor) -> MemoryReport:
    """Let `model` read a text and report what its memories did.

    Args:
        model: a fwzoo model with a memory in at least one layer.
        input_ids: int64 `[1, T]`, T at least 1.

    Raises:
        ValueError: the model has no memory, or input_ids is not one row of tokens.

    Example:
        >>> report = fwzoo.analysis.memory_report(model, input_ids)
        >>> print(report)
        >>> report.save("report", texts)
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [1, T] with T at least 1")
    decoder = model.get_decoder()
    memories = decoder.memories()
    if not memories:
        raise ValueError(f"model has feed_forwards = {model.config.feed_forwards}; it must have a memory in some layer")
    gates: dict[int, Tensor] = {}

    def keep(index: int, activation: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            gate = output[0, :, 0].float()
            gates[index] = gate.sigmoid() if activation == "sigmoid" else gate

        return hook

    fast = {i: memory for i, memory in memories.items() if isinstance(memory, FastMemory)}
    gated = {i: memory.g_proj for i, memory in fast.items() if memory.g_proj is not None}
    hooks = [proj.register_forward_hook(keep(i, model.config.gate_activation)) for i, proj in gated.items()]
    training = model.training
    try:
        with watch() as reads:
            model.eval()(input_ids, use_cache=False)
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()
    slotted = sum(hasattr(memory, "keys") for memory in memories.values())
    if len(reads) != slotted:
        raise ValueError(
            f"kernel_level is {model.config.kernel_level!r}, which does not tell what it reads; it must be 'chunk' or "
            "'reference' for a report"
        )
    layers, seen = {}, iter(reads)
    for index, memory in memories.items():
        report = LayerReport(kind=memory.operator.__name__)
        if hasattr(memory, "keys"):
            slots, weights = next(seen)
            _describe(report, slots[0].flatten(1), weights[0].flatten(1).float(), memory)
        if index in gates:
            report.gate = gates[index].tolist()
        layers[index] = report
    return MemoryReport(input_ids.shape[1], layers)


def _describe(report: LayerReport, slots: Tensor, weights: Tensor, memory: Any) -> None:
    """Fill in what slots and weights `[T, H * k]` say about the table of a memory."""
    size = memory.values.shape[0]
    use = torch.zeros(size, device=slots.device).index_add_(0, slots.flatten(), weights.flatten())
    share = use / use.sum()
    different = torch.unique(slots)
    first = torch.full((size,), slots.shape[0], device=slots.device)
    token = torch.arange(slots.shape[0], device=slots.device)[:, None].expand_as(slots)
    first.scatter_reduce_(0, slots.flatten(), token.flatten(), "amin")
    order = torch.argsort(weights, dim=-1, descending=True, stable=True)
    report.slots, report.used = size, different.numel() / size
    report.entropy = -torch.special.xlogy(share, share).sum().item()
    report.collisions = 1 - different.numel() / slots.numel()
    report.top_slots, report.top_weights = slots.gather(-1, order).tolist(), weights.gather(-1, order).tolist()
    when = first[different]
    if isinstance(
        memory, FastMemory
    ):  # the chunk of the first reader is written when it is full and has its last target
        chunk = memory.config.memory_chunk_size
        when = (when // chunk + 1) * chunk + bool(memory.config.lookahead) - 1
    report.growth = torch.bincount(when[when < slots.shape[0]], minlength=slots.shape[0]).cumsum(0).tolist()
