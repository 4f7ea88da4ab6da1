"""Triton kernels of falcon2a (see `columns.py`) for 16-bit inputs: linear attention on values rescaled about the middle of every 8 rows.

With log-decay prefix u_tv of column v, m(t) the middle of the 8 rows that hold t, and R_tv = exp(u_tv - u_m(t)v),

    o_tv = R_tv * (read of q_t from the state at m(t), and from b_jv / R_jv of the rows j <= t of its 8)

is linear attention whose decays change only from one 8 rows to the next: matrix products on b / R, times a factor for every 8
rows and column. Nothing is neglected: 4 decays of 1e-4 (no decay floor may be smaller) make R at most 1e16, inside the range of bfloat16 and float32 (which
float16 inputs take), and the factors from middle to middle are at least 1e-32.

What the kernels need of beta and v is made once (`_rescale`): b / R, R, and the log-decay of both halves of every 8 rows, in
chunks `[M, H, C, V]`. They walk over a segment 16 rows a step, the state in registers, value columns (for the gradients of queries
and keys: key columns) as the rows of every product. Backward is the same walk from the end: pairs and readers, and the halves
of every step, change places. Segments, and the scan over their states: see `associative.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..associative import FIXED, _segment, scan
from ..gpu import block, dot, key_pointers, of_chunk, on_device, read, row_of
from ..ranks import CHUNK, Ranks
from .rules import Options

STAGES = 3  # of the loads that run ahead of a walk


@triton.jit
def _gate(beta, strength, upto, upto_low, row, token, slot, dv, decay_floor, V: tl.constexpr, DIVIDE: tl.constexpr):
    """Gain, 1 / denominator, decay before it is held above the floor, and what multiplies 1 - gain (or gain) in it."""
    gain = read(beta + row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]).to(tl.float32)
    pull = tl.load(upto_low + slot)[:, None]
    raw = (tl.load(upto + slot)[:, None] + (1.0 - gain) * pull) if DIVIDE else (1.0 - gain * pull)
    return gain, tl.load(strength + slot)[:, None], raw, pull


@triton.jit(do_not_specialize=["T", "NC"])
def _rescale(
    v,
    beta,
    strength,
    upto,
    upto_low,
    b,
    scale,
    halves,
    docs,
    chunk_doc,
    rows,
    decay_floor,
    T,
    NC,
    H,
    V: tl.constexpr,
    BV: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """b / R and R, `[M, H, C, V]`, and the log-decay of the halves of every 8 rows, `[M, H, C / 8, 2, V]`."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    eight, dv = tl.arange(0, C // 8), tl.program_id(1) * BV + tl.arange(0, BV)
    in_v = (dv < V)[None, :]
    at = (c * H + h) * C
    u = tl.zeros([C // 8, BV], tl.float32)
    for s in tl.static_range(4):
        e = 8 * eight + s
        token = i * C + e < length
        row = row_of(rows, start, i * C + e, token, MASKED) * H + h
        _, _, raw, _ = _gate(beta, strength, upto, upto_low, row, token, at + e, dv, decay_floor, V, DIVIDE)
        u -= tl.log(tl.maximum(raw, decay_floor))
    own = halves + (at // 8 + eight)[:, None] * 2 * V + dv[None, :]
    tl.store(own, -u, mask=(eight >= 0)[:, None] & in_v)
    for s in tl.static_range(8):
        e = 8 * eight + s
        token = i * C + e < length
        row = row_of(rows, start, i * C + e, token, MASKED) * H + h
        gain, inverse, raw, _ = _gate(beta, strength, upto, upto_low, row, token, at + e, dv, decay_floor, V, DIVIDE)
        value = read(v + row[:, None] * V + dv[None, :], token[:, None] & in_v).to(tl.float32)
        before = u
        u += tl.log(tl.maximum(raw, decay_floor))
        out = (at + e)[:, None] * V + dv[None, :]
        tl.store(b + out, value * gain * inverse * tl.exp(-u), mask=(e >= 0)[:, None] & in_v)
        if not AFTER:
            u, before = before, u
        tl.store(scale + out, tl.exp(u), mask=(e >= 0)[:, None] & in_v)
        if not AFTER:
            u = before
    tl.store(own + V, u, mask=(eight >= 0)[:, None] & in_v)


@triton.jit
def _factors(halves, slot, d, V: tl.constexpr, BACK: tl.constexpr):
    """Of 16 rows, by column: decay up to the first middle, between the middles, and behind the last (BACK: seen from the end);
    and all of it, as a log."""
    at = halves + (slot // 8) * 2 * V + d
    a = tl.load(at, mask=d < V, other=0.0)
    b = tl.load(at + V, mask=d < V, other=0.0)
    c = tl.load(at + 2 * V, mask=d < V, other=0.0)
    e = tl.load(at + 3 * V, mask=d < V, other=0.0)
    if BACK:
        return tl.exp(e), tl.exp(b + c), tl.exp(a), a + b + (c + e)
    else:
        return tl.exp(a), tl.exp(b + c), tl.exp(e), a + b + (c + e)


@triton.jit(do_not_specialize=FIXED)
def _rescaled_values(
    query,
    k,
    head_x,
    weights,
    scale,
    halves,
    state,
    total,
    out,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SHIFT: tl.constexpr,
    AFTER: tl.constexpr,
    READ: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """READ: outputs of a segment from the state before it (BACK: gradients of b in chunks, from the gradient of the state after it).
    Else: what the segment adds to the state at its end (BACK: start), and its log-decay.

    weights: b / R (BACK: R d_o). A program holds a block of value columns, and the state transposed, `[BV, BK]`.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    t, dk, dv = tl.arange(0, 16), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    in_k, in_v = dk < K, (dv < V)[:, None]
    own = state + (q * H + h) * K * V + dv[:, None] + dk[None, :] * V
    S = tl.load(own, mask=in_v & in_k[None, :], other=0.0) if READ else tl.zeros([BV, BK], tl.float32)
    sum_u = tl.zeros([BV], tl.float32)
    early, apart = t < 8, t[None, :] - t[:, None]
    if BACK:
        early, apart = t >= 8, t[:, None] - t[None, :]
    begin, end = begin * (C // 16), tl.minimum(end * (C // 16), tl.cdiv(length, 16))
    for step in range(begin, end):
        j = step
        if BACK:
            j = begin + end - 1 - step
        r = j * 16 + t
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = ((chunk + j // (C // 16)) * H + h) * C + j % (C // 16) * 16
        pairs, ok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        asks, asked = query + row * K, token
        if BACK:
            pairs, ok, asks, asked = asks, asked, pairs, ok
        pair = read(pairs[:, None] + dk[None, :], ok[:, None] & in_k[None, :])
        w = read(weights + (slot + t)[None, :] * V + dv[:, None], in_v & (t >= 0)[None, :])
        near, between, far, u = _factors(halves, slot, dv, V, BACK)
        sum_u += u
        moved = (w * tl.where(early[None, :], between[:, None], 1.0)).to(w.dtype)
        if READ:
            ask = read(asks[None, :] + dk[:, None], asked[None, :] & in_k[:, None])
            scores = tl.where(apart >= 1 - AFTER, dot(pair, ask), 0.0).to(w.dtype)
            found = dot(S.to(w.dtype), ask) * tl.where(early[None, :], near[:, None], (near * between)[:, None])
            found += tl.where(early[None, :], dot(w, scores), dot(moved, scores))
            factor = read(scale + (slot + t)[None, :] * V + dv[:, None], in_v & (t >= 0)[None, :]).to(tl.float32)
            if BACK:
                to = out + (slot + t)[None, :] * V + dv[:, None]
                tl.store(to, found / tl.where(in_v, factor, 1.0), mask=in_v & token[None, :])
            else:
                tl.store(out + row[None, :] * V + dv[:, None], found * factor, mask=in_v & token[None, :])
        S = far[:, None] * ((near * between)[:, None] * S + dot(moved, pair))
    if not READ:
        tl.store(own, S, mask=in_v & in_k[None, :])
        tl.store(total + (q * H + h) * V + dv, sum_u, mask=dv < V)


@triton.jit(do_not_specialize=["T", "NC"])
def _rescaled_scores(
    d_o,
    b,
    scale,
    halves,
    given,
    scores,
    docs,
    chunk_doc,
    rows,
    T,
    NC,
    H,
    V: tl.constexpr,
    BV: tl.constexpr,
    AFTER: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """R d_o, `[M, H, C, V]`, and the gradient of q_t . x_j inside every 16 rows, `[M, H, C, 16]`."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e = tl.arange(0, C)
    token = i * C + e < length
    row = row_of(rows, start, i * C + e, token, MASKED) * H + h
    at = (c * H + h) * C
    near, far = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for begin in range(0, V, BV):
        dv = begin + tl.arange(0, BV)
        in_v = (dv < V)[None, :] & (e >= 0)[:, None]
        slot = (at + e)[:, None] * V + dv[None, :]
        g = read(d_o + row[:, None] * V + dv[None, :], token[:, None] & in_v).to(tl.float32)
        g = (g * read(scale + slot, in_v).to(tl.float32)).to(given.dtype.element_ty)
        tl.store(given + slot, g, mask=in_v)
        w = read(b + slot, in_v)
        middle = halves + ((at + e // 16 * 16) // 8 * 2 * V)[:, None] + dv[None, :]
        between = tl.exp(tl.load(middle + V, mask=in_v, other=0.0) + tl.load(middle + 2 * V, mask=in_v, other=0.0))
        near += dot(g.to(w.dtype), tl.trans(w))
        far += dot(g.to(w.dtype), tl.trans((w * between).to(w.dtype)))
    found = tl.where(e[:, None] // 8 == e[None, :] // 8, near, far)
    found = tl.where(e[:, None] - e[None, :] >= 1 - AFTER, found, 0.0)
    to = scores + (at + e)[:, None] * 16 + e[None, :] % 16
    tl.store(to, found, mask=e[:, None] // 16 == e[None, :] // 16)


@triton.jit(do_not_specialize=FIXED)
def _rescaled_keys(
    query,
    k,
    head_x,
    asking,
    writing,
    halves,
    scores,
    state,
    d_energy,
    out,
    head_out,
    docs,
    segment_doc,
    rows,
    T,
    NC,
    NS,
    SEG,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SHIFT: tl.constexpr,
    ENERGY: tl.constexpr,
    BACK: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the queries from the states before segments (BACK: of the keys, from the gradients of the states after them).

    asking: R d_o (BACK: b / R). writing: the other one. A program holds a block of key columns, and the state, `[BK, BV]`.
    ENERGY (of keys): add what comes through their energy.
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    t, dv, dk = tl.arange(0, 16), tl.arange(0, BV), tl.program_id(1) * BK + tl.arange(0, BK)
    in_k, in_v = (dk < K)[:, None], dv < V
    own = state + (q * H + h) * K * V + dk[:, None] * V + dv[None, :]
    S = tl.load(own, mask=in_k & in_v[None, :], other=0.0)
    early = t < 8
    if BACK:
        early = t >= 8
    begin, end = begin * (C // 16), tl.minimum(end * (C // 16), tl.cdiv(length, 16))
    for step in range(begin, end):
        j = step
        if BACK:
            j = begin + end - 1 - step
        r = j * 16 + t
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = ((chunk + j // (C // 16)) * H + h) * C + j % (C // 16) * 16
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        if BACK:
            pair = read((query + row * K)[None, :] + dk[:, None], token[None, :] & in_k)
            p = read(scores + (slot + t)[:, None] * 16 + t[None, :], (t >= 0)[:, None])
            to, ok = key_pointers(out, head_out, rows, n, start, length, h, r, H, K, 1, SHIFT, MASKED)
        else:
            pair = read(xp[None, :] + dk[:, None], xok[None, :] & in_k)
            p = read(scores + (slot + t)[None, :] * 16 + t[:, None], (t >= 0)[:, None])
            to, ok = out + row * K, token
        near, between, far, _ = _factors(halves, slot, dv, V, BACK)
        a = read(asking + (slot + t)[None, :] * V + dv[:, None], in_v[:, None] & (t >= 0)[None, :])
        w = read(writing + (slot + t)[:, None] * V + dv[None, :], in_v[None, :] & (t >= 0)[:, None])
        a = (a * tl.where(early[None, :], near[:, None], (near * between)[:, None])).to(w.dtype)
        moved = (w * tl.where(early[:, None], between[None, :], 1.0)).to(w.dtype)
        pair = pair.to(w.dtype)
        found = dot(S.to(w.dtype), a) + dot(pair, p)
        S = far[None, :] * ((near * between)[None, :] * S + dot(pair, moved))
        if ENERGY:
            factor = 2.0 * tl.load(d_energy + (start + r) * H + h, mask=token, other=0.0)
            found += factor[None, :] * read(xp[None, :] + dk[:, None], xok[None, :] & in_k).to(tl.float32)
        tl.store(to[None, :] + dk[:, None], found, mask=ok[None, :] & in_k)


@triton.jit(do_not_specialize=FIXED)
def _gain_gradients(
    v,
    beta,
    d_o,
    o,
    strength,
    upto,
    upto_low,
    d_b,
    product,
    d_v,
    d_beta,
    d_strength,
    d_decay,
    docs,
    segment_doc,
    rows,
    decay_floor,
    T,
    NC,
    NS,
    SEG,
    M,
    H,
    V: tl.constexpr,
    BV: tl.constexpr,
    AFTER: tl.constexpr,
    DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """From the gradient of b: those of v and beta, and the sums over columns of beta times the gradients of eta and gamma.

    The gradient of a log-decay is all that is read from it on, minus all that is written from it on, plus state times gradient
    at the segment's end (`product`).
    """
    q, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    _n, start, length, chunk, begin, end = _segment(q, docs, segment_doc, T, NC, NS, SEG, PLAIN, C)
    t, dv = tl.arange(0, 16), tl.program_id(1) * BV + tl.arange(0, BV)
    in_v = (dv < V)[None, :]
    crossing = tl.load(product + (q * H + h) * V + dv, mask=dv < V, other=0.0)
    begin, end = begin * (C // 16), tl.minimum(end * (C // 16), tl.cdiv(length, 16))
    for step in range(begin, end):
        j = begin + end - 1 - step
        r = j * 16 + t
        token = r < length
        row = row_of(rows, start, r, token, MASKED) * H + h
        slot = ((chunk + j // (C // 16)) * H + h) * C + j % (C // 16) * 16 + t
        ok, at = token[:, None] & in_v, row[:, None] * V + dv[None, :]
        gain, inverse, raw, pull = _gate(beta, strength, upto, upto_low, row, token, slot, dv, decay_floor, V, DIVIDE)
        grad = tl.load(d_b + slot[:, None] * V + dv[None, :], mask=ok, other=0.0)
        reads = read(o + at, ok).to(tl.float32) * read(d_o + at, ok).to(tl.float32)
        tl.store(d_v + at, grad * gain * inverse, mask=ok)
        grad *= read(v + at, ok).to(tl.float32)
        rest = reads - grad * gain * inverse
        d_log_decay = tl.cumsum(rest, 0, reverse=True) + crossing[None, :]
        if not AFTER:
            d_log_decay -= reads
        crossing += tl.sum(rest, 0)
        d_gamma = tl.where(raw >= decay_floor, d_log_decay / tl.maximum(raw, decay_floor), 0.0)
        tl.store(d_beta + at, grad * inverse - d_gamma * pull, mask=ok)
        part = tl.program_id(1).to(tl.int64) * M * H * C + slot
        tl.store(d_strength + part, tl.sum(gain * grad, 1))
        tl.store(d_decay + part, tl.sum(gain * d_gamma, 1))


@dataclass(frozen=True)
class Rescaled:
    """One call of falcon2a: inputs `[B, T, H, .]` (contiguous), gates of `prepass.gates`, tables and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    head_x: Tensor
    found: Tensor
    ranks: Ranks
    options: Options

    def _launch(self, kernel: Any, grid: tuple[int, int], blocks: dict[str, int], **arguments: Any) -> None:
        """Run a kernel with what it takes of the inputs, tables and options, and `arguments`."""
        ranks, options = self.ranks, self.options
        common = {
            "query": self.q,
            "k": self.k,
            "head_x": self.head_x,
            "v": self.v,
            "beta": self.beta,
            "strength": self.found[0],
            "upto": self.found[1],
            "upto_low": self.found[2],
            "docs": ranks.docs,
            "chunk_doc": ranks.chunk_doc,
            "segment_doc": ranks.segment_doc,
            "rows": ranks.rows,
            "decay_floor": options.decay_floor,
            "T": ranks.tokens,
            "NC": ranks.chunks // ranks.documents,
            "NS": ranks.segments // ranks.documents,
            "SEG": ranks.segment,
            "M": ranks.chunks,
            "H": self.q.shape[2],
            "K": self.k.shape[3],
            "V": self.v.shape[3],
            "SHIFT": int(options.shifted),
            "AFTER": int(options.read_after_write),
            "DIVIDE": options.step == "beta",
            "PLAIN": ranks.docs is None,
            "MASKED": ranks.rows is not None,
            "C": CHUNK,
        }
        common = {name: x for name, x in common.items() if name in kernel.arg_names}
        kernel[grid](**{**common, **blocks}, **arguments)

    @property
    def _of_chunks(self) -> int:
        return self.ranks.chunks * self.q.shape[2]

    @property
    def _of_segments(self) -> int:
        return self.ranks.segments * self.q.shape[2]

    def _rescale(self, after: bool) -> tuple[Tensor, Tensor, Tensor]:
        """b / R and R (`after` the decay of its token), and the log-decay of halves, see the kernel."""
        chunks, heads, size = self.ranks.chunks, self.q.shape[2], self.v.shape[3]
        dtype = torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32
        b, scale = (self.q.new_empty(chunks, heads, CHUNK, size, dtype=dtype) for _ in range(2))
        halves = self.q.new_empty(chunks, heads, CHUNK // 8, 2, size, dtype=torch.float32)
        columns = min(128, block(size))
        self._launch(
            _rescale, (self._of_chunks, triton.cdiv(size, columns)), {"BV": columns, "AFTER": after}, b=b, scale=scale,
            halves=halves,
        )  # fmt: skip
        return b, scale, halves

    def _values(
        self,
        weights: Tensor,
        scale: Tensor | None,
        halves: Tensor,
        state: Tensor,
        total: Tensor | None,
        out: Tensor | None,
        back: bool,
    ) -> None:
        k_size, v_size = self.k.shape[3], self.v.shape[3]
        inner = block(k_size)
        self._launch(
            _rescaled_values, (self._of_segments, triton.cdiv(v_size, 64)), {"BK": inner, "BV": 64}, weights=weights,
            scale=scale, halves=halves, state=state, total=total, out=out, READ=out is not None, BACK=back,
            num_warps=8 if inner > 128 else 4, num_stages=STAGES,
        )  # fmt: skip

    def _states(self, weights: Tensor, halves: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        segments, heads = self.ranks.segments, self.q.shape[2]
        state = self.q.new_empty(segments, heads, self.k.shape[3], self.v.shape[3], dtype=torch.float32)
        total = self.q.new_empty(segments, heads, self.v.shape[3], dtype=torch.float32)
        self._values(weights, None, halves, state, total, None, back)
        return state, total

    def forward(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, state after the last token, states before the segments and the segments' log-decay."""
        o = torch.empty_like(self.v) if self.ranks.rows is None else torch.zeros_like(self.v)
        with on_device(self.q):
            b, scale, halves = self._rescale(self.options.read_after_write)
            states, total = self._states(b, halves, False)
            S, _ = scan(states, total, S, self.ranks)
            self._values(b, scale, halves, states, None, o, False)
        return o, S, states, total

    def backward(
        self,
        d_o: Tensor,
        o: Tensor,
        d_S: Tensor,
        S_end: Tensor,
        states: Tensor,
        total: Tensor,
        through_gates: Callable[[Tensor, Tensor], Tensor | None] | None,
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, beta, head_x and S, and beta times those of eta and gamma summed over columns, see `Columns`."""
        ranks, d_o, heads, v_size = self.ranks, d_o.contiguous(), self.q.shape[2], self.v.shape[3]
        make = torch.empty_like if ranks.rows is None else torch.zeros_like
        d_q, d_v, d_beta = make(self.q), make(self.v), make(self.beta)
        d_k = torch.empty_like(self.k) if ranks.docs is None else torch.zeros_like(self.k)
        if self.options.shifted and ranks.docs is None:  # the last key belongs to no pair
            d_k[:, -1] = 0
        d_head_x = torch.zeros_like(self.head_x)
        with on_device(self.q):
            b, scale, halves = self._rescale(self.options.read_after_write)
            given = torch.empty_like(b)
            scores = b.new_empty(ranks.chunks, heads, CHUNK, 16)
            columns = min(64, block(v_size))
            self._launch(
                _rescaled_scores, (self._of_chunks, 1), {"BV": columns}, d_o=d_o, b=b, scale=scale, halves=halves,
                given=given, scores=scores,
            )  # fmt: skip
            d_states, _ = self._states(given, halves, True)
            d_S, product = scan(d_states, total, d_S, ranks, states, S_end)
            self._keys(given, b, halves, scores, states, None, d_q, d_head_x, False)
            d_b = torch.empty_like(b, dtype=torch.float32)
            if not self.options.read_after_write:  # what is read lies before the decay, what is written behind it
                _, scale, _ = self._rescale(True)
            self._values(given, scale, halves, d_states, None, d_b, True)
            columns = min(128, block(v_size))
            parts = triton.cdiv(v_size, columns)
            # slots behind a document's last token are not written
            sums = self.q.new_zeros(2, parts, ranks.chunks, heads, CHUNK, dtype=torch.float32)
            self._launch(
                _gain_gradients, (self._of_segments, parts), {"BV": columns}, d_o=d_o, o=o, d_b=d_b,
                product=product.sum(2), d_v=d_v, d_beta=d_beta, d_strength=sums[0], d_decay=sums[1],
            )  # fmt: skip
            d_strength, d_decay = sums.sum(1)
            d_energy = None if through_gates is None else through_gates(d_strength, d_decay)
            self._keys(b, given, halves, scores, d_states, d_energy, d_k, d_head_x, True)
        return d_q, d_k, d_v, d_beta, d_head_x, d_S, d_strength, d_decay

    def _keys(
        self,
        asking: Tensor,
        writing: Tensor,
        halves: Tensor,
        scores: Tensor,
        state: Tensor,
        d_energy: Tensor | None,
        out: Tensor,
        head_out: Tensor,
        back: bool,
    ) -> None:
        inner = block(self.v.shape[3])
        self._launch(
            _rescaled_keys, (self._of_segments, triton.cdiv(self.k.shape[3], 64)), {"BK": 64, "BV": inner}, asking=asking,
            writing=writing, halves=halves, scores=scores, state=state, d_energy=d_energy, out=out, head_out=head_out,
            ENERGY=d_energy is not None, BACK=back, num_warps=8 if inner > 128 else 4, num_stages=STAGES,
        )  # fmt: skip
