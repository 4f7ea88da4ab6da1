"""falcon2 on a GPU: a scan over tokens finds the residuals and the states before all chunks, which then read side by side.

    r_t = v_t - S_{t-1}^T x_t        S_t = S_{t-1} diag(gamma_t) + x_t (eta_t * r_t)^T

What residuals write is falcon2a's, with them for values, and so is its gradient. Backward is the same recurrence from the end:
with the gradient g of the residuals as values of falcon2a, and the gradient L of the state through later reads,

    d_r_t = g_t + eta_t * (L_t^T x_t)        L_{t-1} = L_t diag(gamma_t) - x_t d_r_t^T

and the reads S_{t-1}^T x_t are differentiated as falcon2a reading before it writes, with x for queries and -d_r for gradient.
"""
# mypy: disable-error-code="assignment, misc, var-annotated"
# (in a kernel, a tuple grows)

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import INTERPRETING
from ..gpu import block, custom, dot, key_pointers, launch, of_chunk, on_device, parts, read, row_of, tables
from ..ranks import CHUNK, Ranks
from .columns import Columns
from .prepass import Gates, gates, gates_backward, pack, unpack
from .rules import Options


@triton.jit
def _gate(beta, upto, upto_low, at, columns, where, decay_floor, DIVIDE: tl.constexpr):
    """Gain and decay of a token, for every column."""
    gain, pull = read(beta + columns, where).to(tl.float32), tl.load(upto_low + at)
    if DIVIDE:
        gamma = tl.load(upto + at) + (1.0 - gain) * pull
    else:
        gamma = 1.0 - gain * pull
    return gain, tl.maximum(gamma, decay_floor)


@triton.jit
def _advance(rows, gamma, z, gram_at, t: tl.constexpr, N: tl.constexpr, C: tl.constexpr, OWN: tl.constexpr):
    """What the N rows of a block (those behind row t, OWN: and row t) read once its token has decayed by gamma and written z."""
    new = ()
    for s in tl.static_range(N):
        if s > t or (OWN and s == t):
            new = new + (rows[s] * gamma + tl.load(gram_at + t * C + s) * z,)
        else:
            new = new + (rows[s],)
    return new


@triton.jit
def _decayed(rows, gamma, z, t: tl.constexpr, N: tl.constexpr):
    """What the first t tokens of a block have written, and z, the token in row t."""
    new = ()
    for s in tl.static_range(N):
        if s < t:
            new = new + (rows[s] * gamma,)
        elif s == t:
            new = new + (z,)
        else:
            new = new + (rows[s],)
    return new


