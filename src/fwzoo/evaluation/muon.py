"""Muon: matrices are moved along their orthogonalised momentum.

Source: "Muon is Scalable for LLM Training" (2025). What it computes is `torch.optim.Muon` (torch 2.9), which launches every
matrix by itself and whose rate cannot change within a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon on matrices, those of one shape at once; the size of an update is that of AdamW, so AdamW's rate fits.

    Args:
        lr: a number, or a tensor without axes that may change between the replays of a CUDA graph.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float | Tensor, weight_decay: float, momentum: float = 0.95
    ) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": alike} for alike in shapes.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update; every matrix must have a gradient."""
        for group in self.param_groups:
            alike, momentum = group["params"], group["momentum"]
            grads = torch.stack([matrix.grad for matrix in alike])
            state = self.state[alike[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grads)
            mean = state["momentum"].lerp_(grads, 1 - momentum)
            direction = 0.2 * max(grads.shape[1:]) ** 0.5 * orthogonal(grads.lerp(mean, momentum))
            weights = torch.stack(alike)
            weights -= group["lr"] * (direction + group["weight_decay"] * weights)
            for matrix, weight in zip(alike, weights.unbind(), strict=True):
                matrix.copy_(weight)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Matrices `[M, R, C]` with their singular values near 1, bfloat16, by Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).bfloat16()
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y
