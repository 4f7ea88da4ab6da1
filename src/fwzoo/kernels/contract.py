"""What every operator shares: levels, dispatch, and one-sentence errors for bad input.

Axis letters, here and in every kernel: B batch, T tokens, H heads, K key size, V value size, W window, C chunk,
N sequences (B, or the number of documents when packed).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .samples import Draw, Sample

logger = logging.getLogger("fwzoo.kernels")

State = TypeVar("State", bound=tuple[Tensor, ...])

LEVELS = ("reference", "chunk", "triton")
LARGEST = 256  # K and V that the Triton kernels take
MOST_TOKENS = 16  # of a call that a step kernel takes; more are faster in chunks
OLDEST_TRITON = (3, 6)
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "the package triton does not say its version"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON:
        return f"triton is {version}, and the kernels need at least {'.'.join(map(str, OLDEST_TRITON))}"
    return None


NO_TRITON = _no_triton()  # why there is no Triton to use, or None

_debug: ContextVar[bool] = ContextVar("fwzoo_debug", default=False)
_overwriting: ContextVar[bool] = ContextVar("fwzoo_overwriting", default=False)
_discarding: ContextVar[bool] = ContextVar("fwzoo_discarding", default=False)


@contextlib.contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Within this context, operators also check the values of their inputs (costs a device synchronisation).

    Example:
        >>> with fwzoo.debug():
        ...     model(input_ids)
    """
    token = _debug.set(enabled)
    try:
        yield
    finally:
        _debug.reset(token)


def debugging() -> bool:
    """Whether `debug()` is active here (never while compiling)."""
    return not torch.compiler.is_compiling() and _debug.get()


@contextlib.contextmanager
def overwriting_states() -> Iterator[None]:
    """Within this context, an operator may write the new state into the tensors of the state it was given."""
    token = _overwriting.set(True)
    try:
        yield
    finally:
        _overwriting.reset(token)


def may_overwrite_states() -> bool:
    """Whether `overwriting_states()` is active here."""
    return _overwriting.get()


@contextlib.contextmanager
def discarding_states(enabled: bool = True) -> Iterator[None]:
    """Within this context nobody uses the state that an operator returns: where making it is work, it may be the given one."""
    token = _discarding.set(enabled)
    try:
        yield
    finally:
        _discarding.reset(token)


def may_discard_states() -> bool:
    """Whether `discarding_states()` is active here."""
    return _discarding.get()


@dataclass(frozen=True)
class Explanation:
    """The level that would run, why, and why each other level would not."""

    op: str
    level: str
    reason: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.level} ({self.reason})"]
        return "\n".join(lines + [f"  not {level}: {why}" for level, why in self.others.items()])


def heads_fit(tensors: Sequence[Tensor], largest: int = LARGEST) -> str | None:
    """Why the Triton kernels, which take K and V up to `largest`, cannot take those of query, key, value, ..., or None."""
    q, v = tensors[0], tensors[2] if len(tensors) > 2 else tensors[0]
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size > largest:
            return f"{name} is {size}, and the Triton kernels take {name} up to {largest}"
    return None


