"""What both levels of the LaCT operator share: the state, the fast SwiGLU, its ascent direction and one update.

Axis letters: N sequences, H memory heads, C chunk, D head size, M hidden size of the fast weights, L = 1 or D rates a token.
Fast weights are `f(x) = W1 (silu(W0 x) * (W2 x))` with W0, W2 `[.., M, D]` and W1 `[.., D, M]`; tokens are rows `[.., C, D]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS, FROBENIUS_EPS = 1e-5, 1e-7
WIDEST = 8192  # row of fast weights that a Triton program holds

NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

Weights = tuple[Tensor, Tensor, Tensor]  # W0, W1, W2


@dataclass(frozen=True)
class Options:
    """Validated keyword options of `fwzoo.kernels.lact`."""

    chunk: int
    momentum: bool
    muon: bool
    prenorm: bool


class LactState(NamedTuple):
    """Complete state of a LaCT memory: continuing from it equals never having stopped.

    Weights, sums, norms, directions and rates are float32 (float64 for float64 inputs); `pk` and `pv` have the inputs' dtype.

    Attributes:
        w0, w1, w2: the weights that are read, `[N, H, M, D]`, `[N, H, D, M]`, `[N, H, M, D]`.
        s0, s1, s2: their un-normalised sums; without `prenorm` these are the weights themselves.
        n0, n1, n2: row norms of the initial weights, `[N, H, M]`, `[N, H, D]`, `[N, H, M]`.
        g0, g1, g2: direction of the last update with its momentum, before Muon; 0 at the start and without momentum.
        pk, pv: key and value of the pending tokens, `[N, C, H, D]`, 0 behind the last one.
        plr0, plr1, plr2: their rates `[N, C, H, L]`. pm: their momentum `[N, C, H]`.
        count: int64 `[N]`, how many tokens are pending, 0 to C - 1.
    """

    w0: Tensor
    w1: Tensor
    w2: Tensor
    s0: Tensor
    s1: Tensor
    s2: Tensor
    n0: Tensor
    n1: Tensor
    n2: Tensor
    g0: Tensor
    g1: Tensor
    g2: Tensor
    pk: Tensor
    pv: Tensor
    plr0: Tensor
    plr1: Tensor
    plr2: Tensor
    pm: Tensor
    count: Tensor

    @property
    def memory(self) -> Memory:
        """Weights, sums, norms and directions: what an update reads and replaces."""
        return Memory(*self[:12])

    @property
    def pending(self) -> Tokens:
        """The tokens that wait for their chunk to be full."""
        return Tokens(*self[12:18])


class Memory(NamedTuple):
    """The part of a `LactState` that an update changes (the norms stay)."""

    w0: Tensor
    w1: Tensor
    w2: Tensor
    s0: Tensor
    s1: Tensor
    s2: Tensor
    n0: Tensor
    n1: Tensor
    n2: Tensor
    g0: Tensor
    g1: Tensor
    g2: Tensor


class Tokens(NamedTuple):
    """What a token leaves for the update: `[.., H, D]`, rates `[.., H, L]`, momentum `[.., H]`."""

    k: Tensor
    v: Tensor
    lr0: Tensor
    lr1: Tensor
    lr2: Tensor
    momentum: Tensor


def empty_state(documents: int, k: Tensor, rates: int, weights: Weights, chunk: int, dtype: torch.dtype) -> LactState:
    """The state before the first token: the initial weights `[H, .., ..]` for each of `documents` sequences.

    Its pending tokens, which nobody writes, take no memory.
    """
    heads, size = k.shape[2], k.shape[3]
    w0, w1, w2 = (w.to(dtype).expand(documents, *w.shape) for w in weights)
    zero, wide = k.new_zeros(()), k.new_zeros((), dtype=dtype)
    pending = (
        *(zero.expand(documents, chunk, heads, size) for _ in range(2)),
        *(wide.expand(documents, chunk, heads, rates) for _ in range(3)),
        wide.expand(documents, chunk, heads),
    )
    fields = (
        *(w0, w1, w2) * 2,
        *(torch.linalg.vector_norm(w, dim=-1) for w in (w0, w1, w2)),
        *(torch.zeros_like(w) for w in (w0, w1, w2)),
        *pending,
        torch.zeros(documents, dtype=torch.long, device=k.device),
    )
    return LactState._make(fields)


def read(w0: Tensor, w1: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    """The fast SwiGLU of queries `[.., C, D]`."""
    hidden = F.silu(q @ w0.mT) * (q @ w2.mT)
    return hidden @ w1.mT


def update(memory: Memory, tokens: Tokens, options: Options) -> Memory:
    """The memory after one full chunk of tokens: k, v `[.., C, D]`, rates `[.., C, L]`, momentum `[.., C]`."""
    w0, w1, w2 = memory[:3]
    k, v, lr0, lr1, lr2, momentum = tokens
    gate, up = k @ w0.mT, k @ w2.mT
    sigmoid = gate.sigmoid()
    active = gate * sigmoid
    error = v @ w1  # W1^T v: what the value asks of the hidden layer
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    direction = (
        (slope * error * up).mT @ (lr0 * k),
        v.mT @ (lr1 * active * up),
        (error * active).mT @ (lr2 * k),
    )
    last = memory[9:]
    if options.momentum:
        kept = momentum.mean(-1)[..., None, None]
        last = direction = tuple(g + kept * old for g, old in zip(direction, last, strict=True))
    step = tuple(orthogonal(g) for g in direction) if options.muon else direction
    start = memory[3:6] if options.prenorm else memory[:3]
    sums = tuple(w + g for w, g in zip(start, step, strict=True))
    weights = tuple(rescale_rows(s, norm) for s, norm in zip(sums, memory[6:9], strict=True))
    return Memory._make((*weights, *(sums if options.prenorm else weights), *memory[6:9], *last))


def rescale_rows(w: Tensor, norm: Tensor) -> Tensor:
    """Every row of `[.., R, F]` with the norm `[.., R]`."""
    return w / (torch.linalg.vector_norm(w, dim=-1, keepdim=True) + NORM_EPS) * norm[..., None]


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz orthogonalisation of matrices `[.., R, F]`: singular values towards 1."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + FROBENIUS_EPS)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
