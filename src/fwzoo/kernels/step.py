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
from .falcon.eigenvalues import top_direction, top_value
from .falcon.rules import FalconState, Options
from .gpu import block, launch, on_device, parts, read

COLUMNS, WARPS = 32, 2  # of S that a program holds: enough for whole cache lines, few enough to stay in registers
# heads from which on a program goes through all columns of one; its warps and pipeline stages, and registers of a thread
MANY, MANY_WARPS, STAGES, REGISTERS = 512, 4, 3, 128
NOTHING = (None,) * 5


@triton.jit
def _key_of(
    k, key, tail_x, n, h, t, begin, tokens, heads, K: tl.constexpr, WINDOW: tl.constexpr, SHIFTED: tl.constexpr
):
    """Where the key of token t's pair begins. Pairs before token `begin`, the first that has one, are in the tail."""
    at = k + ((n * tokens + t - SHIFTED) * heads + h) * K
    if SHIFTED:
        at = tl.where(t > 0, at, key + (n * heads + h) * K)
    if WINDOW > 1:
        at = tl.where(t >= begin, at, tail_x + ((n * (WINDOW - 1) + WINDOW - 1 + t - begin) * heads + h) * K)
    return at


@triton.jit
def _value_of(v, tail_v, n, h, t, begin, tokens, heads, V: tl.constexpr, WINDOW: tl.constexpr):
    """The same for the value."""
    at = v + ((n * tokens + t) * heads + h) * V
    if WINDOW > 1:
        at = tl.where(t >= begin, at, tail_v + ((n * (WINDOW - 1) + WINDOW - 1 + t - begin) * heads + h) * V)
    return at


