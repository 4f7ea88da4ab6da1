"""Differentiating a scan over chunks in little memory: keep the states between segments, recompute what is inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Body = Callable[..., tuple[Tensor, Tensor]]

TOKENS = 16384  # tokens times heads in a segment: enough work for every thread, little enough to keep between passes
CUDA_TOKENS = 1 << 20  # the same on a GPU, where a segment costs as many launches however short it is


def scan_segments(
    body: Body, S: Tensor, inputs: Sequence[Tensor], steps: Sequence[int], heads: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run `body` over segments of chunk steps; in backward, each segment is recomputed from its incoming state.

    Args:
        body: `(S, *inputs of the segment, steps=...) -> (output, S)`, differentiable.
        S: state `[N * H, K, V]`.
        inputs: tile tensors `[M * H, ...]` ordered by step.
        steps: documents that are active in each step (M is their sum).
        heads: H. chunk: C.

    Returns: output `[M * H, ...]` and the final state.
    """
    segments: list[list[int]] = [[]]
    tokens = CUDA_TOKENS if S.device.type == "cuda" else TOKENS
    for n in steps:
        if segments[-1] and (sum(segments[-1]) + n) * heads * chunk > tokens:
            segments.append([])
        segments[-1].append(n)
    if len(segments) == 1:
        return body(S, *inputs, steps=segments[0])
    recompute = torch.is_grad_enabled() and any(x.requires_grad for x in (S, *inputs))
    parts = [x.split([sum(segment) * heads for segment in segments]) for x in inputs]
    outputs = []
    for i, segment in enumerate(segments):
        own = tuple(part[i] for part in parts)
        if recompute:
            o, S = checkpoint(body, S, *own, steps=segment, use_reentrant=False, preserve_rng_state=False)
        else:
            o, S = body(S, *own, steps=segment)
        outputs.append(o)
    return torch.cat(outputs), S


def scan_steps(
    update: Callable[..., Tensor], S: Tensor, inputs: Sequence[Tensor], steps: Sequence[int], heads: int
) -> tuple[Tensor, Tensor]:
    """Apply `S = update(S, *inputs of the step)` for every step.

    Returns: the state before each step, stacked `[M * H, K, V]`, and the final state.
    """
    parts = [x.split([n * heads for n in steps]) for x in inputs]
    before = []
    for i, n in enumerate(steps):
        active, resting = S.split([n * heads, S.shape[0] - n * heads])
        before.append(active)
        active = update(active, *(part[i] for part in parts))
        S = torch.cat([active, resting]) if resting.shape[0] else active
    return torch.cat(before), S
