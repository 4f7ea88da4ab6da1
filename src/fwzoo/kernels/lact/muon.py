"""Newton-Schulz orthogonalisation of the three matrices of all heads at once, and its backward pass, as batched products.

Matrices are flat `[R, 3 M D]` as in `passes.py`; products run in their dtype. X are the same `[3 R, short, long]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rules import FROBENIUS_EPS, NEWTON_SCHULZ


@dataclass(frozen=True)
class Trail:
    """What the backward pass needs: the X, X X^T and polynomial of every step, and the norm of the direction `[3 R, 1, 1]`."""

    steps: list[tuple[Tensor, Tensor, Tensor]]
    norm: Tensor


def orthogonal(flat: Tensor, size: int, hidden: int) -> tuple[Tensor, Trail]:
    """The orthogonalised directions, flat, and what `orthogonal_backward` needs. size, hidden: D and M."""
    g = _wide(flat, size, hidden)
    wide = torch.promote_types(g.dtype, torch.float32)
    norm = torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True, dtype=wide)
    x = torch.div(g, norm + FROBENIUS_EPS, out=torch.empty_like(g))
    steps = []
    for a, b, c in NEWTON_SCHULZ:
        gram = torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        steps.append((x, gram, factor))
        x = torch.baddbmm(x, factor, x, beta=a)
    return _flat(x, size, hidden), Trail(steps, norm)


def orthogonal_backward(d_flat: Tensor, flat: Tensor, trail: Trail, size: int, hidden: int) -> Tensor:
    """Gradient of the direction, float32 and flat, from that of `orthogonal(flat)`."""
    d = _wide(d_flat.to(flat.dtype), size, hidden)
    for (a, b, c), (x, gram, factor) in zip(reversed(NEWTON_SCHULZ), reversed(trail.steps), strict=True):
        d_factor = torch.bmm(d, x.mT)
        d = torch.baddbmm(d, factor.mT, d, beta=a)
        d_gram = torch.baddbmm(d_factor, d_factor, gram.mT, beta=b, alpha=c)
        d_gram = torch.baddbmm(d_gram, gram.mT, d_factor, alpha=c)
        d = torch.baddbmm(d, d_gram + d_gram.mT, x)
    d, g = d.float(), _wide(flat, size, hidden).float()
    around = trail.norm + FROBENIUS_EPS
    along = (g * d).sum((1, 2), keepdim=True) / (trail.norm.clamp(min=1e-30) * around.square())
    return _flat(d / around - g * along, size, hidden)


def _wide(flat: Tensor, size: int, hidden: int) -> Tensor:
    """Flat `[R, 3 M D]` as matrices `[3 R, short, long]`."""
    if hidden == size:
        return flat.reshape(-1, size, size)
    both, w1 = split(flat, size, hidden)
    both = both.unflatten(1, (2, hidden))
    if hidden > size:
        both = both.mT
    else:
        w1 = w1.mT
    return torch.cat([both, w1[:, None]], 1).flatten(0, 1)


def _flat(x: Tensor, size: int, hidden: int) -> Tensor:
    """The inverse of `_wide`."""
    if hidden == size:
        return x.reshape(-1, 3 * size * size)
    x = x.unflatten(0, (-1, 3))
    both, w1 = x[:, :2], x[:, 2]
    if hidden > size:
        both = both.mT
    else:
        w1 = w1.mT
    return torch.cat([both.flatten(1), w1.flatten(1)], 1)


def split(flat: Tensor, size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """W0 over W2 `[R, 2 M, D]` and W1 `[R, D, M]` in flat matrices."""
    cut = 2 * hidden * size
    return flat[:, :cut].unflatten(1, (2 * hidden, size)), flat[:, cut:].unflatten(1, (size, hidden))
