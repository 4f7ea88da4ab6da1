"""A few tokens of a matrix-valued recurrence in one Triton kernel: the fast weights are read once and written once.

This is the decoding step of the Falcon rules, the gated delta rule and linear attention. The floor is the traffic of S;
every program holds `[K, BLOCK_V]` of one head in registers. Falcon's gates are computed on the way, by every program of
a head for itself: they need its keys only, which each of them has read.

Imported only by the `triton` levels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .contract import may_overwrite_states
from .documents import select
from .falcon.prepass import heads_of, top_direction
from .falcon.rules import FalconState, Options
from .gpu import block, on_device, read


@triton.jit(do_not_specialize=["tokens", "rows"])
def _window_energies(
    x,
    energy,
    tokens,
    heads,
    rows,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Top eigenvalue of the Gram matrix of every token's window, `[N, T, H]`."""
    g, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    n, token_head = g // (tokens * heads), g % (tokens * heads)
    pair = n * (tokens + WINDOW - 1) * heads + token_head
    inside = (g < rows)[:, None] & (d < K)[None, :]
    a, b = tl.arange(0, BLOCK_W)[None, :, None], tl.arange(0, BLOCK_W)[None, None, :]
    gram = tl.zeros([ROWS, BLOCK_W, BLOCK_W], tl.float32)
    for i in tl.static_range(WINDOW):
        left = read(x + (pair + i * heads)[:, None] * K + d[None, :], inside).to(tl.float32)
        for j in tl.static_range(i, WINDOW):
            right = read(x + (pair + j * heads)[:, None] * K + d[None, :], inside).to(tl.float32)
            here = ((a == i) & (b == j)) | ((a == j) & (b == i))
            gram += tl.where(here, tl.sum(left * right, 1)[:, None, None], 0.0)
    tl.store(energy + g, top_direction(gram, BLOCK_W)[0], mask=g < rows)


@triton.jit(do_not_specialize=["tokens"])
def _steps(
    q,
    x,
    values,
    gain,
    other,
    known,
    count,
    energies,
    real,
    S,
    new_S,
    o,
    tokens,
    heads,
    scale,
    eps,
    decay_floor,
    K: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    REGRESSION: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    DECAY_FIRST: tl.constexpr,
    READ_AFTER_WRITE: tl.constexpr,
    GATED: tl.constexpr,
    DIVIDE: tl.constexpr,
    COUPLED: tl.constexpr,
    SHIFTED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """GATED: `gain`, `other` are Falcon's beta and ridge; otherwise strength and log-decay, either of them perhaps None."""
    sequence_head = tl.program_id(1).to(tl.int64)
    n, h = sequence_head // heads, sequence_head % heads
    d, c = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < K)[:, None] & (c < V)[None, :]
    at = sequence_head * K * V + d[:, None] * V + c[None, :]
    old = tl.load(S + at, mask=inside, other=0.0)
    begin, before = 0, 0
    if GATED:
        before = tl.load(count + n)
        if SHIFTED:
            begin = tl.where(tl.load(known + n) != 0, 0, 1)
    for t in range(tokens):
        token, pair = (n * tokens + t) * heads + h, (n * (tokens + WINDOW - 1) + t) * heads + h
        # how many entries of this token's rows exist: none where it is masked (a bound, as masks of blocks and scalars do not mix)
        alive = tl.load(real + n * tokens + t).to(tl.int32) if MASKED else 1
        own_k, own_v = K * alive, V * alive
        writes = (alive > 0) & (t >= begin)
        new_k, new_v = tl.where(writes, K, 0), tl.where(writes, V, 0)
        row = read(q + token * K + d, d < own_k).to(tl.float32) * scale
        if GATED:
            summed = 0.0
            if energies is not None:
                summed = tl.load(energies + token)
            elif DIVIDE or COUPLED:
                for i in tl.static_range(WINDOW):
                    key = read(x + (pair + i * heads) * K + d, d < (K if i < WINDOW - 1 else new_k)).to(tl.float32)
                    summed += tl.sum(key * key, 0)
            pairs = tl.minimum(tl.maximum(before + t + 1 - begin, 1), WINDOW).to(tl.float32)
            energy = summed / pairs
            lam = read(other + token, alive > 0).to(tl.float32)
            if COUPLED:
                lam = lam * energy
            if PER_COLUMN:
                beta = read(gain + token * V + c, c < own_v).to(tl.float32)[None, :]
            else:
                beta = read(gain + token, alive > 0).to(tl.float32)
            if DIVIDE:
                under = energy + lam + eps
                writes = writes & (under != 0)
                inverse = tl.where(writes, 1.0 / tl.where(writes, under, 1.0), 0.0)
                strength = beta * inverse
                # 1 - eta * ridge, so that float32 keeps its digits near the floor
                decay = tl.where(writes, (energy + eps) * inverse, 1.0) + (1.0 - beta) * (lam * inverse)
            else:
                strength = tl.where(writes, beta, 0.0)
                decay = 1.0 - strength * lam
            decay = tl.maximum(decay, decay_floor)
            if WINDOW > 1:
                strength = strength / pairs
        else:
            strength, decay = 1.0, 1.0
            if gain is not None:
                strength = read(gain + token, alive > 0).to(tl.float32)
            if other is not None:
                decay = tl.exp(read(other + token, alive > 0).to(tl.float32))
        kept = old * decay
        seen = kept if DECAY_FIRST else old
        new = kept
        for j in tl.static_range(WINDOW):
            key = read(x + (pair + j * heads) * K + d, d < (K if j < WINDOW - 1 else new_k)).to(tl.float32)
            written = read(values + (pair + j * heads) * V + c, c < (V if j < WINDOW - 1 else new_v))
            written = written.to(tl.float32)[None, :]
            if REGRESSION:
                written = written - tl.sum(seen * key[:, None], 0)[None, :]
            new += key[:, None] * (strength * written)
        new = tl.where(writes, new, old)
        found = tl.sum((new if READ_AFTER_WRITE else old) * row[:, None], 0)
        tl.store(o + token * V + c, found.to(o.dtype.element_ty), mask=c < V)
        old = new
    tl.store(new_S + at, old, mask=inside)


