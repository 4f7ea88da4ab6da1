"""Inputs for the LaCT operator, and one way to run it: outputs, state and every gradient by name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compare import errors, floor, too_large
from fwzoo.kernels import LactState, lact

VECTORS = sorted((Path(__file__).parents[1] / "data" / "lact").glob("*.safetensors"))
WEIGHTS = ("w0", "w1", "w2")


def run(
    given: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype, operator: Any = lact
) -> dict[str, Tensor]:
    """Run the operator on `given` (names as in a vector) and differentiate; results named as in `load`."""
    leaves = {
        name: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
        if not name.startswith("cotangent.")
    }
    arguments = {name.removeprefix("in."): x for name, x in leaves.items() if name.startswith("in.")}
    fields = {name.removeprefix("state_in."): x for name, x in leaves.items() if name.startswith("state_in.")}
    o, new = operator(**arguments, **options, state=LactState(**fields) if fields else None)
    results = {"o": o, **{f"state.{name}": x for name, x in new._asdict().items()}}
    outputs = {"o": o, **new._asdict()}
    loss = sum(
        (outputs[name.removeprefix("cotangent.")] * x.to(dtype)).sum()
        for name, x in given.items()
        if name.startswith("cotangent.")
    )
    names = [name for name, x in leaves.items() if x.is_floating_point()]
    grads = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    for name, grad in zip(names, grads, strict=True):
        grad = torch.zeros_like(leaves[name]) if grad is None else grad
        results["grad." + name.removeprefix("in.")] = grad
    return results


def draw(
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    size: int = 4,
    hidden: int = 6,
    rates: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    momentum: bool = True,
    rate: float = 0.5,
) -> dict[str, Tensor]:
    """Random arguments; the rates are large enough that a few updates change the weights visibly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arguments = {
        "q": F.normalize(normal(batch, tokens, heads, size), dim=-1),
        "k": F.normalize(normal(batch, tokens, heads, size), dim=-1),
        "v": normal(batch, tokens, heads, size),
        **{f"lr{i}": rate * normal(batch, tokens, heads, rates).sigmoid() for i in range(3)},
        "w0": normal(heads, hidden, size) / size**0.5,
        "w1": normal(heads, size, hidden) / hidden**0.5,
        "w2": normal(heads, hidden, size) / size**0.5,
    }
    if momentum:
        arguments["momentum"] = normal(batch, tokens, heads).sigmoid()
    return {name: x.to(dtype) for name, x in arguments.items()}


def as_given(arguments: dict[str, Tensor], seed: int = 1, state: LactState | None = None) -> dict[str, Tensor]:
    """Arguments as a vector names them, with random cotangents for the output and every field of the final state."""
    generator = torch.Generator().manual_seed(seed)
    given = {f"in.{name}": x for name, x in arguments.items()}
    if state is not None:
        given.update({f"state_in.{name}": x.detach() for name, x in state._asdict().items()})
    _, new = lact(**arguments, chunk_size=1 if state is None else state.pk.shape[1], state=state)
    shapes = {"o": arguments["q"].shape, **{n: getattr(new, n).shape for n in (*WEIGHTS, "s0", "s1", "s2")}}
    if state is not None:
        shapes |= {name: x.shape for name, x in new._asdict().items() if x.is_floating_point()}
    for name, shape in shapes.items():
        given[f"cotangent.{name}"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return given


def beyond(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    plain: dict[str, Tensor],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> dict[str, tuple[float, float]]:
    """`too_large`; with Muon, the worst tensor against the plain path's worst one.

    Newton-Schulz lifts rounding noise by up to 490, and which tensor that hits hardest is chance.
    """
    if not options.get("muon"):
        return too_large(found, exact, plain, dtype)
    ours, theirs = max(errors(found, exact).values()), max(errors(plain, exact).values())
    limit = 2 * theirs + floor(dtype)
    return {} if ours <= limit else {"worst": (ours, limit)}


def typical(
    triples: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]],
) -> tuple[float, float]:
    """Median of the largest error of found, and of plain, over (found, exact, plain): with Muon a single one is chance."""
    worst = [
        (max(errors(found, exact).values()), max(errors(plain, exact).values())) for found, exact, plain in triples
    ]
    ours, theirs = (statistics.median(column) for column in zip(*worst, strict=True))
    return ours, theirs