@triton.jit(do_not_specialize=["tokens", "rows"])
def _window_energies(
    k,
    key,
    tail_x,
    has_key,
    real,
    energy,
    tokens,
    heads,
    rows,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    SHIFTED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Top eigenvalue of the Gram matrix of every token's window, `[N, T, H]`."""
    g, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    ok = g < rows
    n, t, h = g // (tokens * heads), (g // heads) % tokens, g % heads
    begin = tl.zeros_like(g)
    if SHIFTED:
        begin = tl.where(tl.load(has_key + n, mask=ok, other=1) != 0, 0, 1).to(tl.int64)
    ok = ok & (t >= begin)
    if MASKED:
        ok = ok & (tl.load(real + n * tokens + t, mask=ok, other=0) != 0)
    x = ()
    for j in tl.static_range(WINDOW):
        at = _key_of(k, key, tail_x, n, h, t - (WINDOW - 1) + j, begin, tokens, heads, K, WINDOW, SHIFTED)
        x = x + (read(at[:, None] + d[None, :], ok[:, None] & (d < K)[None, :]).to(tl.float32),)
    gram = ()
    for i in tl.static_range(WINDOW):
        for j in tl.static_range(WINDOW):
            if j < i:
                gram = gram + (gram[j * WINDOW + i],)
            else:
                gram = gram + (tl.sum(x[i] * x[j], 1),)
    top, _u = top_direction(gram, WINDOW)
    tl.store(energy + g, top, mask=g < rows)


@triton.jit
def _keys(
    k, key, tail_x, n, h, t, begin, entries, tokens, heads, d, K: tl.constexpr, WINDOW: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """The keys that token t writes, a tuple of `[K]`, of which only `entries` exist."""
    x = ()
    for j in tl.static_range(WINDOW):
        there = _key_of(k, key, tail_x, n, h, t - (WINDOW - 1) + j, begin, tokens, heads, K, WINDOW, SHIFTED)
        x = x + (read(there + d, d < entries),)
    return x


@triton.jit
def _values(v, tail_v, n, h, t, begin, entries, tokens, heads, c, V: tl.constexpr, WINDOW: tl.constexpr):
    """Their values."""
    value = ()
    for j in tl.static_range(WINDOW):
        there = _value_of(v, tail_v, n, h, t - (WINDOW - 1) + j, begin, tokens, heads, V, WINDOW)
        value = value + (read(there + c, c < entries),)
    return value


@triton.jit
def _gram(x, WINDOW: tl.constexpr):
    """Gram matrix of the keys x, a tuple of its entries. Up to 4 keys, all of it is one sum over threads."""
    rows, gram = (), ()
    if WINDOW > 4:
        for i in tl.static_range(WINDOW):
            for j in tl.static_range(WINDOW):
                if j < i:
                    gram = gram + (gram[j * WINDOW + i],)
                else:
                    gram = gram + (tl.sum(x[i].to(tl.float32) * x[j].to(tl.float32), 0),)
    else:
        for i in tl.static_range(4):
            rows = rows + (x[i].to(tl.float32) if i < WINDOW else x[0].to(tl.float32) * 0.0,)
        both = tl.join(tl.join(rows[0], rows[1]), tl.join(rows[2], rows[3]))  # key a + 2 b in column [a, b]
        entries = (tl.sum(both[:, :, :, None, None] * both[:, None, None, :, :], 0),)
        for level in tl.static_range(4):
            halves = ()
            for i in tl.static_range(1 << level):
                even, odd = tl.split(entries[i])
                halves = halves + (even, odd)
            entries = halves
        for i in tl.static_range(WINDOW):
            for j in tl.static_range(WINDOW):
                gram = gram + (entries[4 * j + i],)
    return gram


@triton.jit
def _energy_of(energies, token, x, GATED: tl.constexpr, WINDOW: tl.constexpr, TOP: tl.constexpr, NEEDED: tl.constexpr):
    """Summed energy of the keys that a token writes. TOP: their top eigenvalue."""
    summed = 0.0
    if energies is not None:
        summed = tl.load(energies + token)
    elif GATED and NEEDED and TOP and WINDOW > 1:
        summed = top_value(_gram(x, WINDOW), WINDOW)
    elif GATED and NEEDED:
        square = x[0].to(tl.float32) * x[0].to(tl.float32)
        for j in tl.static_range(1, WINDOW):
            square += x[j].to(tl.float32) * x[j].to(tl.float32)
        summed = tl.sum(square, 0)
    return summed


@triton.jit
def _gates(
    gain, other, token, c, summed, pairs, alive, writes, eps, decay_floor,
    V: tl.constexpr, WINDOW: tl.constexpr, GATED: tl.constexpr, PER_COLUMN: tl.constexpr, DIVIDE: tl.constexpr,
    COUPLED: tl.constexpr,
):  # fmt: skip
    """Strength and decay of a token, for a block of columns `[1, c]` where every column has its own."""
    strength, decay = 1.0, 1.0
    if PER_COLUMN:
        strength = read(gain + token * V + c, c < V * alive).to(tl.float32)[None, :]
    elif gain is not None:
        strength = read(gain + token, alive > 0).to(tl.float32)
    if other is not None:
        decay = read(other + token, alive > 0).to(tl.float32)
    if GATED:
        beta, lam, energy = strength, decay, summed / pairs
        if COUPLED:
            lam = lam * energy
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
    elif other is not None:
        decay = tl.exp(decay)
    return strength, decay


@triton.jit
def _advance(
    old, x, value, wanted, strength, decay,
    WINDOW: tl.constexpr, REGRESSION: tl.constexpr, DECAY_FIRST: tl.constexpr, READ_AFTER_WRITE: tl.constexpr,
):  # fmt: skip
    """S after a token, and what it reads; wanted: its query `[K, 1]`."""
    if not READ_AFTER_WRITE:
        found = tl.sum(old * wanted, 0)
    if DECAY_FIRST:
        old = old * decay
    written = ()
    for j in tl.static_range(WINDOW):
        one = value[j].to(tl.float32)[None, :]
        if REGRESSION:
            one = one - tl.sum(old * x[j].to(tl.float32)[:, None], 0)[None, :]
        written = written + (strength * one,)
    if not DECAY_FIRST:
        old = old * decay
    for j in tl.static_range(WINDOW):  # where nothing is written, keys are 0 and the decay is 1
        old += x[j].to(tl.float32)[:, None] * written[j]
    if READ_AFTER_WRITE:
        found = tl.sum(old * wanted, 0)
    return old, found


@triton.jit(do_not_specialize=["tokens"])
def _steps(
    q,
    k,
    v,
    gain,
    other,
    key,
    tail_x,
    tail_v,
    has_key,
    count,
    energies,
    real,
    z,
    S,
    new_key,
    new_tail_x,
    new_tail_v,
    new_has_key,
    new_count,
    new_z,
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
    NORMALIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """GATED: a Falcon rule; `gain`, `other` are its beta and ridge. Otherwise strength and log-decay, either of them perhaps None.

    PARTS: blocks of columns that a program of a single token goes through, each loaded while the ones before are worked on; 0 for
    several tokens, whose programs hold one block. All programs of a head read its keys, so what changes but S goes to new tensors.
    """
    sequence_head = tl.program_id(1).to(tl.int64)
    n, h = sequence_head // heads, sequence_head % heads
    d, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    c = tl.program_id(0) * BLOCK_V * (PARTS if PARTS else 1) + columns
    states = sequence_head * K * V + d[:, None] * V
    if not PARTS:
        inside = (d < K)[:, None] & (c < V)[None, :]
        old = tl.load(S + states + c[None, :], mask=inside, other=0.0)
    # every wait for other threads is also one for loads before it, so all loads come first
    begin, before, moved, pairs_of_call, there_is = 0, 0, (), 0, 1
    own = d < tl.where(tl.program_id(0) == 0, K, 0)
    if GATED:
        before = tl.load(count + n)
        known = tl.load(has_key + n) != 0
        if SHIFTED:
            begin = tl.where(known, 0, 1)
        there_is = tl.load(real + n * tokens).to(tl.int32) if MASKED else 1
        pairs_of_call = (tokens - begin) * there_is
        there = tl.where(there_is > 0, k + ((n * tokens + tokens - 1) * heads + h) * K, key + sequence_head * K)
        moved = (tl.load(there + d, mask=own),)
        for i in tl.static_range(WINDOW - 1):
            t = begin + i + pairs_of_call - (WINDOW - 1)
            there = _key_of(k, key, tail_x, n, h, t, begin, tokens, heads, K, WINDOW, SHIFTED)
            moved = moved + (tl.load(there + d, mask=own),)
    if z is not None:
        norms = tl.load(z + sequence_head * K + d, mask=d < K, other=0.0)
    for t in range(tokens if not PARTS else 1):
        token = (n * tokens + t) * heads + h
        # how many entries of this token's rows exist: none where it is masked (a bound, as masks of blocks and scalars do not mix)
        alive = tl.load(real + n * tokens + t).to(tl.int32) if MASKED else 1
        writes = (alive > 0) & (t >= begin)
        new_k, new_v = tl.where(writes, K, 0), tl.where(writes, V, 0)
        x = _keys(k, key, tail_x, n, h, t, begin, new_k, tokens, heads, d, K, WINDOW, SHIFTED)
        row = read(q + token * K + d, d < K * alive).to(tl.float32)
        wanted = (row * scale)[:, None]
        summed = _energy_of(energies, token, x, GATED, WINDOW, REGRESSION, DIVIDE or COUPLED)
        pairs = tl.minimum(tl.maximum(before + t + 1 - begin, 1), WINDOW).to(tl.float32)
        if z is not None:
            decay = 1.0
            if other is not None:
                decay = tl.exp(read(other + token, alive > 0).to(tl.float32))
            norms = norms * decay + x[0].to(tl.float32)
            divisor = 1.0
            if NORMALIZE:
                divisor = tl.where(alive > 0, tl.sum(norms * row, 0) + eps, 1.0)
        if PARTS:
            for part in tl.range(PARTS, num_stages=STAGES):
                mine = c + part * BLOCK_V
                inside = (d < K)[:, None] & (mine < V)[None, :]
                block = tl.load(S + states + mine[None, :], mask=inside, other=0.0)
                value = _values(v, tail_v, n, h, 0, begin, new_v, tokens, heads, mine, V, WINDOW)
                strength, decay = _gates(
                    gain, other, token, mine, summed, pairs, alive, writes, eps, decay_floor,
                    V, WINDOW, GATED, PER_COLUMN, DIVIDE, COUPLED,
                )  # fmt: skip
                for i in tl.static_range(WINDOW - 1):
                    there = _value_of(
                        v, tail_v, n, h, begin + i + pairs_of_call - (WINDOW - 1), begin, tokens, heads, V, WINDOW
                    )
                    to = new_tail_v + ((n * (WINDOW - 1) + i) * heads + h) * V
                    tl.store(to + mine, tl.load(there + mine, mask=mine < V), mask=mine < V)
                block, found = _advance(
                    block, x, value, wanted, strength, decay, WINDOW, REGRESSION, DECAY_FIRST, READ_AFTER_WRITE
                )
                if NORMALIZE:
                    found = found / divisor
                tl.store(o + token * V + mine, found.to(o.dtype.element_ty), mask=mine < V)
                tl.store(new_S + states + mine[None, :], block, mask=inside)
        else:
            value = _values(v, tail_v, n, h, t, begin, new_v, tokens, heads, c, V, WINDOW)
            strength, decay = _gates(
                gain, other, token, c, summed, pairs, alive, writes, eps, decay_floor,
                V, WINDOW, GATED, PER_COLUMN, DIVIDE, COUPLED,
            )  # fmt: skip
            old, found = _advance(
                old, x, value, wanted, strength, decay, WINDOW, REGRESSION, DECAY_FIRST, READ_AFTER_WRITE
            )
            if NORMALIZE:
                found = found / divisor
            tl.store(o + token * V + c, found.to(o.dtype.element_ty), mask=c < V)
    if not PARTS:
        tl.store(new_S + states + c[None, :], old, mask=inside)
        for i in tl.static_range(WINDOW - 1):
            t = begin + i + pairs_of_call - (WINDOW - 1)
            there = _value_of(v, tail_v, n, h, t, begin, tokens, heads, V, WINDOW)
            to = new_tail_v + ((n * (WINDOW - 1) + i) * heads + h) * V
            tl.store(to + c, tl.load(there + c, mask=c < V), mask=c < V)
    if z is not None:
        tl.store(new_z + sequence_head * K + d, norms, mask=own)
    if GATED:
        tl.store(new_key + sequence_head * K + d, moved[0], mask=own)
        for i in tl.static_range(WINDOW - 1):
            to = (n * (WINDOW - 1) + i) * heads + h
            tl.store(new_tail_x + to * K + d, moved[1 + i], mask=own)
        if (tl.program_id(0) == 0) & (h == 0):
            tl.store(new_has_key + n, known | (there_is > 0))
            tl.store(new_count + n, tl.minimum(before + pairs_of_call, WINDOW - 1))


def _many(q: Tensor) -> bool:
    """Whether a program goes through all columns of a head."""
    return q.shape[1] == 1 and q.shape[0] * q.shape[2] >= MANY


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    other: Tensor | None,
    state: tuple[Tensor | None, ...],
    energies: Tensor | None,
    mask: Tensor | None,
    S: Tensor,
    new: tuple[Tensor | None, ...],
    window: int,
    z: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run the kernel: `state` and `new` are key, tail_x, tail_v, has_key and count before and after."""
    (batch, tokens, heads, k_size), v_size = q.shape, v.shape[3]
    S = S.contiguous()
    new_S = S if may_overwrite_states() else torch.empty_like(S)
    o = v.new_empty(batch, tokens, heads, v_size)
    block_k, block_v = block(k_size), min(block(v_size), COLUMNS if k_size <= 128 else 16)
    blocks = parts(v_size, block_v)
    through = blocks if _many(q) else int(tokens == 1)
    names = ("key", "tail_x", "tail_v", "has_key", "count")
    with on_device(q):
        launch(
            _steps, (parts(blocks, max(1, through)), batch * heads), q=q, k=k, v=v, gain=gain, other=other,
            **dict(zip(names, state, strict=True)), energies=energies, real=mask, z=z[0], S=S,
            **{f"new_{name}": x for name, x in zip(names, new, strict=True)}, new_z=z[1], new_S=new_S, o=o, tokens=tokens, heads=heads,
            K=k_size, V=v_size, WINDOW=window, MASKED=mask is not None, BLOCK_K=block_k, BLOCK_V=block_v, PARTS=through,
            STAGES=STAGES, **({"num_warps": WARPS} if through < 2 else {"num_warps": MANY_WARPS, "maxnreg": REGISTERS}), **options,
        )  # fmt: skip
    return o, new_S


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


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
    z: Tensor | None = None,
    normalize: bool = False,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`S <- decay S + strength k e^T`, token by token, where e is v or its residual at the decayed S; o = scale * S^T q.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, H, V]`. strength, log_decay: `[B, T, H]`, None means 1 and 0.
        S: float32 `[B, H, K, V]`; overwritten within `contract.overwriting_states()`. mask: bool `[B, T]` or None.
        z: normaliser `[B, H, K]`, `z <- decay z + k`, or None. normalize: divide o by q . z + eps.

    Returns: o `[B, T, H, V]` in the dtype of v, the new S, and the new z.
    """
    options = {"REGRESSION": regression, "PER_COLUMN": False, "DECAY_FIRST": True, "READ_AFTER_WRITE": True}
    gates = {"GATED": False, "DIVIDE": False, "COUPLED": False, "SHIFTED": False, "decay_floor": 0.0}
    q, k, v, strength, log_decay, mask, z = _contiguous(q, k, v, strength, log_decay, mask, z)
    norms = (z, None if z is None else torch.empty_like(z))
    o, S = _run(
        q, k, v, strength, log_decay, NOTHING, None, mask, S, NOTHING, 1, norms, NORMALIZE=normalize, eps=eps, scale=scale,
        **options, **gates,
    )  # fmt: skip
    return o, S, norms[1]


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
    rule, window = options.rule, options.window
    q, k, v, beta, ridge, mask = _contiguous(q, k, v, beta, ridge, mask)
    held = FalconState(*(x.contiguous() for x in state))
    key, tail_x, tail_v, count = (torch.empty_like(x) for x in (held.key, held.tail_x, held.tail_v, held.count))
    new = FalconState(state.S, key, torch.empty_like(held.has_key), tail_x, tail_v, count)
    o, S = _run(
        q,
        k,
        v,
        beta,
        ridge,
        _moving(held),
        _energies(q, k, held, mask, options),
        mask,
        state.S,
        _moving(new),
        window,
        SHIFTED=options.shifted,
        REGRESSION=rule.regression,
        PER_COLUMN=rule.per_column,
        DECAY_FIRST=False,
        READ_AFTER_WRITE=options.read_after_write,
        GATED=True,
        NORMALIZE=False,
        DIVIDE=options.step == "beta",
        COUPLED=options.scale_coupled,
        eps=options.eps,
        decay_floor=options.decay_floor,
        scale=1.0,
    )
    return o, new._replace(S=S)


def _moving(state: FalconState) -> tuple[Tensor, ...]:
    return state.key, state.tail_x, state.tail_v, state.has_key, state.count


def _energies(q: Tensor, k: Tensor, state: FalconState, mask: Tensor | None, options: Options) -> Tensor | None:
    """falcon3's energies before they are divided by the number of pairs `[N, T, H]`; None where the step makes them itself."""
    if not (options.needs_energy and options.rule.regression and options.window > 1) or _many(q):
        return None
    (batch, tokens, heads, k_size), few = q.shape, 2
    energies = q.new_empty(batch, tokens, heads, dtype=torch.float32)
    with on_device(q):
        launch(
            _window_energies, (parts(energies.numel(), few),), k=k, key=state.key, tail_x=state.tail_x, has_key=state.has_key,
            real=mask, energy=energies, tokens=tokens, heads=heads, rows=energies.numel(), K=k_size, WINDOW=options.window,
            SHIFTED=options.shifted, MASKED=mask is not None, BLOCK_K=block(k_size), ROWS=few, num_warps=1,
        )  # fmt: skip
    return energies