def _run(
    q: Tensor,
    x: Tensor,
    values: Tensor,
    gain: Tensor | None,
    other: Tensor | None,
    known: Tensor | None,
    count: Tensor | None,
    energies: Tensor | None,
    mask: Tensor | None,
    S: Tensor,
    window: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    (batch, tokens, heads, k_size), v_size = q.shape, values.shape[3]
    given = (q, x, values, gain, other, known, count, energies, mask)
    q, x, values, gain, other, known, count, energies, mask = (t if t is None else t.contiguous() for t in given)
    S = S.contiguous()
    new_S = S if may_overwrite_states() else torch.empty_like(S)
    o = values.new_empty(batch, tokens, heads, v_size)
    # enough columns for whole cache lines, few enough that S stays in registers
    block_k, block_v = block(k_size), min(block(v_size), 32 if k_size <= 128 else 16)
    with on_device(q):
        _steps[(triton.cdiv(v_size, block_v), batch * heads)](
            q,
            x,
            values,
            gain,
            other,
            known,
            count,
            energies,
            mask,
            S,
            new_S,
            o,
            tokens,
            heads,
            K=k_size,
            V=v_size,
            WINDOW=window,
            MASKED=mask is not None,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
            **options,
        )
    return o, new_S


def steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    mask: Tensor | None,
    *,
    scale: float = 1.0,
    regression: bool,
) -> tuple[Tensor, Tensor]:
    """`S <- decay S + strength k e^T`, token by token, where e is v or its residual at the decayed S; o = scale * S^T q.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, H, V]`. strength, log_decay: `[B, T, H]`, None means 1 and 0.
        S: float32 `[B, H, K, V]`; overwritten within `contract.overwriting_states()`. mask: bool `[B, T]` or None.

    Returns: o `[B, T, H, V]` in the dtype of v, and the new S.
    """
    options = {"REGRESSION": regression, "PER_COLUMN": False, "DECAY_FIRST": True, "READ_AFTER_WRITE": True}
    gates = {
        "GATED": False,
        "DIVIDE": False,
        "COUPLED": False,
        "eps": 0.0,
        "decay_floor": 0.0,
        "scale": scale,
        "SHIFTED": False,
    }
    return _run(q, k, v, strength, log_decay, None, None, None, mask, S, 1, **options, **gates)


