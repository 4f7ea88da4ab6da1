"""Falcon's gates on a GPU: energy, step, decay and its prefix of every token in one pass over the keys, and their gradients.

Results lie in chunks, float32 `[M, H, C]`. Kernels that differentiate them hand back gradients in the same layout.
Slots, chunks, heads of a document: see `ranks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..associative import gradients_of_chunk, weigh
from ..gpu import (
    block,
    key_pointers,
    launch,
    missing_pairs,
    of_chunk,
    on_device,
    read,
    row_of,
    slots_of,
    split_dot,
    tables,
)
from ..ranks import BLOCK, CHUNK, Ranks, ranks_of
from .eigenvalues import top_eigenvalues, window_products
from .rules import RULES, FalconState, Options


class Gates(NamedTuple):
    """Gates of every slot; 0 (and no decay) where a slot has no pair of its own.

    Attributes:
        found: `[4, M, H, C]`: strength, upto, upto_low, energy. With one gain a token, strength is eta / B, and upto and upto_low
            are the two halves of the log-decay summed from the chunk's start (the second is 0 for 16-bit inputs). With a gain for every column, upto is kept and
            upto_low is pull, with eta = strength * beta and gamma = max(kept + (1 - beta) * pull, floor), or
            max(1 - beta * pull, floor) with `step="eta"`.
        vector: top eigenvector of falcon3's windows, `[B * T, H, W]` by first row plus rank.
    """

    found: Tensor
    vector: Tensor


def heads_of(state: FalconState, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs in slots -(W - 1) ... 0 of every document, and whether its first token has none.

    Returns: head_x `[N, H, W, K]`, head_v `[N, H, W, V]` (slot 0 holds a value only where the first token has no pair:
    there the tail moves up, so that the window has no gap; empty for W = 1), first int32 `[N]`.
    """
    if options.window == 1:
        return state.key[:, :, None].contiguous(), state.tail_v, (~state.has_key & options.shifted).int()
    x, v = torch.cat([state.tail_x, state.key[:, None]], 1), torch.nn.functional.pad(state.tail_v, (0, 0, 0, 0, 0, 1))
    known = (state.has_key if options.shifted else torch.ones_like(state.has_key))[:, None, None, None]
    x, v = (torch.where(known, rows, rows.roll(1, 1)) for rows in (x, v))
    return x.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), (~state.has_key & options.shifted).int()


@triton.jit(do_not_specialize=["T", "NC"])
def _gates(
    k,
    head_x,
    beta,
    ridge,
    first,
    count,
    strength,
    upto,
    upto_low,
    energy,
    weights,
    mixes,
    docs,
    chunk_doc,
    rows,
    eps,
    decay_floor,
    T,
    NC,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    ENERGY: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIVIDE: tl.constexpr,
    COUPLED: tl.constexpr,
    LOW: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
):
    """ENERGY: 0 none, 1 mean squared norm of the window, 2 already there, as a sum. DIVIDE: the step is beta / (E + ...).

    weights, mixes: where those of `weigh` go, or None.
    """
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, d = tl.arange(0, C), tl.arange(0, BK)
    place, r = slots_of(i, W, C, N)
    token, begin = (place >= W - 1) & (r < length), missing_pairs(first, n, SHIFT)
    writes = token & (r >= begin)
    at = (c * H + h) * C + e
    before = 0
    if count is not None:
        before = tl.load(count + n)
    pairs = tl.minimum(tl.maximum(before + r + 1 - begin, 1), W).to(tl.float32)
    E = tl.zeros([C], tl.float32)
    if ENERGY == 1:
        p, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
        x = read(p[:, None] + d[None, :], ok[:, None] & (d < K)[None, :]).to(tl.float32)
        E = tl.sum(x * x, 1)
        if W > 1:
            behind = e[:, None] - e[None, :]
            E = tl.sum(tl.where((behind >= 0) & (behind < W), E[None, :], 0.0), 1)
    if ENERGY == 2:
        E = tl.load(energy + at)
    E = tl.where(writes, E / pairs, 0.0)
    row = row_of(rows, start, r, token, MASKED) * H + h
    lam = read(ridge + row, token).to(tl.float32)
    if COUPLED:
        lam *= E
    inverse = tl.where(writes, 1.0, 0.0)
    kept = tl.full([C], 1.0, tl.float32)
    if DIVIDE:
        under = E + lam + eps
        writes = writes & (under != 0)
        inverse = tl.where(writes, tl.div_rn(tl.full([C], 1.0, tl.float32), tl.where(writes, under, 1.0)), 0.0)
        # 1 - eta * ridge = (energy + eps + (1 - beta) * ridge) / denominator, so that float32 keeps its digits near the floor
        kept = tl.where(writes, (E + eps) * inverse, 1.0)
    pull = tl.where(writes, lam * inverse, 0.0)
    if ENERGY:
        tl.store(energy + at, E)
    if COLUMNS:
        tl.store(strength + at, inverse)
        tl.store(upto + at, kept)
        tl.store(upto_low + at, pull)
    else:
        gain = read(beta + row, token).to(tl.float32)
        if DIVIDE:
            gamma = kept + (1.0 - gain) * pull
        else:
            gamma = 1.0 - gain * pull
        tl.store(strength + at, gain * inverse / pairs)
        log_decay = tl.log(tl.maximum(gamma, decay_floor))
        if LOW:
            wide = tl.cumsum(log_decay.to(tl.float64), 0)
            high = wide.to(tl.float32)
            low = (wide - high.to(tl.float64)).to(tl.float32)
        else:
            high = tl.cumsum(log_decay, 0)
            low = tl.zeros([C], tl.float32)
        tl.store(upto + at, high)
        tl.store(upto_low + at, low)
        if weights is not None:
            tl.debug_barrier()  # slots are read again by other threads
            weigh(strength, upto, upto_low, weights, mixes, (c * H + h) * C, W, AFTER, LOW, C)


