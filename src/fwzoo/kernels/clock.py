"""The clock of memories that are updated once a chunk: which tokens make a chunk, what is pending, what a token's target is.

Axis letters: N sequences (rows, or packed documents), G memories (N with scope "sequence", 1 with scope "batch"), C chunk,
L ticks of the longest stream. A stream is what is pending, followed by the new tokens; its first tick begins a chunk.
With scope "sequence" every sequence has its own stream, of its real tokens. With scope "batch" all share one clock, which
ticks on every column in which some row has a real token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import contract


@dataclass(frozen=True)
class FastOptions:
    """Options that the memories written while they are read have in common."""

    chunk_size: int
    lookahead: bool
    normalize_targets: bool
    scope: str
    group: Any

    @property
    def shared(self) -> bool:
        """One memory for all sequences."""
        return self.scope == "batch"

    def check(self) -> None:
        """Raise unless these options are allowed."""
        contract.whole_number("chunk_size", self.chunk_size, 1)
        for name in ("lookahead", "normalize_targets"):
            contract.one_of(name, getattr(self, name), (True, False))
        contract.one_of("scope", self.scope, ("sequence", "batch"))
        if self.group is not None and not self.shared:
            raise ValueError(
                f"group is given with scope {self.scope!r}; a memory is shared by ranks with scope 'batch' only"
            )

    def check_reference(self) -> None:
        """Raise unless a token loop can run these options."""
        if self.group is not None:
            raise ValueError(
                "level is 'reference', but a memory shared by a process group is pooled by level 'chunk' only"
            )

    def written(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The value that is written for targets `[..., V]`."""
        target = target.to(dtype)
        return F.layer_norm(target, target.shape[-1:]) if self.normalize_targets else target


