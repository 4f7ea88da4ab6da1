"""Product-key memory: a table of n * n learned values, of which every token reads k.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import contract
from ..contract import Op
from ..product_keys import (
    check_finite,
    check_query_and_keys,
    check_retrieval,
    check_table,
    keep_read,
    search_cannot,
    tables_fit,
    watching,
)
from ..samples import FLOATS, Draw, Sample, Samples
from .chunk import pkm_chunk
from .reference import pkm_reference
from .sparse import Readers, SparseTableGradient, sum_readers

__all__ = ["pkm"]


def _samples(draw: Draw) -> Samples:
    sizes, n = draw.sizes, 32
    keys, values = draw.normal(2, sizes.heads, n, sizes.key // 2), draw.normal(n * n, sizes.value)
    for score in ("dot", "idw"):
        options = {"top_k": 8, "score": score}
        yield Sample(
            score,
            {"q": draw.heads(sizes.key)},
            weights={"keys": keys, "values": values},
            options=options,
            dtypes=FLOATS[:1],
        )


def _triton(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import pkm_triton  # only here: fwzoo does not need triton

    return pkm_triton(*arguments)


def _triton_readers(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ..product_key_search import sparse_table_gradient

    return sparse_table_gradient(*arguments)


def _level(read: Callable[..., Any], readers: Readers) -> Callable[..., Any]:
    """A level that gives the table a sparse gradient where one is asked for, summed by `readers`."""

    def run(
        q: Tensor, keys: Tensor, values: Tensor, top_k: int, score: str, eps: float, sparse_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        v, slots, weights = read(q, keys, values.detach() if sparse_grad else values, top_k, score, eps)
        if sparse_grad:
            v = SparseTableGradient.apply(v, values, slots, weights, readers)
        return v, slots, weights

    return run


def _limit(few: bool, *, top_k: int = 32, **_: Any) -> str | None:
    return search_cannot(top_k)


PKM = contract.register(
    Op(
        "pkm",
        {
            "reference": _level(pkm_reference, sum_readers),
            "chunk": _level(pkm_chunk, sum_readers),
            "triton": _level(_triton, _triton_readers),
        },
        samples=_samples,
        limit=_limit,
        fits=tables_fit,
    )
)


def pkm(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    top_k: int = 32,
    score: str = "dot",
    score_eps: float = 1e-3,
    return_slots: bool = False,
    sparse_grad: bool = False,
    level: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Read the k best of n * n slots, found through two lists of n sub-keys. Stateless: the one operator without a state.

    Source: "Large Memory Layers with Product Keys" (2019).

    Args:
        q: queries `[B, T, H, K]`. keys: sub-keys `[2, H, n, K / 2]`. values: table `[n * n, V]`, shared by the heads.
        top_k: slots a head reads, at most n.
        score: "dot", or "idw": -log(score_eps + squared distance).
        return_slots: also return the slots (int64) and their weights, `[B, T, H, k]`, best first.
        sparse_grad: the gradient of `values` is a sparse tensor that holds the rows read, each once, and no dense
            `[n * n, V]` one is made. As with `torch.nn.Embedding(sparse=True)`, only some optimisers take it: SGD, SparseAdam,
            Adagrad.
        level: "auto", "reference", "chunk" or "triton" (CUDA tensors, K and n up to 1,024, top_k up to 64).

    Returns:
        The values read `[B, T, V]` in the dtype of `values`, summed over heads.

    Raises:
        ValueError, TypeError: an argument has a wrong type, shape, dtype, device or value; the message names it.
    """
    check_query_and_keys(q, keys)
    check_table(values, keys)
    check_retrieval(top_k, score, score_eps, keys.shape[2])
    contract.one_of("return_slots", return_slots, (True, False))
    contract.one_of("sparse_grad", sparse_grad, (True, False))
    check_finite(None, q=q, keys=keys, values=values)
    run = PKM.resolve(level, q.shape[1], (q, keys, values), search_cannot(top_k))
    v, slots, weights = run(q, keys, values, top_k, score, score_eps, sparse_grad)
    if watching():
        keep_read(slots, weights)
    return (v, slots, weights) if return_slots else v