@triton.jit(do_not_specialize=["T", "NC", "size"])
def _gates_backward(
    beta,
    ridge,
    first,
    count,
    energy,
    d_strength,
    d_log_decay,
    low,
    exact,
    strength,
    upto,
    upto_low,
    weights,
    inner,
    far,
    close,
    apart,
    d_beta,
    d_ridge,
    d_energy,
    docs,
    chunk_doc,
    rows,
    size,
    eps,
    decay_floor,
    T,
    NC,
    H: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    ENERGY: tl.constexpr,
    SLIDING: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIVIDE: tl.constexpr,
    COUPLED: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
):
    """Gradients of beta, ridge and the window's energy (divided by its pairs, `[B * T, H]` by first row plus rank).

    d_strength None: it and d_log_decay come from products of the walks, see `associative.gradients_of_chunk`.
    """
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e = tl.arange(0, C)
    place, r = slots_of(i, W, C, N)
    token, begin = (place >= W - 1) & (r < length), missing_pairs(first, n, SHIFT)
    writes = token & (r >= begin)
    at = (c * H + h) * C + e
    before = 0
    if count is not None:
        before = tl.load(count + n)
    pairs = tl.minimum(tl.maximum(before + r + 1 - begin, 1), W).to(tl.float32)
    row = row_of(rows, start, r, token, MASKED) * H + h
    own = read(ridge + row, token).to(tl.float32)
    E = tl.zeros([C], tl.float32)
    if ENERGY:
        E = tl.load(energy + at)
    lam = own
    if COUPLED:
        lam = own * E
    inverse = tl.where(writes, 1.0, 0.0)
    kept = tl.full([C], 1.0, tl.float32)
    if DIVIDE:
        under = E + lam + eps
        writes = writes & (under != 0)
        inverse = tl.where(writes, tl.div_rn(tl.full([C], 1.0, tl.float32), tl.where(writes, under, 1.0)), 0.0)
        kept = tl.where(writes, (E + eps) * inverse, 1.0)
    pull = tl.where(writes, lam * inverse, 0.0)
    if d_strength is None:
        d_eta, d_gamma = gradients_of_chunk(
            low, exact, upto, upto_low, weights, inner, far, close, apart, (c * H + h) * C, size, PARTS, W, AFTER, LOW, C
        )  # fmt: skip
    else:
        d_eta, d_gamma = tl.load(d_strength + at), tl.load(d_log_decay + at)
    if not COLUMNS:
        gain = read(beta + row, token).to(tl.float32)
        if DIVIDE:
            gamma = kept + (1.0 - gain) * pull
        else:
            gamma = 1.0 - gain * pull
        d_gamma = tl.where(gamma >= decay_floor, d_gamma / tl.maximum(gamma, decay_floor), 0.0)
        d_eta = d_eta / pairs
        d_gain = tl.where(writes, d_eta * inverse - d_gamma * pull, 0.0)
        tl.store(d_beta + row, d_gain, mask=token)
        d_eta, d_gamma = gain * d_eta, gain * d_gamma
    # from here on, d_eta and d_gamma are multiplied by the gain (and summed over its columns)
    if DIVIDE:
        d_lam = -inverse * (inverse * (d_eta + (E + eps) * d_gamma))
        d_E = inverse * (inverse * (lam * d_gamma - d_eta))
    else:
        d_lam = -d_gamma
        d_E = tl.zeros([C], tl.float32)
    d_own = d_lam
    if COUPLED:
        d_own = d_lam * E
        if not SLIDING:
            d_E += own * d_lam
    tl.store(d_ridge + row, tl.where(writes, d_own, 0.0), mask=token)
    if ENERGY:
        tl.store(d_energy + (start + r) * H + h, tl.where(writes, d_E / pairs, 0.0), mask=token)