class Clock:
    """The map between tokens `[B, T, ...]` and streams `[N, L, ...]`.

    Args:
        like: an input `[B, T, ...]`. chunk: C. lookahead: a token's target is the next token's value.
        shared: one memory for all sequences (scope "batch").
        mask: bool `[B, T]` or None. bounds: document boundaries or None.
        pending: bool `[N, C]`, the real tokens that wait. count: int64 `[G]`, ticks that wait.
        group: process group whose ranks share the memory, or None.

    Attributes:
        sequences: N. chunks: number of chunks, the last one perhaps not full.
        real: bool `[N, L]`. count: ticks pending before the call. total: ticks of each stream. Both are lists of length G.
        first: the first tick that has to be read: 0, or after what was pending when it has been read already and stays.
    """

    def __init__(
        self,
        like: Tensor,
        chunk: int,
        lookahead: bool,
        shared: bool,
        *,
        mask: Tensor | None,
        bounds: list[int] | None,
        pending: Tensor,
        count: Tensor,
        group: Any = None,
    ) -> None:
        self.batch, self.tokens, self.device = like.shape[0], like.shape[1], like.device
        self.chunk, self.lookahead, self.shared = chunk, lookahead, shared
        self.sequences = self.batch if bounds is None else len(bounds) - 1
        token, present, sizes = self._tokens(mask, bounds)
        if mask is None and group is None:  # the real tokens are the first of every sequence
            lengths = [max(sizes, default=0)] if shared else sizes
        elif shared:
            tick = _any_rank(present.any(0), group)
            token, present = _pad(token, tick.shape[0])[:, tick], _pad(present, tick.shape[0])[:, tick]
            lengths = [token.shape[1]]
        else:
            order = torch.argsort((~present).long(), dim=1, stable=True)
            token, present = token.gather(1, order), present.gather(1, order)
            lengths = present.sum(1).tolist()
        self.count = known_count(count)
        self.total = [waiting + length for waiting, length in zip(self.count, lengths, strict=True)]
        self.ticks = max(self.total, default=0)
        self.chunks = -(-self.ticks // chunk)
        self.first = 0 if any(self.due(0)) else min(self.count, default=0)
        self._plain = mask is None and bounds is None and not any(self.count) and self.ticks == self.tokens
        if self._plain:
            self.real = present
        else:
            self._place(token, present, pending, count.expand(self.sequences))

    def on_device(self, numbers: Sequence[int]) -> Tensor:
        """int64 numbers on the device, without waiting for it."""
        if len(set(numbers)) == 1:
            return torch.full((len(numbers),), numbers[0], device=self.device)
        made = torch.tensor(numbers, dtype=torch.long)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made

    def _tokens(self, mask: Tensor | None, bounds: list[int] | None) -> tuple[Tensor, Tensor, list[int]]:
        """Flat index of every token of every sequence `[N, T']`, whether it is a real one, and how many there are of each."""
        if bounds is None:  # made where they live: nothing is copied from the host, so a CUDA graph can capture it
            starts, sizes = torch.arange(self.batch, device=self.device) * self.tokens, [self.tokens] * self.batch
        else:
            starts, sizes = self.on_device(bounds[:-1]), [b - a for a, b in itertools.pairwise(bounds)]
        column = torch.arange(max(sizes), device=self.device)
        token = starts[:, None] + column
        present = column < self.on_device(sizes)[:, None]
        if mask is not None:
            present = present & mask.reshape(-1)[torch.where(present, token, 0)]
        return token, present, sizes

    def _place(self, token: Tensor, present: Tensor, pending: Tensor, count: Tensor) -> None:
        """Index of the source of every tick: new tokens first, then pending ones, then nothing (-1)."""
        new = self.batch * self.tokens
        column = torch.arange(self.ticks, device=self.device).expand(self.sequences, -1)
        waits = column < count[:, None]
        fresh = column - count[:, None]
        has_new = ~waits & (fresh < present.shape[1])
        at = torch.where(has_new, fresh, 0)
        if present.shape[1]:
            has_new = has_new & present.gather(1, at)
            at = token.gather(1, at)
        old = torch.where(waits, column, 0)
        waits = waits & pending.gather(1, old)
        old = new + torch.arange(self.sequences, device=self.device)[:, None] * self.chunk + old
        self._source = torch.where(has_new, at, torch.where(waits, old, -1))
        self.real = self._source >= 0
        place = torch.full((new + 1,), -1, device=self.device)
        flat = torch.where(has_new, at, new).reshape(-1)
        place[flat] = torch.arange(flat.numel(), device=self.device)
        self._where = place[:-1]

    def stream(self, new: Tensor, pending: Tensor) -> Tensor:
        """`[B, T, ...]` and what is pending `[N, C, ...]` as streams `[N, L, ...]`; 0 where there is no real token.

        `new` itself where the streams are the tokens as they come.
        """
        if self._plain:
            return new
        rows = torch.cat([new.flatten(0, 1), pending.flatten(0, 1).to(new.dtype)])
        rows = (
            rows[self._source.clamp(min=0)] if rows.shape[0] else rows.new_zeros(*self._source.shape, *rows.shape[1:])
        )
        return rows.masked_fill(~_like(self.real, rows), 0)

    def back(self, stream: Tensor) -> Tensor:
        """Streams from their tick `first` on, `[N, L - first, ...]`, to tokens `[B, T, ...]`; rows of masked tokens are 0."""
        if self._plain:
            return stream
        if self.ticks == 0:
            return stream.new_zeros(self.batch, self.tokens, *stream.shape[2:])
        if self.first:
            stream = F.pad(stream, [0, 0] * (stream.ndim - 2) + [self.first, 0])
        rows = stream.flatten(0, 1)[self._where.clamp(min=0)]
        rows = rows.masked_fill(_like(self._where < 0, rows), 0)
        return rows.unflatten(0, (self.batch, self.tokens))

    def steps(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Of every chunk: the ticks to read, and which sequences are updated after them, bool `[N, 1]` (None: no one is)."""
        for step in range(self.chunks):
            due, start = self.due(step), step * self.chunk
            now = self.on_device(due).bool()[:, None] if any(due) else None
            part = slice(max(start, self.first), start + self.chunk)
            yield part, None if now is None else now.expand(self.sequences, 1)

    def due(self, step: int) -> list[bool]:
        """Which memories have what their update of chunk `step` waits for."""
        end = (step + 1) * self.chunk
        return [total > end or (not self.lookahead and total == end) for total in self.total]

    def targets(self) -> tuple[Tensor, Tensor]:
        """Where in the stream the target of every tick lies, int64 `[N, L]`, and whether it has come when its chunk is
        updated, bool `[N, L]`."""
        column = torch.arange(self.ticks, device=self.device)
        if not self.lookahead:
            return column.expand_as(self.real), self.real
        following = _next(self.real)
        known = self.real & (following <= (column // self.chunk + 1) * self.chunk) & (following < self.ticks)
        return following.clamp(max=max(self.ticks - 1, 0)), known

    def pending(self, stream: Tensor) -> Tensor:
        """The ticks that wait for their update after this call `[N, C, ...]`, 0 where there are none."""
        start = self.on_device([self._start(total) for total in self.total]).expand(self.sequences)
        column = start[:, None] + torch.arange(self.chunk, device=self.device)
        if self.ticks == 0:
            return stream.new_zeros(self.sequences, self.chunk, *stream.shape[2:])
        rows = at_ticks(stream, column.clamp(max=self.ticks - 1))
        return rows.masked_fill(_like(column >= self.ticks, rows), 0)

    def new_count(self) -> Tensor:
        """int64 `[G]`: how many ticks wait after this call."""
        count = [total - self._start(total) for total in self.total]
        return remember_count(self.on_device(count), count)

    def _start(self, total: int) -> int:
        last = max(total - 1, 0) if self.lookahead else total
        return last // self.chunk * self.chunk


_COUNTS = WeakIdKeyDictionary()  # counts of pending ticks that were made here: (version, the numbers)


def remember_count(count: Tensor, numbers: list[int]) -> Tensor:
    """`count`, of which `known_count` will know that it holds `numbers`."""
    _COUNTS[count] = (count._version, numbers)
    return count


def known_count(count: Tensor) -> list[int]:
    """The numbers in `count`. The device is waited for only where they are not known."""
    version, numbers = _COUNTS.get(count, (None, None))
    return list(numbers) if version == count._version else count.tolist()


def pending_targets(v: Tensor, real: Tensor, lookahead: bool) -> tuple[Tensor, Tensor]:
    """Targets of pending tokens v `[N, C, V]` when no further token comes, and whether they have one, bool `[N, C]`."""
    if not lookahead:
        return v, real
    following = _next(real)
    return at_ticks(v, following.clamp(max=v.shape[1] - 1)), real & (following < v.shape[1])


def at_ticks(stream: Tensor, position: Tensor) -> Tensor:
    """Positions `[N, X]` of streams `[N, L, ...]`: `[N, X, ...]`."""
    return stream.gather(1, _like(position, stream).expand(-1, -1, *stream.shape[2:]))


def _next(real: Tensor) -> Tensor:
    """Position of the next real token of every row `[N, L]`, L when there is none."""
    ticks = real.shape[1]
    if ticks == 0:
        return torch.zeros_like(real, dtype=torch.long)
    column = torch.arange(ticks, device=real.device)
    where = torch.where(real, column, ticks).flip(1).cummin(1).values.flip(1)
    return torch.cat([where[:, 1:], where.new_full((where.shape[0], 1), ticks)], 1)


def _like(x: Tensor, other: Tensor) -> Tensor:
    """`x` with axes of size 1 appended until it has as many as `other`."""
    return x.view(*x.shape, *[1] * (other.ndim - x.ndim))


def _pad(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1]))


def _any_rank(tick: Tensor, group: Any) -> Tensor:
    """Columns in which some row of some rank has a real token."""
    if group is None:
        return tick
    columns = torch.tensor([tick.shape[0]], device=tick.device)
    dist.all_reduce(columns, dist.ReduceOp.MAX, group=group)
    ticks = torch.nn.functional.pad(tick, (0, int(columns) - tick.shape[0])).int()
    dist.all_reduce(ticks, dist.ReduceOp.MAX, group=group)
    return ticks.bool()


# --- the definition: one tick after the other ---

Token = tuple[Tensor, ...]  # q, v and whatever else a token brings
Update = Callable[[list[tuple[Token, "Tensor | None"]]], None]


def run_ticks(
    ticks: Sequence[dict[int, Token]],
    pending: list[dict[int, Token]],
    chunk: int,
    lookahead: bool,
    read: Callable[[Token], Token],
    update: Update,
) -> tuple[list[dict[int, Token]], list[dict[int, Token]]]:
    """Read tick by tick, update chunk by chunk.

    Args:
        ticks: the new ones, each with the tokens of the rows that have one. pending: those that wait.
        read: token to its outputs. update: takes the tokens of a chunk, each with its target (None: it has not come).
    Returns: outputs of every tick, and the ticks that wait now.
    """
    outputs = []
    for tick in ticks:
        if lookahead and len(pending) == chunk:
            update(_with_targets(pending, tick, lookahead))
            pending = []
        outputs.append({row: read(token) for row, token in tick.items()})
        pending = [*pending, tick]
        if not lookahead and len(pending) == chunk:
            update(_with_targets(pending, {}, lookahead))
            pending = []
    return outputs, pending


def _with_targets(
    pending: list[dict[int, Token]], last: dict[int, Token], lookahead: bool
) -> list[tuple[Token, Tensor | None]]:
    """Every pending token with the v of the next token of its row (its own v without lookahead)."""
    pairs: list[tuple[Token, Tensor | None]] = []
    ticks = [*pending, last]
    for i, tick in enumerate(pending):
        for row, token in tick.items():
            later = [other[row][1] for other in ticks[i + 1 :] if row in other]
            target = token[1] if not lookahead else later[0] if later else None
            pairs.append((token, target))
    return pairs


def run_reference(
    inputs: Sequence[Tensor],
    pending: Sequence[Tensor],
    real: Tensor,
    count: Tensor,
    chunk: int,
    lookahead: bool,
    shared: bool,
    mask: Tensor | None,
    bounds: list[int] | None,
    read: Callable[[int, Token], Token],
    update: Callable[[int, list[tuple[Token, Tensor | None]]], None],
    zeros: Token,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The token loop of a chunk-updated memory.

    Args:
        inputs: q, v, ... `[B, T, ...]`. pending: the same of the state `[N, C, ...]`. real `[N, C]`, count `[G]`: see `Clock`.
        read: memory and token to its outputs. update: memory and tokens with their targets.
        zeros: the outputs of a masked token.
    Returns: outputs `[B, T, ...]`, new pending tensors, new real, new count.
    """
    batch, tokens = inputs[0].shape[:2]
    spans = [(b, 0, tokens) for b in range(batch)]
    if bounds is not None:
        spans = [(0, start, end) for start, end in itertools.pairwise(bounds)]
    is_real = [[True] * tokens] * batch if mask is None else mask.tolist()
    rows = [[(b, t) if is_real[b][t] else None for t in range(start, end)] for b, start, end in spans]
    groups = [list(range(len(rows)))] if shared else [[n] for n in range(len(rows))]
    outputs: dict[tuple[int, int], Token] = {}
    waiting: list[tuple[list[int], list[dict[int, Token]]]] = []
    for g, members in enumerate(groups):
        old = [{n: tuple(x[n, c] for x in pending) for n in members if real[n, c]} for c in range(int(count[g]))]
        longest = max(len(rows[n]) for n in members)
        columns: list[dict[int, tuple[int, int]]] = [{} for _ in range(longest)]
        for n in members:
            for c, at in enumerate(rows[n]):
                if at is not None:
                    columns[c][n] = at
        columns = [column for column in columns if column]
        ticks = [{n: tuple(x[at] for x in inputs) for n, at in column.items()} for column in columns]
        done, left = run_ticks(ticks, old, chunk, lookahead, functools.partial(read, g), functools.partial(update, g))
        for column, output in zip(columns, done, strict=True):
            outputs.update({column[n]: y for n, y in output.items()})
        waiting.append((members, left))
    every = [outputs.get((b, t), zeros) for b in range(batch) for t in range(tokens)]
    out = [
        torch.stack(x).unflatten(0, (batch, tokens)) if every else zero.new_zeros(batch, tokens, *zero.shape)
        for x, zero in zip(zip(*every, strict=True) if every else zeros, zeros, strict=True)
    ]
    new_pending = [
        torch.stack([_column(waiting, n, chunk, i, x[0, 0]) for n in range(len(rows))]) for i, x in enumerate(pending)
    ]
    new_real = torch.zeros_like(real)
    for members, left in waiting:
        for c, tick in enumerate(left):
            for n in members:
                new_real[n, c] = n in tick
    return out, new_pending, new_real, torch.tensor([len(left) for _, left in waiting], device=count.device)


def _column(waiting: Any, n: int, chunk: int, field: int, like: Tensor) -> Tensor:
    """Pending tensor `[C, ...]` of sequence n."""
    left = next(left for members, left in waiting if n in members)
    empty = torch.zeros_like(like)
    return torch.stack(
        [left[c][n][field].detach().to(like.dtype) if c < len(left) and n in left[c] else empty for c in range(chunk)]
    )