@dataclass(frozen=True)
class Op:
    """An operator: its public function and its implementations by level.

    Attributes:
        name: public name, as in `fwzoo.kernels.<name>`.
        levels: level name to implementation.
        short: up to this many tokens a CPU runs the token loop faster than the chunk form.
        samples: random calls for `fwzoo selftest`, from what draws their tensors.
        limit: from whether a call is of few tokens and its keyword options: why the Triton kernels cannot run it, or None.
        fits: from the tensors of a call: why the Triton kernels cannot take their sizes, or None.
    """

    name: str
    levels: dict[str, Callable[..., Any]]
    short: int = 0
    samples: Callable[[Draw], Iterator[Sample]] = lambda draw: iter(())
    limit: Callable[..., str | None] = lambda few, **options: None
    fits: Callable[[Sequence[Tensor]], str | None] = heads_fit

    def unavailable(self, level: str, tensors: Sequence[Tensor] = (), limit: str | None = None) -> str | None:
        """Why `level` cannot run on `tensors` (query, key, value, ...), or None."""
        if level not in self.levels:
            return f"{self.name} has no {level} level in this version of fwzoo"
        if level != "triton":
            return None
        return triton_cannot_run(tensors) or self.fits(tensors) or limit

    def choose(self, tokens: int, tensors: Sequence[Tensor] = (), limit: str | None = None) -> tuple[str, str]:
        """The level that `auto` takes for a call of `tokens` tokens, and the reason."""
        if tensors and tensors[0].is_cuda and self.unavailable("triton", tensors, limit) is None:
            return "triton", "the tensors are on a CUDA device"
        if tokens <= self.short:
            return "reference", f"a call of at most {self.short} tokens is fastest as a token loop"
        return "chunk", "fastest available level" + (f" for more than {self.short} tokens" if self.short else "")

    def resolve(
        self, level: str, tokens: int, tensors: Sequence[Tensor] = (), limit: str | None = None
    ) -> Callable[..., Any]:
        """The implementation to run, the reference where there is no token.

        Raises ValueError for a level that does not exist or cannot run.

        Args:
            level: as the caller gave it. tokens: T.
            tensors: query, key, value, ...: what they are decides whether the Triton kernels can run.
            limit: why this call's options keep the Triton kernels from it, or None.
        """
        if level == "auto":
            level, reason = self.choose(tokens, tensors, limit)
            if not torch.compiler.is_compiling() and (self.name, reason) not in _LOGGED:
                _LOGGED.add((self.name, reason))
                logger.info("%s: level %s, because %s", self.name, level, reason)
        else:
            one_of("level", level, ("auto", *LEVELS))
            if (why := self.unavailable(level, tensors, limit)) is not None:
                allowed = sorted(name for name in self.levels if self.unavailable(name, tensors, limit) is None)
                raise ValueError(f"level is {level!r}, but {why}; use 'auto' or one of {allowed}")
        return functools.partial(_without_autocast, self.levels[level if tokens else "reference"])

    def explain(self, tokens: int, tensors: Sequence[Tensor] = (), **options: Any) -> Explanation:
        """What `auto` would do for a call of `tokens` tokens with these options."""
        limit = self.limit(few_tokens(tensors, None, None), **options)
        chosen, reason = self.choose(tokens, tensors, limit)
        others = {}
        for level in (level for level in LEVELS if level != chosen):
            why = f"{chosen} is faster here; level={level!r} runs when asked for"
            others[level] = self.unavailable(level, tensors, limit) or why
        return Explanation(self.name, chosen, reason, others)


def triton_cannot_run(tensors: Sequence[Tensor]) -> str | None:
    """Why no Triton kernel can run on query, key, value, ..., or None. The device of the tensors decides."""
    if NO_TRITON is not None:
        return NO_TRITON
    if not tensors:
        return "there are no tensors to run on"
    q = tensors[0]
    if not q.is_cuda and not (INTERPRETING and q.device.type == "cpu"):
        return f"the tensors are on {q.device}, and Triton needs a CUDA device"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the tensors are {q.dtype}, and the Triton kernels take float32, bfloat16 and float16"
    return None


def few_tokens(tensors: Sequence[Tensor | None], mask: Tensor | None, bounds: list[int] | None) -> bool:
    """Whether these inputs are a few tokens that need no backward pass (with a mask, one token)."""
    if bounds is not None or tensors[0] is None or torch.compiler.is_compiling():
        return False
    return not needs_backward(tensors) and 1 <= tensors[0].shape[1] <= (MOST_TOKENS if mask is None else 1)