def falcon_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState,
    mask: Tensor | None,
) -> tuple[Tensor, FalconState]:
    """A few tokens of `fwzoo.kernels.falcon` without a backward pass; with a mask, one token."""
    rule, window, shifted = options.rule, options.window, options.shifted
    x, values = _pairs(k, v, state, options)
    o, S = _run(
        q,
        x,
        values,
        beta,
        ridge,
        state.has_key,
        state.count,
        _energies(x, q, options),
        mask,
        state.S,
        window,
        SHIFTED=shifted,
        REGRESSION=rule.regression,
        PER_COLUMN=rule.per_column,
        DECAY_FIRST=False,
        READ_AFTER_WRITE=options.read_after_write,
        GATED=True,
        DIVIDE=options.step == "beta",
        COUPLED=options.scale_coupled,
        eps=options.eps,
        decay_floor=options.decay_floor,
        scale=1.0,
    )
    real = None if mask is None else mask[:, 0]
    tail_x, tail_v, count = state.tail_x, state.tail_v, state.count
    if window > 1:  # before has_key is overwritten
        written = q.shape[1] - ((~state.has_key).long() if shifted else torch.zeros_like(count))
        new_x, new_v = x[:, 1 - window :], values[:, 1 - window :]
        if q.shape[1] == 1:
            writes = written > 0 if real is None else (written > 0) & real
            new_x, new_v, written = select(writes, new_x, tail_x), select(writes, new_v, tail_v), writes.long()
        tail_x, tail_v, count = new_x, new_v, (count + written).clamp(max=window - 1)
    if real is not None:
        return o, FalconState(S, select(real, k[:, -1], state.key), state.has_key | real, tail_x, tail_v, count)
    has_key = (state.has_key if may_overwrite_states() else torch.empty_like(state.has_key)).fill_(True)
    return o, FalconState(S, k[:, -1], has_key, tail_x, tail_v, count)


def _energies(x: Tensor, q: Tensor, options: Options) -> Tensor | None:
    """falcon3's energies before they are divided by the number of pairs `[N, T, H]`; None where the step sums them itself."""
    if not (options.needs_energy and options.rule.regression and options.window > 1):
        return None
    (batch, tokens, heads, k_size), x = q.shape, x.contiguous()
    energies, few = q.new_empty(batch, tokens, heads, dtype=torch.float32), 8
    with on_device(x):
        _window_energies[(triton.cdiv(energies.numel(), few),)](
            x,
            energies,
            tokens,
            heads,
            energies.numel(),
            K=k_size,
            WINDOW=options.window,
            BLOCK_W=triton.next_power_of_2(options.window),
            BLOCK_K=block(k_size),
            ROWS=few,
        )
    return energies


def _pairs(k: Tensor, v: Tensor, state: FalconState, options: Options) -> tuple[Tensor, Tensor]:
    """The pairs of the tail and of every token: keys `[N, W - 1 + T, H, K]` and values `[N, W - 1 + T, H, V]`."""
    if k.shape[1] == 1 or options.window == 1:
        x, values = (torch.cat([state.key[:, None], k[:, :-1]], 1) if options.shifted else k), v
        if options.window > 1:
            x, values = torch.cat([state.tail_x, x], 1), torch.cat([state.tail_v, v], 1)
        return x, values
    head_x, head_v, first = (rows.transpose(1, 2) if rows.ndim == 4 else rows for rows in heads_of(state, options))
    behind = options.window - 1
    x = torch.cat([head_x, k[:, :-1]] if options.shifted else [head_x[:, :behind], k], 1)
    start = select(first > 0, head_v[:, behind:], v[:, :1])
    return x, torch.cat([head_v[:, :behind], start, v[:, 1:]], 1)
