"""Calls of operators again without their Python: what a function launched and allocated, by shapes.

On a GPU the kernels of a call are often shorter than the Python around them. A function that only allocates tensors and launches
kernels does the same for all tensors of the same shapes, so its second call is recorded (which allocations, which compiled
kernels, and which tensor or part of one each argument was), and later ones allocate and launch what is in the plan. Nothing
is kept on the GPU. A function that does anything else, such as another operator of torch or a launch by Triton's own way, is not planned.

Imported only by the `triton` levels.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from .ahead import rehearsed

MOST = 512  # plans that are kept; then all are made anew
ALIGNED = 512  # bytes, as torch's own allocations
ALLOCATES = ("aten::empty", "aten::new_empty")  # and empty_like, empty_strided, ...

_local = threading.local()  # its `recording`: what wants to know of this thread's launches
_plans: dict[tuple[Any, ...], Plan | bool] = {}  # True: called once. False: not to be planned


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Recording(TorchDispatchMode):
    """What one call does.

    Attributes:
        launches: grid, compiled kernel and arguments, tensors among them as they were given.
        made: all allocations. plain: whether there was nothing else.
        started: launches that Triton knows of. Those that did not come through `gpu.launch` are not among `launches`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[tuple[int, ...], Any, list[Any]]] = []
        self.made: list[Tensor] = []
        self.plain, self.started = True, 0

    def launched(self, _: Any) -> None:
        """A hook of Triton, which calls it from every thread."""
        self.started += getattr(_local, "recording", None) is self

    @property
    def complete(self) -> bool:
        """Whether the launches and allocations are all that the call did."""
        return self.plain and self.started <= len(self.launches)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = [x for x in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if func._schema.is_mutable:
            self.plain = False
        elif func._schema.name.startswith(ALLOCATES) or all(x.numel() == 0 for x in outputs):
            self.made += outputs
        elif not all(x.untyped_storage().data_ptr() in given for x in outputs):  # then they are no views
            self.plain = False
        return found


def note_launch(grid: tuple[int, ...], compiled: Any, values: list[Any]) -> None:
    """Tell a recording of a launch, if there is one."""
    recording = getattr(_local, "recording", None)
    if recording is not None:
        recording.launches.append((grid, compiled, values))


class Plan:
    """A recorded call. Tensors are numbered: the arguments, the returned ones, and one buffer for all others."""

    def __init__(self, arguments: tuple[Any, ...], results: tuple[Tensor, ...], found: Recording) -> None:
        given = [x for x in arguments if isinstance(x, Tensor)]
        self.results = [(tuple(x.shape), x.dtype) for x in results]
        ranges = [(x.data_ptr(), _bytes(x), place, 0) for place, x in enumerate([*given, *results])]
        returned, self.scratch = {x.data_ptr() for x in results}, 0
        for x in found.made:
            if x.data_ptr() not in returned:
                ranges.append((x.data_ptr(), _bytes(x), len(given) + len(results), self.scratch))
                self.scratch += -(-_bytes(x) // ALIGNED) * ALIGNED
        ranges = sorted(x for x in ranges if x[1])
        apart = all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        new = {x.data_ptr() for x in found.made}
        self.valid = apart and all(x.is_contiguous() and x.data_ptr() in new for x in results if x.numel())
        self.launches = []
        for grid, compiled, values in found.launches:
            addresses, patches = list(values), []
            for place, x in enumerate(values):
                if isinstance(x, Tensor):
                    own = [r for r in ranges if r[0] <= x.data_ptr() < r[0] + r[1]]
                    addresses[place] = 0
                    if own:
                        (start, _, number, offset) = own[0]
                        patches.append((place, number, offset + x.data_ptr() - start))
                    elif x.numel():
                        self.valid = False
            self.launches.append((grid, compiled, addresses, patches))

    def run(self, addresses: list[int], device: torch.device) -> tuple[Tensor, ...]:
        """Do it again for arguments at other addresses."""
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results)
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
        addresses = [*addresses, *(x.data_ptr() for x in results), scratch.data_ptr()]
        for (x, y, z), compiled, values, patches in self.launches:
            own = values.copy()
            for place, number, offset in patches:
                own[place] = addresses[number] + offset
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *own)
        return results


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors on one device, numbers and lists of them, which returns a tuple of new tensors, by its plan where there is one.

    All that it allocates and does not return exists until its end.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if rehearsed() is not None:
            return function(*arguments)
        addresses: list[int] = []
        key: list[Any] = [function]
        for x in arguments:
            if isinstance(x, Tensor):
                if not x.is_contiguous():
                    return function(*arguments)
                address = x.data_ptr()
                addresses.append(address)
                key += x.shape, x.dtype, x.device, address & 15
            else:
                key.append(tuple(x) if isinstance(x, list) else x)
        whole_key = tuple(key)
        plan = _plans.get(whole_key)
        if isinstance(plan, Plan) and not knobs.runtime.launch_enter_hook.calls:
            first = next(x for x in arguments if isinstance(x, Tensor))
            with torch.cuda.device_of(first):
                return plan.run(addresses, first.device)
        if plan is not True or getattr(_local, "recording", None) is not None:
            if plan is None:
                if len(_plans) >= MOST:
                    _plans.clear()
                _plans[whole_key] = True
            return function(*arguments)
        with Recording() as found:
            _local.recording = found
            knobs.runtime.launch_enter_hook.add(found.launched)
            try:
                results = function(*arguments)
            finally:
                knobs.runtime.launch_enter_hook.remove(found.launched)
                _local.recording = None
        made = Plan(arguments, results, found)
        _plans[whole_key] = made if found.complete and made.valid else False
        return results

    return call
