"""The chain of LaCT's updates on a GPU, one chunk after the other, forward and backward, on buffers of its own.

A chunk is a dozen short launches, and launching them from Python takes longer than running them. So every chunk is copied
into the same buffers and the launches between are one CUDA graph, captured when a shape comes for the second time and
replayed for every chunk from then on. The first call of a shape, ragged documents, and calls within a capture of the
caller's own run the same launches one by one.

R are rows of the batched products: sequences times heads, n of them active. Flat matrices `[R, 3 M D]` hold W0, W2, W1 (see
`passes.py`). The gates of a chunk are flat too: rates `[3, n, C, L]`, then the share `[n]` of the last direction that is kept.
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
        dtype: of the products.
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

    def gates(self, flat: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Rates `[3, n C, L]` and what is kept `[n]`."""
        cut = 3 * n * self.chunk * self.rates
        return flat[:cut].view(3, n * self.chunk, self.rates), flat[cut : cut + n]

    def gate_count(self, n: int) -> int:
        """Numbers of the gates of a chunk."""
        return n * (3 * self.chunk * self.rates + 1)


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
        self.k, self.v = narrow(rows, shape.chunk, shape.size), narrow(rows, shape.chunk, shape.size)
        self.gates = wide(shape.gate_count(rows))
        self.norms, self.lengths = wide(rows, shape.lines), wide(rows, shape.lines)
        self.full = torch.empty(rows // shape.heads, dtype=torch.int32, device=device) if shape.ragged else None
        self.allocate(narrow, wide)

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        """Further buffers."""
        raise NotImplementedError

    def launch(self, n: int) -> None:
        """One chunk of n rows."""
        raise NotImplementedError

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


def _alive(full: Tensor, heads: int, n: int) -> Tensor:
    return full.bool().repeat_interleave(heads)[:n, None]


class Forward(Chain):
    """Updates.

    Attributes:
        k, v, gates, full: of the chunk. norms: of the rows in the beginning.
        weights, sums, last: float32, advanced. narrow: the weights in the products' dtype. lengths: norms of the rows before
            they were rescaled. direction: that of the chunk in the products' dtype.
    """

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        shape = self.shape
        rows, chunk, hidden, entries = shape.rows, shape.chunk, shape.hidden, shape.entries
        self.weights = wide(rows, entries)
        self.sums = wide(rows, entries) if shape.prenorm else self.weights
        self.last = wide(rows, entries) if shape.momentum else None
        self.narrow, self.step = narrow(rows, entries), narrow(rows, entries)
        self.direction = narrow(rows, entries) if shape.muon or (shape.momentum and shape.keep) else None
        self.both, self.error = narrow(rows, chunk, 2 * hidden), narrow(rows, chunk, hidden)

    def launch(self, n: int) -> None:
        shape, k, v, both, error, step = (
            self.shape,
            *(x[:n] for x in (self.k, self.v, self.both, self.error, self.step)),
        )
        hidden, (w02, w1) = shape.hidden, shape.split(self.narrow[:n])
        rates, kept = shape.gates(self.gates, n)
        torch.bmm(k, w02.mT, out=both)
        torch.bmm(v, w1, out=error)
        passes.written(both, error, rates)
        step02, step1 = shape.split(step)
        if shape.rates == 1:
            torch.bmm(both.mT, k, out=step02)
        else:
            for j, part in ((0, slice(None, hidden)), (2, slice(hidden, None))):
                torch.bmm(both[..., part].mT, _scaled(k, rates[j]), out=step02[:, part])
        torch.bmm(v.mT, error, out=step1)
        last, direction = self.last, self.direction
        if shape.muon:
            assert direction is not None
            self._direct(step, kept, n)
            step, last, direction = orthogonal(direction[:n], shape.size, hidden)[0], None, None
        passes.step_weights(
            step, last, kept, self.full, shape.heads, self.sums, self.weights, self.norms, self.narrow,
            self.lengths if shape.keep else None, direction, shape.size, hidden,
        )  # fmt: skip

    def _direct(self, step: Tensor, kept: Tensor, n: int) -> None:
        """The direction with its momentum, which also replaces the last one: what Newton-Schulz gets."""
        assert self.direction is not None
        if self.last is None:
            self.direction[:n].copy_(step)
            return
        last = self.last[:n]
        new = torch.addcmul(step, kept[:, None], last)
        if self.full is not None:
            new = torch.where(_alive(self.full, self.shape.heads, n), new, last)
        last.copy_(new)
        self.direction[:n].copy_(new)


class Backward(Chain):
    """The backward pass of `Forward`, last chunk first.

    Attributes:
        k, v, gates, full, norms, lengths: as there. before, after: weights before and after the chunk. last: direction of
            the chunk before. direction: that of this chunk (with Muon). read: gradient of `after` from its reads.
        d_weights, d_sums, d_last, d_norms: float32, gradients behind the chunk, become those before it.
        d_write: gradient of the weights from the chunk's own products, not yet in d_weights.
        d_k, d_v, d_gates: of the chunk.
    """

    def allocate(self, narrow: Callable[..., Tensor], wide: Callable[..., Tensor]) -> None:
        shape = self.shape
        rows, chunk, hidden, entries = shape.rows, shape.chunk, shape.hidden, shape.entries
        self.before, self.after, self.read, self.d_write = (narrow(rows, entries) for _ in range(4))
        self.last = narrow(rows, entries) if shape.momentum else None
        self.direction = narrow(rows, entries) if shape.muon else None
        self.d_weights = wide(rows, entries)
        self.d_sums = wide(rows, entries) if shape.prenorm else None
        self.d_last = wide(rows, entries) if shape.momentum else None
        self.d_norms, self.parts = torch.empty_like(self.norms), torch.empty_like(self.norms)
        self.d_k, self.d_v, self.d_gates = (torch.empty_like(x) for x in (self.k, self.v, self.gates))
        self.four, self.two = narrow(rows, chunk, 4 * hidden), narrow(rows, chunk, 2 * hidden)
        self.beside, self.d_step = narrow(rows, 2 * entries), wide(rows, entries) if shape.muon else None

    def launch(self, n: int) -> None:
        shape, k, v, d_k, d_v, four, two = (
            self.shape,
            *(x[:n] for x in (self.k, self.v, self.d_k, self.d_v, self.four, self.two)),
        )
        size, hidden = shape.size, shape.hidden
        (rates, kept), (d_rates, d_kept) = shape.gates(self.gates, n), shape.gates(self.d_gates, n)
        passes.step_weights_backward(
            n, self.d_weights, self.d_sums, self.read, self.d_write, None if shape.muon else self.d_last, self.last, kept,
            self.full, shape.heads, self.after, None if shape.muon else self.before, self.lengths, self.norms, self.d_norms,
            self.d_step if shape.muon else self.beside, self.parts, size, hidden,
        )  # fmt: skip
        cut = 4 * hidden * size
        beside02 = self.beside[:n, :cut].unflatten(1, (4 * hidden, size))
        beside1 = self.beside[:n, cut:].unflatten(1, (size, 2 * hidden))
        if shape.muon:
            for at, x in ((0, self._d_direction(kept, d_kept, n)), (1, self.before[:n])):
                x02, x1 = shape.split(x)
                beside02[:, 2 * hidden * at : 2 * hidden * (at + 1)].copy_(x02)
                beside1[..., hidden * at : hidden * (at + 1)].copy_(x1)
        elif shape.momentum:
            torch.sum(self.parts[:n], 1, out=d_kept)
        else:
            d_kept.zero_()
        parts = ((0, slice(None, hidden)), (2, slice(hidden, 2 * hidden)))
        if shape.rates == 1:
            torch.bmm(k, beside02.mT, out=four)
        else:
            torch.bmm(k, beside02[:, 2 * hidden :].mT, out=four[..., 2 * hidden :])
            for j, part in parts:
                torch.bmm(_scaled(k, rates[j]), beside02[:, part].mT, out=four[..., part])
        torch.bmm(v, beside1, out=two)
        passes.written_backward(four, two, rates, d_rates)
        if shape.rates == 1:
            torch.bmm(four, beside02, out=d_k)
        else:
            d = torch.bmm(four[..., 2 * hidden :], beside02[:, 2 * hidden :]).float()
            for j, part in parts:
                d_scaled = torch.bmm(four[..., part], beside02[:, part]).float()
                d_rates[j] = (d_scaled * k).flatten(0, 1)
                d += d_scaled * rates[j].view(d.shape)
            d_k.copy_(d)
        torch.bmm(two, beside1.mT, out=d_v)
        d02, d1 = shape.split(self.d_write[:n])
        torch.bmm(four[..., 2 * hidden :].mT, k, out=d02)
        torch.bmm(v.mT, two[..., hidden:], out=d1)

    def _d_direction(self, kept: Tensor, d_kept: Tensor, n: int) -> Tensor:
        """Through Newton-Schulz and the momentum: the gradient of the chunk's own direction."""
        shape = self.shape
        assert self.direction is not None and self.d_step is not None
        direction = self.direction[:n]
        _, trail = orthogonal(direction, shape.size, shape.hidden)
        d = orthogonal_backward(self.d_step[:n], direction, trail, shape.size, shape.hidden)
        if self.d_last is None or self.last is None:
            d_kept.zero_()
            return d
        d_last, last = self.d_last[:n], self.last[:n]
        d = d + d_last
        earlier = kept[:, None] * d
        if self.full is not None:
            alive = _alive(self.full, shape.heads, n)
            earlier, d = torch.where(alive, earlier, d_last), torch.where(alive, d, 0)
        torch.sum(d * last, 1, out=d_kept)
        d_last.copy_(earlier)
        return d


def _scaled(k: Tensor, rate: Tensor) -> Tensor:
    """Keys `[n, C, D]` times a rate a channel, `[n C, D]`."""
    return (k * rate.view(k.shape)).to(k.dtype)
