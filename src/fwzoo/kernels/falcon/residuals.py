"""falcon2 on a GPU: a run over blocks of 16 tokens finds outputs, residuals and the states before all chunks.

    r_t = v_t - S_{t-1}^T x_t        S_t = S_{t-1} diag(gamma_t) + x_t (eta_t * r_t)^T

Every column has its own triangular system and its own transition of the state, so nothing shorter than the run exists. It has a program of
one warp for 16 columns, and S^T lies in its registers. A block is four fours of tokens. A thread has all tokens of a four for its columns, and solves
them one after the other: with S before the four, and D_ij the product of the decays behind token i and before token j,

    r_t = v_t - D_t S^T x_t - sum_{j < t, in the four} D_jt (x_j . x_t) eta_j r_j

What a four has written, decayed to its end, goes to the tokens behind it in one product with the Gram matrix, decayed from there to the beginnings
of their fours. Nothing in it waits for memory: what a block needs is copied to shared memory two blocks ahead, and what does not depend on the state is
made before, by all multiprocessors (`block_kernel`). All factors are products of decays, but for what outputs read of their own four: there is one product for all of it, with decays until
a token reads and the inverses of those until others have written (4 decays of 1e-4, at most 1e16). Backward is the same run from the
end: with L the gradient of the state through later reads and residuals,

    L_t += q_t d_o_t^T        d_z_t = L_t^T x_t        L_{t-1} = L_t diag(gamma_t) - x_t (eta_t * d_z_t)^T

Everything else is done chunk by chunk from the borders of both runs: in `residual_chunks.py` for 16-bit inputs; float32 goes to the kernels of
falcon2a (`columns.py`), for what residuals write is falcon2a's with them for values, and reads S_{t-1}^T x_t are falcon2a's reading
before it writes, with x for queries.
"""
# mypy: disable-error-code="assignment, misc"
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
from .columns import Columns
from .prepass import Gates, gates, gates_backward, pack, unpack
from .residual_chunks import Chunks, prefixes
from .rules import Options


