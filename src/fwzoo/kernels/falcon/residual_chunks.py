"""falcon2's gradient chunk by chunk, for 16-bit inputs, once `residuals.py` has the residuals and the states at all borders.

With log-decay prefix u_tv of column v from the chunk's start, b = eta * r, S_0 before the chunk and L_C, the gradient of the state behind it,

    d_q_t  = S_0 (exp(u_t) d_o_t) + sum_{j <= t} P_tj x_j                                P_tj = sum_v d_o_tv exp(u_tv - u_jv) b_jv
    d_x_t  = L_C (exp(u_C - u_t) b_t) + sum_{i >= t} P_it q_i - S_0 (exp(u_{t-1}) d_r_t) - sum_{j < t} R_tj x_j - sum_{i > t} R_it x_i

with R like P, of d_r = eta * d_z and exp(u_{t-1} - u_j). Within 8 rows, reads and writes are rescaled about their middle (by at most 1e16: see
`rescaled.py`); beyond, by halving, as in `columns.py`: on every level the right half of a block reads the left half, both rescaled to the
border between them by factors <= 1. One product of a level has all its readers, those of P and those of R, as rows, and a chunk's programs for
levels and rows within 8 come one after the other, so that they find in the L2 cache what they share. u is kept in float32 and its differences are taken: of 64
log-decays above -9.3 they are right to 4e-5, which is why float32 inputs go elsewhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import INTERPRETING
from ..gpu import block, decayed_by, key_pointers, launch, of_chunk, on_device, parts, read, row_of, tables
from ..ranks import CHUNK, Ranks
from .columns import Columns, low_columns
from .rescaled import LOW
from .rules import Options

LEVELS = tl.constexpr((CHUNK - 1).bit_length() - 3)  # halvings of a chunk, until 8 rows are left


@triton.jit
def _raw(gain, upto, upto_low, at, DIVIDE: tl.constexpr):
    """Decay before it is held above the floor, and what multiplies 1 - gain (or gain) in it."""
    pull = tl.load(upto_low + at)[:, None]
    raw = (tl.load(upto + at)[:, None] + (1.0 - gain) * pull) if DIVIDE else (1.0 - gain * pull)
    return raw, pull


@triton.jit
def _tokens(index, docs, chunk_doc, rows, T, NC, H, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Of a chunk and head (index, returned in 64 bits): document, head, its first row and length, which of its chunks, ranks, tokens, rows."""
    index = index.to(tl.int64)
    h = index % H
    n, start, length, i = of_chunk(index // H, docs, chunk_doc, T, NC, PLAIN)
    rank = i * C + tl.arange(0, C)
    token = rank < length
    return index, n, h, start, length, i, rank, token, row_of(rows, start, rank, token, MASKED) * H + h


@triton.jit(do_not_specialize=["T", "NC", "H"])
def prefix_kernel(
    beta, upto, upto_low, u, docs, chunk_doc, rows, decay_floor, T, NC, H, V: tl.constexpr, BV: tl.constexpr, DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """u, `[M, H, C, V]`."""
    index, _n, _h, _start, _length, _i, _rank, token, row = _tokens(
        tl.program_id(0), docs, chunk_doc, rows, T, NC, H, PLAIN, MASKED, C
    )
    at, dv = index * C + tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    gain = read(beta + row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]).to(tl.float32)
    raw, _pull = _raw(gain, upto, upto_low, at, DIVIDE)
    sums = tl.cumsum(tl.log(tl.maximum(raw, decay_floor)).to(u.dtype.element_ty), 0)
    tl.store(u + at[:, None] * V + dv[None, :], sums, mask=(at >= 0)[:, None] & (dv < V)[None, :])


@triton.jit
def _u(u, at, rows, dv, V: tl.constexpr):
    """u after rows of a chunk, 0 before its first one."""
    return tl.load(u + (at + rows)[:, None] * V + dv[None, :], mask=(rows >= 0)[:, None] & (dv < V)[None, :], other=0.0)


@triton.jit
def _near(
    index, second, r, d_o, d_z, beta, strength, u, asking, answering, leaving, scores, seen, docs, chunk_doc, rows, T, NC, H, V: tl.constexpr, BV: tl.constexpr,
    AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P (second: R) within 8 rows, and 0 above; asking and leaving (second: answering)."""
    index, _n, _h, _start, _length, _i, _rank, token, row = _tokens(
        index, docs, chunk_doc, rows, T, NC, H, PLAIN, MASKED, C
    )
    e, at = tl.arange(0, C), index * C
    inverse = tl.load(strength + at + e)[:, None]
    readers, asked, found_in = d_o, asking, scores
    if second == 1:
        readers, asked, found_in = d_z, answering, seen
    before = second
    if not AFTER:
        before = 1
    found = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        dv = v0 + tl.arange(0, BV)
        here, where = row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]
        out, in_v = (at + e)[:, None] * V + dv[None, :], (e >= 0)[:, None] & (dv < V)[None, :]
        to, until = _u(u, at, e, dv, V), _u(u, at, e - before, dv, V)
        eta = read(beta + here, where).to(tl.float32) * inverse
        b, ask = eta * read(r + here, where).to(tl.float32), read(readers + here, where).to(tl.float32)
        if second == 1:
            ask *= eta
        tl.store(asked + out, (ask * decayed_by(until)).to(asking.dtype.element_ty), mask=in_v)
        if second == 0:
            end = tl.load(u + (at + C - 1) * V + dv, mask=dv < V, other=0.0)[None, :]
            tl.store(leaving + out, (b * decayed_by(end - to)).to(leaving.dtype.element_ty), mask=in_v)
        middle = _u(u, at, e // 8 * 8 + 3, dv, V)
        writes = tl.trans((b * decayed_by(middle - to)).to(WORK))
        found = tl.dot((ask * decayed_by(until - middle)).to(WORK), writes, found, input_precision=PRECISION)
    within = (e[:, None] // 8 == e[None, :] // 8) & (e[:, None] - e[None, :] >= before)
    to = found_in + (at + e)[:, None] * C + e[None, :]
    tl.store(to, tl.where(within, found, 0.0).to(scores.dtype.element_ty), mask=e[:, None] // 8 <= e[None, :] // 8)


@triton.jit
def _far(
    index, level, r, d_o, d_z, beta, strength, u, scores, seen, docs, chunk_doc, rows, T, NC, H, V: tl.constexpr, BV: tl.constexpr, AFTER: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and R where the right half of a block of 2^(level + 1) rows reads its left half."""
    index, _n, _h, start, length, i, _rank, _token, _row = _tokens(
        index, docs, chunk_doc, rows, T, NC, H, PLAIN, MASKED, C
    )
    at = index * C
    half, a = 1 << level, tl.arange(0, C)  # the second half of a product's rows are readers of R
    reader, writer, second = a % (C // 2), tl.arange(0, C // 2), a >= C // 2
    which, other = reader >> level, writer >> level
    reader, writer = reader + (which + 1) * half, writer + other * half
    token, written = i * C + reader < length, i * C + writer < length
    row = row_of(rows, start, i * C + reader, token, MASKED) * H + index % H
    there = row_of(rows, start, i * C + writer, written, MASKED) * H + index % H
    inverse, before = tl.load(strength + at + reader)[:, None], second.to(tl.int32)
    if not AFTER:
        before = tl.full([C], 1, tl.int32)
    readers = tl.where(second, d_z, d_o)[:, None]
    found = tl.zeros([C, C // 2], tl.float32)
    for v0 in range(0, V, BV):
        dv = v0 + tl.arange(0, BV)
        in_v = (dv < V)[None, :]
        here = row[:, None] * V + dv[None, :]
        ask = read(readers + here, token[:, None] & in_v).to(tl.float32)
        gain = read(beta + here, (token & second)[:, None] & in_v).to(tl.float32)
        ask = tl.where(second[:, None], ask * (gain * inverse), ask)
        ask *= decayed_by(_u(u, at, reader - before, dv, V) - _u(u, at, (2 * which + 1) * half - 1, dv, V))
        here, where = there[:, None] * V + dv[None, :], written[:, None] & in_v
        b = read(r + here, where).to(tl.float32) * read(beta + here, where).to(tl.float32)
        b *= tl.load(strength + at + writer)[:, None]
        b *= decayed_by(_u(u, at, (2 * other + 1) * half - 1, dv, V) - _u(u, at, writer, dv, V))
        found = tl.dot(ask.to(WORK), tl.trans(b.to(WORK)), found, input_precision=PRECISION)
    to = tl.where(second, seen, scores)[:, None] + (at + reader)[:, None] * C + writer[None, :]
    tl.store(to, found.to(scores.dtype.element_ty), mask=which[:, None] == other[None, :])


@triton.jit(do_not_specialize=["T", "NC", "H"])
def scores_kernel(
    r, d_o, d_z, beta, strength, u, asking, answering, leaving, scores, seen, docs, chunk_doc, rows, T, NC, H, V: tl.constexpr, BV: tl.constexpr,
    AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P and R, `[M, H, C, C]` (scores, seen), and exp(u) d_o, exp(u_{t-1}) d_r and exp(u_C - u) b, `[M, H, C, V]` (asking, answering, leaving).

    A program has one of the levels, or P or R within 8 rows.
    """
    index, part = tl.program_id(0) // (LEVELS + 2), tl.program_id(0) % (LEVELS + 2)
    if part < LEVELS:
        _far(
            index, 3 + part, r, d_o, d_z, beta, strength, u, scores, seen, docs, chunk_doc, rows, T, NC, H, V, BV, AFTER, PLAIN, MASKED, C,
            WORK, PRECISION,
        )  # fmt: skip
    else:
        _near(
            index, part - LEVELS, r, d_o, d_z, beta, strength, u, asking, answering, leaving, scores, seen, docs, chunk_doc, rows, T, NC, H, V,
            BV, AFTER, PLAIN, MASKED, C, WORK, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NC", "H"])
def products_kernel(
    q, k, head_x, asking, answering, leaving, scores, seen, borders, d_borders, d_q, d_k, d_head_x, docs, chunk_doc, rows, T, NC, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFT: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
    C: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_q and d_x of a chunk. asking, answering: exp(u) d_o, exp(u_{t-1}) d_r. scores, seen: P, R."""
    index, n, h, start, length, _i, rank, token, row = _tokens(
        tl.program_id(0), docs, chunk_doc, rows, T, NC, H, PLAIN, MASKED, C
    )
    e, at = tl.arange(0, C), index * C
    xp, xok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
    to, ok = key_pointers(d_k, d_head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
    square = (at + e)[:, None] * C + e[None, :]
    for k0 in range(0, K, BK):
        dk = k0 + tl.arange(0, BK)
        in_k = (dk < K)[None, :]
        found = tl.zeros([C, BK], tl.float32)
        d_x = tl.zeros([C, BK], tl.float32)
        for v0 in range(0, V, BV):
            dv = v0 + tl.arange(0, BV)
            tile, in_v = (at + e)[:, None] * V + dv[None, :], (e >= 0)[:, None] & (dv < V)[None, :]
            place, both = (index * K + dk)[:, None] * V + dv[None, :], (dk < K)[:, None] & (dv < V)[None, :]
            S, L = read(borders + place, both).to(WORK), read(d_borders + place, both).to(WORK)
            found = tl.dot(read(asking + tile, in_v).to(WORK), tl.trans(S), found, input_precision=PRECISION)
            d_x = tl.dot(-read(answering + tile, in_v).to(WORK), tl.trans(S), d_x, input_precision=PRECISION)
            d_x = tl.dot(read(leaving + tile, in_v).to(WORK), tl.trans(L), d_x, input_precision=PRECISION)
        x = read(xp[:, None] + dk[None, :], xok[:, None] & in_k).to(WORK)
        query = read(q + row[:, None] * K + dk[None, :], token[:, None] & in_k).to(WORK)
        p, s = tl.load(scores + square).to(WORK), -tl.load(seen + square).to(WORK)
        found = tl.dot(p, x, found, input_precision=PRECISION)
        d_x = tl.dot(tl.trans(p), query, d_x, input_precision=PRECISION)
        d_x = tl.dot(s, x, d_x, input_precision=PRECISION)
        d_x = tl.dot(tl.trans(s), x, d_x, input_precision=PRECISION)
        tl.store(d_q + row[:, None] * K + dk[None, :], found.to(d_q.dtype.element_ty), mask=token[:, None] & in_k)
        tl.store(to[:, None] + dk[None, :], d_x.to(d_k.dtype.element_ty), mask=(token & ok)[:, None] & in_k)


@triton.jit(do_not_specialize=["T", "NC", "H", "M"])
def gains_kernel(
    v, r, o, d_o, d_z, beta, strength, upto, upto_low, borders, d_borders, d_S, d_v, d_beta, d_strength, d_decay, low, docs, chunk_doc, rows,
    decay_floor, T, NC, M, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AFTER: tl.constexpr, DIVIDE: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """d_v and d_beta of a chunk, and the sums over columns of beta times the gradients of eta and gamma, `[SHARE * programs, M, H, C]`.

    The gradient of a log-decay is state times gradient at the chunk's start, plus what later residuals and less what earlier reads
    have added to it on the way. low, `[programs, M, H]`: 1 where a decay is below LOW, so that this is no good.
    """
    index, n, h, _start, _length, i, _rank, token, row = _tokens(
        tl.program_id(0), docs, chunk_doc, rows, T, NC, H, PLAIN, MASKED, C
    )
    at, dk, dv = index * C + tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    both, place = (dk < K)[:, None] & (dv < V)[None, :], dk[:, None] * V + dv[None, :]
    S = read(borders + index * K * V + place, both).to(tl.float32)
    L = read(d_borders + (index - H) * K * V + place, both & (place * 0 + i > 0)).to(tl.float32)
    L += tl.load(d_S + (n * H + h) * K * V + place, mask=both & (place * 0 + i == 0), other=0.0)
    crossing = tl.sum(S * L, 0)[None, :]
    here, where = row[:, None] * V + dv[None, :], token[:, None] & (dv < V)[None, :]
    gain, inverse = read(beta + here, where).to(tl.float32), tl.load(strength + at)[:, None]
    raw, pull = _raw(gain, upto, upto_low, at, DIVIDE)
    dz, residual = read(d_z + here, where).to(tl.float32), read(r + here, where).to(tl.float32)
    dr = gain * inverse * dz
    tl.store(d_v + here, dr.to(d_v.dtype.element_ty), mask=where)
    grad = dz * residual
    reads = read(o + here, where).to(tl.float32) * read(d_o + here, where).to(tl.float32)
    writes = gain * inverse * grad
    passed = tl.cumsum(dr * (read(v + here, where).to(tl.float32) - residual) + writes - reads, 0) - writes
    if AFTER:
        passed += reads
    d_gamma = tl.where(raw >= decay_floor, (passed + crossing) / tl.maximum(raw, decay_floor), 0.0)
    tl.store(d_beta + here, (grad * inverse - d_gamma * pull).to(d_beta.dtype.element_ty), mask=where)
    smallest = tl.min(tl.min(tl.where(raw >= decay_floor, raw, 1.0), 1), 0)
    tl.store(low + tl.program_id(1) * M * H + index, (smallest < LOW).to(tl.int32))
    part = tl.program_id(1).to(tl.int64) * SHARE * M * H * C + at
    tl.store(d_strength + part, tl.sum(gain * grad, 1))
    tl.store(d_decay + part, tl.sum(gain * d_gamma, 1))


def prefixes(beta: Tensor, found: Tensor, ranks: Ranks, options: Options, exact: bool) -> Tensor:
    """u, `[M, H, C, V]`, exact: in float64, so that its differences keep the digits of float32."""
    heads, size = beta.shape[2:]
    u = found.new_empty(ranks.chunks, heads, CHUNK, size, dtype=torch.float64 if exact else torch.float32)
    columns = min(64, block(size))
    with on_device(beta):
        launch(
            prefix_kernel, (ranks.chunks * heads, parts(size, columns)), beta=beta, upto=found[1], upto_low=found[2], u=u,
            **tables(ranks), decay_floor=options.decay_floor, H=heads, V=size, BV=columns, DIVIDE=options.step == "beta", num_warps=4,
        )  # fmt: skip
    return u


SETTINGS: dict[str, dict[str, int]] = {
    "scores": {"BV": 64, "num_warps": 8, "num_stages": 1, "maxnreg": 128},
    "products": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 1},
    "gains": {"BV": 64, "num_warps": 4, "num_stages": 1},
}


@dataclass(frozen=True)
class Chunks:
    """One call of falcon2: inputs `[B, T, H, .]` (contiguous), gates of `prepass.gates`, tables and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    head_x: Tensor
    found: Tensor
    u: Tensor
    ranks: Ranks
    options: Options

    def _launch(self, name: str, kernel: Any, programs: int = 1, split: bool = False, **arguments: Any) -> None:
        """Run a kernel with so many programs for each chunk and head, and (split) block of columns, with what it takes of the inputs, tables and options."""
        heads, (k_size, v_size) = self.q.shape[2], (self.k.shape[3], self.v.shape[3])
        settings, wide = dict(SETTINGS[name]), self.q.dtype != torch.bfloat16 or INTERPRETING
        # of products with fewer than 64 columns ptxas 12.8 makes code that reads a register which nothing has written
        settings["BV"] = min(settings["BV"], block(v_size) if name == "gains" else max(64, block(v_size)))
        settings.setdefault("BK", block(k_size))
        if wide and not INTERPRETING:  # float16, as tf32
            settings |= {"BV": min(settings["BV"], 64), "num_warps": 8}
            settings.pop("maxnreg", None)
        grid = (self.ranks.chunks * heads * programs, parts(v_size, settings["BV"]) if split else 1)
        given = {
            **tables(self.ranks),
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "head_x": self.head_x,
            "beta": self.beta,
            "strength": self.found[0],
            "upto": self.found[1],
            "upto_low": self.found[2],
            "u": self.u,
            "decay_floor": self.options.decay_floor,
            "M": self.ranks.chunks,
            "H": heads,
            "K": k_size,
            "V": v_size,
            "SHIFT": int(self.options.shifted),
            "AFTER": self.options.read_after_write,
            "DIVIDE": self.options.step == "beta",
            "WORK": tl.float32 if wide else tl.bfloat16,
            "PRECISION": "ieee" if INTERPRETING else "tf32",
        }
        launch(kernel, grid, **{**given, **settings, **arguments})

    def backward(
        self,
        d_o: Tensor,
        o: Tensor,
        r: Tensor,
        d_z: Tensor,
        borders: Tensor,
        d_borders: Tensor,
        d_S: Tensor,
        writes: Columns,
        pairs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, beta and head_x, and beta times those of eta and gamma summed over columns, see `Columns.backward`.

        Args:
            d_S: gradient of the state before the first token. d_borders: of those behind all chunks. writes: what residuals write.
            pairs: keys of pairs by token.
        """
        ranks, (chunks, heads), size = self.ranks, borders.shape[:2], self.v.shape[3]
        d_q, d_v, d_beta = (ranks.new_like(x) for x in (self.q, self.v, self.beta))
        d_k = ranks.new_pairs_like(self.k, -1 if self.options.shifted else None)
        d_head_x = torch.zeros_like(self.head_x)
        asking, answering, leaving = (borders.new_empty(chunks, heads, CHUNK, size) for _ in range(3))
        scores, seen = (borders.new_empty(chunks, heads, CHUNK, CHUNK) for _ in range(2))
        width = min(SETTINGS["gains"]["BV"], block(size))
        blocks, share = parts(size, width), width // low_columns(self.k.shape[3], width)
        sums = self.found.new_zeros(2, blocks * share, chunks, heads, CHUNK)
        low = torch.zeros(blocks, chunks, heads, dtype=torch.int32, device=d_o.device)
        with on_device(self.q):
            self._launch(
                "scores", scores_kernel, LEVELS.value + 2, r=r, d_o=d_o, d_z=d_z, asking=asking, answering=answering, leaving=leaving,
                scores=scores, seen=seen,
            )  # fmt: skip
            self._launch(
                "products", products_kernel, asking=asking, answering=answering, leaving=leaving, scores=scores, seen=seen,
                borders=borders, d_borders=d_borders, d_q=d_q, d_k=d_k, d_head_x=d_head_x,
            )  # fmt: skip
            self._launch(
                "gains", gains_kernel, split=True, r=r, o=o, d_o=d_o, d_z=d_z, borders=borders, d_borders=d_borders, d_S=d_S, d_v=d_v, d_beta=d_beta,
                d_strength=sums[0], d_decay=sums[1], low=low, SHARE=share,
            )  # fmt: skip
            gains = {"before": borders, "d_beta": d_beta, "d_strength": sums[0], "d_decay": sums[1]}
            writes.low_values(low, width, state=d_borders, d_o=d_o, **gains)
            before = dataclasses.replace(writes, options=dataclasses.replace(self.options, read_after_write=False))
            before.low_values(low, width, True, query=pairs, d_o=d_v, **gains)
        d_strength, d_decay = sums.sum(1)
        return d_q, d_k, d_v, d_beta, d_head_x, d_strength, d_decay
