"""Falcon on a GPU. What happens to the state around the kernels is here; the kernels of each pair of rules have their file."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .. import step
from ..associative import Associative, Kept, new_weights, segment_length
from ..contract import few_tokens
from ..gpu import custom
from ..plans import planned
from ..ranks import CHUNK, Ranks, make_ranks, ranks_of
from .columns import Columns
from .delta import regression
from .prepass import Gates, gates, heads_of, inputs_backward, pack, slots_a_block, unpack
from .residuals import residuals
from .rules import RULES, FalconState, Options, started


class Kernels(Protocol):
    """Output `[B, T, H, V]` and the new S of one call; see `prepass.heads_of` for head_x, head_v and first.

    Those, S and count may be None for `inner_product` and falcon1, where all documents begin.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        ridge: Tensor,
        head_x: Any,
        head_v: Any,
        S: Any,
        first: Any,
        count: Any,
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
    state: FalconState | None,
    mask: Tensor | None,
    bounds: list[int] | None,
) -> tuple[Tensor, FalconState]:
    """Triton form over `[B, T, H, .]`; arguments are those of `fwzoo.kernels.falcon`, checked."""
    if few_tokens((q, k, v, beta, ridge, *(state or ())), mask, bounds):
        return step.falcon_steps(q, k, v, beta, ridge, options, started(state, q, v, bounds, options), mask)
    window, shift, run = options.window, int(options.shifted), KERNELS[options.rule]
    overlap = CHUNK // slots_a_block(options) * (window - 1)
    ranks = make_ranks(q, mask, bounds, overlap=overlap, segment=segment_length(q, overlap))
    q, k, v, beta, ridge = (x.contiguous() for x in (q, k, v, beta, ridge))
    whole = ranks.docs is None and q.shape[1] >= window  # then the new state's pairs are of this call alone
    if state is None and whole and (run is inner_product or options.rule is RULES["falcon1"]):
        o, S = run(q, k, v, beta, ridge, None, None, None, None, None, ranks, options)
    else:
        state = started(state, q, v, bounds, options)
        head_x, head_v, first = heads_of(state, options)
        o, S = run(q, k, v, beta, ridge, head_x, head_v, state.S, first, state.count, ranks, options)
    if whole:
        end, documents = q.shape[1] - shift, q.shape[0]
        tail_x, tail_v = k.new_empty(documents, 0, *k.shape[2:]), v.new_empty(documents, 0, *v.shape[2:])
        if window > 1:
            tail_x, tail_v = k[:, end - window + 1 : end].clone(), v[:, q.shape[1] - window + 1 :].clone()
        has_key = torch.ones(documents, dtype=torch.bool, device=q.device)
        count = torch.full((documents,), window - 1, device=q.device)
        return o, FalconState(S, k[:, -1].clone(), has_key, tail_x, tail_v, count)
    assert state is not None
    last, there = ranks.last(k)
    key, has_key = torch.where(there[:, None, None], last, state.key), state.has_key | there
    tail_x, tail_v, count = state.tail_x, state.tail_v, state.count
    if window > 1:
        written = (ranks.lengths(q.device) - first).clamp(min=0)
        tail_x = _new_tail(tail_x, k, head_x, written, first, ranks, shift)
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
    head_x: Tensor | None,
    head_v: Tensor | None,
    first: Tensor | None,
    found: Tensor,
    weights: Tensor,
    mixes: Tensor,
    ranks: Ranks,
    options: Options,
) -> Associative:
    return Associative(
        q, k, v, head_x, head_v, first, found[1], found[2], weights, mixes, ranks, options.window, int(options.shifted),
        options.read_after_write,
    )  # fmt: skip


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor | None,
    head_v: Tensor | None,
    S: Tensor | None,
    first: Tensor | None,
    count: Tensor | None,
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
    if options.rule.per_column:
        found, _ = gates(k, head_x, beta, ridge, first, count, ranks, options)
        call = Columns(q, k, v, beta, head_x, head_v, first, found, ranks, options)
        return *call.forward(S), found, found.new_empty(0), found.new_empty(0)
    weights, mixes = new_weights(q, ranks, options.window)
    found, _ = gates(k, head_x, beta, ridge, first, count, ranks, options, weights, mixes if mixes.numel() else None)
    o, S, _, kept = _call(q, k, v, head_x, head_v, first, found, weights, mixes, ranks, options).forward(S, None)
    return o, S, kept.states, kept.total, found, weights, mixes


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sizes, columns, window = others[11], RULES[others[12]].per_column, others[13][0]
    weighed = new_weights(q, ranks_of(sizes, None, None, None, None), window)
    documents, chunks, segments, heads = sizes[2], sizes[5], sizes[6], q.shape[2]
    wide = {"dtype": torch.float32}
    return (
        torch.empty_like(v),
        q.new_empty(documents, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(segments, heads, k.shape[3], v.shape[3], **wide),
        q.new_empty(segments, heads, *([v.shape[3]] if columns else []), **wide),
        q.new_empty(4, chunks, heads, CHUNK, **wide),
        *((q.new_empty(0, **wide), q.new_empty(0, **wide)) if columns else weighed),
    )


def _backward(
    d_o: Tensor | None,
    d_S: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor | None,
    head_v: Tensor | None,
    S: Tensor | None,
    first: Tensor | None,
    count: Tensor | None,
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
    weights: Tensor,
    mixes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    d_o = torch.zeros_like(o) if d_o is None else d_o
    gradients: list[Tensor] = []

    def through_gates(grads: dict[str, Any]) -> Tensor | None:
        d_beta, d_ridge, d_energy = inputs_backward(
            beta, ridge, first, count, Gates(found, found), grads, ranks, options
        )
        gradients.extend((d_beta, d_ridge))
        return d_energy

    def through_columns(d_strength: Tensor, d_decay: Tensor) -> Tensor | None:
        return through_gates({"d_strength": d_strength, "d_log_decay": d_decay})

    if options.rule.per_column:
        columns = Columns(q, k, v, beta, head_x, head_v, first, found, ranks, options)
        d_q, d_k, d_v, d_beta, d_head_x, d_head_v, d_S, *_ = columns.backward(
            d_o, o, d_S, S_end, states, total, through_columns
        )
        d_ridge = gradients[1]
    else:
        call, none = _call(q, k, v, head_x, head_v, first, found, weights, mixes, ranks, options), weights.new_empty(0)
        d_q, d_k, d_v, d_head_x, d_head_v, d_S, _ = call.backward(
            d_o, o, d_S, None, S_end, none, Kept(states, none, total, none), through_gates, options.decay_floor
        )
        d_beta, d_ridge = gradients
    found_of = ((head_x, d_head_x), (head_v, d_head_v), (S, d_S))
    of_state = (q.new_empty(0) if given is None else x for given, x in found_of)
    return d_q, d_k, d_v, d_beta, d_ridge, *of_state


def _fake_backward(d_o: Any, d_S: Any, *arguments: Any) -> tuple[Tensor, ...]:
    q = arguments[0]
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in arguments[:8])


_associative = custom(
    "associative", planned(_forward), planned(_backward), _fake_forward, _fake_backward, outputs=2, inputs=range(8), module=__name__,
    materialize=False,
)  # fmt: skip


def inner_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    ridge: Tensor,
    head_x: Tensor | None,
    head_v: Tensor | None,
    S: Tensor | None,
    first: Tensor | None,
    count: Tensor | None,
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
