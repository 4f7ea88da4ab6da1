"""Every Triton kernel once, on a small call, for NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck python tests/kernels/sanitize.py
compute-sanitizer --tool racecheck python tests/kernels/sanitize.py

Names of operators, or "convolution", after it: only these. Under memcheck set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every
tensor is an allocation of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fwzoo import kernels
from fwzoo.kernels import contract
from fwzoo.kernels.convolution import convolution, convolution_step
from fwzoo.kernels.ranks import make_ranks
from fwzoo.kernels.samples import Draw, Sample, Sizes


def call(op: contract.Op, sample: Sample, dtype: torch.dtype, decode: bool) -> None:
    """Forward and backward of one call; one token without a backward pass for the decoding step."""
    tokens = {name: x.to("cuda", dtype) for name, x in sample.tokens.items()}
    tokens |= {name: x.to("cuda", torch.float32) for name, x in sample.gates.items()}
    given = {name: x[:, :1] if decode else x for name, x in tokens.items()}
    given |= {name: x.to("cuda", torch.float32) for name, x in sample.weights.items()}
    leaves = [x.requires_grad_(not decode) for x in given.values()]
    result = getattr(kernels, op.name)(**given, **sample.options, level="triton")
    o = result if isinstance(result, Tensor) else result[0]
    if not decode:
        torch.autograd.grad(o.float().square().sum(), leaves, allow_unused=True)


def convolutions() -> None:
    """The fused convolution with its gradients, on a text and on documents with holes, and its step."""
    x = torch.randn(1, 70, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, 4, device="cuda", requires_grad=True)
    mask = torch.rand(1, 70, device="cuda") > 0.3
    for holes, bounds in ((None, None), (mask, [0, 30, 70])):
        past = torch.randn(1 if bounds is None else 2, 3, 64, device="cuda", requires_grad=True)
        (y,) = convolution([x], weight, past, make_ranks(x, holes, bounds), head=32, norms=["rms"], eps=1e-6)
        torch.autograd.grad(y.square().sum(), [x, weight, past])
    options: dict[str, Any] = {"heads": [32, 16, 16], "norms": ["l2", "rms", None], "eps": 1e-6}
    with torch.no_grad():
        convolution_step(x[:, :1].split([32, 16, 16], -1), weight, past[:1], mask[:, :1], **options)
    torch.cuda.synchronize()
    print("convolution", flush=True)


def main() -> None:
    sizes, only = Sizes(batch=1, tokens=70, heads=1, key=32, value=32), sys.argv[1:]
    for name, op in contract.operators().items():
        if "triton" not in op.levels or (only and name not in only):
            continue
        for sample in op.samples(Draw(sizes)):
            for decode in (False, True):
                call(op, sample, torch.bfloat16 if torch.bfloat16 in sample.dtypes else torch.float32, decode)
                torch.cuda.synchronize()
                print(name, sample.name, "decoding step" if decode else "forward and backward", flush=True)
    if not only or "convolution" in only:
        convolutions()


if __name__ == "__main__":
    main()