@triton.jit(do_not_specialize=["T", "NC"])
def _energy_backward(
    k,
    head_x,
    d_energy,
    vector,
    d_k,
    d_head_x,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,
    SHIFT: tl.constexpr,
    TOP: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
):
    """Add the gradient through the energy to the gradient of the keys."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, d = tl.arange(0, C), tl.arange(0, BK)
    # as many slots of its own as a chunk has, in a row, and those of the windows that begin or end there
    stride: tl.constexpr = C // N * (N - W + 1)
    r = i * stride - (W - 1) + e
    own = (r < length) & (e < W - 1 + stride) & ((e >= W - 1) | (i + e * 0 == 0))
    column = (d < K)[None, :]
    p, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    x = read(p[:, None] + d[None, :], ok[:, None] & column)
    if TOP:
        behind = e[:, None] - e[None, :]
        factors = tl.zeros([C, C], tl.float32)
        for w in tl.static_range(W):
            # the pair in slot r is number w of the window of rank r + w, and the other one number w + behind
            s, number = r + w, w + behind
            ok = own & (s >= 0) & (s < length)
            window = (start + s) * H + h
            scale = tl.load(vector + window * W + w, mask=ok, other=0.0) * tl.load(
                d_energy + window, mask=ok, other=0.0
            )
            ok = ok[:, None] & (number >= 0) & (number < W)
            factors += scale[:, None] * tl.load(vector + window[:, None] * W + number, mask=ok, other=0.0)
        grad = split_dot(factors, x)
    else:
        factor = tl.zeros([C], tl.float32)
        for w in tl.static_range(W):
            ok = own & (r + w >= 0) & (r + w < length)
            factor += tl.load(d_energy + (start + r + w) * H + h, mask=ok, other=0.0)
        grad = factor[:, None] * x.to(tl.float32)
    p, ok = key_pointers(d_k, d_head_x, rows, n, start, length, h, r, H, K, W, SHIFT, MASKED)
    p, ok = p[:, None] + d[None, :], (ok & own)[:, None] & column
    tl.store(p, read(p, ok).to(tl.float32) + 2.0 * grad, mask=ok)


def _options(options: Options) -> dict[str, Any]:
    return {
        "COLUMNS": options.rule.per_column,
        "DIVIDE": options.step == "beta",
        "COUPLED": options.scale_coupled,
        "W": options.window,
        "N": slots_a_block(options),
        "AFTER": int(options.read_after_write),
    }


def _top(options: Options) -> bool:
    """Whether the energy is an eigenvalue; that of a single pair is its squared norm."""
    return options.rule.regression and options.window > 1


def slots_a_block(options: Options) -> int:
    """Slots that share the last W - 1 pairs before them: falcon3's blocks, otherwise chunks."""
    return BLOCK if _top(options) else CHUNK


def gates(
    k: Tensor,
    head_x: Tensor | None,
    beta: Tensor,
    ridge: Tensor,
    first: Tensor | None,
    count: Tensor | None,
    ranks: Ranks,
    options: Options,
    weights: Tensor | None = None,
    mixes: Tensor | None = None,
) -> Gates:
    """Gates of all tokens.

    Args:
        k: `[B, T, H, K]`. head_x, first: of `heads_of`; None for documents that begin here. beta, ridge: `[B, T, H]` (beta with V
            is not read here).
        count: int64 `[N]`, real rows of the tail, or None. ranks: with W - 1 shared slots a block. weights, mixes: where
            those of `associative.weigh` go, or None.
    """
    heads, k_size = k.shape[2:]
    shape = (ranks.chunks, heads, CHUNK)
    out = k.new_empty(4, *shape, dtype=torch.float32)
    vector = k.new_empty(0, dtype=torch.float32)
    sizes = {"H": heads, "K": k_size, "BK": block(k_size), "SHIFT": int(options.shifted)}
    energy = int(options.needs_energy)
    with on_device(k):
        if energy and _top(options):
            energy = 2
            vector = k.new_empty(ranks.batch * ranks.tokens, heads, options.window, dtype=torch.float32)
            bands = out.new_empty(options.window, *shape)
            given = {
                **tables(ranks),
                **sizes,
                "k": k,
                "head_x": head_x,
                "bands": bands,
                "M": ranks.chunks,
                "W": options.window,
            }
            launch(window_products, (ranks.chunks * heads,), **given, num_warps=4)
            launch(top_eigenvalues, (ranks.chunks * heads,), **given, energy=out[3], vector=vector, num_warps=2)
        launch(
            _gates,
            (ranks.chunks * heads,),
            k=k,
            head_x=head_x,
            beta=beta,
            ridge=ridge,
            first=first,
            count=count,
            **dict(zip(("strength", "upto", "upto_low", "energy"), out.unbind(), strict=True)),
            weights=weights,
            mixes=mixes,
            **tables(ranks),
            **sizes,
            **_options(options),
            eps=options.eps,
            decay_floor=options.decay_floor,
            ENERGY=energy,
            LOW=k.dtype == torch.float32,
        )
    return Gates(out, vector)


