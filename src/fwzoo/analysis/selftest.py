"""Whether every kernel computes on this machine what its definition says: the check behind `fwzoo selftest`."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    Sizes(batch=1, tokens=70, heads=2, key=8, value=16),
)
"""A token alone, chunks with a ragged end, keys and values of different size, the widest heads in common use, and small ones."""


@dataclass(frozen=True)
class Verdict:
    """One level of one operator on one sample.

    Attributes:
        mode: "training", two calls and their gradients; "decoding", a prefix, then a few tokens at a time without gradients.
        error: largest of `max|a - b| / max(1, max|b|)` over outputs and gradients, against float64; 0.01 in place of 1 in
            decoding, whose outputs are small.
        limit: twice that error of the plain path in the same dtype, plus eight units in the last place.
        passed: None when the level cannot run here; `note` then says why.
    """

    op: str
    sample: str
    mode: str
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
    device: torch.device, only: str | None = None, sizes: tuple[Sizes, ...] | None = None, processes: int = 1
) -> Iterator[Verdict]:
    """Compare every level of every operator with the float64 definition: outputs, gradients, and calls that go on.

    The plain path that a level is measured against is the chunk level, and the token loop for the chunk level itself.

    Args:
        device: where the kernels run (the definition runs on the CPU). only: name of one operator.
        processes: that share the work: most of it, on a GPU, is compiling kernels.

    Raises:
        ValueError: `only` is not the name of an operator.
    """
    operators = contract.operators()
    if only is not None:
        contract.one_of("only", only, tuple(operators))
    jobs = [
        (name, size, place, device)
        for name, op in operators.items()
        if only in (None, name)
        for size in (SIZES if sizes is None else sizes)
        for place, _ in enumerate(op.samples(Draw(size)))
    ]
    if processes == 1:
        for job in jobs:
            yield from _sample(*job)
        return
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the parent's CUDA
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        for found in [pool.submit(_sample, *job) for job in jobs]:
            yield from found.result()


def _sample(name: str, sizes: Sizes, place: int, device: torch.device) -> list[Verdict]:
    """The verdicts on one sample of an operator, in every dtype and mode."""
    op = contract.operators()[name]
    sample = next(itertools.islice(op.samples(Draw(sizes)), place, None))
    cases = itertools.product(sample.dtypes, MODES)
    return [x for dtype, mode in cases for x in _verdicts(op, sample, mode, sizes, dtype, device)]


def _verdicts(
    op: Op, sample: Sample, mode: str, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Iterator[Verdict]:
    rounded = {name: x.to(dtype).double() for name, x in sample.tokens.items()}  # what every level is given
    sample, (run, least) = replace(sample, tokens=rounded), MODES[mode]
    exact = run(op, sample, "reference", torch.float64, torch.device("cpu"))
    plain = _worst(run(op, sample, "reference", dtype, device), exact, least)
    for level in ("chunk", "triton"):
        about = (op.name, sample.name, mode, level, str(sizes), str(dtype).removeprefix("torch."))
        tensors = [x.to(device, dtype) for x in sample.tokens.values()]
        unfit = op.limit(mode == "decoding", **sample.options)
        if (why := op.unavailable(level, tensors, unfit)) is not None:
            yield Verdict(*about, None, None, None, 0.0, why)
            continue
        limit, start = 2 * plain + 8 * torch.finfo(dtype).eps, time.perf_counter()
        try:
            error = _worst(run(op, sample, level, dtype, device), exact, least)
        except Exception as failure:  # a kernel that does not compile or launch here is a finding, not the end
            note = f"{type(failure).__name__}: {failure}"[:300]
            yield Verdict(*about, None, limit, False, time.perf_counter() - start, note)
        else:
            yield Verdict(*about, error, limit, error <= limit, time.perf_counter() - start)
            plain = error if level == "chunk" else plain


def _worst(found: dict[str, Tensor], exact: dict[str, Tensor], least: float) -> float:
    """The largest error of any output or gradient."""
    return max(_error(found[name], exact[name], least) for name in exact)


def _error(a: Tensor, b: Tensor, least: float) -> float:
    a, b = a.detach().double().cpu(), b.detach().double()
    if not a.isfinite().all():
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp(min=least)).item() if b.numel() else 0.0


def _inputs(sample: Sample, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x.to(device, dtype) for name, x in sample.tokens.items()}
    return given | {name: x.to(device, wide) for name, x in (sample.gates | sample.weights).items()}


def _calls(op: Op, sample: Sample, inputs: dict[str, Tensor], cuts: Sequence[int], level: str) -> dict[str, Tensor]:
    """Outputs of calls that follow one another, from each of `cuts` to the next."""
    function, state, outputs = getattr(_kernels(), op.name), None, {}
    for start, end in itertools.pairwise(cuts):
        here = {name: x if name in sample.weights else x[:, start:end] for name, x in inputs.items()}
        options = dict(sample.options) if state is None else {**sample.options, "state": state}
        result = function(**here, **options, level=level)
        outputs[f"tokens {start} to {end}"], state = result if isinstance(result, tuple) else (result, None)
    return outputs


def _train(op: Op, sample: Sample, level: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Outputs of two calls, and the gradients of a weighted sum of them, by name."""
    leaves = {name: x.requires_grad_() for name, x in _inputs(sample, dtype, device).items()}
    tokens = sample.length
    outputs = _calls(op, sample, leaves, (0, (2 * tokens) // 3, tokens), level)
    loss = sum(_weighted(o) for o in outputs.values())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return outputs | {f"gradient of {name}": grad for name, grad in named if grad is not None}


@torch.no_grad()
def _decode(op: Op, sample: Sample, level: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Outputs of a prefix of up to 17 tokens, of three tokens one by one, and of four at once."""
    tokens = min(sample.length, 24)
    cuts = sorted({0, tokens, *(max(0, tokens - rest) for rest in (7, 6, 5, 4))})
    outputs = _calls(op, sample, _inputs(sample, dtype, device), cuts, level)
    return {"outputs": torch.cat(list(outputs.values()), 1)}


MODES = {"training": (_train, 1.0), "decoding": (_decode, 0.01)}


def _weighted(o: Tensor) -> Tensor:
    """A sum of the entries with weights between -1 and 1 that no symmetry can hide an error from."""
    weights = torch.arange(o.numel(), device=o.device, dtype=torch.float64).add(1).mul(0.7).sin()
    return (o.double() * weights.view(o.shape)).sum()


def _kernels() -> Any:
    from .. import kernels

    return kernels
