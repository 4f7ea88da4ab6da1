"""Golden vectors of the memories, and one way to run them: outputs, state and gradients by name, tables written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fwzoo.kernels import fwmlp, fwpkm, pkm
from fwzoo.kernels.product_keys import score_all

DATA = Path(__file__).parents[1] / "data"
OPERATORS = {"pkm": pkm, "fwpkm": fwpkm, "fwmlp": fwmlp}


def vectors(op: str, folder: Path = DATA) -> list[Path]:
    return sorted((folder / op).glob("*.safetensors"))


def load(path: Path) -> tuple[str, dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Operator, options, arguments (`in.*`, `prefix.*`, `cotangent.o`) and expected results (`o`, `state.*`, `grad.*`, ...)."""
    with safe_open(path, "pt") as f:
        meta = {name: json.loads(value) for name, value in f.metadata().items()}
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    expected = {}
    for name, value in tensors.items():
        if name.startswith(("out.", "state_out.", "grad.")):
            expected[name.replace("state_out.", "state.").replace("out.", "")] = value
    given = {name: x for name, x in tensors.items() if name.startswith(("in.", "prefix.", "cotangent."))}
    return meta["op"], meta["options"], given, expected


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def run(
    op: str,
    given: dict[str, Tensor],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    operator: Any = None,
) -> dict[str, Tensor]:
    """Run an operator on `given` and differentiate; results named as in `load`."""
    operator = operator or OPERATORS[op]
    inputs = {n.removeprefix("in."): cast(x, dtype) for n, x in given.items() if n.startswith("in.")}
    if op == "pkm":
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        o, slots, weights = operator(**leaves, **options, return_slots=True)
        results = {"o": o, "slots": slots, "weights": weights}
    else:
        weights = {n: x for n, x in inputs.items() if n not in ("q", "v", "gate", "mask", "cu_seqlens")}
        state = None
        prefix = {n.removeprefix("prefix."): cast(x, dtype) for n, x in given.items() if n.startswith("prefix.")}
        if prefix:
            _, state = operator(**prefix, **weights, **options)
        leaves = {"q": inputs["q"].requires_grad_()}
        o, new = operator(**inputs, **options, state=state)
        fields = new._asdict()
        if op == "fwpkm":
            fields["values"] = new.table(inputs["values"])
            for name in ("slots", "where", "written", "shared_rows", "base"):
                del fields[name]
        results = {"o": o, **{f"state.{n}": x for n, x in fields.items()}}
    loss = (o * given["cotangent.o"].to(dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"grad.{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def nearest_tie(q: Tensor, keys: Tensor, top_k: int, score: str, order: bool) -> Tensor:
    """How near a token's best scores are to a tie that changes which slots it reads (order: or their order), `[G, T]`."""
    n = keys.shape[3]
    half = score_all(q.unflatten(-1, (2, -1)), keys, score, 1e-3).topk(min(top_k + 1, n), -1).values
    best = half[..., :top_k]
    sums = (best[..., 0, :, None] + best[..., 1, None, :]).flatten(-2)
    first = 0 if order else top_k - 1
    gaps = []
    for x in (half, sums.topk(min(top_k + 1, top_k * top_k), -1).values):
        if x.shape[-1] > first + 1:
            gap = -x[..., first:].diff(dim=-1).amax(-1) / x.abs().amax(-1).clamp(min=1)
            gaps.append(gap.flatten(2).amin(2))
    return torch.stack(gaps).amin(0) if gaps else torch.full(q.shape[:2], torch.inf, device=q.device)
