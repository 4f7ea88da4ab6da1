"""Fast-weight product-key memory: a table of slots that is written while it is read, once a chunk.

Source: "Fast-weight Product Key Memory" (2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import contract
from ..contract import Op
from ..product_keys import (
    check_finite,
    check_query_and_keys,
    check_retrieval,
    check_table,
    search_cannot,
    tables_fit,
)
from ..samples import FLOATS, Draw, Sample, Samples
from . import chunk
from .chunk import fwpkm_chunk
from .reference import fwpkm_reference
from .state import FwpkmState, Options, empty_state, fingerprint

__all__ = ["FwpkmState", "fwpkm", "fwpkm_flush"]

MOST_PLACES = 1 << 28  # slots of all memories that the Triton kernels keep a map of, 16 bytes each
LARGEST_VALUE = 2048  # V that they take


def _samples(draw: Draw) -> Samples:
    sizes, n = draw.sizes, 32
    tokens = {"q": draw.heads(sizes.key), "v": draw.tokens(sizes.value)}
    gate = {"gate": draw.uniform(sizes.batch, sizes.tokens)}
    tables = {"keys": draw.normal(2, sizes.heads, n, sizes.key // 2), "values": draw.normal(n * n, sizes.value)}
    for score in ("idw", "dot"):
        yield Sample(score, tokens, gate, tables, {"chunk_size": 64, "score": score}, FLOATS[:1])


def _triton(*arguments: Any) -> tuple[Tensor, FwpkmState]:
    from .triton import fwpkm_triton  # only here: fwzoo does not need triton

    return fwpkm_triton(*arguments)


def _limit(
    few: bool,
    *,
    top_k: int = 8,
    group: Any = None,
    max_slots: int | None = None,
    places: int = 0,
    **_: Any,
) -> str | None:
    """places: slots of all memories together."""
    if group is not None:
        return "a memory shared by a process group is pooled by level 'chunk' only"
    if max_slots is not None:
        return f"max_slots is {max_slots}, and the Triton kernels do not bound what a memory writes"
    if places > MOST_PLACES:
        return f"the memories have {places} slots, and the Triton kernels take up to {MOST_PLACES}"
    return search_cannot(top_k)


def _fits(tensors: Sequence[Tensor]) -> str | None:
    if tensors[-1].shape[-1] > LARGEST_VALUE:
        return f"V is {tensors[-1].shape[-1]}, and the Triton kernels take V up to {LARGEST_VALUE}"
    return tables_fit(tensors)


FWPKM = contract.register(
    Op(
        "fwpkm",
        {"reference": fwpkm_reference, "chunk": fwpkm_chunk, "triton": _triton},
        samples=_samples,
        limit=_limit,
        fits=_fits,
    )
)


def fwpkm(
    q: Tensor,
    v: Tensor,
    gate: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    top_k: int = 8,
    chunk_size: int = 512,
    score: str = "idw",
    score_eps: float = 1e-3,
    lookahead: bool = True,
    normalize_targets: bool = True,
    row_averaging: bool = True,
    gate_weighting: bool = True,
    address_loss: bool = True,
    value_lr: float = 1.0,
    key_lr: float = 1.0,
    scope: str = "sequence",
    max_slots: int | None = None,
    evict: bool = False,
    group: Any = None,
    state: FwpkmState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    level: str = "auto",
) -> tuple[Tensor, FwpkmState]:
    """Read k of n * n slots a head; once a chunk, move the rows that were read towards what came next.

    Source: "Fast-weight Product Key Memory" (2026).

    Args:
        q: queries `[B, T, H, K]`. v: values `[B, T, V]`, the targets. gate: weight of a token's write `[B, T]`.
        keys: sub-keys `[2, H, n, K / 2]`. values: table `[n * n, V]`. Both are where every memory starts; they stay as they are.
        top_k: slots a head reads, at most n. chunk_size: tokens between updates.
        score: "idw": -log(score_eps + squared distance), or "dot".
        lookahead: the target of a token is the next token's v (otherwise its own).
        normalize_targets: z-score the targets over features.
        row_averaging: divide the change of a row by the number of times it was read.
        gate_weighting: weight a token's write by its gate.
        address_loss: move the sub-keys so that the use of slots spreads.
        value_lr, key_lr: step sizes.
        scope: "sequence": every row (or document) has its own memory; "batch": one memory for all.
        max_slots: most rows that a memory may write, None for no limit. evict: beyond it, drop the least recently written
            rows (they read as the table's again) instead of raising.
        group: process group whose ranks share the memory, for scope "batch".
        state: `FwpkmState` to continue from; `keys` and `values` must be those it was made from.
        mask: bool `[B, T]`, True for real tokens.
        cu_seqlens: int64 `[S + 1]`, boundaries of documents packed along T (B must be 1); the state then has N = S rows.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, K and n up to 1,024, top_k up to 64, V up to 2,048).

    Returns:
        The values read `[B, T, V]` in the dtype of v (rows of masked tokens are 0), and the complete `FwpkmState`.
        Gradients flow to q only, through the weights of the slots read.

    Memory: a call holds the rows written and bookkeeping, never a second table; `FwpkmState` says how they are laid out. A
    call that continues a state copies its rows once, before the first write.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    check_query_and_keys(q, keys)
    contract.is_tensor("v", v, 3)
    contract.has_shape("v", v, (*q.shape[:2], v.shape[2]), "[B, T, V]")
    contract.is_tensor("gate", gate, 2)
    contract.has_shape("gate", gate, q.shape[:2], "[B, T]")
    check_table(values, keys)
    contract.has_shape("values", values, (values.shape[0], v.shape[2]), "[n * n, V] like v")
    for name, x in (("v", v), ("gate", gate), ("values", values)):
        contract.same_device(name, x, q)
    if v.dtype != q.dtype:
        raise ValueError(f"v has dtype {v.dtype}; it must be {q.dtype}, like q")
    options = _check_options(
        keys.shape[2],
        top_k=top_k,
        chunk_size=chunk_size,
        score=score,
        score_eps=score_eps,
        lookahead=lookahead,
        normalize_targets=normalize_targets,
        row_averaging=row_averaging,
        gate_weighting=gate_weighting,
        address_loss=address_loss,
        value_lr=value_lr,
        key_lr=key_lr,
        scope=scope,
        max_slots=max_slots,
        evict=evict,
        group=group,
    )
    bounds, sequences = contract.check_documents(mask, cu_seqlens, q)
    dtype = contract.compute_dtype(q.dtype)
    empty = empty_state(0 if state is not None else sequences, q, v, gate, keys, values, options, dtype)
    state = empty if state is None else _check_state(state, empty, sequences, keys, values, options)
    check_finite(mask, q=q, v=v, gate=gate)
    check_finite(None, keys=state.keys, values=values)
    places = state.keys.shape[0] * values.shape[0]
    limit = _limit(False, top_k=top_k, group=group, max_slots=max_slots, places=places)
    run = FWPKM.resolve(level, q.shape[1], (q, keys, values), limit)
    if q.is_meta:  # no values to choose slots by: shapes only, those of a memory that has not written yet
        return torch.empty_like(v), state
    return run(q, v, gate, keys.detach(), values.detach(), options, state, mask, bounds)


