"""Falcon on a GPU. What happens to the state around the kernels is here; the kernels of each pair of rules have their file."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .. import step
from ..associative import Associative, Kept, segment_length
from ..contract import few_tokens
from ..gpu import custom
from ..ranks import CHUNK, Ranks, make_ranks
from .columns import Columns
from .delta import regression
from .prepass import Gates, gates, heads_of, inputs_backward, pack, unpack
from .residuals import residuals
from .rules import RULES, FalconState, Options


class Kernels(Protocol):
    """Output `[B, T, H, V]` and the new S of one call; see `prepass.heads_of` for head_x, head_v and first."""

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...


def falcon_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    options: Options,
    state: FalconState,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FalconState]:
    """Triton form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.falcon`, checked."""
    if few_tokens((q, k, v, beta, ridge, *state), mask, bounds):
        return step.falcon_steps(q, k, v, beta, ridge, options, state, mask)
    ranks = make_ranks(
        q,
        mask,
        bounds,
        overlap=options.window - 1,
        segment=segment_length(q, options.window - 1),
    )
    q, k, v, beta, ridge = (x.contiguous() for x in (q, k, v, beta, ridge))
    head_x, head_v, first = heads_of(state, options)
    o, S = KERNELS[options.rule](q, k, v, beta, ridge, head_x, head_v, state.S, first, state.count, ranks, options)

    last, there = ranks.last(k)
    window = options.window
    key, has_key, tail_x, tail_v, count = last, torch.ones_like(state.has_key), state.tail_x, state.tail_v, state.count
    if ranks.docs is not None:
        key = torch.where(there[:, None, None], last, state.key)
        has_key = state.has_key | there
    if window > 1 and ranks.docs is None and q.shape[1] >= window:  # only pairs of this call
        end = q.shape[1] - int(options.shifted)
        tail_x, tail_v = k[:, end - window + 1 : end].clone(), v[:, q.shape[1] - window + 1 :].clone()
        count = torch.full_like(count, window - 1)
    elif window > 1:
        written = (ranks.lengths(q.device) - first).clamp(min=0)
        tail_x = _new_tail(tail_x, k, head_x, written, first, ranks, int(options.shifted))
        tail_v = _new_tail(tail_v, v, head_v, written, first, ranks, 0)
        count = (count + written).clamp(max=window - 1)
    return o, FalconState(S, key, has_key, tail_x, tail_v, count)


def _new_tail(
    tail: Tensor, rows: Tensor, head: Tensor, written: Tensor, first: Tensor, ranks: Ranks, shift: int
) -> Tensor:
    """The last W - 1 pairs of every document: `[N, W - 1, H, F]`.

    Args:
        tail: the incoming one. rows: `[B, T, H, F]`. head: of `heads_of`. written: int64 `[N]`, pairs of this call.
        shift: 1 when the row of a pair is the one before its token.
    """
    size, n = tail.shape[1], torch.arange(tail.shape[0], device=tail.device)[:, None]
    position = written[:, None] + torch.arange(
        size, device=tail.device
    )  # in the tail followed by the pairs of this call
    rank = position - size + first[:, None] - shift
    start = n * ranks.tokens if ranks.docs is None else ranks.docs[:-1, :1]
    at = (start + rank.clamp(min=0)).clamp(max=ranks.batch * ranks.tokens - 1)
    if ranks.rows is not None:
        at = ranks.rows[at]
    new = rows.flatten(0, 1)[at]
    before = head[:, :, -1] if shift else new[:, 0]  # the pair in slot 0 has the state's key
    new = torch.where((rank < 0)[..., None, None], before[:, None], new)
    old = tail.gather(1, position.clamp(max=size - 1)[..., None, None].expand_as(tail))
    return torch.where((position < size)[..., None, None], old, new)


# --- falcon1a, falcon2a, falcon3a ---


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_x: Tensor,
    head_v: Tensor,
    first: Tensor,
    found: Tensor,
    ranks: Ranks,
    options: Options,
) -> Associative:
    return Associative(
        q, k, v, head_x, head_v, first, found[0], found[1], found[2], ranks, options.window, int(options.shifted),
        options.read_after_write,
    )  # fmt: skip


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
    found, vector = gates(k, head_x, beta, ridge, first, count, ranks, options)
    if options.rule.per_column:
        columns = Columns(q, k, v, beta, head_x, head_v, first, found, ranks, options)
        return *columns.forward(S), found, vector
    o, S, _, kept = _call(q, k, v, head_x, head_v, first, found, ranks, options).forward(S, S.new_empty(0))
    return o, S, kept.states, kept.total, found, vector


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    S, sizes = others[4], others[11]
    chunks, segments, heads = sizes[5], sizes[6], q.shape[2]
    wide = {"dtype": torch.float32}
    return (
        torch.empty_like(v),
        torch.empty_like(S, **wide),
        q.new_empty(segments, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(segments, heads, *([v.shape[3]] if RULES[others[12]].per_column else []), **wide),
        q.new_empty(4, chunks, heads, CHUNK, **wide),
        q.new_empty(0, **wide),
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
    vector: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    gates_found = Gates(found, vector)
    gradients: list[Tensor] = []

    def through_gates(d_strength: Tensor, d_log_decay: Tensor) -> Tensor | None:
        d_beta, d_ridge, d_energy = inputs_backward(
            beta, ridge, first, count, gates_found, d_strength, d_log_decay, ranks, options
        )
        gradients.extend((d_beta, d_ridge))
        return d_energy

    if options.rule.per_column:
        columns = Columns(q, k, v, beta, head_x, head_v, first, found, ranks, options)
        d_q, d_k, d_v, d_beta, d_head_x, d_head_v, d_S, *_ = columns.backward(
            d_o, o, d_S, S_end, states, total, through_gates
        )
        return d_q, d_k, d_v, d_beta, gradients[1], d_head_x, d_head_v, d_S
    call, none = _call(q, k, v, head_x, head_v, first, found, ranks, options), d_S.new_empty(0)
    d_q, d_k, d_v, d_head_x, d_head_v, d_S, _ = call.backward(
        d_o, o, d_S, none, S_end, none, Kept(states, none, total, none), through_gates
    )
    d_beta, d_ridge = gradients
    return d_q, d_k, d_v, d_beta, d_ridge, d_head_x, d_head_v, d_S


def _fake_backward(d_o: Tensor, d_S: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return *(torch.empty_like(x) for x in arguments[:7]), torch.empty_like(d_S)


_associative = custom(
    "associative", _forward, _backward, _fake_forward, _fake_backward, outputs=2, inputs=range(8), module=__name__
)


def inner_product(
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
    """falcon1a, falcon2a and falcon3a."""
    o, S, *_ = _associative(q, k, v, beta, ridge, head_x, head_v, S, first, count, *pack(ranks, options))
    return o, S


KERNELS: dict[Any, Kernels] = {RULES[name]: inner_product for name in ("falcon1a", "falcon2a", "falcon3a")} | {
    RULES["falcon1"]: regression,
    RULES["falcon2"]: residuals,
    RULES["falcon3"]: regression,
}