@triton.jit
def _places(column, N: tl.constexpr):
    """Of columns of tiles of N tokens, their places in the order of the run: a thread that holds columns 2 l, 2 l + 1, N / 2 + 2 l and
    N / 2 + 2 l + 1 of a product, as the tensor cores give it, has places 4 l to 4 l + 3."""
    return column % (N // 2) // 2 * 4 + column // (N // 2) * 2 + column % 2


@triton.jit
def _fours(tile, BV: tl.constexpr, N: tl.constexpr):
    """`[BV, N]` as a tuple of four `[BV, N / 4]`: of every four places the first, ..., the last."""
    even, odd = tl.split(tl.reshape(tile, [BV, 2, N // 4, 2]))
    first, third = tl.split(tl.permute(even, (0, 2, 1)))
    second, fourth = tl.split(tl.permute(odd, (0, 2, 1)))
    return first, second, third, fourth


@triton.jit
def _tile(fours, BV: tl.constexpr, N: tl.constexpr):
    """The inverse of `_fours`."""
    even, odd = tl.permute(tl.join(fours[0], fours[2]), (0, 2, 1)), tl.permute(tl.join(fours[1], fours[3]), (0, 2, 1))
    tile = tl.reshape(tl.join(even, odd), [BV, N])
    if INTERPRET:
        return tile
    else:  # Triton looks for how wide an operand's numbers are, and takes them for half of that behind a join: its search ends here
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [tile], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _times(fours, factors):
    found = ()
    for i in tl.static_range(4):
        found = found + (fours[i] * factors[i],)
    return found


@triton.jit
def _plus(fours, others):
    found = ()
    for i in tl.static_range(4):
        found = found + (fours[i] + others[i],)
    return found


@triton.jit
def _all_times(fours, factor):
    return fours[0] * factor, fours[1] * factor, fours[2] * factor, fours[3] * factor


@triton.jit
def _inverse(x):
    """1 / x, of numbers that are neither very small nor very large."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _as_product(tile, BV: tl.constexpr, N: tl.constexpr):
    """`tile`, which threads hold as they hold a product from now on."""
    return tl.dot(tl.zeros([BV, N], tl.bfloat16), tl.zeros([N, N], tl.bfloat16), tile)


@triton.jit
def _as_operand(tile, N: tl.constexpr):
    """`tile`, `[., N]`, in float32. As a product, where that is exact: Triton loads 16-bit numbers blocks ahead if they are an operand of one."""
    if tile.dtype == tl.float32:
        return tile
    else:
        n = tl.arange(0, N)
        return tl.dot(tile, tl.where(n[:, None] == n[None, :], 1.0, 0.0).to(tile.dtype))


@triton.jit
def _gates_of_block(numbers, block, column, N: tl.constexpr):
    """What `prepass.gates` has found for the tokens of a block."""
    at = numbers + block * (3 * N) + column
    return tl.load(at), tl.load(at + N), tl.load(at + 2 * N)


@triton.jit
def _keep(to, S, state, dk, dv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """S^T, `[BV, BK]`, as a state `[K, V]`."""
    if K == BK and V % BV == 0:
        tl.store(to + state, S.to(to.dtype.element_ty))
    else:
        tl.store(to + state, S.to(to.dtype.element_ty), mask=(dk < K)[None, :] & (dv < V)[:, None])


@triton.jit
def _in_fours(near_gram, decay, near, BV: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    """What the keys of the second, third and fourth token of a four have of those before them, decayed between the two: a product with ones
    gives them to every column."""
    one, turn = tl.full([BV, N], 1.0, near_gram.dtype), near[None, :] % 4
    zero = tl.zeros_like(one)
    first = _fours(tl.dot(tl.where(turn == 0, one, zero), near_gram, input_precision=PRECISION), BV, N)
    second = _fours(tl.dot(tl.where(turn == 1, one, zero), near_gram, input_precision=PRECISION), BV, N)
    third = _fours(tl.dot(tl.where(turn == 2, one, zero), near_gram, input_precision=PRECISION), BV, N)
    return (
        first[1],
        (first[2] * decay[1], second[2]),
        (first[3] * (decay[1] * decay[2]), second[3] * decay[2], third[3]),
    )


@triton.jit(do_not_specialize=["T", "NC", "M"])
def run_kernel(
    vectors, tiles, numbers, given, beta, S_in, S_out, out, reads, o, borders, docs, rows, decay_floor, T, NC, M,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AFTER: tl.constexpr,
    DIVIDE: tl.constexpr, BACK: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Residuals (`out`) and outputs of every token, S from S_in to S_out and before every chunk (borders). BACK, from the end: L, behind every
    chunk, and d_z.

    vectors, tiles, numbers: of `block_kernel`. given: v (BACK: d_o). reads: S_{t-1}^T x_t, may be None.
    """
    lane = tl.program_id(1).to(tl.int64)
    n, h = lane // H, lane % H
    first, start, length = n * NC, n * T, tl.zeros_like(n) + T
    if not PLAIN:
        start, length, first = tl.load(docs + 4 * n), tl.load(docs + 4 * n + 1), tl.load(docs + 4 * n + 2)
    dk, dv = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    column, four = tl.arange(0, N), tl.arange(0, N // 4)[None, :]
    near = _places(column, N)
    in_k, in_v = (dk < K)[None, :], (dv < V)[:, None]
    state = dk[None, :] * V + dv[:, None]
    S = tl.load(S_in + lane * K * V + state, mask=in_k & in_v, other=0.0)
    blocks = tl.cdiv(length, N).to(tl.int32)
    blocks_before = (h * M + first) * (C // N)
    tile, square = column[:, None] * BK + dk[None, :], column[:, None] * N + column[None, :]
    order, begin, way = near, 0, 1
    if BACK:
        order, begin, way = N - 1 - near, blocks - 1, -1
    one, which = tl.full([BV, N // 4], 1.0, tl.float32), tl.zeros([BV, N // 4], tl.int32)
    # by numbers: there are too few predicates for conditions
    is_0, is_1 = (four == 0).to(tl.float32), (four == 1).to(tl.float32)
    is_2, is_3 = (four == 2).to(tl.float32), (four == 3).to(tl.float32)
    if blocks > 0:
        _keep(borders + ((first + begin // (C // N)) * H + h) * K * V, S, state, dk, dv, K, V, BK, BV)
    for step in range(0, blocks):
        j = begin + way * step
        c, part = first + j // (C // N), j % (C // N)
        rank = j * N + order
        token, base, at = rank < length, (start + j * N) * H + h, order * H
        if MASKED:
            base, at = h, row_of(rows, start, rank, token, MASKED) * H
        here, where = base * V + (at[:, None] * V + dv[None, :]), token[:, None]
        if V % BV != 0:
            where = where & (dv < V)[None, :]
        here_k = (blocks_before + j) * (2 * N * BK)
        here_n = tiles + (blocks_before + j) * (4 * N * N) + square
        value = read(given + base * V + (dv[:, None] + at[None, :] * V), tl.trans(where))
        inverse, kept, pull = _gates_of_block(numbers, blocks_before + j, column, N)
        gain = read(beta + here, where).to(tl.float32)
        raw = (kept[:, None] + (1.0 - gain) * pull[:, None]) if DIVIDE else (1.0 - gain * pull[:, None])
        x, query = tl.load(vectors + here_k + tile).to(WORK), tl.load(vectors + (here_k + N * BK) + tile).to(WORK)
        gram, scores = tl.load(here_n), tl.load(here_n + N * N)
        near_gram, own = tl.load(here_n + 2 * N * N), tl.load(here_n + 3 * N * N)
        # decays of a four until each of its tokens and until its end, and behind each; of the block until and behind every four
        decay = _fours(_as_product(tl.trans(tl.maximum(raw, decay_floor)), BV, N), BV, N)
        # 0 * kept: Triton loads ahead what the first two operands of a product come from, and the decays are the third one of theirs
        eta = _fours(tl.trans(gain * (inverse + 0.0 * kept + 0.0 * pull)[:, None]), BV, N)
        values = _fours(_as_operand(value, N), BV, N)
        after = (decay[1] * (decay[2] * decay[3]), decay[2] * decay[3], decay[3], one)
        until = (one, decay[0], decay[0] * decay[1], decay[0] * decay[1] * decay[2])
        through = until[3] * decay[3]
        until = until + (through,)
        g0, g1 = tl.gather(through, which, 1), tl.gather(through, which + 1, 1)
        g2, g3 = tl.gather(through, which + 2, 1), tl.gather(through, which + 3, 1)
        before = is_0 + g0 * (is_1 + g1 * (is_2 + g2 * is_3))
        behind = is_3 + g3 * (is_2 + g2 * (is_1 + g1 * is_0))
        # what keys and queries read of the state before the block
        narrow = S.to(WORK)
        found = _all_times(_fours(tl.dot(narrow, tl.trans(x), input_precision=PRECISION), BV, N), before)
        S *= tl.sum((g0 * g1 * g2 * g3) * is_0, 1)[:, None]
        reach = (until[1], until[2], until[3], until[4]) if AFTER else (until[0], until[1], until[2], until[3])
        undone = _inverse(through)
        undone = (undone * after[0], undone * after[1], undone * after[2], undone)
        if BACK:
            asks = (
                (values[0], values[1] * undone[0], values[2] * undone[1], values[3] * undone[2])
                if AFTER
                else _times(values, undone)
            )
            more = _fours(tl.dot(_tile(asks, BV, N).to(WORK), own, input_precision=PRECISION), BV, N)
            found = _plus(found, more)
            values = _times(_times(values, decay), after) if AFTER else _times(values, after)
            leaving = _tile(_all_times(values, behind), BV, N).to(WORK)
            S = tl.dot(leaving, query, S, input_precision=PRECISION)
        else:
            output = _all_times(_fours(tl.dot(narrow, tl.trans(query), input_precision=PRECISION), BV, N), before)
        # one four after the other: residuals of its tokens (BACK: -d_z), and what they write
        pairs = _in_fours(near_gram, decay, near, BV, N, PRECISION)
        for turn in tl.static_range(N // 4):
            r0 = -found[0] if BACK else values[0] - found[0]
            w0 = eta[0] * r0
            r1 = -until[1] * found[1] if BACK else values[1] - until[1] * found[1]
            r1 -= pairs[0] * w0
            w1 = eta[1] * r1
            r2 = -until[2] * found[2] if BACK else values[2] - until[2] * found[2]
            r2 = r2 - pairs[1][0] * w0 - pairs[1][1] * w1
            w2 = eta[2] * r2
            r3 = -until[3] * found[3] if BACK else values[3] - until[3] * found[3]
            r3 = r3 - pairs[2][0] * w0 - pairs[2][1] * w1 - pairs[2][2] * w2
            written = (w0, w1, w2, eta[3] * r3)
            if turn < N // 4 - 1:
                mine, to = is_0, is_1 + g1 * (is_2 + g2 * is_3)
                if turn == 1:
                    mine, to = is_1, is_2 + g2 * is_3
                if turn == 2:
                    mine, to = is_2, is_3
                told = _tile(_times(written, _all_times(after, mine)), BV, N).to(WORK)
                # to: decay from the end of this four to the beginnings of those behind it
                more = tl.zeros([BV, N], tl.float32)
                if BACK:
                    asks = _tile(_all_times(values, mine), BV, N)
                    more = tl.dot(asks.to(WORK), scores, more, input_precision=PRECISION)
                else:
                    asked = _fours(tl.dot(told, scores, input_precision=PRECISION), BV, N)
                    output = _plus(output, _all_times(asked, to))
                more = _fours(tl.dot(told, gram, more, input_precision=PRECISION), BV, N)
                found = _plus(found, _all_times(more, to))
        leaving = _tile(_times(written, _all_times(after, behind)), BV, N).to(WORK)
        S = tl.dot(leaving, x, S, input_precision=PRECISION)
        if BACK:
            tl.store(out + here, tl.trans((-_tile((r0, r1, r2, r3), BV, N)).to(out.dtype.element_ty)), mask=where)
        else:
            asks = _tile(_times(written, undone), BV, N).to(WORK)
            output = _times(reach, _plus(output, _fours(tl.dot(asks, own, input_precision=PRECISION), BV, N)))
            tl.store(o + here, tl.trans(_tile(output, BV, N).to(o.dtype.element_ty)), mask=where)
            left = _tile((r0, r1, r2, r3), BV, N)
            tl.store(out + here, tl.trans(left.to(out.dtype.element_ty)), mask=where)
            if reads is not None:
                seen = _tile((values[0] - r0, values[1] - r1, values[2] - r2, values[3] - r3), BV, N)
                tl.store(reads + here, tl.trans(seen.to(reads.dtype.element_ty)), mask=where)
        # the state at a chunk's border
        if (part == (0 if BACK else C // N - 1)) & (step < blocks - 1):
            _keep(borders + ((c + way) * H + h) * K * V, S, state, dk, dv, K, V, BK, BV)
    _keep(S_out + lane * K * V, S, state, dk, dv, K, V, BK, BV)


@triton.jit(do_not_specialize=["T", "NC", "M", "H"])
def block_kernel(
    k, head_x, q, strength, upto, upto_low, vectors, tiles, numbers, docs, chunk_doc, rows, T, NC, M, H, K: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr,
    AFTER: tl.constexpr, BACK: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    WORK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the run takes of a chunk, block by block in its order: keys and queries (`vectors`, `[H, M * C / N, 2, N, BK]`, 0 behind the last token), what
    `prepass.gates` has found (`numbers`, `[H, M * C / N, 3, N]`), and products (`tiles`, `[H, M * C / N, 4, N, N]`): of keys with keys, of keys with
    queries (BACK: of queries with keys), and the same within fours."""
    c, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    n, start, length, i = of_chunk(c, docs, chunk_doc, T, NC, PLAIN)
    e, dk = tl.arange(0, C), tl.arange(0, BK)
    place = _places(e % N, N)
    order = place
    if BACK:
        order = N - 1 - place
    rank = i * C + e // N * N + order
    token = rank < length
    keys, ok = key_pointers(k, head_x, rows, n, start, length, h, rank, H, K, 1, SHIFT, MASKED)
    x = read(keys[:, None] + dk[None, :], (token & ok)[:, None] & (dk < K)[None, :])
    row = row_of(rows, start, rank, token, MASKED) * H + h
    query = read(q + row[:, None] * K + dk[None, :], token[:, None] & (dk < K)[None, :])
    chunk, at = (h * M + c) * C, (c * H + h) * C + e // N * N + order
    for_gates = numbers + (chunk + e // N * N) * 3 + e % N
    tl.store(for_gates, tl.load(strength + at))
    tl.store(for_gates + N, tl.load(upto + at))
    tl.store(for_gates + 2 * N, tl.load(upto_low + at))
    to = vectors + (2 * (chunk + e // N * N) + e % N)[:, None] * BK + dk[None, :]
    tl.store(to, x.to(vectors.dtype.element_ty))
    tl.store(to + N * BK, query.to(vectors.dtype.element_ty))
    x, query = x.to(WORK), query.to(WORK)
    to = (chunk + e // N * N)[:, None] * (4 * N) + (e % N)[:, None] * N + (e % N)[None, :]
    block = e[:, None] // N == e[None, :] // N
    near = block & (place[:, None] // 4 == place[None, :] // 4)
    gram = tl.dot(x, tl.trans(x), input_precision=PRECISION)
    tl.store(tiles + to, gram.to(tiles.dtype.element_ty), mask=block)
    tl.store(tiles + 2 * N * N + to, tl.where(near, gram, 0.0).to(tiles.dtype.element_ty), mask=block)
    if BACK:
        x, query = query, x
    scores = tl.dot(x, tl.trans(query), input_precision=PRECISION)
    own = near & ((place[:, None] <= place[None, :]) if AFTER else (place[:, None] < place[None, :]))
    tl.store(tiles + N * N + to, scores.to(tiles.dtype.element_ty), mask=block)
    tl.store(tiles + 3 * N * N + to, tl.where(own, scores, 0.0).to(tiles.dtype.element_ty), mask=block)


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


N, WARPS, STAGES = 16, 1, 3  # tokens of a block of the run


def _some(x: Tensor, ranks: Ranks, *size: int) -> Tensor:
    """A new tensor, 0 where no chunk may write to it."""
    return x.new_empty(size) if ranks.rows is None else x.new_zeros(size)


def _run(
    k: Tensor, head_x: Tensor, q: Tensor, given: Tensor, beta: Tensor, found: Tensor, S: Tensor, ranks: Ranks, options: Options,
    back: bool, reads: Tensor | None = None, o: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Residuals (or d_z), new state (or gradient of the old one), and states at the borders, `[M, H, K, V]`. o: where outputs go."""
    (heads, k_size), v_size = k.shape[2:], given.shape[3]
    out = ranks.new_like(given)
    S_out, borders = torch.empty_like(S), _some(k, ranks, ranks.chunks, heads, k_size, v_size)
    wide, width = k.dtype != torch.bfloat16 or INTERPRETING, block(k_size)
    vectors = k.new_empty(heads, ranks.chunks * CHUNK // N, 2, N, width)
    tiles = k.new_empty(heads, ranks.chunks * CHUNK // N, 4, N, N, dtype=torch.float32 if wide else k.dtype)
    numbers = found.new_empty(heads, ranks.chunks * CHUNK // N, 3, N)
    given_to_both = {
        "vectors": vectors,
        "tiles": tiles,
        "numbers": numbers,
        **tables(ranks),
        "M": ranks.chunks,
        "H": heads,
        "K": k_size,
        "BK": width,
        "AFTER": options.read_after_write,
        "BACK": back,
        "N": N,
        "WORK": tl.float32 if wide else tl.bfloat16,
        "PRECISION": "ieee" if INTERPRETING else "tf32x3" if k.dtype == torch.float32 else "tf32",
    }
    with on_device(k):
        launch(
            block_kernel, (ranks.chunks * heads,), k=k, head_x=head_x, q=q, strength=found[0], upto=found[1], upto_low=found[2],
            SHIFT=int(options.shifted), **given_to_both,
        )  # fmt: skip
        launch(
            run_kernel, (parts(v_size, 16), ranks.documents * heads), given=given, beta=beta,
            S_in=S, S_out=S_out, out=out, reads=reads, o=o, borders=borders, decay_floor=options.decay_floor, V=v_size, BV=16,
            DIVIDE=options.step == "beta", num_warps=WARPS, num_stages=STAGES, **given_to_both,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    found, _vector = gates(k, head_x, beta, ridge, first, count, ranks, options)
    exact, o = k.dtype == torch.float32, ranks.new_like(v)
    reads = ranks.new_like(v) if exact else k.new_empty(0)
    r, S, borders = _run(k, head_x, q, v, beta, found, S, ranks, options, False, reads if exact else None, o)
    return o, S, borders, found, r, reads


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    S, (ranks, _options), heads, size = others[4], unpack(*others[7:]), q.shape[2], v.shape[3]
    return (
        torch.empty_like(v),
        torch.empty_like(S),
        q.new_empty(ranks.chunks, heads, k.shape[3], size),
        q.new_empty(4, ranks.chunks, heads, CHUNK, dtype=torch.float32),
        torch.empty_like(v),
        torch.empty_like(v) if q.dtype == torch.float32 else q.new_empty(0),
    )


def _backward(
    d_o: Tensor | None,
    d_S: Tensor | None,
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
    reads: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    d_o = torch.zeros_like(o) if d_o is None else d_o.contiguous()
    d_S = torch.zeros_like(S_end) if d_S is None else d_S.contiguous()
    gates_found = Gates(found, found.new_empty(0))
    u = prefixes(beta, found, ranks, options, k.dtype == torch.float32)
    d_z, d_S_in, d_borders = _run(k, head_x, q, d_o, beta, found, d_S, ranks, options, True)
    writes, pairs = Columns(q, k, r, beta, head_x, head_v, first, found, ranks, options), torch.zeros_like(k)
    _pairs(pairs, k, head_x, ranks, options, False)
    if k.dtype != torch.float32:
        chunks = Chunks(q, k, v, beta, head_x, found, u, ranks, options)
        d_q, d_k, d_v, d_beta, d_head_x, d_strength, d_decay = chunks.backward(
            d_o, o, r, d_z, borders, d_borders, d_S_in, writes, pairs
        )
    else:
        nothing, total = torch.zeros_like(d_S_in), u[:, :, -1].float().contiguous()
        d_q, d_k, _, d_beta, d_head_x, _, _, d_strength, d_decay = writes.backward(d_o, o, d_S, S_end, borders, total)
        d_v = d_z * beta * out_of_chunks(found[0], ranks, torch.float32)[..., None]
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


def _fake_backward(d_o: Any, d_S: Any, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[:8])


_residuals = custom(
    "falcon_residuals", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(8), module=__name__,
    materialize=False,
)  # fmt: skip