def fwpkm_flush(state: FwpkmState, keys: Tensor, values: Tensor, **options: Any) -> FwpkmState:
    """Write what is pending: the update runs on the pending tokens that have a target, and a new chunk starts.

    Args:
        state: what `fwpkm` returned. keys, values: the tables it was made from. options: keyword options of that call.
    """
    defaults = {name: x for name, x in (fwpkm.__kwdefaults__ or {}).items() if name in Options.__dataclass_fields__}
    if unknown := set(options) - set(defaults):
        raise TypeError(f"{sorted(unknown)[0]} is not an option of fwpkm")
    checked = _check_options(keys.shape[2], **{**defaults, **options})
    like = (state.q[:0], state.v[:0], state.gate[:0]) if isinstance(state, FwpkmState) else (values,) * 3
    empty = empty_state(0, *like, keys, values, checked, contract.compute_dtype(like[0].dtype))
    state = _check_state(state, empty, None, keys, values, checked)
    return chunk.fwpkm_flush(state, values.detach(), checked)


def _check_options(n: int, **options: Any) -> Options:
    checked = Options(**options)
    check_retrieval(checked.top_k, checked.score, checked.score_eps, n)
    checked.check()
    switches = ("row_averaging", "gate_weighting", "address_loss", "evict")
    for name in switches:
        contract.one_of(name, getattr(checked, name), (True, False))
    for name in ("value_lr", "key_lr"):
        if not getattr(checked, name) >= 0:
            raise ValueError(f"{name} is {getattr(checked, name)!r}; it must be at least 0")
    if checked.max_slots is not None:
        contract.whole_number("max_slots", checked.max_slots, 1)
    return checked


def _check_state(
    state: FwpkmState, empty: FwpkmState, sequences: int | None, keys: Tensor, values: Tensor, options: Options
) -> FwpkmState:
    if not isinstance(state, FwpkmState):
        raise TypeError(f"state is a {type(state).__name__}; it must be a fwzoo.kernels.FwpkmState")
    sequences = state.real.shape[0] if sequences is None else sequences
    groups = 1 if options.shared else sequences
    for name, field, like in zip(state._fields, state, empty, strict=True):
        contract.is_tensor(f"state.{name}", field, like.ndim, floating=like.is_floating_point())
        rows = groups if name in ("keys", "slots", "where", "written", "count", "base") else sequences
        shape = (rows, *like.shape[1:])
        if name in ("slots", "where", "written"):
            shape = (groups, state.slots.shape[1])
        elif name == "shared_rows":
            shape = (field.shape[0], values.shape[1])
        contract.has_shape(f"state.{name}", field, shape, "[N, ...]")
        contract.same_device(f"state.{name}", field, values)
        if not like.is_floating_point() and field.dtype != like.dtype:
            raise ValueError(f"state.{name} has dtype {field.dtype}; it must be {like.dtype}")
    if not values.is_meta and not _made_from(state.base, fingerprint(keys, values)):
        raise ValueError(
            f"state was made from other tables (sums {state.base[0].tolist()}); keys and values must be those it was made "
            f"from (sums {fingerprint(keys, values).tolist()})"
        )
    # tensors that need no change as they are: of some, it is known what they hold
    pairs = zip(state, empty, strict=True)
    return FwpkmState(
        *(x if x.dtype == like.dtype and not x.requires_grad else x.detach().to(like.dtype) for x, like in pairs)
    )


_MADE_FROM = WeakIdKeyDictionary()  # base of a state: (its version, the sums that it was found to equal)


def _made_from(base: Tensor, expected: Tensor) -> bool:
    """Whether a state with these sums is of the tables with those. The device is asked once for a tensor."""
    if base.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # nothing can be asked now; what is captured ran before
    version, sums = _MADE_FROM.get(base, (None, None))
    if version == base._version and sums is expected:
        return True
    same = torch.allclose(base, expected, rtol=1e-9, atol=1e-9)
    if same:
        _MADE_FROM[base] = base._version, expected
    return same
