"""The chain of LaCT's updates on a GPU, one chunk after the other, forward and backward, on buffers of its own.

A chunk is a dozen short launches, and launching them from Python takes longer than running them. So they work on the same
buffers for every chunk and find its tensors by a table of addresses on the device (`passes.Table`): one CUDA graph, captured
when a shape comes for the second time and replayed for every chunk from then on. The first call of a shape, ragged
documents, and calls within a capture of the caller's own run the same launches one by one.

R are rows of the batched products: sequences times heads, n of them active. Flat matrices `[R, 3 M D]` hold W0, W2, W1 (see
`passes.py`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import passes
from .muon import orthogonal, orthogonal_backward, split

SHAPES = 8  # for which buffers and graphs are kept


@dataclass(frozen=True)
class Shape:
    """What decides the launches of a chunk.

    Attributes:
        rows: R. heads, chunk, size, hidden: H, C, D, M. rates: L.
        momentum, muon, prenorm: as in `Options`. keep: whether a backward pass follows. ragged: whether `full` is looked at.
        aligned: as in `passes.Table`. dtype: of the products.
    """

    rows: int
    heads: int
    chunk: int
    size: int
    hidden: int
    rates: int
    momentum: bool
    muon: bool
    prenorm: bool
    keep: bool
    ragged: bool
    aligned: bool
    dtype: torch.dtype

    @property
    def entries(self) -> int:
        """Numbers of a flat matrix."""
        return 3 * self.size * self.hidden

    @property
    def lines(self) -> int:
        """Rows of the three matrices, 2 M + D."""
        return 2 * self.hidden + self.size

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """W0 over W2 `[R, 2 M, D]`, and W1 `[R, D, M]`."""
        return split(flat, self.size, self.hidden)


class Chain:
    """Buffers and launches of a chunk.

    Attributes:
        lock: held while a call's launches are queued.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.lock = shape, threading.Lock()
        self._device, self._calls = device, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._refused = False
        self._done: Any = None  # event behind the last call, on the stream
        self._stream: Any = None
        rows, narrow = shape.rows, functools.partial(torch.empty, dtype=shape.dtype, device=device)
        wide = functools.partial(torch.empty, dtype=torch.float32, device=device)
        self.table = passes.Table(device, shape.aligned)
        self.k, self.v = narrow(rows, shape.chunk, shape.size), narrow(rows, shape.chunk, shape.size)
        self.norms = wide(rows, shape.lines)
        self.kept = wide(rows)
        self.allocate(narrow, wide)

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        """Further buffers."""
        raise NotImplementedError

    def launch(self, n: int) -> None:
        """One chunk of n rows."""
        raise NotImplementedError

    def _rates(self, n: int) -> Tensor:
        """The rates `[3, n C, L]`, where torch looks at them."""
        rates = self.norms.new_empty(3, n * self.shape.chunk, self.shape.rates)
        self.table.move(passes.RATES, rates.flatten(0, 1))
        return rates

    def _alive(self, n: int) -> Tensor | None:
        """Whose chunk is full, bool `[n, 1]`; None for all."""
        if not self.shape.ragged:
            return None
        full = torch.empty(1, n // self.shape.heads, dtype=torch.int32, device=self._device)
        self.table.move(passes.FULL, full)
        return full[0].bool().repeat_interleave(self.shape.heads, output_size=n)[:, None]

    def run(self, n: int) -> None:
        """One chunk: a replay where there is a graph, or one can be captured now."""
        if (
            self._graph is None
            and self._calls > 1
            and not self._refused
            and not torch.cuda.is_current_stream_capturing()
        ):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.launch(n)
                self._graph = graph
            except RuntimeError:
                self._refused = True
        if self._graph is None or n != self.shape.rows:
            self.launch(n)
        else:
            self._graph.replay()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around the chunks of one call: nobody else uses the buffers, whichever stream and thread they are on."""
        with self.lock:
            kept = _KEPT.get((type(self), self.shape, self._device)) is self
            if kept:
                self._calls += 1
                stream = torch.cuda.current_stream(self._device)
                if self._done is not None and stream != self._stream:
                    stream.wait_event(self._done)
            yield
            if kept:
                self._stream, self._done = stream, torch.cuda.Event()
                self._done.record(stream)


_KEPT: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_KEPT_LOCK = threading.Lock()
AnyChain = TypeVar("AnyChain", bound=Chain)


def chain_for(kind: type[AnyChain], shape: Shape, device: torch.device) -> AnyChain:
    """Buffers for a call: kept from the last one of the shape where they can be, or new."""
    if device.type != "cuda" or shape.ragged or torch.cuda.is_current_stream_capturing():
        return kind(shape, device)
    key = (kind, shape, device)
    with _KEPT_LOCK:
        if key not in _KEPT:
            with torch.inference_mode(False):
                _KEPT[key] = kind(shape, device)
            while len(_KEPT) > SHAPES:
                _KEPT.popitem(last=False)
        _KEPT.move_to_end(key)
        return _KEPT[key]


def first(x: Tensor, n: int) -> Tensor:
    """The first n of `x`, which is often all of it (an index costs as much as a launch)."""
    return x if n == x.shape[0] else x[:n]


class Forward(Chain):
    """Updates. The table has all of `passes.written` and `passes.step_weights`, KEYS and VALUES.

    Attributes:
        weights, sums, last: float32, advanced. narrow: the weights in the products' dtype. norms: of the rows in the beginning.
    """

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        shape = self.shape
        rows, chunk, hidden, entries = shape.rows, shape.chunk, shape.hidden, shape.entries
        self.weights = wide(rows, entries)
        self.sums = wide(rows, entries) if shape.prenorm else self.weights
        self.last = wide(rows, entries) if shape.momentum else None
        self.narrow, self.step = narrow(rows, entries), narrow(rows, entries)
        self.both, self.error = narrow(rows, chunk, 2 * hidden), narrow(rows, chunk, hidden)

    def launch(self, n: int) -> None:
        shape, table = self.shape, self.table
        k, v, both, error, step = (first(x, n) for x in (self.k, self.v, self.both, self.error, self.step))
        hidden, (w02, w1) = shape.hidden, shape.split(first(self.narrow, n))
        table.advance()
        table.move(passes.KEYS, k)
        table.move(passes.VALUES, v)
        torch.bmm(k, w02.mT, out=both)
        torch.bmm(v, w1, out=error)
        passes.written(table, both, error, shape.rates > 1)
        step02, step1 = shape.split(step)
        if shape.rates == 1:
            torch.bmm(both.mT, k, out=step02)
        else:
            rates = self._rates(n)
            for j, part in ((0, slice(None, hidden)), (2, slice(hidden, None))):
                torch.bmm(both[..., part].mT, _scaled(k, rates[j]), out=step02[:, part])
        torch.bmm(v.mT, error, out=step1)
        last = self.last
        if shape.muon:
            step = self._direct(step, n)
            if shape.keep:
                table.move(passes.DIRECTION, step, out=True)
            step, last = orthogonal(step, shape.size, hidden)[0], None
        passes.step_weights(
            table, step, last, shape.ragged, shape.heads, self.sums, self.weights, self.norms, self.narrow, shape.keep,
            shape.size, hidden,
        )  # fmt: skip

    def _direct(self, step: Tensor, n: int) -> Tensor:
        """The direction with its momentum, which also replaces the last one: what Newton-Schulz gets."""
        if self.last is None:
            return step
        last, kept = first(self.last, n), first(self.kept, n)
        self.table.move(passes.KEPT, kept[None])
        new = torch.addcmul(step, kept[:, None], last)
        if (alive := self._alive(n)) is not None:
            new = torch.where(alive, new, last)
        last.copy_(new)
        return new.to(step.dtype)


class Backward(Chain):
    """The backward pass of `Forward`, last chunk first. The table has all of `passes.written_backward` and
    `passes.step_weights_backward`, KEYS, VALUES, D_KEYS, D_VALUES, D_KEPT and, with Muon, DIRECTION.

    Attributes:
        norms: as there. d_weights, d_sums, d_last, d_norms: float32, gradients behind the chunk, become those before it.
        d_write: gradient of the weights from the chunk's own products, not yet in d_weights.
        read: where READ can point for ragged documents.
    """

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        shape = self.shape
        rows, chunk, hidden, entries = shape.rows, shape.chunk, shape.hidden, shape.entries
        self.d_write, self.beside = narrow(rows, entries), narrow(rows, 2 * entries)
        self.read = narrow(rows if shape.ragged else 0, entries)
        self.d_weights = wide(rows, entries)
        self.d_sums = wide(rows, entries) if shape.prenorm else None
        self.d_last = wide(rows, entries) if shape.momentum else None
        self.d_norms, self.parts, self.d_kept = torch.empty_like(self.norms), torch.empty_like(self.norms), wide(rows)
        self.four, self.two = narrow(rows, chunk, 4 * hidden), narrow(rows, chunk, 2 * hidden)
        self.d_step = wide(rows, entries) if shape.muon else None
        self.last = narrow(rows, entries) if shape.muon and shape.momentum else None
        self.direction = narrow(rows, entries) if shape.muon else None

    def launch(self, n: int) -> None:
        shape, table = self.shape, self.table
        k, v, four, two = (first(x, n) for x in (self.k, self.v, self.four, self.two))
        size, hidden, beside = shape.size, shape.hidden, first(self.beside, n)
        table.advance()
        table.move(passes.KEYS, k)
        table.move(passes.VALUES, v)
        passes.step_weights_backward(
            table, n, self.d_weights, self.d_sums, self.d_write, None if shape.muon else self.d_last, shape.ragged,
            shape.heads, self.norms, self.d_norms, self.d_step, self.beside, self.parts, size, hidden,
        )  # fmt: skip
        cut = 4 * hidden * size
        beside02 = beside[:, :cut].unflatten(1, (4 * hidden, size))
        beside1 = beside[:, cut:].unflatten(1, (size, 2 * hidden))
        d_kept = first(self.d_kept, n)
        if shape.muon:
            d02, d1 = shape.split(self._d_direction(d_kept, n))
            beside02[:, : 2 * hidden].copy_(d02)
            beside1[..., :hidden].copy_(d1)
        elif shape.momentum:
            torch.sum(first(self.parts, n), 1, out=d_kept)
        if shape.momentum:
            table.move(passes.D_KEPT, d_kept[None], out=True)
        parts = ((0, slice(None, hidden)), (2, slice(hidden, 2 * hidden)))
        if shape.rates == 1:
            torch.bmm(k, beside02.mT, out=four)
        else:
            rates = self._rates(n)
            torch.bmm(k, beside02[:, 2 * hidden :].mT, out=four[..., 2 * hidden :])
            for j, part in parts:
                torch.bmm(_scaled(k, rates[j]), beside02[:, part].mT, out=four[..., part])
        torch.bmm(v, beside1, out=two)
        passes.written_backward(table, four, two, shape.rates > 1)
        d02, d1 = shape.split(first(self.d_write, n))
        torch.bmm(four[..., 2 * hidden :].mT, k, out=d02)
        torch.bmm(v.mT, two[..., hidden:], out=d1)
        if shape.rates == 1:
            torch.bmm(four, beside02, out=k)  # from here on k and v are their gradients
        else:
            d = torch.bmm(four[..., 2 * hidden :], beside02[:, 2 * hidden :]).float()
            for j, part in parts:
                d_scaled = torch.bmm(four[..., part], beside02[:, part]).float()
                table.move(passes.D_RATES, (d_scaled * k).flatten(0, 1), out=True, offset=j * rates[j].numel())
                d += d_scaled * rates[j].view(d.shape)
            k.copy_(d)
        torch.bmm(two, beside1.mT, out=v)
        table.move(passes.D_KEYS, k, out=True)
        table.move(passes.D_VALUES, v, out=True)

    def _d_direction(self, d_kept: Tensor, n: int) -> Tensor:
        """Through Newton-Schulz and the momentum: the gradient of the chunk's own direction."""
        shape = self.shape
        assert self.direction is not None and self.d_step is not None
        direction = first(self.direction, n)
        self.table.move(passes.DIRECTION, direction)
        _, trail = orthogonal(direction, shape.size, shape.hidden)
        d = orthogonal_backward(first(self.d_step, n), direction, trail, shape.size, shape.hidden)
        if self.d_last is None or self.last is None:
            return d
        d_last, last, kept = first(self.d_last, n), first(self.last, n), first(self.kept, n)
        self.table.move(passes.LAST, last)
        self.table.move(passes.KEPT, kept[None])
        d = d + d_last
        earlier = kept[:, None] * d
        if (alive := self._alive(n)) is not None:
            earlier, d = torch.where(alive, earlier, d_last), torch.where(alive, d, 0)
        torch.sum(d * last, 1, out=d_kept)
        d_last.copy_(earlier)
        return d


def _scaled(k: Tensor, rate: Tensor) -> Tensor:
    """Keys `[n, C, D]` times a rate a channel, `[n C, D]`."""
    return (k * rate.view(k.shape)).to(k.dtype)