@triton.jit(do_not_specialize=["T", "NC", "H", "NS", "SEG"])
def residual_kernel(
    k, head_x, given, beta, strength, upto, upto_low, S_in, S_out, out, reads, pairs, borders, states, total, scratch, docs, chunk_doc, rows,
    decay_floor, SEG, NS, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFT: tl.constexpr, DIVIDE: tl.constexpr,
    BACK: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Residuals of every token, S from S_in to S_out, before every chunk (borders) and every segment (states, and total, its
    log-decay). BACK, from the end: gradients of the residuals, and the pair keys by token.

    Within a chunk m `[C, BV]` holds what every row reads of the state as of the token reached. In blocks of N rows a thread runs
    over the tokens with a column of its own; to the rows behind, and to S, a block is one product.
    scratch: C * C + (2 C + 1) BV numbers a program.
    """
    lane = tl.program_id(1).to(tl.int64)
    n, h = lane // H, lane % H
    first, last = n * NC, (n + 1) * NC
    if not PLAIN:
        first, last = tl.load(docs + 4 * n + 2), tl.load(docs + 4 * n + 6)
    e, dk, dv, near = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, 16)
    own_v = tl.arange(0, BV)
    in_k, in_v = (dk < K)[None, :], dv < V
    own = (lane * K + dk)[:, None] * V + dv[None, :]
    gram_at = scratch + (lane * tl.num_programs(0) + tl.program_id(0)) * (C * C + (2 * C + 1) * BV)
    read_at, write_at, kept_at = gram_at + C * C, gram_at + C * C + C * BV, gram_at + C * C + 2 * C * BV
    wide = e[:, None] * BV + own_v[None, :]
    S = tl.load(S_in + own, mask=(dk < K)[:, None] & in_v[None, :], other=0.0)
    decayed = tl.zeros([BV], tl.float32)
    for step in range(0, last - first):
        c = first + step
        if BACK:
            c = last - 1 - step
        _n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
        rank = i * C + e
        if BACK:
            rank = i * C + (C - 1 - e)  # rows in the order in which they are reached
        token = rank < length
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
        x = read(xp[:, None] + dk[None, :], xok[:, None] & in_k)
        if BACK:
            if tl.program_id(0) == 0:
                row = row_of(rows, start, rank, token, MASKED) * H + h
                tl.store(
                    pairs + row[:, None] * K + dk[None, :], x.to(pairs.dtype.element_ty), mask=token[:, None] & in_k
                )
        else:
            place = ((c * H + h) * K + dk)[:, None] * V + dv[None, :]
            tl.store(borders + place, S.to(borders.dtype.element_ty), mask=(dk < K)[:, None] & in_v[None, :])
            segment = n * NS
            if not PLAIN:
                segment = tl.load(docs + 4 * n + 3)
            lane_at = (segment + i // SEG) * H + h
            if i % SEG == 0:
                decayed = tl.zeros([BV], tl.float32)
                place = (lane_at * K + dk)[:, None] * V + dv[None, :]
                tl.store(states + place, S, mask=(dk < K)[:, None] & in_v[None, :])
        tl.store(gram_at + e[:, None] * C + e[None, :], dot(x, tl.trans(x)))
        m = dot(x, S.to(x.dtype))
        for begin in range(0, C, N):
            tl.store(read_at + wide, m, mask=((e >= begin) & (e < begin + N))[:, None] & (own_v >= 0)[None, :])
            tl.debug_barrier()
            here, etas, gammas, values, written = (), (), (), (), ()
            for t in tl.static_range(N):  # everything is loaded before anything is stored
                slot = begin + t
                if BACK:
                    slot = C - 1 - slot
                at = (c * H + h) * C + slot
                present = i * C + slot < length
                its_row = row_of(rows, start, i * C + slot, present, MASKED) * H + h
                where = dv < tl.where(present, V, 0)
                gain, gamma = _gate(beta, upto, upto_low, at, its_row * V + dv, where, decay_floor, DIVIDE)
                etas, gammas = etas + (gain * tl.load(strength + at),), gammas + (gamma,)
                values = values + (read(given + its_row * V + dv, where).to(tl.float32),)
                here = here + (tl.load(read_at + (begin + t) * BV + own_v),)
                written = written + (tl.zeros([BV], tl.float32),)
            found, seen = (), ()
            kept = tl.full([BV], 1.0, tl.float32)
            for t in tl.static_range(N):
                if BACK:
                    y = values[t] + etas[t] * here[t]
                    z = -y
                else:
                    y = values[t] - here[t]
                    z = etas[t] * y
                found, seen = found + (y,), seen + (here[t],)
                here = _advance(here, gammas[t], z, gram_at + begin * (C + 1), t, N, C, False)
                written = _decayed(written, gammas[t], z, t, N)
                kept = kept * gammas[t]
                if not BACK:
                    decayed += tl.log(gammas[t])
            for t in tl.static_range(N):
                slot = begin + t
                if BACK:
                    slot = C - 1 - slot
                present = i * C + slot < length
                its_row = row_of(rows, start, i * C + slot, present, MASKED) * H + h
                where = dv < tl.where(present, V, 0)
                tl.store(out + its_row * V + dv, found[t].to(out.dtype.element_ty), mask=where)
                if not BACK:
                    tl.store(reads + its_row * V + dv, seen[t].to(reads.dtype.element_ty), mask=where)
                tl.store(write_at + (begin + t) * BV + own_v, written[t])
            tl.store(kept_at + own_v, kept)
            tl.debug_barrier()
            kept_all = tl.load(kept_at + own_v)[
                None, :
            ]  # through memory, so that no thread has to hold many columns above
            wrote = tl.load(
                write_at + (begin + near)[:, None] * BV + own_v[None, :],
                mask=(near < N)[:, None] & (own_v >= 0)[None, :],
                other=0.0,
            )
            weight = tl.load(
                gram_at + e[:, None] * C + (begin + near)[None, :],
                mask=(near < N)[None, :] & (e >= 0)[:, None],
                other=0.0,
            )
            m = tl.dot(weight, wrote, m * kept_all, input_precision=PRECISION)
            late = i * C + begin + near
            if BACK:
                late = i * C + (C - 1 - begin - near)
            near_p, near_ok = key_pointers(k, head_x, rows, n, start, length, h, late, H, K, 1, SHIFT, MASKED)
            theirs = read(near_p[:, None] + dk[None, :], (near_ok & (near < N))[:, None] & in_k)
            S = S * kept_all + dot(tl.trans(theirs), wrote.to(x.dtype))
        if not BACK:
            tl.store(total + lane_at * V + dv, decayed, mask=in_v)
        tl.debug_barrier()
    tl.store(S_out + own, S, mask=(dk < K)[:, None] & in_v[None, :])


@triton.jit(do_not_specialize=["T", "NC", "H", "tiles"])
def column_read_kernel(
    q, k, head_x, r, beta, strength, upto, upto_low, borders, o, scratch, docs, chunk_doc, rows, decay_floor, tiles, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFT: tl.constexpr, DIVIDE: tl.constexpr,
    AFTER: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of every tile from its residuals and the state before it, as `residual_kernel` finds what its rows read."""
    e, dk, dv, near = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, 16)
    own_v = tl.arange(0, BV)
    in_k, in_v = (dk < K)[None, :], dv < V
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    score_at = scratch + program * (C * C + (2 * C + 1) * BV)
    read_at, write_at, kept_at = score_at + C * C, score_at + C * C + C * BV, score_at + C * C + 2 * C * BV
    wide = e[:, None] * BV + own_v[None, :]
    for index in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        c, h = index // H, index % H
        n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
        rank = i * C + e
        token = rank < length
        row = row_of(rows, start, rank, token, MASKED) * H + h
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
        query = read(q + row[:, None] * K + dk[None, :], token[:, None] & in_k)
        x = read(xp[:, None] + dk[None, :], xok[:, None] & in_k)
        place = (index * K + dk)[:, None] * V + dv[None, :]
        S = tl.load(borders + place, mask=(dk < K)[:, None] & in_v[None, :], other=0.0)
        tl.store(score_at + e[:, None] * C + e[None, :], dot(x, tl.trans(query)))
        m = dot(query, S.to(query.dtype))
        for begin in range(0, C, N):
            tl.store(read_at + wide, m, mask=((e >= begin) & (e < begin + N))[:, None] & (own_v >= 0)[None, :])
            tl.debug_barrier()
            here, gammas, values, written = (), (), (), ()
            for t in tl.static_range(N):  # everything is loaded before anything is stored
                slot = begin + t
                at = (c * H + h) * C + slot
                present = i * C + slot < length
                its_row = row_of(rows, start, i * C + slot, present, MASKED) * H + h
                where = dv < tl.where(present, V, 0)
                gain, gamma = _gate(beta, upto, upto_low, at, its_row * V + dv, where, decay_floor, DIVIDE)
                gammas = gammas + (gamma,)
                z = gain * tl.load(strength + at) * read(r + its_row * V + dv, where).to(tl.float32)
                values = values + (z,)
                here = here + (tl.load(read_at + (begin + t) * BV + own_v),)
                written = written + (tl.zeros([BV], tl.float32),)
            found = ()
            kept = tl.full([BV], 1.0, tl.float32)
            for t in tl.static_range(N):
                if not AFTER:
                    found = found + (here[t],)
                here = _advance(here, gammas[t], values[t], score_at + begin * (C + 1), t, N, C, AFTER)
                if AFTER:
                    found = found + (here[t],)
                written = _decayed(written, gammas[t], values[t], t, N)
                kept = kept * gammas[t]
            for t in tl.static_range(N):
                slot = begin + t
                present = i * C + slot < length
                its_row = row_of(rows, start, i * C + slot, present, MASKED) * H + h
                tl.store(o + its_row * V + dv, found[t].to(o.dtype.element_ty), mask=dv < tl.where(present, V, 0))
                tl.store(write_at + slot * BV + own_v, written[t])
            tl.store(kept_at + own_v, kept)
            tl.debug_barrier()
            kept_all = tl.load(kept_at + own_v)[None, :]
            some = near < N
            wrote = tl.load(
                write_at + (begin + near)[:, None] * BV + own_v[None, :],
                mask=some[:, None] & (own_v >= 0)[None, :],
                other=0.0,
            )
            weight = tl.load(
                score_at + e[:, None] + (begin + near)[None, :] * C, mask=some[None, :] & (e >= 0)[:, None], other=0.0
            )
            m = tl.dot(weight, wrote, m * kept_all, input_precision=PRECISION)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "NC", "H"])
