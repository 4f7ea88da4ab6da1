"""The kernels that a call needs, compiled side by side.

Triton compiles a kernel when it is launched first, one after the other, and a rule has up to twenty of them. So when one is missing,
the operator's function is rehearsed: it runs on torch's fake tensors, which have shapes and no numbers, and its launches are only
noted, those of its backward pass as well where one will follow. What of them is missing is compiled in threads, and then the call
goes on. Where the rehearsal ends early (a function may ask for numbers) the kernels that it did not come to are compiled as they are launched.

Imported only by the `triton` levels.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import driver

MOST_REPEATED = 100  # launches in a row: then a rehearsal is in a loop over chunks, and ends
logger = logging.getLogger("fwzoo.kernels")


class _Local(threading.local):
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # what to rehearse when a kernel is missing
    rehearsal: Rehearsal | None = None


_local = _Local()
LOCK = threading.RLock()  # held while a kernel is compiled: no other thread compiles it again, or finds it half loaded


class _Pointer:
    """What Triton wants to know of a tensor."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class _Launch(NamedTuple):
    kernel: Any
    given: list[Any]
    options: dict[str, Any]


class Rehearsal:
    """The launches of a call on fake tensors.

    Attributes:
        launches: by what `gpu.launch` finds compiled kernels by.
    """

    def __init__(self) -> None:
        self.launches: dict[tuple[Any, ...], _Launch] = {}
        self._repeated = 0  # launches since one that was new
        self._begins: dict[int, int] = {}  # addresses of arguments, by their stand-ins' storages

    def stand_in(self, x: Any) -> Any:
        """A fake tensor for an argument of the call, anything else itself."""
        if not isinstance(x, Tensor):
            return x
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        self._begins[fake.untyped_storage()._cdata] = x.data_ptr()
        return fake

    def address(self, x: Tensor) -> int:
        """Where `x` may lie, right up to multiples of 16 (allocations are aligned)."""
        begin = self._begins.get(x.untyped_storage()._cdata, 0)
        return begin + x.storage_offset() * x.element_size() if x.numel() else 0

    def note(
        self, key: tuple[Any, ...], kernel: Any, given: list[Any], addresses: list[Any], options: dict[str, Any]
    ) -> None:
        """A launch of `kernel` with `given`, whose tensors have `addresses`."""
        self._repeated = self._repeated + 1 if key in self.launches else 0
        if self._repeated > MOST_REPEATED:
            raise RuntimeError("there are only launches that were noted before")
        places = zip(given, addresses, strict=True)
        given = [_Pointer(x.dtype, address) if isinstance(x, Tensor) else x for x, address in places]
        self.launches.setdefault(key, _Launch(kernel, given, options))


def rehearsed() -> Rehearsal | None:
    """The rehearsal that this thread is in."""
    return _local.rehearsal


def ahead(function: Callable[..., Any], whole: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`function` of tensors and numbers, whose kernels are compiled side by side.

    Args:
        whole: function of the same arguments that launches these kernels and those that will follow, in place of `function`.
    """
    whole = whole or function

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        before, _local.call = _local.call, (whole, arguments)
        try:
            return function(*arguments)
        finally:
            _local.call = before

    return call


def compile_call(compiled: dict[tuple[Any, ...], Any]) -> None:
    """Add to `compiled` what is missing there of the operator's call that this thread is in, if it is in one."""
    call, _local.call = _local.call, None
    if call is None:
        return
    function, arguments = call
    rehearsal, mode = Rehearsal(), FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False  # a launch by Triton's own way raises, and starts nothing
    _local.rehearsal = rehearsal
    try:
        with _disable_current_modes(), torch.no_grad(), mode:
            function(*map(rehearsal.stand_in, arguments))
    except Exception as error:
        logger.debug("the rehearsal of %s ended early: %s", function, error)
    finally:
        _local.rehearsal = None
    missing = {key: x for key, x in rehearsal.launches.items() if key not in compiled}
    if len(missing) < 2:
        return
    try:
        device = driver.active.get_current_device()
        for x in missing.values():
            x.kernel.device_caches[device]  # made here: two threads would make two
        threads = min(len(missing), os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, initializer=driver.active.set_current_device, initargs=(device,)) as pool:
            for key, found in zip(missing, pool.map(_compile, missing.values()), strict=True):
                if found is not None:
                    compiled[key] = found
    except Exception as error:
        logger.debug("no more is compiled ahead: %s", error)


def _compile(x: _Launch) -> Any:
    """The kernel, compiled and loaded with its launcher, or None: then its launch says why."""
    try:
        found = x.kernel.warmup(*x.given, grid=(1,), **x.options)
        return found if found is not None and found.run else None  # loaded when it is asked how to run
    except Exception as error:
        logger.debug("%s is not compiled ahead: %s", x.kernel, error)
        return None