def needs_backward(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient of a result of these tensors may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _without_autocast(run: Callable[..., Any], q: Tensor, *arguments: Any) -> Any:
    """Call a level as it is written: under autocast its products, and its state with them, would be 16 bit."""
    device = q.device.type
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not (available and torch.is_autocast_enabled(device)):
        return run(q, *arguments)
    with torch.autocast(device, enabled=False):
        return run(q, *arguments)


_LOGGED: set[tuple[str, str]] = set()  # what was logged already: once per reason
_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Make an operator known to `explain`."""
    _OPS[op.name] = op
    return op


def operators() -> dict[str, Op]:
    """Every operator by name."""
    return dict(_OPS)


def explain(op: str | Callable[..., Any], *tensors: Tensor, **options: Any) -> Explanation:
    """The level that `level="auto"` would run for these inputs, and why the others would not.

    Args:
        op: an operator of `fwzoo.kernels`, or its name.
        tensors: the operator's tensors, query, key, value `[B, T, H, .]` first.
        options: keyword options of the call, such as Falcon's `rule` and `window`.

    Raises:
        ValueError: the operator is unknown, or no tensor was given.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    one_of("op", name, tuple(_OPS))
    if not tensors or tensors[0].ndim < 2:
        raise ValueError(f"tensors has {len(tensors)} entries; give the operator's inputs, query [B, T, H, K] first")
    return _OPS[name].explain(tensors[0].shape[1], tensors, **options)


# --- checks: each raises one sentence that names the argument, what it was and what is allowed ---


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def whole_number(name: str, value: Any, least: int) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def is_tensor(name: str, value: Any, ndim: int, floating: bool = True) -> None:
    """Raise unless `value` is a tensor with `ndim` axes, of a floating dtype when asked."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor with {ndim} axes")
    if value.ndim != ndim:
        raise ValueError(f"{name} has shape {list(value.shape)}; it must have {ndim} axes")
    if floating and not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; it must be a floating dtype")


def has_shape(name: str, value: Tensor, shape: Sequence[int], axes: str) -> None:
    """Raise unless `value.shape` is `shape`; `axes` names the axes in the message, e.g. `[B, T, H]`."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be {axes} = {list(shape)}")


def same_device(name: str, value: Tensor, like: Tensor, like_name: str = "q") -> None:
    """Raise unless `value` lies on the device of `like`."""
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}; it must be on {like.device}, like {like_name}")


def finite_number(name: str, value: Any, least: float = -math.inf) -> None:
    """Raise unless `value` is a finite number of at least `least`."""
    allowed = "a finite number" if least == -math.inf else f"a finite number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be {allowed}")
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Raise unless q and k are `[B, T, H, K]` and v is `[B, T, H, V]`, all of one floating dtype on one device."""
    is_tensor("q", q, 4)
    is_tensor("k", k, 4)
    has_shape("k", k, q.shape, "[B, T, H, K] like q")
    is_tensor("v", v, 4)
    has_shape("v", v, (*q.shape[:3], v.shape[-1]), "[B, T, H, V]")
    if min(q.shape[0], *q.shape[2:], v.shape[-1]) < 1:
        raise ValueError(f"q has shape {list(q.shape)} and v {list(v.shape)}; B, H, K and V must be at least 1")
    for name, tensor in (("k", k), ("v", v)):
        same_device(name, tensor, q)
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {q.dtype}, like q")


def check_gate(name: str, value: Any, q: Tensor) -> None:
    """Raise unless `value` holds one number a token and head, `[B, T, H]`, on the device of q."""
    is_tensor(name, value, 3)
    has_shape(name, value, q.shape[:3], "[B, T, H]")
    same_device(name, value, q)


def check_state(state: Any, empty: State, q: Tensor | None = None) -> State:
    """`state` in the dtypes of `empty`, the state before the first token; raises unless all fields have its shapes.

    `q` is on the device where the state must be; None means that `empty` is.
    """
    if not isinstance(state, type(empty)):
        raise TypeError(f"state is a {type(state).__name__}; it must be a fwzoo.kernels.{type(empty).__name__}")
    for name, field, like in zip(empty._fields, state, empty, strict=True):  # type: ignore[attr-defined]
        is_tensor(f"state.{name}", field, like.ndim, floating=like.is_floating_point())
        has_shape(f"state.{name}", field, like.shape, "[N, ...]")
        same_device(f"state.{name}", field, like if q is None else q)
        if not like.is_floating_point() and field.dtype != like.dtype:
            raise ValueError(f"state.{name} has dtype {field.dtype}; it must be {like.dtype}")
    return type(empty)(*(field.to(like.dtype) for field, like in zip(state, empty, strict=True)))


def given_state(state: Any, empty: Callable[[Tensor, Tensor], State], q: Tensor, v: Tensor) -> State | None:
    """`state`, checked as by `check_state` beside `empty(q, v)`, or None where it is None.

    An empty state to compare with is made without storage, so that a decoding step does not fill one for nothing.
    """
    if state is None:
        return None
    return check_state(state, empty(*(x.new_empty(x.shape, device="meta") for x in (q, v))), q)


def start_state(state: Any, empty: Callable[[Tensor, Tensor], State], q: Tensor, v: Tensor) -> State:
    """The same with `empty(q, v)` in place of None."""
    given = given_state(state, empty, q, v)
    return empty(q, v) if given is None else given


def check_values(tensors: Mapping[str, Tensor], mask: Tensor | None) -> None:
    """Under `debug()`, raise unless every real token of every tensor `[B, T, ...]` is finite."""
    if not debugging():
        return
    real = slice(None) if mask is None else mask
    for name, tensor in tensors.items():
        if not tensor[real].isfinite().all():
            raise ValueError(f"{name} holds a value that is not finite; every real token must be finite")


def check_log_decay(log_decay: Tensor, mask: Tensor | None) -> None:
    """Under `debug()`, raise unless every real token's log-decay is at most 0."""
    if debugging() and ((real := log_decay if mask is None else log_decay[mask]) > 0).any():
        raise ValueError(f"log_decay has maximum {real.max().item():.3g}; it must be at most 0")


