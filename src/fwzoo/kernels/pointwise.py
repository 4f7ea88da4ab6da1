"""The small steps around an operator in one Triton kernel each, where no backward pass follows.

In decoding a layer's kernels are so short that their number counts. Imported only where the tensors are on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu import block, on_device, read

SIZE = 1024  # entries of a program


@triton.jit
def _gated_norm(x, weight, gate, y, eps, F: tl.constexpr, BF: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BF)
    value = read(x + row * F + d, d < F).to(tl.float32)
    value = value / tl.sqrt(tl.sum(value * value, 0) / F + eps) * read(weight + d, d < F).to(tl.float32)
    if gate is not None:
        z = read(gate + row * F + d, d < F).to(tl.float32)
        value = value * (z * tl.sigmoid(z))
    tl.store(y + row * F + d, value.to(y.dtype.element_ty), mask=d < F)


def gated_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None) -> Tensor:
    """RMSNorm over the last axis, times the weight, times SiLU(gate); x and gate `[..., F]` of as many entries."""
    x, gate = x.contiguous(), None if gate is None else gate.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        with on_device(x):
            _gated_norm[(x.numel() // size,)](x, weight, gate, y, eps, F=size, BF=block(size), num_warps=1)
    return y


@triton.jit(do_not_specialize=["entries"])
def _swiglu(gate, up, y, entries, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    z, x = read(gate + i, i < entries).to(tl.float32), read(up + i, i < entries).to(tl.float32)
    tl.store(y + i, (z * tl.sigmoid(z) * x).to(y.dtype.element_ty), mask=i < entries)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(up)
    if y.numel():
        with on_device(y):
            _swiglu[(triton.cdiv(y.numel(), SIZE),)](gate, up, y, y.numel(), SIZE=SIZE)
    return y


@triton.jit(do_not_specialize=["entries"])
def _scaled_sigmoid(x, y, factor, entries, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.sigmoid(read(x + i, i < entries).to(tl.float32))
    tl.store(y + i, factor * value, mask=i < entries)


def scaled_sigmoid(x: Tensor, factor: float) -> Tensor:
    """factor * sigmoid(x), float32."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.float32)
    if y.numel():
        with on_device(y):
            _scaled_sigmoid[(triton.cdiv(y.numel(), SIZE),)](x, y, factor, y.numel(), SIZE=SIZE)
    return y
