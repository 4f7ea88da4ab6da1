"""falcon1 and falcon3 on a GPU: their gates, then the kernels of `kernels/delta.py` or of `windows.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..delta import Form, delta_backward, delta_forward, kept_like
from ..gpu import custom
from ..plans import planned
from ..ranks import CHUNK, Ranks
from .prepass import Gates, gates, gates_backward, pack, unpack
from .rules import Options
from .windows import blocks_like, window_backward, window_forward


def regression(
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
    """falcon1 and falcon3; the state may be None for falcon1, where all documents begin."""
    S = None if S is None else S.contiguous()
    o, new_S, *_ = _regression(q, k, v, beta, ridge, head_x, head_v, S, first, count, *pack(ranks, options))
    return o, new_S


def _form(options: Options) -> Form:
    return Form(shifted=options.shifted, after=options.read_after_write, window=options.window)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    falcon = None
    if options.window == 1 and k.dtype != torch.float32:  # the kernel that solves a chunk makes the gates as well
        found, vector = k.new_empty(4, ranks.chunks, k.shape[2], CHUNK, dtype=torch.float32), k.new_empty(0).float()
        falcon = {
            "beta": beta,
            "ridge": ridge,
            "first": first,
            "energy": found[3],
            "eps": options.eps,
            "decay_floor": options.decay_floor,
            "DIVIDE": options.step == "beta",
            "COUPLED": options.scale_coupled,
        }
    else:
        found, vector = gates(k, head_x, beta, ridge, first, count, ranks, options)
    strength, upto, upto_low, _energy = found
    blocks = k.new_empty(0)
    if options.window > 1:
        assert head_x is not None and head_v is not None and S is not None and first is not None
        o, new_S, solve, blocks, *kept = window_forward(
            q, k, head_x, v, head_v, first, strength, upto, upto_low, S, ranks, _form(options)
        )
    else:
        o, new_S, solve, *kept = delta_forward(
            q, k, head_x, v, strength, upto, upto_low, S, ranks, _form(options), falcon
        )
    return o, new_S, solve, *kept, blocks, found, vector


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    (ranks, options), wide = unpack(*others[7:]), {"dtype": torch.float32}
    windows = ranks.batch * ranks.tokens if options.window > 1 and options.needs_energy else 0
    return (
        torch.empty_like(v),
        q.new_empty(ranks.documents, q.shape[2], q.shape[3], v.shape[3], **wide),
        *kept_like(q, v, ranks.chunks, (4,) if options.window > 1 else ()),
        blocks_like(q, ranks.chunks) if options.window > 1 else q.new_empty(0),
        q.new_empty(4, ranks.chunks, q.shape[2], CHUNK, **wide),
        q.new_empty(windows, q.shape[2], options.window, **wide) if windows else q.new_empty(0, **wide),
    )


def _backward(
    d_o: Tensor | None,
    d_S_out: Tensor | None,
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
    S_out: Tensor,
    solve: Tensor,
    residual_t: Tensor,
    borders_t: Tensor,
    blocks: Tensor,
    found: Tensor,
    vector: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ranks, options = unpack(docs, chunk_doc, segment_doc, rows, sizes, rule, flags, numbers)
    d_o = torch.zeros_like(o) if d_o is None else d_o.contiguous()
    d_S_out = None if d_S_out is None else d_S_out.contiguous()
    strength, upto, upto_low, _energy = found
    if options.window > 1:
        assert head_x is not None and head_v is not None and first is not None
        d_q, d_k, d_head_x, d_v, d_head_v, d_strength, d_log_decay, d_S = window_backward(
            q,
            k,
            head_x,
            v,
            head_v,
            first,
            strength,
            upto,
            upto_low,
            solve,
            blocks,
            residual_t,
            borders_t,
            d_o,
            d_S_out,
            ranks,
            _form(options),
        )
    else:
        d_q, d_k, d_head_x, d_v, d_strength, d_log_decay, d_S = delta_backward(
            q, k, head_x, v, strength, upto, upto_low, solve, residual_t, borders_t, d_o, d_S_out, ranks, _form(options)
        )
        d_head_v = q.new_empty(0) if head_v is None else torch.zeros_like(head_v)
    d_beta, d_ridge = gates_backward(
        k,
        head_x,
        beta,
        ridge,
        first,
        count,
        Gates(found, vector),
        d_strength,
        d_log_decay,
        d_k,
        d_head_x if head_x is not None else None,
        ranks,
        options,
    )
    return d_q, d_k, d_v, d_beta, d_ridge, d_head_x, d_head_v, d_S if S is not None else q.new_empty(0)


def _fake_backward(d_o: Any, d_S_out: Any, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(arguments[0].new_empty(0) if x is None else torch.empty_like(x) for x in arguments[:8])


_regression = custom(
    "falcon_delta",
    planned(_forward),
    planned(_backward),
    _fake_forward,
    _fake_backward,
    outputs=2,
    inputs=range(8),
    module=__name__,
    materialize=False,
)
