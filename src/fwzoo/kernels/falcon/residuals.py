"""falcon2 on a GPU: a run over blocks of 16 tokens finds the residuals and the states before all chunks, which then read side by side.

    r_t = v_t - S_{t-1}^T x_t        S_t = S_{t-1} diag(gamma_t) + x_t (eta_t * r_t)^T

Every column has its own triangular system and its own transition of the state, so nothing shorter than the run exists. It has a
program of one warp for 16 columns: S^T lies in its registers, the reads of a block and what it writes are matrix products, and the
block's system is solved with a column to a thread (see `apart.py`). Backward is the same run from the end: with L the gradient of the
state through later reads and residuals,

    L_t += q_t d_o_t^T        d_z_t = L_t^T x_t        L_{t-1} = L_t diag(gamma_t) - x_t (eta_t * d_z_t)^T

Everything else is done chunk by chunk from the borders of both runs: in `residual_chunks.py` for 16-bit inputs; float32 goes to the kernels of
falcon2a (`columns.py`), for what residuals write is falcon2a's with them for values, and reads S_{t-1}^T x_t are falcon2a's reading
before it writes, with x for queries.
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
from ..gpu import (
    INTERPRET,
    block,
    custom,
    key_pointers,
    launch,
    of_chunk,
    on_device,
    out_of_chunks,
    parts,
    read,
    row_of,
    tables,
)
from ..ranks import CHUNK, Ranks
from .apart import columns_of, matrix_of, numbers_of
from .columns import Columns
from .prepass import Gates, gates, gates_backward, pack, unpack
from .residual_chunks import Chunks
from .rules import Options


@triton.jit
def _soon(pointers):
    """Fetch what will be read into the second-level cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NC", "H"])
