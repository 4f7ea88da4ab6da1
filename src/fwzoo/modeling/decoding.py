"""Decoding on a GPU without Python: one token's step as a CUDA graph that `generate` replays.

A step of a fast-weight model is a few hundred small kernels, and launching them takes far longer than running them. The
first decoding step of a `generate` call runs as usual, is then captured, and every later step of the same shape is one
launch. The graph works on buffers of its own, which the cache holds between steps, so nothing is copied unless
`generate` reordered the sequences.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..kernels.contract import overwriting_states
from .cache import FastWeightCache, FastWeightLayer

logger = logging.get_logger("fwzoo")

Step = Callable[[Tensor, "Tensor | None", FastWeightCache], Tensor]

DEVICES = ("cuda",)

_decoder: ContextVar[GraphedStep | None] = ContextVar("fwzoo_decoder", default=None)


@contextlib.contextmanager
def graphed_decoding(enabled: bool) -> Iterator[None]:
    """Within this context, decoding steps on a GPU are captured and replayed where their shapes allow."""
    token = _decoder.set(GraphedStep() if enabled else None)
    try:
        yield
    finally:
        _decoder.reset(token)


def graphed_step() -> GraphedStep | None:
    """What replays decoding steps here, or None."""
    return None if torch.compiler.is_compiling() else _decoder.get()


class GraphedStep:
    """The steps of one `generate` call. Graphs live as long as the call: weights may change between calls."""

    def __init__(self) -> None:
        self._graphs: dict[Any, _Graph] = {}
        self._last: _Graph | None = None
        self._left: int | None = None  # steps until one does other work
        self._refused = False
        self._capturable: bool | None = None

    def allows(self, model: Any, input_ids: Tensor | None, cache: Any) -> bool:
        """Whether this call is one decoding step that a graph can replay."""
        if (
            self._refused
            or input_ids is None
            or input_ids.shape[1] != 1
            or input_ids.device.type not in DEVICES
            or not isinstance(cache, FastWeightCache)
        ):
            return False
        if self._last is not None and self._last.holds(cache):
            return self._left != 0
        allowed = (
            not (torch.is_grad_enabled() or torch.is_autocast_enabled(input_ids.device.type) or model.training)
            and not hasattr(model, "hf_device_map")
            and all(layer.tensors and not layer.record_past for layer in cache.layers)
            and model.get_decoder().steps_alike()
            and self._can_capture(model)
        )
        if allowed:
            self._left = model.get_decoder().steps_left(cache)
        return allowed and self._left != 0

    def _can_capture(self, model: Any) -> bool:
        if self._capturable is None:
            self._capturable = capturable(model)
        return self._capturable

    def __call__(self, step: Step, input_ids: Tensor, mask: Tensor | None, cache: FastWeightCache) -> Tensor | None:
        """The logits `[B, 1, vocabulary]` of `step(input_ids, mask, cache)`, which also advances the cache; None: run it.

        Args:
            step: one decoding step. input_ids: `[B, 1]`. mask: bool `[B, 1]` or None.
        """
        if self._last is None or not (self._last.holds(cache) and self._last.masked == (mask is not None)):
            key = (input_ids.shape, input_ids.device, mask is None, _shapes(cache))
            if key not in self._graphs:
                if self._left is not None:  # the graphs of steps behind us, whose buffers may be large
                    self._graphs.clear()
                    self._last = None
                try:
                    self._graphs[key] = _Graph(step, input_ids, mask, cache)
                except RuntimeError as error:
                    self._refused = True
                    logger.warning_once("decoding runs without a CUDA graph, because capturing it failed: %s", error)
                    return None
            self._last = self._graphs[key]
        if self._left is not None:
            self._left -= 1
        return self._last.replay(input_ids, mask, cache)


def capturable(model: Any) -> bool:
    """Whether the operators run as Triton kernels here: the plain levels may wait for the device, which no graph can."""
    memories = model.get_decoder().memories().values()
    return all(level in ("triton", "sdpa") for _, _, level, _ in model.kernel_report(tokens=1)) and all(
        getattr(memory, "steps_are_kernels", True) for memory in memories
    )


def _shapes(cache: FastWeightCache) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(x.shape), x.dtype, x.device) for layer in cache.layers for name, x in layer.tensors.items()
    )


def capture(rehearse: Callable[[], None], advance: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What runs `advance` as a CUDA graph, after `rehearse` has loaded its kernels and filled their workspaces."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        rehearse()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = advance()

    def run() -> Tensor:
        graph.replay()
        return result.clone()

    return run


class _Graph:
    """A captured step and its buffers: ids, mask, the tensors of every layer, logits."""

    def __init__(self, step: Step, input_ids: Tensor, mask: Tensor | None, cache: FastWeightCache) -> None:
        self._ids = input_ids.clone()
        self._mask = None if mask is None else mask.clone()
        self._layers = [{name: x.clone() for name, x in layer.tensors.items()} for layer in cache.layers]

        def rehearse() -> None:
            step(self._ids, self._mask, _holding(cache, self._layers, copied=True))

        def advance() -> Tensor:
            advanced = _holding(cache, self._layers)
            with overwriting_states():
                logits = step(self._ids, self._mask, advanced)
            moved: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for own, layer in zip(self._layers, advanced.layers, strict=True):
                for name, x in layer.tensors.items():
                    if x.data_ptr() != own[name].data_ptr():
                        moved[x.dtype].append((own[name], x))
            for pairs in moved.values():  # one kernel for all layers
                torch._foreach_copy_([to for to, _ in pairs], [x for _, x in pairs])
            return logits

        self._run = capture(rehearse, advance, input_ids.device)

    @property
    def masked(self) -> bool:
        """Whether the step takes a mask."""
        return self._mask is not None

    def holds(self, cache: FastWeightCache) -> bool:
        """Whether a cache is as this graph's last step left it, in this graph's buffers."""
        return all(layer.tensors is own for own, layer in zip(self._layers, cache.layers, strict=True))

    def replay(self, input_ids: Tensor, mask: Tensor | None, cache: FastWeightCache) -> Tensor:
        """Advance `cache` by one token; returns the logits."""
        self._ids.copy_(input_ids)
        if self._mask is not None and mask is not None:
            self._mask.copy_(mask)
        for own, layer in zip(self._layers, cache.layers, strict=True):
            if layer.tensors is not own:
                for name, x in layer.tensors.items():
                    own[name].copy_(x)
                layer.tensors = own
            layer.end(1)
        return self._run()


def _holding(cache: FastWeightCache, layers: list[dict[str, Tensor]], copied: bool = False) -> FastWeightCache:
    """A cache like `cache` that holds these tensors."""
    made = FastWeightCache.__new__(FastWeightCache)
    Cache.__init__(made, layers=[FastWeightLayer() for _ in layers])
    for layer, tensors, like in zip(made.layers, layers, cache.layers, strict=True):
        layer.tensors = {name: x.clone() if copied else x for name, x in tensors.items()}
        layer.seen, layer.is_initialized = like.seen, True
    return made
