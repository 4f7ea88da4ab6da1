"""The loss curve of a run, as JSON and as a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_curve(
    folder: Path, log_history: Sequence[Mapping[str, Any]], unit: str, lines: Mapping[str, float] | None = None
) -> list[Path]:
    """Write `loss.json` and, where matplotlib is installed, `loss.png` into `folder`.

    Args:
        log_history: the Trainer's records; training losses are in nats a token, evaluations carry `eval_<unit>`.
        unit: `"bits_per_byte"` or `"nats_per_token"`, the unit of both curves.
        lines: values to draw as horizontal lines, by name.

    Returns:
        The files that were written.
    """
    scale = 1 / math.log(2) if unit == "bits_per_byte" else 1.0
    curve = {
        "unit": unit,
        "train": [[record["step"], record["loss"] * scale] for record in log_history if "loss" in record],
        "eval": [[record["step"], record[f"eval_{unit}"]] for record in log_history if f"eval_{unit}" in record],
    }
    written = [folder / "loss.json"]
    written[0].write_text(json.dumps(curve) + "\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return written
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train", {"alpha": 0.6}), ("eval", {"marker": "o", "markersize": 3})):
        points = curve[name]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    for i, (name, value) in enumerate((lines or {}).items()):
        axes.axhline(value, label=name, color=f"C{i + 2}", linestyle="--", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(unit.replace("_", " "))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    return [*written, folder / "loss.png"]
