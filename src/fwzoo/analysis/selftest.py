"""Whether every kernel computes on this machine what its definition says: the check behind `fwzoo selftest`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import contract
from ..kernels.contract import Op
from ..kernels.samples import Draw, Sample, Sizes

SIZES = (
    Sizes(batch=2, tokens=1, heads=2, key=64, value=64),
    Sizes(batch=2, tokens=130, heads=2, key=64, value=64),
    Sizes(batch=1, tokens=70, heads=3, key=32, value=96),
    Sizes(batch=1, tokens=200, heads=2, key=128, value=128),
)
"""A token alone, chunks with a ragged end, keys and values of different size, and the widest heads in common use."""


@dataclass(frozen=True)
class Verdict:
    """One level of one operator on one sample.

    Attributes:
        error: largest of `max|a - b| / max(1, max|b|)` over outputs and gradients, against float64.
        limit: twice that error of the plain path in the same dtype, plus eight units in the last place.
        passed: None when the level cannot run here; `note` then says why.
    """

    op: str
    sample: str
    level: str
    sizes: str
    dtype: str
    error: float | None
    limit: float | None
    passed: bool | None
    seconds: float
    note: str = ""

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def selftest(
    device: torch.device, only: str | None = None, sizes: tuple[Sizes, ...] | None = None
) -> Iterator[Verdict]:
    """Compare every level of every operator with the float64 definition: outputs, gradients, and a call that goes on.

    The plain path that a level is measured against is the chunk level, and the token loop for the chunk level itself.

    Args:
        device: where the kernels run (the definition runs on the CPU). only: name of one operator.

    Raises:
        ValueError: `only` is not the name of an operator.
    """
    operators = contract.operators()
    if only is not None:
        contract.one_of("only", only, tuple(operators))
    for name, op in operators.items():
        if only in (None, name):
            for size in SIZES if sizes is None else sizes:
                for sample in op.samples(Draw(size)):
                    for dtype in sample.dtypes:
                        yield from _verdicts(op, sample, size, dtype, device)


def _verdicts(op: Op, sample: Sample, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Verdict]:
    rounded = {name: x.to(dtype).double() for name, x in sample.tokens.items()}  # what every level is given
    sample = replace(sample, tokens=rounded)
    exact = _run(op, sample, "reference", torch.float64, torch.device("cpu"))
    plain = _worst(_run(op, sample, "reference", dtype, device), exact)
    for level in ("chunk", "triton"):
        about = (op.name, sample.name, level, str(sizes), str(dtype).removeprefix("torch."))
        tensors = [x.to(device, dtype) for x in sample.tokens.values()]
        if (why := op.unavailable(level, tensors)) is not None:
            yield Verdict(*about, None, None, None, 0.0, why)
            continue
        limit, start = 2 * plain + 8 * torch.finfo(dtype).eps, time.perf_counter()
        try:
            error = _worst(_run(op, sample, level, dtype, device), exact)
        except Exception as failure:  # a kernel that does not compile or launch here is a finding, not the end
            note = f"{type(failure).__name__}: {failure}"[:300]
            if note.startswith("ValueError: level is"):  # it does not take these options
                yield Verdict(*about, None, None, None, 0.0, str(failure))
                continue
            yield Verdict(*about, None, limit, False, time.perf_counter() - start, note)
        else:
            yield Verdict(*about, error, limit, error <= limit, time.perf_counter() - start)
            plain = error if level == "chunk" else plain


def _worst(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest error of any output or gradient."""
    return max(_error(found[name], exact[name]) for name in exact)


def _error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double()
    if not a.isfinite().all():
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item() if b.numel() else 0.0


def _run(op: Op, sample: Sample, level: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Outputs of two calls that follow one another, and the gradients of a weighted sum of them, by name."""
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x.to(dtype) for name, x in sample.tokens.items()}
    given |= {name: x.to(wide) for name, x in sample.gates.items()}
    fixed = {name: x.to(wide) for name, x in sample.weights.items()}
    leaves = {name: x.to(device).requires_grad_() for name, x in (given | fixed).items()}
    tokens = next(iter(given.values())).shape[1]
    cut = (2 * tokens) // 3
    function, state, outputs = getattr(_kernels(), op.name), None, {}
    for part, span in (("first", slice(0, cut)), ("second", slice(cut, tokens))):
        here = {name: x[:, span] if name in given else x for name, x in leaves.items()}
        options = dict(sample.options) if state is None else {**sample.options, "state": state}
        result = function(**here, **options, level=level)
        outputs[part], state = result if isinstance(result, tuple) else (result, None)
    loss = sum(_weighted(o) for o in outputs.values())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return outputs | {f"gradient of {name}": grad for name, grad in named if grad is not None}


def _weighted(o: Tensor) -> Tensor:
    """A sum of the entries with weights between -1 and 1 that no symmetry can hide an error from."""
    weights = torch.arange(o.numel(), device=o.device, dtype=torch.float64).add(1).mul(0.7).sin()
    return (o.double() * weights.view(o.shape)).sum()


def _kernels() -> Any:
    from .. import kernels

    return kernels
