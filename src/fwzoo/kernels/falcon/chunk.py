"""Falcon in chunks of tokens: dense matrix work inside a chunk, a short scan over chunk states.

Axis letters: R tiles times heads, C chunk, K key size, V value size, W window, E = C + W - 1 pairs a chunk sees.
Decays enter only as exp of differences that are <= 0. Within a chunk, with log-decay prefix u (u_0 = 0), the state is

    S_t = exp(u_t) S_0 + sum_s exp(u_t - u_s) c_s sum_{j in window of s} x_j e_{s,j}^T,    c_s = eta_s / B_s,

where e_{s,j} is the value v_j (inner-product rules) or the residual v_j - S_{s-1}^T x_j (regression rules). Rules 1 and 1A
are the case W = 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import compute_dtype
from ..segments import scan_segments, scan_steps
from ..tiling import Tiling
from .reference import falcon_reference
from .rules import FalconState, Options, Rule, started, step_and_decay, window_energy


def falcon_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState | None,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FalconState]:
    """Chunk-parallel form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.falcon`, checked."""
    state = started(state, q, v, bounds, options)
    if q.shape[1] == 0:
        return falcon_reference(q, k, v, beta, ridge, options, state, mask, bounds)
    rule, window, dtype, heads = options.rule, options.window, compute_dtype(q.dtype), q.shape[2]
    chunk = chunk_size(rule, window, q.shape[1])
    tiling = Tiling(q.shape[0], q.shape[1], chunk, mask=mask, bounds=bounds, device=q.device)
    state = FalconState(*(tiling.enter(field) for field in state))
    q_tiles, k_tiles, v_tiles, beta_tiles, ridge_tiles = (tiling.tile(x.to(dtype)) for x in (q, k, v, beta, ridge))

    # pairs: the previous real key (or this one) with this value; a document's first token may have none
    x = k_tiles
    if options.shifted:
        x = torch.cat([tiling.before(k_tiles, 1, state.key[:, :, None]), k_tiles[:, :-1]], 1)
    position = tiling.positions()
    unpaired = ~state.has_key if options.shifted else torch.zeros_like(state.has_key)
    first, length = tiling.per_tile(unpaired.long())[:, None], tiling.per_tile(tiling.lengths)[:, None]
    writes = (position >= first) & (position < length)
    pairs = (tiling.per_tile(state.count)[:, None] + position + 1 - first).clamp(1, window)
    by_head = functools.partial(torch.repeat_interleave, repeats=heads, dim=0)
    writes, pairs = by_head(writes), by_head(pairs)
    x, values = (torch.where(writes[..., None], rows, 0) for rows in (x, v_tiles))
    x, values = _with_tail(x, values, tiling, state, unpaired, window)

    energy = None
    if options.needs_energy:
        energy = window_energy(_windows(x, window), pairs, rule) if rule.sliding else x.square().sum(-1)
    eta, gamma = step_and_decay(beta_tiles, ridge_tiles, energy, writes, options)
    strength = eta if rule.per_column else eta / pairs
    form = {
        (True, False): regression_form,
        (True, True): regression_columns_form,
        (False, False): inner_product_form,
        (False, True): inner_product_columns_form,
    }[rule.regression, rule.per_column]
    body = functools.partial(form, heads=heads, window=window, read_after_write=options.read_after_write)
    S = state.S.flatten(0, 1)
    o, S = scan_segments(body, S, (q_tiles, x, values, strength, gamma.log()), tiling.steps, heads, chunk)
    S = S.view(state.S.shape)

    last = tiling.lengths - 1
    key = torch.where(
        (last < 0)[:, None, None], state.key, tiling.pick(k_tiles, last[:, None], heads)[:, :, 0].to(q.dtype)
    )
    has_key = state.has_key | (last >= 0)
    tail_x, tail_v = (
        _new_tail(tail, rows, tiling, unpaired, heads) for tail, rows in ((state.tail_x, x), (state.tail_v, values))
    )
    written = (tiling.lengths - unpaired.long()).clamp(min=0)
    count = (state.count + written).clamp(max=window - 1)
    new = (tiling.leave(field) for field in (S, key, has_key, tail_x, tail_v, count))
    return tiling.untile(o.to(v.dtype), heads), FalconState(*new)


def chunk_size(rule: Rule, window: int, tokens: int) -> int:
    """C: 64 rows where a chunk is plain matrix work, 16 where per-column decays or windowed residuals are solved for."""
    if rule.regression and rule.per_column:
        size = COLUMN_SOLVE_CHUNK
    elif rule.regression and window > 1:
        size = 16
    else:
        size = 64
    while size > 16 and size * 2 > tokens:
        size //= 2
    while size < window:
        size *= 2
    return size


COLUMN_SOLVE_CHUNK = 8


# --- pairs and windows ---


def _with_tail(
    x: Tensor, values: Tensor, tiling: Tiling, state: FalconState, unpaired: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Put the W - 1 pairs before each tile in front of it: `[R, C, .]` to `[R, E, .]`."""
    if window == 1:
        return x, values
    first = state.S.shape[1] * tiling.steps[0]
    skip = unpaired[: tiling.steps[0]].repeat_interleave(state.S.shape[1])[:, None, None]
    extended = []
    for rows, tail in ((x, state.tail_x), (values, state.tail_v)):
        rows = torch.cat([tiling.before(rows, window - 1, tail.transpose(1, 2)), rows], 1)
        # a first token without a pair leaves no gap in the window: the tail moves up into its place
        moved = torch.cat([rows[:first, :window].roll(1, 1), rows[:first, window:]], 1)
        rows = torch.cat([torch.where(skip, moved, rows[:first]), rows[first:]])
        extended.append(rows)
    return extended[0], extended[1]


def _new_tail(tail: Tensor, rows: Tensor, tiling: Tiling, unpaired: Tensor, heads: int) -> Tensor:
    """The last W - 1 pairs of every document: `[N, W - 1, H, F]`.

    Args:
        tail: the incoming one. rows: `[R, E, F]`, whose row e holds the pair at position e - (W - 1) of its tile.
    """
    size = tail.shape[1]
    if size == 0:
        return tail
    length = tiling.lengths[:, None]
    back = torch.arange(-size, 0, device=tail.device)
    picked = tiling.pick(rows[:, size:], torch.where(length > 0, length + back, -1), heads).transpose(1, 2)
    # positions before the document (or its unpaired first token) come from the incoming tail
    older = length + back - unpaired[:, None].long()
    old_row = (size + torch.where(length > 0, older, back)).clamp(0, size - 1)
    old = tail.gather(1, old_row[..., None, None].expand_as(tail))
    from_tail = (older < 0) | (length == 0)
    return torch.where(from_tail[..., None, None], old, picked.to(tail.dtype))


def _windows(rows: Tensor, window: int) -> Tensor:
    """`[R, E, F]` to the window of every token, oldest first: `[R, C, W, F]`."""
    return rows.unfold(1, window, 1).transpose(-1, -2)


def _fold(windows: Tensor) -> Tensor:
    """Transpose of `_windows`: add every token's window rows `[R, C, W, F]` into the pairs `[R, E, F]`."""
    size = windows.shape[2]
    return sum((F.pad(windows[:, :, w], (0, 0, w, size - 1 - w)) for w in range(size)), windows.new_zeros(()))


# --- decays ---


def _decay_matrix(log_decay: Tensor) -> Tensor:
    """exp(u_i - u_j) for i >= j, else 0: `[R, C]` to `[R, C, C]`, from sums over segments (no cancellation)."""
    size = log_decay.shape[1]
    lower = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    segments = torch.where(lower.tril(-1), log_decay[..., None], 0).cumsum(1)
    return torch.where(lower, segments, -torch.inf).exp()


def _one_later(x: Tensor, first: float) -> Tensor:
    """Row i becomes row i - 1 along axis 1; row 0 is filled with `first`."""
    return F.pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0), value=first)


# --- scalar decay: rules 1, 3 and 1A, 3A ---


def inner_product_form(
    S: Tensor,
    q: Tensor,
    x: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    *,
    steps: list[int],
    heads: int,
    window: int,
    read_after_write: bool,
) -> tuple[Tensor, Tensor]:
    """Masked attention with the banded mask M_tj = sum of exp(u_t - u_s) c_s over the tokens s whose window holds j."""
    decay = _decay_matrix(log_decay)
    from_start = log_decay.cumsum(1).exp()
    weight = decay * strength[:, None]
    banded = F.pad(weight, (window - 1, window - 1)).unfold(2, window, 1).sum(-1) if window > 1 else weight
    written = (x * banded[:, -1, :, None]).transpose(1, 2) @ v
    before, S = scan_steps(
        lambda S, kept, new: torch.addcmul(new, kept, S), S, (from_start[:, -1:, None], written), steps, heads
    )
    if not read_after_write:
        banded, from_start = _one_later(banded, 0), _one_later(from_start, 1)
    o = torch.baddbmm((q * from_start[..., None]) @ before, (q @ x.transpose(1, 2)) * banded, v)
    return o, S


def regression_form(
    S: Tensor,
    q: Tensor,
    x: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    *,
    steps: list[int],
    heads: int,
    window: int,
    read_after_write: bool,
    decay_before_residual: bool = False,
) -> tuple[Tensor, Tensor]:
    """Residuals of all chunks at once, as an affine function of S_0: e = from_v + from_S S_0; then a scan over chunks.

    e_{s,j} = v_j - exp(u_{s-1}) S_0^T x_j - sum_{s' < s} exp(u_{s-1} - u_{s'}) c_{s'} sum_{j'} (x_j . x_{j'}) e_{s',j'}

    With `decay_before_residual` (and W = 1) the residual sees the state after this token's decay: u_s in place of u_{s-1}.
    """
    sizes = (v.shape[2], x.shape[2])
    decay = _decay_matrix(log_decay)
    from_start = log_decay.cumsum(1).exp()
    weight = decay * strength[:, None]
    earlier = _one_later(weight, 0)
    gram = x @ x.transpose(1, 2)
    seen, since = (weight, from_start) if decay_before_residual else (earlier, _one_later(from_start, 1))
    read = -x * F.pad(since, (window - 1, 0), value=1.0)[..., None]
    if window == 1:
        sides = torch.cat([v, read], -1)  # of the system, only what lies below the diagonal is read
        residual = torch.linalg.solve_triangular(gram * seen, sides, upper=False, unitriangular=True)[:, :, None]
    else:
        newest = gram[:, window - 1 :].unfold(2, window, 1) * earlier[..., None]
        within = torch.diagonal(gram.unfold(1, window, 1).unfold(2, window, 1), dim1=1, dim2=2).permute(0, 3, 1, 2)
        residual = _WindowSolve.apply(v, read, newest, within * strength[..., None, None], log_decay.exp())
    folded = _fold(residual * weight[:, -1, :, None, None])
    from_v, from_S = folded.split(sizes, -1)

    def update(S: Tensor, kept: Tensor, x: Tensor, from_v: Tensor, from_S: Tensor) -> Tensor:
        return torch.baddbmm(kept * S, x.transpose(1, 2), torch.baddbmm(from_v, from_S, S))

    before, S = scan_steps(update, S, (from_start[:, -1:, None], x, from_v, from_S), steps, heads)
    if not read_after_write:
        weight, from_start = earlier, _one_later(from_start, 1)
    scores = (q @ x.transpose(1, 2)).unfold(2, window, 1) * weight[..., None]
    from_v, from_S = residual.flatten(1, 2).split(sizes, -1)
    written = torch.baddbmm(from_v, from_S, before)
    o = torch.baddbmm((q * from_start[..., None]) @ before, scores.flatten(2), written)
    return o, S


class _WindowSolve(torch.autograd.Function):
    """Residuals of every window by forward substitution over the tokens of a chunk, for all chunks at once.

    The read R_j = S^T x_j of every key in the window is kept: formed once, when the key enters, from all earlier
    residuals, then updated by R_j <- gamma_t R_j + c_t sum_{j'} (x_j . x_{j'}) e_{t,j'}. The residual is v_j - R_j. The last
    K columns are the factor of S_0. Backward runs the same recursion transposed.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, read: Tensor, newest: Tensor, within: Tensor, gamma: Tensor) -> Tensor:
        """v `[R, E, V]`; read: minus what a key reads of S_0 when it enters, `[R, E, K]`; newest: weight of each earlier
        residual in the read of the key that enters, `[R, C, C, W]`; within: c_t times the window's Gram matrix,
        `[R, C, W, W]`; gamma `[R, C]`. Returns the residuals `[R, C, W, V + K]`.
        """
        rows, chunk, _, window = newest.shape
        first = torch.cat([v, read], -1)
        targets = F.pad(v, (0, read.shape[2]))
        residual = first.new_empty(rows, chunk, window, first.shape[2])
        residual[:, 0] = first[:, :window]
        for t in range(1, chunk):
            last = residual[:, t - 1]
            kept = (last - targets[:, t - 1 : t - 1 + window]) * gamma[:, t - 1, None, None]
            kept = torch.baddbmm(kept, within[:, t - 1], last, alpha=-1)[:, 1:]
            entering = newest[:, t, :t].flatten(1)[:, None] @ residual[:, :t].flatten(1, 2)
            residual[:, t, :-1] = targets[:, t : t + window - 1] + kept
            residual[:, t, -1] = first[:, t + window - 1] - entering[:, 0]
        ctx.save_for_backward(targets, newest, within, gamma, residual)
        ctx.key_size = read.shape[2]
        return residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        targets, newest, within, gamma, residual = ctx.saved_tensors
        rows, chunk, _, window = newest.shape
        columns = targets.shape[2] - ctx.key_size
        d_residual = grads[0].clone()
        d_newest, d_within = torch.zeros_like(newest), torch.zeros_like(within)
        d_gamma, d_first = torch.zeros_like(gamma), torch.zeros_like(targets)
        for t in range(chunk - 1, 0, -1):
            d_new, d_kept = d_residual[:, t, -1:], F.pad(d_residual[:, t, :-1], (0, 0, 1, 0))
            earlier, last = residual[:, :t].flatten(1, 2), residual[:, t - 1]
            d_first[:, t + window - 1] += d_new[:, 0]
            d_newest[:, t, :t] = -(d_new @ earlier.transpose(1, 2)).view(rows, t, window)
            d_residual[:, :t] -= newest[:, t, :t, :, None] * d_new[:, None]
            # rows that stay: target of the row now, minus gamma times the read before, minus what was written
            shown = last - targets[:, t - 1 : t - 1 + window]
            d_gamma[:, t - 1] = (d_kept * shown).sum((1, 2))
            d_within[:, t - 1] = -(d_kept @ last.transpose(1, 2))
            scaled = d_kept * gamma[:, t - 1, None, None]
            d_residual[:, t - 1] += torch.baddbmm(scaled, within[:, t - 1].transpose(1, 2), d_kept, alpha=-1)
            d_first[:, t : t + window - 1, :columns] += d_kept[:, 1:, :columns]
            d_first[:, t - 1 : t - 1 + window, :columns] -= scaled[..., :columns]
        d_first[:, :window] += d_residual[:, 0]
        return d_first[..., :columns], d_first[..., columns:], d_newest, d_within, d_gamma


# --- one decay a value column: rules 2 and 2A ---


class _ColumnAttention(torch.autograd.Function):
    """o_t = sum_{j <= t} scores_tj exp(u_t - u_j) * b_j for every value column, by halving.

    At every level the right half of a block reads the left half: the left rows are rescaled to the border and the right
    rows from it, both by factors <= 1, so the work between is one matrix product and no [C, C, V] tensor exists. With
    `read_after_write=False` the decay is exp(u_{t-1} - u_j), for j < t.

    `ahead` holds sums of log-decay from the start of a block up to t, `behind` those from j + 1 to its end.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, log_decay: Tensor, b: Tensor, read_after_write: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """scores `[R, C, C]`; log_decay, b `[R, C, V]`; C a power of two.

        Returns o, `ahead` and `behind` of the whole chunk `[R, C, V]`, and the sum of its log-decay `[R, 1, V]`.
        """
        rows, chunk, columns = b.shape
        saved = []
        o = torch.diagonal(scores, dim1=1, dim2=2)[..., None] * b if read_after_write else torch.zeros_like(b)
        ahead = log_decay.clone() if read_after_write else torch.zeros_like(log_decay)
        behind, total = torch.zeros_like(log_decay), log_decay
        for half in _halves(chunk):
            shape = (rows, chunk // (2 * half), 2, half, columns)
            left, right = behind.view(shape)[:, :, 0], ahead.view(shape)[:, :, 1]
            from_left, to_right = left.exp(), right.exp()
            rescaled = b.view(shape)[:, :, 0] * from_left
            read = _cross(scores, half) @ rescaled
            o.view(shape)[:, :, 1].addcmul_(read, to_right)
            saved += [from_left, to_right, rescaled, read]
            total = total.view(rows, -1, 2, 1, columns)
            right += total[:, :, 0]
            left += total[:, :, 1]
            total = total.sum(2)
        ctx.save_for_backward(scores, b, *saved)
        ctx.read_after_write = read_after_write
        return o, ahead, behind, total.view(rows, 1, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        scores, b, *saved = ctx.saved_tensors
        d_o, d_ahead, d_behind, d_total = grads[0].contiguous(), grads[1].clone(), grads[2].clone(), grads[3]
        rows, chunk, columns = b.shape
        d_scores, d_b = torch.zeros_like(scores), torch.zeros_like(b)
        for level, half in reversed(list(enumerate(_halves(chunk)))):
            shape = (rows, chunk // (2 * half), 2, half, columns)
            from_left, to_right, rescaled, read = saved[4 * level : 4 * level + 4]
            d_left, d_right = d_behind.view(shape)[:, :, 0], d_ahead.view(shape)[:, :, 1]
            d_total = d_total[:, :, None] + torch.stack([d_right.sum(2), d_left.sum(2)], 2)
            d_total = d_total.view(rows, -1, columns)
            d_read = d_o.view(shape)[:, :, 1] * to_right
            _cross(d_scores, half).copy_(d_read @ rescaled.transpose(-1, -2))
            d_rescaled = _cross(scores, half).transpose(-1, -2) @ d_read
            d_b.view(shape)[:, :, 0].addcmul_(d_rescaled, from_left)
            d_right.addcmul_(d_read, read)
            d_left.addcmul_(d_rescaled, rescaled)
        d_log_decay = d_total
        if ctx.read_after_write:
            d_log_decay = d_total + d_ahead
            torch.diagonal(d_scores, dim1=1, dim2=2).copy_((d_o * b).sum(-1))
            d_b.addcmul_(torch.diagonal(scores, dim1=1, dim2=2)[..., None], d_o)
        return d_scores, d_log_decay, d_b, None


def _halves(chunk: int) -> list[int]:
    """1, 2, 4, ... below `chunk`."""
    return [1 << level for level in range((chunk - 1).bit_length())]


def _cross(scores: Tensor, half: int) -> Tensor:
    """View of the scores of the right half (rows) on the left half of every block: `[R, C / 2 half, half, half]`."""
    rows, chunk, _ = scores.shape
    blocks = scores.view(rows, chunk // (2 * half), 2, half, chunk // (2 * half), 2, half)[:, :, 1, :, :, 0]
    return torch.diagonal(blocks, dim1=1, dim2=3).permute(0, 3, 1, 2)


def inner_product_columns_form(
    S: Tensor,
    q: Tensor,
    x: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    *,
    steps: list[int],
    heads: int,
    window: int,
    read_after_write: bool,
) -> tuple[Tensor, Tensor]:
    """Masked attention with one decay a column."""
    b = strength * v
    o, ahead, behind, total = _ColumnAttention.apply(q @ x.transpose(1, 2), log_decay, b, read_after_write)
    written = x.transpose(1, 2) @ (b * behind.exp())
    before, S = scan_steps(lambda S, kept, new: torch.addcmul(new, kept, S), S, (total.exp(), written), steps, heads)
    return torch.addcmul(o, ahead.exp(), q @ before), S


class _ColumnSolve(torch.autograd.Function):
    """Solve b_i + eta_i * sum_{j < i} G_ij exp(u_{i-1} - u_j) * b_j = r_i, one triangular system a value column.

    The backward pass solves the transposed systems with the same inverses; no gradient of size [R, C, C, V] is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, gram: Tensor, log_decay: Tensor, eta: Tensor, sides: Tensor, decay: Tensor, inverse: Tensor
    ) -> Tensor:
        """gram `[R, C, C]`; log_decay, eta, sides `[R, C, V]`; decay (of i by j), inverse `[R, C, C, V]`."""
        b = (inverse * sides[:, None]).sum(2)
        ctx.save_for_backward(gram, eta, decay, inverse, b)
        return b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gram, eta, decay, inverse, b = ctx.saved_tensors
        d_sides = (inverse * grads[0][:, :, None]).sum(1)
        d_product = decay * d_sides[:, :, None] * -b[:, None]  # gradient of eta_i G_ij
        weighted = d_product * gram[..., None]
        d_eta = weighted.sum(2)
        d_gram = (d_product * eta[:, :, None]).sum(3)
        # log-decay s lies between every j < s < i: add exactly those pairs, so that nothing has to cancel
        earlier = (weighted * eta[:, :, None]).cumsum(2)[:, :, :-1]
        later = torch.ones(gram.shape[1:], dtype=torch.bool, device=gram.device).tril(-1)[:, 1:, None]
        d_log_decay = F.pad(torch.where(later, earlier, 0).sum(1), (0, 0, 1, 0))
        return d_gram, d_log_decay, d_eta, d_sides, None, None


def _column_inverses(system: Tensor) -> Tensor:
    """(I + A_v)^-1 for strictly lower triangular A_v, by forward substitution over rows: `[R, C, C, V]`."""
    chunk = system.shape[1]
    inverse = torch.zeros_like(system)
    for i in range(chunk):
        if i:
            inverse[:, i, :i] = -(system[:, i, :i, None] * inverse[:, :i, :i]).sum(1)
        inverse[:, i, i] = 1
    return inverse


def regression_columns_form(
    S: Tensor,
    q: Tensor,
    x: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    *,
    steps: list[int],
    heads: int,
    window: int,
    read_after_write: bool,
) -> tuple[Tensor, Tensor]:
    """Residuals by one small triangular system a column; all columns share the Gram matrix of the keys.

    b_i = eta_i * (v_i - exp(u_{i-1}) S_0^T x_i - sum_{j < i} (x_i . x_j) exp(u_{i-1} - u_j) * b_j)
    """
    chunk = q.shape[1]
    upto = log_decay.cumsum(1)
    until, after = _one_later(upto, 0), _one_later(log_decay.flip(1).cumsum(1), 0).flip(1)
    gram = x @ x.transpose(1, 2)
    with torch.no_grad():
        upper = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu()[..., None]
        decay = (until[:, :, None] - upto[:, None]).masked_fill_(upper, -torch.inf).exp_()
        inverse = _column_inverses((decay * gram[..., None]).mul_(strength[:, :, None]))
    kept, to_end = upto[:, -1:].exp(), after.exp()
    gain, target = strength * until.exp(), strength * v
    written = []

    def update(
        S: Tensor, kept: Tensor, x: Tensor, target: Tensor, gain: Tensor, to_end: Tensor, *solve: Tensor
    ) -> Tensor:
        gram, log_decay, eta, decay, inverse = solve
        sides = torch.addcmul(target, gain, x @ S, value=-1)
        b = _ColumnSolve.apply(gram, log_decay, eta, sides, decay, inverse)
        written.append(b)
        return torch.baddbmm(kept * S, x.transpose(1, 2), b * to_end)

    solve = (gram, log_decay, strength, decay, inverse)
    before, S = scan_steps(update, S, (kept, x, target, gain, to_end, *solve), steps, heads)
    o, ahead, *_ = _ColumnAttention.apply(q @ x.transpose(1, 2), log_decay, torch.cat(written), read_after_write)
    return torch.addcmul(o, ahead.exp(), q @ before), S