def pair_kernel(
    d_x, d_k, d_head_x, docs, chunk_doc, rows, T, NC, H, K: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add gradients of pair keys, lying by token, to those of the keys."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    rank, dk = i * C + tl.arange(0, C), tl.arange(0, BK)
    token = rank < length
    row = row_of(rows, start, rank, token, MASKED) * H + h
    to, ok = key_pointers(d_k, d_head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
    where = (token & ok)[:, None] & (dk < K)[None, :]
    extra = read(d_x + row[:, None] * K + dk[None, :], where).to(tl.float32)
    to = to[:, None] + dk[None, :]
    tl.store(to, (read(to, where).to(tl.float32) + extra).to(d_k.dtype.element_ty), mask=where)


COLUMNS, ROWS = 64, 8  # value columns of a program, rows of a block
PROGRAMS = 264  # of `column_read_kernel`: two for each multiprocessor of an H200


def _common(
    k: Tensor, head_x: Tensor, v: Tensor, beta: Tensor, found: Tensor, ranks: Ranks, options: Options
) -> dict[str, Any]:
    return {
        "k": k,
        "head_x": head_x,
        "beta": beta,
        "strength": found[0],
        "upto": found[1],
        "upto_low": found[2],
        **tables(ranks),
        "decay_floor": options.decay_floor,
        "H": k.shape[2],
        "K": k.shape[3],
        "V": v.shape[3],
        "BK": max(64, block(k.shape[3])),
        "BV": _columns(k),
        "N": ROWS,
        "SHIFT": int(options.shifted),
        "DIVIDE": options.step == "beta",
        "PRECISION": "ieee" if INTERPRETING else "tf32x3" if k.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 1,
    }


def _columns(k: Tensor) -> int:
    """Value columns of a program: the state `[K, columns]` lies in its registers, and in shared memory as an operand."""
    return COLUMNS // (2 if k.shape[3] > 128 else 1) // (2 if k.dtype == torch.float32 else 1)


def _scratch(k: Tensor, programs: int) -> Tensor:
    return k.new_empty(programs, CHUNK * CHUNK + (2 * CHUNK + 1) * _columns(k), dtype=torch.float32)


def _forward_run(
    q: Tensor, k: Tensor, head_x: Tensor, v: Tensor, beta: Tensor, found: Tensor, S: Tensor, ranks: Ranks, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, new state, states before the segments and their log-decay, residuals, and what their rows read."""
    (heads, k_size), v_size, M = k.shape[2:], v.shape[3], ranks.chunks * k.shape[2]
    make = torch.empty_like if ranks.rows is None else torch.zeros_like
    wide = k.new_empty if ranks.rows is None else k.new_zeros
    o, r, reads, S_out = make(v), make(v), make(v), torch.empty_like(S)
    borders = k.new_empty(M, k_size, v_size)
    states = wide(ranks.segments, heads, k_size, v_size, dtype=torch.float32)
    total = wide(ranks.segments, heads, v_size, dtype=torch.float32)
    blocks, lanes, programs = parts(v_size, _columns(k)), ranks.documents * heads, min(PROGRAMS, M)
    common = _common(k, head_x, v, beta, found, ranks, options)
    with on_device(k):
        launch(
            residual_kernel, (blocks, lanes),
            given=v, S_in=S, S_out=S_out, out=r, reads=reads, pairs=None, borders=borders, states=states, total=total,
            scratch=_scratch(k, lanes * blocks), SEG=ranks.segment, NS=ranks.segments // ranks.documents, BACK=False, **common,
        )  # fmt: skip
        launch(
            column_read_kernel, (programs, blocks),
            q=q, r=r, borders=borders, o=o, scratch=_scratch(k, programs * blocks), tiles=M, AFTER=options.read_after_write, **common,
        )  # fmt: skip
    return o, S_out, states, total, r, reads


def _backward_run(
    k: Tensor, head_x: Tensor, d_r: Tensor, beta: Tensor, found: Tensor, S: Tensor, ranks: Ranks, options: Options
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the residuals in all, and pair keys by token. d_r: those through what the residuals write."""
    make = torch.empty_like if ranks.rows is None else torch.zeros_like
    out, pairs, blocks, lanes = make(d_r), make(k), parts(d_r.shape[3], _columns(k)), ranks.documents * k.shape[2]
    with on_device(k):
        launch(
            residual_kernel, (blocks, lanes),
            given=d_r, S_in=S, S_out=torch.empty_like(S), out=out, reads=None, pairs=pairs, borders=None, states=None, total=None,
            scratch=_scratch(k, lanes * blocks), SEG=1, NS=1, BACK=True, **_common(k, head_x, d_r, beta, found, ranks, options),
        )  # fmt: skip
    return out, pairs


# --- the operator ---


def residuals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor,
    head_v: Tensor,
    S: Tensor,
    first: Tensor,
    count: Tensor,
    ranks: Ranks,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """falcon2."""
    o, S, *_ = _residuals(q, k, v, beta, ridge, head_x, head_v, S.contiguous(), first, count, *pack(ranks, options))
    return o, S


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor,
    head_v: Tensor,
    S: Tensor,
    first: Tensor,
    count: Tensor,
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    rule: str,
    flags: list[int],
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    found, _vector = gates(k, head_x, beta, ridge, first, count, ranks, options)
    o, S, states, total, r, reads = _forward_run(q, k, head_x, v, beta, found, S, ranks, options)
    return o, S, states, total, found, r, reads


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    S, (ranks, _options), heads = others[4], unpack(*others[7:]), q.shape[2]
    wide = {"dtype": torch.float32}
    return (
        torch.empty_like(v),
        torch.empty_like(S),
        q.new_empty(ranks.segments, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(ranks.segments, heads, v.shape[3], **wide),
        q.new_empty(4, ranks.chunks, heads, CHUNK, **wide),
        torch.empty_like(v),
        torch.empty_like(v),
    )


def _backward(
    d_o: Tensor,
    d_S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor,
    head_v: Tensor,
    S: Tensor,
    first: Tensor,
    count: Tensor,
    docs: Tensor | None,
    chunk_doc: Tensor | None,
    segment_doc: Tensor | None,
    rows: Tensor | None,
    sizes: list[int],
    rule: str,
    flags: list[int],
    numbers: list[float],
    o: Tensor,
    S_end: Tensor,
    states: Tensor,
    total: Tensor,
    found: Tensor,
    r: Tensor,
    reads: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    writes = Columns(q, k, r, beta, head_x, head_v, first, found, ranks, options)
    d_q, d_k, d_r, d_beta, d_head_x, d_head_v, d_S, d_strength, d_decay = writes.backward(
        d_o, o, d_S.contiguous(), S_end, states, total
    )
    nothing = torch.zeros_like(d_S)
    d_v, pairs = _backward_run(k, head_x, d_r, beta, found, nothing, ranks, options)
    before = dataclasses.replace(writes, q=pairs, options=dataclasses.replace(options, read_after_write=False))
    d_pairs, more_k, _, more_beta, more_head_x, _, more_S, more_strength, more_decay = before.backward(
        -d_v, reads, nothing, S_end, states, total
    )
    d_k, d_head_x = d_k + more_k, d_head_x + more_head_x
    with on_device(k):
        launch(
            pair_kernel, (ranks.chunks * k.shape[2],), d_x=d_pairs, d_k=d_k, d_head_x=d_head_x, **tables(ranks), H=k.shape[2],
            K=k.shape[3], BK=block(k.shape[3]), SHIFT=int(options.shifted),
        )  # fmt: skip
    _beta, d_ridge = gates_backward(
        k, head_x, beta, ridge, first, count, Gates(found, found.new_empty(0)), d_strength + more_strength,
        d_decay + more_decay, d_k, d_head_x, ranks, options,
    )  # fmt: skip
    return d_q, d_k, d_v, d_beta + more_beta, d_ridge, d_head_x, d_head_v, d_S + more_S


def _fake_backward(d_o: Tensor, d_S: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[:8])


_residuals = custom(
    "falcon_residuals", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(8), module=__name__
)