def inputs_backward(
    beta: Tensor,
    ridge: Tensor,
    first: Tensor | None,
    count: Tensor | None,
    found: Gates,
    grads: Mapping[str, Any],
    ranks: Ranks,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of beta (empty with a gain for every column), of ridge, and of the energies.

    Args:
        grads: d_strength and d_log_decay, of strength and of the log-decay of every token (not its prefix), `[M, H, C]`. With a gain
            for every column: the sums over columns of beta * (gradient of eta) and of beta * (gradient of gamma, 0 at the floor). Or
            what `associative.gradients_of_chunk` makes them from.
    Returns: the last one, divided by the pairs of the window, `[B * T, H]` by first row plus rank; None where there is none.
    """
    heads = ridge.shape[2]
    d_beta = ridge.new_empty(0) if options.rule.per_column else ranks.new_like(beta)
    d_ridge = ranks.new_like(ridge)
    live = options.step == "beta" or (options.scale_coupled and not options.rule.sliding)
    d_energy = ridge.new_empty(ranks.batch * ranks.tokens, heads, dtype=torch.float32)
    with on_device(ridge):
        launch(
            _gates_backward,
            (ranks.chunks * heads,),
            beta=beta,
            ridge=ridge,
            first=first,
            count=count,
            energy=found.found[3],
            **grads,
            d_beta=d_beta,
            d_ridge=d_ridge,
            d_energy=d_energy,
            **tables(ranks),
            **_options(options),
            H=heads,
            SHIFT=int(options.shifted),
            eps=options.eps,
            decay_floor=options.decay_floor,
            ENERGY=int(options.needs_energy),
            SLIDING=options.rule.sliding,
        )
    return d_beta, d_ridge, d_energy if live else None


def gates_backward(
    k: Tensor,
    head_x: Tensor | None,
    beta: Tensor,
    ridge: Tensor,
    first: Tensor | None,
    count: Tensor | None,
    found: Gates,
    d_strength: Tensor,
    d_log_decay: Tensor,
    d_k: Tensor,
    d_head_x: Tensor | None,
    ranks: Ranks,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Gradients of beta and ridge, see `inputs_backward`; that of the keys is added to d_k and d_head_x.

    Args:
        d_k: `[B, T, H, K]`, d_head_x `[N, H, W, K]`: changed in place.
    """
    grads = {"d_strength": d_strength, "d_log_decay": d_log_decay}
    d_beta, d_ridge, d_energy = inputs_backward(beta, ridge, first, count, found, grads, ranks, options)
    if d_energy is not None:
        energy_backward(k, head_x, d_energy, found.vector, d_k, d_head_x, ranks, options)
    return d_beta, d_ridge


def energy_backward(
    k: Tensor,
    head_x: Tensor | None,
    d_energy: Tensor,
    vector: Tensor | None,
    d_k: Tensor,
    d_head_x: Tensor | None,
    ranks: Ranks,
    options: Options,
) -> None:
    """Add the gradient of the energies (of `inputs_backward`) to those of the keys. vector: of `Gates`, where an energy is an eigenvalue."""
    heads, k_size = k.shape[2:]
    with on_device(k):
        launch(
            _energy_backward,
            (ranks.chunks * heads,),
            k=k,
            head_x=head_x,
            d_energy=d_energy,
            vector=vector,
            d_k=d_k,
            d_head_x=d_head_x,
            **tables(ranks),
            H=heads,
            K=k_size,
            BK=block(k_size),
            SHIFT=int(options.shifted),
            W=options.window,
            N=slots_a_block(options),
            TOP=_top(options),
        )


# --- options and tables as an operator's arguments ---


def unpack(
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    rule: str,
    flags: list[int],
    numbers: list[float],
) -> tuple[Ranks, Options]:
    """Tables and options from what an operator can take."""
    ranks = ranks_of(sizes, docs, chunk_doc, segment_doc, rows)
    window, shifted, after, divide, coupled = flags
    return ranks, Options(
        RULES[rule], window, bool(shifted), bool(after), "beta" if divide else "eta", bool(coupled), *numbers
    )


def pack(ranks: Ranks, options: Options) -> tuple[Any, ...]:
    """The inverse of `unpack`."""
    rule = next(name for name, rule in RULES.items() if rule == options.rule)
    flags = [options.window, options.shifted, options.read_after_write, options.step == "beta", options.scale_coupled]
    return *ranks.tables, ranks.sizes, rule, [int(x) for x in flags], [options.eps, options.decay_floor]