def check_documents(mask: Any, cu_seqlens: Any, like: Tensor) -> tuple[list[int] | None, int]:
    """Validate mask and boundaries for inputs `like` `[B, T, ...]`; returns the boundaries and the number of documents."""
    check_mask(mask, like)
    bounds = check_cu_seqlens(cu_seqlens, like)
    return bounds, like.shape[0] if bounds is None else len(bounds) - 1


def check_mask(mask: Any, like: Tensor) -> None:
    """Raise unless `mask` is None or bool `[B, T]` for inputs `like` `[B, T, ...]`."""
    if mask is None:
        return
    is_tensor("mask", mask, 2, floating=False)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be torch.bool, True for a real token")
    has_shape("mask", mask, like.shape[:2], "[B, T]")
    same_device("mask", mask, like)


def check_cu_seqlens(cu_seqlens: Any, like: Tensor) -> list[int] | None:
    """Validate document boundaries and return them as a list (None when not packed).

    Args:
        cu_seqlens: None, or int64 `[S + 1]`: first entry 0, last T, never decreasing.
        like: the inputs `[B, T, ...]`; B must be 1.
    """
    if cu_seqlens is None:
        return None
    is_tensor("cu_seqlens", cu_seqlens, 1, floating=False)
    if cu_seqlens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; it must be torch.int64")
    if like.shape[0] != 1:
        raise ValueError(f"cu_seqlens was given with batch size {like.shape[0]}; packed input must have batch size 1")
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != like.shape[1]:
        raise ValueError(f"cu_seqlens is {_brief(bounds)}; it must start with 0 and end with T = {like.shape[1]}")
    if any(b < a for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens is {_brief(bounds)}; it must never decrease")
    return bounds


def _brief(values: Sequence[Any]) -> str:
    return repr(list(values)) if len(values) <= 12 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything else: the dtype of gates, decays and accumulated state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_weights(documents: int, q: Tensor, v: Tensor) -> Tensor:
    """Fast weights before the first token, `[N, H, K, V]`, for q `[B, T, H, K]` and v `[B, T, H, V]`."""
    return q.new_zeros(documents, q.shape[2], q.shape[3], v.shape[3], dtype=compute_dtype(q.dtype))
