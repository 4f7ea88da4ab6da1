"""Product-key retrieval: the best of n * n slots from two lists of n sub-keys, shared by `pkm` and `fwpkm`.

Axis letters: G memories, T tokens, H heads, K query size, F = K / 2, n sub-keys a half, k slots read.
Slot (i, j) is row i * n + j. Equal scores go to the lower row, on every device.

Source: "Large Memory Layers with Product Keys" (2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import contract

SCORES = ("idw", "dot")
MOST_SUBKEYS, LARGEST_QUERY, MOST_SLOTS = 1024, 1024, 64  # n, K and k that the Triton kernels take


class Selection(NamedTuple):
    """What every token reads.

    Attributes:
        slots: int64 `[G, T, H, k]`, best first. weights: their softmax weights.
        index: int64 `[G, T, H, 2, k]`, the sub-keys kept of each half, ascending. half: their scores.
    """

    slots: Tensor
    weights: Tensor
    index: Tensor
    half: Tensor


def select(q: Tensor, keys: Tensor, top_k: int, score: str, eps: float) -> Selection:
    """The slots that queries `[G, T, H, K]` read in tables of sub-keys `[G, 2, H, n, F]`.

    All n sub-keys are scored without gradients; gradients flow through the scores of the k kept ones only.
    """
    groups, _, heads, n, size = keys.shape
    halves = q.unflatten(-1, (2, size))
    with torch.no_grad():
        scores = score_all(halves, keys, score, eps)
        index = top_k_lowest(scores, top_k).sort(-1).values
        half = scores.gather(-1, index)
    if torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad):
        table = torch.arange(groups * 2 * heads, device=q.device).view(groups, 2, heads).transpose(1, 2) * n
        chosen = keys.reshape(-1, size)[index + table[:, None, :, :, None]]
        again = score_pairs(halves[..., None, :], chosen, score, eps)
        half = half + (again - again.detach())  # the value of `half`, the gradient of `again`
    sums = (half[..., 0, :, None] + half[..., 1, None, :]).flatten(-2)
    rows = (index[..., 0, :, None] * n + index[..., 1, None, :]).flatten(-2)
    best = top_k_lowest(sums.detach(), top_k)
    return Selection(rows.gather(-1, best), sums.gather(-1, best).softmax(-1), index, half)


def score_all(halves: Tensor, keys: Tensor, score: str, eps: float) -> Tensor:
    """Scores of query halves `[G, T, H, 2, F]` with all sub-keys `[G, 2, H, n, F]`: `[G, T, H, 2, n]`, no gradients."""
    halves = halves.permute(0, 3, 2, 1, 4)
    if score == "dot":
        scores = halves @ keys.transpose(-1, -2)
    else:
        distance = torch.cdist(halves, keys, compute_mode="donot_use_mm_for_euclid_dist")
        scores = distance.square_().add_(eps).log_().neg_()
    return scores.permute(0, 3, 2, 1, 4)


def score_pairs(query: Tensor, key: Tensor, score: str, eps: float) -> Tensor:
    """Scores of pairs over the last axis F."""
    if score == "dot":
        return (query * key).sum(-1)
    return -(eps + (query - key).square().sum(-1)).log()


def top_k_lowest(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest along the last axis, best first; of equal scores the lower position wins."""
    best = scores.topk(k, -1)
    index, least = best.indices, best.values[..., -1:]
    tied = (scores >= least).sum(-1) > k  # more candidates than places: `topk` may have kept any of them
    if not scores.is_meta and bool(tied.any()):
        index = index.clone()
        index[tied] = torch.sort(scores[tied], dim=-1, descending=True, stable=True).indices[..., :k]
    index = index.sort(-1).values
    order = torch.sort(scores.gather(-1, index), dim=-1, descending=True, stable=True).indices
    return index.gather(-1, order)


