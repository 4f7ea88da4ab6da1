"""Every Triton kernel once, on a small call, for NVIDIA's compute-sanitizer.

compute-sanitizer --tool memcheck python tests/kernels/sanitize.py
compute-sanitizer --tool racecheck python tests/kernels/sanitize.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from fwzoo import kernels
from fwzoo.kernels import contract
from fwzoo.kernels.convolution import convolution
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


def main() -> None:
    sizes = Sizes(batch=1, tokens=70, heads=1, key=32, value=32)
    for name, op in contract.operators().items():
        if "triton" not in op.levels:
            continue
        for sample in op.samples(Draw(sizes)):
            for decode in (False, True):
                call(op, sample, torch.bfloat16 if torch.bfloat16 in sample.dtypes else torch.float32, decode)
                torch.cuda.synchronize()
                print(name, sample.name, "decoding step" if decode else "forward and backward", flush=True)
    x = torch.randn(1, 70, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, 4, device="cuda", requires_grad=True)
    y = convolution(x, weight, None, make_ranks(x, None, None), head=32, norm="rms", eps=1e-6)
    torch.autograd.grad(y.square().sum(), [x, weight])
    torch.cuda.synchronize()
    print("convolution")


if __name__ == "__main__":
    main()