def run_kernel(
    k, head_x, q, given, beta, strength, upto, upto_low, S_in, S_out, out, reads, borders, total, docs, rows, decay_floor, T, NC,
    H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHIFT: tl.constexpr, DIVIDE: tl.constexpr, AFTER: tl.constexpr,
    BACK: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Residuals of every token (`out`), S from S_in to S_out and before every chunk (borders). BACK, from the end: L, behind every chunk, and d_z.

    given: v (BACK: d_o). reads and total may be None: S_{t-1}^T x_t, and the log-decay of every chunk.
    """
    lane = tl.program_id(1).to(tl.int64)
    n, h = lane // H, lane % H
    first, start, length = n * NC, n * T, tl.zeros_like(n) + T
    if not PLAIN:
        start, length, first = tl.load(docs + 4 * n), tl.load(docs + 4 * n + 1), tl.load(docs + 4 * n + 2)
    dk, dv, near = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, N)
    in_k, in_v = (dk < K)[None, :], (dv < V)[:, None]
    place = dk[None, :] * V + dv[:, None]
    S = tl.load(S_in + lane * K * V + place, mask=in_k & in_v, other=0.0)
    blocks = tl.cdiv(length, N).to(tl.int32)
    summed = tl.zeros([BV], tl.float32)
    for step in range(0, blocks):
        j, order = step, near
        if BACK:
            j, order = blocks - 1 - step, N - 1 - near
        c, part = first + j // (C // N), j % (C // N)
        edge = part == 0
        if BACK:
            edge = (part == C // N - 1) | (step == 0)
        if edge:
            tl.store(borders + (c * H + h) * K * V + place, S.to(borders.dtype.element_ty), mask=in_k & in_v)
            summed = tl.zeros([BV], tl.float32)
        rank = j * N + order
        token = rank < length
        row = row_of(rows, start, rank, token, MASKED) * H + h
        at = (c * H + h) * C + part * N + order
        here, where = row[None, :] * V + dv[:, None], token[None, :] & in_v
        xp, xok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
        x = read(xp[:, None] + dk[None, :], xok[:, None] & in_k).to(WORK)
        m = columns_of(tl.dot(S.to(WORK), tl.trans(x), input_precision=PRECISION), BV)
        values, gains = columns_of(read(given + here, where), BV), columns_of(read(beta + here, where), BV)
        inverses, pulls = numbers_of(tl.load(strength + at)), numbers_of(tl.load(upto_low + at))
        if DIVIDE:
            lefts = numbers_of(tl.load(upto + at))
        gamma, eta = (), ()
        for i in tl.static_range(N):
            gain = gains[i].to(tl.float32)
            decay = 1.0 - gain * pulls[i]
            if DIVIDE:
                decay = lefts[i] + (1.0 - gain) * pulls[i]
            gamma, eta = gamma + (tl.maximum(decay, decay_floor),), eta + (gain * inverses[i],)
        gram = columns_of(tl.dot(x, tl.trans(x), input_precision=PRECISION), N)
        if BACK:
            query = read(q + row[:, None] * K + dk[None, :], token[:, None] & in_k).to(WORK)
            score = columns_of(tl.dot(x, tl.trans(query), input_precision=PRECISION), N)
        found = ()
        for i in tl.static_range(N):
            weight = numbers_of(gram[i])
            value = values[i].to(tl.float32)
            if BACK:
                scores = numbers_of(score[i])
                y = m[i]
                if AFTER:
                    y += scores[i] * value
                    value *= gamma[i]
                z = -eta[i] * y
            else:
                y = value - m[i]
                z = eta[i] * y
            new = ()
            for s in tl.static_range(N):
                if s > i:
                    moved = m[s] * gamma[i] + weight[s] * z
                    if BACK:
                        moved += scores[s] * value
                    new = new + (moved,)
                else:
                    new = new + (m[s],)
            m, found = new, found + (y,)
        tl.store(out + here, matrix_of(found, BV).to(out.dtype.element_ty), mask=where)
        if reads is not None:
            tl.store(reads + here, matrix_of(m, BV).to(reads.dtype.element_ty), mask=where)
        # what tokens have written, decayed to the block's end: from the last one on
        kept = tl.full([BV], 1.0, tl.float32)
        written, answered = (), ()
        for i in tl.static_range(N):
            z = eta[N - 1 - i] * found[N - 1 - i]
            value = values[N - 1 - i].to(tl.float32)
            if BACK:
                written = (-z * kept,) + written
                if AFTER:
                    kept *= gamma[N - 1 - i]
                    answered = (value * kept,) + answered
                else:
                    answered = (value * kept,) + answered
                    kept *= gamma[N - 1 - i]
            else:
                written = (z * kept,) + written
                kept *= gamma[N - 1 - i]
            if total is not None:
                summed += tl.log(gamma[N - 1 - i])
        S = tl.dot(matrix_of(written, BV).to(WORK), x, S * kept[:, None], input_precision=PRECISION)
        if BACK:
            S = tl.dot(matrix_of(answered, BV).to(WORK), query, S, input_precision=PRECISION)
        if total is not None:
            tl.store(total + (c * H + h) * V + dv, summed, mask=dv < V)
    tl.store(S_out + lane * K * V + place, S, mask=in_k & in_v)


@triton.jit(do_not_specialize=["T", "NC", "H"])
def pair_kernel(
    pairs, k, head_x, docs, chunk_doc, rows, T, NC, H, K: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr, ADD: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pair keys by token. ADD: add `pairs`, their gradients by token, to those of the keys, k and head_x."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    rank, dk = i * C + tl.arange(0, C), tl.arange(0, BK)
    token = rank < length
    row = row_of(rows, start, rank, token, MASKED) * H + h
    keys, ok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
    where, keys = (token & ok)[:, None] & (dk < K)[None, :], keys[:, None] + dk[None, :]
    by_token, x = pairs + row[:, None] * K + dk[None, :], read(keys, where)
    if ADD:
        tl.store(keys, (x.to(tl.float32) + read(by_token, where).to(tl.float32)).to(k.dtype.element_ty), mask=where)
    else:
        tl.store(by_token, x.to(pairs.dtype.element_ty), mask=where)


WARPS, STAGES = 1, 1


def _some(x: Tensor, ranks: Ranks, *size: int) -> Tensor:
    """A new tensor, 0 where no chunk may write to it."""
    return x.new_empty(size) if ranks.rows is None else x.new_zeros(size)


def _by_token(x: Tensor, ranks: Ranks) -> Tensor:
    """The same for a tensor like `x` `[B, T, ...]`, whose masked tokens are 0."""
    return torch.empty_like(x) if ranks.rows is None else torch.zeros_like(x)


def _run(
    k: Tensor, head_x: Tensor, q: Tensor, given: Tensor, beta: Tensor, found: Tensor, S: Tensor, ranks: Ranks, options: Options,
    back: bool, reads: Tensor | None = None, total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Residuals (or d_z), new state (or gradient of the old one), and states at the borders, `[M, H, K, V]`."""
    (heads, k_size), v_size = k.shape[2:], given.shape[3]
    out = _by_token(given, ranks)
    S_out, borders = torch.empty_like(S), _some(k, ranks, ranks.chunks, heads, k_size, v_size)
    wide = k.dtype != torch.bfloat16 or INTERPRETING
    with on_device(k):
        launch(
            run_kernel, (parts(v_size, 16), ranks.documents * heads),
            k=k, head_x=head_x, q=q, given=given, beta=beta, strength=found[0], upto=found[1], upto_low=found[2], S_in=S, S_out=S_out,
            out=out, reads=reads, borders=borders, total=total, decay_floor=options.decay_floor, **tables(ranks), H=heads, K=k_size, V=v_size, BK=block(k_size), BV=16,
            SHIFT=int(options.shifted), DIVIDE=options.step == "beta", AFTER=options.read_after_write, BACK=back, N=16,
            WORK=tl.float32 if wide else tl.bfloat16,
            PRECISION="ieee" if INTERPRETING else "tf32x3" if k.dtype == torch.float32 else "tf32",
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out, S_out, borders


def _pairs(pairs: Tensor, k: Tensor, head_x: Tensor, ranks: Ranks, options: Options, add: bool) -> None:
    heads, size = k.shape[2:]
    with on_device(k):
        launch(
            pair_kernel, (ranks.chunks * heads,), pairs=pairs, k=k, head_x=head_x, **tables(ranks), H=heads, K=size, BK=block(size),
            SHIFT=int(options.shifted), ADD=add,
        )  # fmt: skip


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
    total, reads = k.new_empty(0), k.new_empty(0)
    if k.dtype != torch.float32:
        r, S, borders = _run(k, head_x, q, v, beta, found, S, ranks, options, False)
        return Chunks(q, k, v, beta, head_x, found, ranks, options).read(r, borders), S, borders, found, r, total, reads
    total, (o, reads) = _some(k, ranks, ranks.chunks, k.shape[2], v.shape[3]), (_by_token(v, ranks) for _ in range(2))
    r, S, borders = _run(k, head_x, q, v, beta, found, S, ranks, options, False, reads, total)
    with on_device(k):
        Columns(q, k, r, beta, head_x, head_v, first, found, ranks, options).values(borders, o)
    return o, S, borders, found, r, total, reads


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    S, (ranks, _options), heads, size = others[4], unpack(*others[7:]), q.shape[2], v.shape[3]
    exact = q.dtype == torch.float32
    return (
        torch.empty_like(v),
        torch.empty_like(S),
        q.new_empty(ranks.chunks, heads, k.shape[3], size),
        q.new_empty(4, ranks.chunks, heads, CHUNK, dtype=torch.float32),
        torch.empty_like(v),
        q.new_empty(ranks.chunks, heads, size) if exact else q.new_empty(0),
        torch.empty_like(v) if exact else q.new_empty(0),
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
    borders: Tensor,
    found: Tensor,
    r: Tensor,
    total: Tensor,
    reads: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    d_o, gates_found = d_o.contiguous(), Gates(found, found.new_empty(0))
    d_z, d_S_in, d_borders = _run(k, head_x, q, d_o, beta, found, d_S.contiguous(), ranks, options, True)
    if k.dtype != torch.float32:
        chunks = Chunks(q, k, v, beta, head_x, found, ranks, options)
        d_q, d_k, d_v, d_beta, d_head_x, d_strength, d_decay = chunks.backward(
            d_o, o, r, d_z, borders, d_borders, d_S_in
        )
    else:
        writes, nothing = Columns(q, k, r, beta, head_x, head_v, first, found, ranks, options), torch.zeros_like(d_S_in)
        d_q, d_k, _, d_beta, d_head_x, _, _, d_strength, d_decay = writes.backward(
            d_o, o, d_S.contiguous(), S_end, borders, total
        )
        pairs, d_v = torch.zeros_like(k), d_z * beta * out_of_chunks(found[0], ranks, torch.float32)[..., None]
        _pairs(pairs, k, head_x, ranks, options, False)
        before = dataclasses.replace(writes, q=pairs, options=dataclasses.replace(options, read_after_write=False))
        d_pairs, more_k, _, more_beta, more_head_x, _, _, more_strength, more_decay = before.backward(
            -d_v, reads, nothing, S_end, borders, total
        )
        d_k, d_beta, d_head_x = d_k + more_k, d_beta + more_beta, d_head_x + more_head_x
        d_strength, d_decay = d_strength + more_strength, d_decay + more_decay
        _pairs(d_pairs, d_k, d_head_x, ranks, options, True)
    _beta, d_ridge = gates_backward(
        k, head_x, beta, ridge, first, count, gates_found, d_strength, d_decay, d_k, d_head_x, ranks, options
    )
    return d_q, d_k, d_v, d_beta, d_ridge, d_head_x, torch.zeros_like(head_v), d_S_in


def _fake_backward(d_o: Tensor, d_S: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[:8])


_residuals = custom(
    "falcon_residuals", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(8), module=__name__
)