def sum_rows(table: Tensor, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Weighted sums of table rows, in bags that follow each other: `[M, V]` in the dtype of `weights`.

    Args:
        table: `[N, V]`. rows, weights: `[E]`. counts: int64 `[M]`, entries of every bag; their sum is E.
    """
    if table.dtype == weights.dtype:
        offsets = counts.cumsum(0) - counts
        return F.embedding_bag(rows, table, offsets, per_sample_weights=weights, mode="sum")
    bag = torch.repeat_interleave(counts, output_size=rows.shape[0])
    out = weights.new_zeros(counts.shape[0], table.shape[1])
    return out.index_add(0, bag, table[rows].to(weights.dtype) * weights[:, None])


class Bags(NamedTuple):
    """Rows that are weighted sums of rows: row m is the sum of the m-th bag of entries, which follow each other.

    Attributes:
        table: `[N, V]`. rows, weights: `[E]`, the row of every entry and its weight.
        counts: int64 `[M]`, entries of every bag; their sum is E.
    """

    table: Tensor
    rows: Tensor
    weights: Tensor
    counts: Tensor

    @classmethod
    def of_rows(cls, table: Tensor) -> Bags:
        """The rows of a table themselves."""
        rows = torch.arange(table.shape[0], device=table.device)
        return cls(table, rows, torch.ones_like(rows, dtype=table.dtype), torch.ones_like(rows))

    def sum(self) -> Tensor:
        """The rows `[M, V]`."""
        return sum_rows(*self)

    def scaled(self, scale: Tensor) -> Bags:
        """Row m times `scale[m]`."""
        return self._replace(weights=self.weights * torch.repeat_interleave(scale, self.counts))

    def split(self, size: int) -> Iterator[Bags]:
        """The rows in blocks of at most `size`."""
        if size >= self.counts.shape[0]:
            yield self
            return
        blocks = self.counts.split(size)
        sizes = torch.stack([x.sum() for x in blocks]).tolist()
        parts = zip(self.rows.split(sizes), self.weights.split(sizes), blocks, strict=True)
        for rows, weights, counts in parts:
            yield Bags(self.table, rows, weights, counts)


def sort_bags(table: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Bags]:
    """What tokens add to the rows they read, row by row.

    Args:
        table: `[X, V]`, one a token. rows, weights: `[X, k]`, the rows that it reads and its weights there.
    Returns: the rows read `[M]` (ascending, each once), and for each the weighted sum of its readers.
    """
    ordered, order = torch.sort(rows.flatten(), stable=True)
    different, counts = torch.unique_consecutive(ordered, return_counts=True)
    return different, Bags(table, order // rows.shape[1], weights.flatten()[order], counts)


# --- watching ---

_WATCH: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("fwzoo_watch", default=None)


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Within this context, what `pkm` and `fwpkm` read is kept: slots and weights `[B, T, H, k]`, call by call."""
    reads: list[tuple[Tensor, Tensor]] = []
    token = _WATCH.set(reads)
    try:
        yield reads
    finally:
        _WATCH.reset(token)


def watching() -> bool:
    """Whether `watch()` is active here (never while compiling)."""
    return not torch.compiler.is_compiling() and _WATCH.get() is not None


def keep_read(slots: Tensor, weights: Tensor) -> None:
    """Add a call to what is watched."""
    if (reads := _WATCH.get()) is not None:
        reads.append((slots, weights.detach()))


# --- checks ---


def check_query_and_keys(q: Tensor, keys: Tensor) -> None:
    """Raise unless q is `[B, T, H, K]` and keys `[2, H, n, K / 2]`."""
    contract.is_tensor("q", q, 4)
    contract.is_tensor("keys", keys, 4)
    batch, _, heads, size = q.shape
    if size < 2 or size % 2 or heads < 1 or batch < 1:
        raise ValueError(f"q has shape {list(q.shape)}; B and H must be at least 1 and K even, at least 2")
    if keys.shape[2] < 1:
        raise ValueError(f"keys has shape {list(keys.shape)}; n must be at least 1")
    contract.has_shape("keys", keys, (2, heads, keys.shape[2], size // 2), "[2, H, n, K / 2]")
    contract.same_device("keys", keys, q)


def check_table(values: Tensor, keys: Tensor) -> None:
    """Raise unless values is `[n * n, V]` for the n sub-keys of `keys`."""
    contract.is_tensor("values", values, 2)
    n = keys.shape[2]
    if values.shape[0] != n * n or values.shape[1] < 1:
        raise ValueError(
            f"values has shape {list(values.shape)}; it must be square in its slots: [n * n, V] with n * n = {n * n}"
        )
    contract.same_device("values", values, keys, "keys")


def check_retrieval(top_k: int, score: str, score_eps: float, n: int) -> None:
    """Raise unless the retrieval options are allowed for n sub-keys a half."""
    contract.whole_number("top_k", top_k, 1)
    if top_k > n:
        raise ValueError(f"top_k is {top_k}; it must be at most n = {n}, the number of sub-keys a half")
    contract.one_of("score", score, SCORES)
    if not score_eps > 0:
        raise ValueError(f"score_eps is {score_eps!r}; it must be greater than 0")


def tables_fit(tensors: Sequence[Tensor]) -> str | None:
    """Why the Triton kernels cannot take query, sub-keys, ... (as many as there are), or None."""
    q, keys = tensors[0], tensors[1] if len(tensors) > 1 else None
    sizes = [("K", q.shape[-1], LARGEST_QUERY)]
    if keys is not None and keys.ndim == 4:
        sizes.append(("n", keys.shape[2], MOST_SUBKEYS))
    for name, size, most in sizes:
        if size > most:
            return f"{name} is {size}, and the Triton kernels take {name} up to {most}"
    for x in tensors[1:]:
        if x.dtype == torch.float64:
            return "a table is torch.float64, and the Triton kernels take float32, bfloat16 and float16"
    return None


def search_cannot(top_k: int) -> str | None:
    """Why the Triton kernels cannot read `top_k` slots, or None."""
    return f"top_k is {top_k}, and the Triton kernels take up to {MOST_SLOTS}" if top_k > MOST_SLOTS else None


def check_finite(mask: Tensor | None, **tensors: Tensor) -> None:
    """Under `debug()`: raise unless every real token of `[B, T, ...]` tensors is finite."""
    if not contract.debugging():
        return
    for name, x in tensors.items():
        if not (x if mask is None else x[mask]).isfinite().all():
            raise ValueError(f"{name} holds a value that is not finite; every real token must be finite")
