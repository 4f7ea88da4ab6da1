"""flash-linear-attention as a peer: its guard out of the way, and its many configurations compiled on all cores first.

flash-linear-attention compiles up to 24 configurations of a kernel and takes the fastest, which on one core lasts minutes
on a machine that has not run it. Here workers compile a share of all configurations each, into Triton's cache; the measuring
process then times every one of them, as it would have, only for shorter.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHARE = "FWZOO_BENCHMARK_SHARE"  # "2/12": the third of twelve workers
FEWER = "FWZOO_BENCHMARK_FEWER"


def installed() -> bool:
    """Whether flash-linear-attention is there to be compared with."""
    return importlib.util.find_spec("fla") is not None


def without_guard() -> None:
    """Take flash-linear-attention's refusal of Hopper's backward out of this process."""
    import fla.ops.common.chunk_o as module

    module.IS_NVIDIA_HOPPER = False


def prepare_autotuning(fewer: bool = False) -> None:
    """In a worker, compile this worker's share of the configurations; otherwise time each for 20 ms in place of 100.

    fewer: leave out those that pipeline in four stages, which saves a third of the compiling, here and in the workers.
    """
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    if fewer or FEWER in os.environ:
        os.environ[FEWER] = "1"
        prune = Autotuner.prune_configs
        Autotuner.prune_configs = lambda self, given: (
            [x for x in prune(self, given) if x.num_stages < 4] or prune(self, given)
        )
    share = os.environ.get(SHARE)
    if share is None:
        Autotuner.do_bench = property(lambda self: functools.partial(triton.testing.do_bench, warmup=5, rep=20))
        return
    part, parts = map(int, share.split("/"))

    def compile_own(self: Autotuner, *args: Any, config: Any, **options: Any) -> list[float]:
        place = self.configs.index(config)
        if place and place % parts != part:
            return [float("inf")] * 3
        try:
            self.fn.run(*args, **{**options, **config.all_kwargs(), "warmup": True})
        except Exception:  # as the autotuner does with configurations that do not fit
            return [float("inf")] * 3
        return [float(place)] * 3  # so that the first one that compiles runs

    Autotuner._bench = compile_own
    Autotuner.check_disk_cache = lambda self, key, configs, bench: bench() or False


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Within this context nothing on this machine is measured; benchmarks may prepare at the same time."""
    with _locked(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Within this context no other benchmark prepares or measures on this machine."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def turn(places: int) -> Iterator[None]:
    """Within this context there are at most so many processes on this machine."""
    with contextlib.ExitStack() as stack:
        names = [f"fwzoo-benchmarks-{place}.lock" for place in range(places)]
        files = [stack.enter_context(open(Path(tempfile.gettempdir()) / name, "w")) for name in names]
        for file in itertools.cycle(files):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        yield


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / "fwzoo-benchmarks.lock", "w") as file:
        fcntl.flock(file, how)
        yield


def compile_on_all_cores(
    script: str,
    calls: Sequence[Sequence[str]],
    shared: Sequence[Sequence[str]],
    cores: int | None = None,
    patience: float = 600,
) -> None:
    """Run `script` with each of `calls`, and with each of `shared` once on every core, all at the same time.

    What is not compiled after `patience` seconds is left to the process that measures.
    """
    end = time.perf_counter() + patience
    cores = cores or max(2, (os.cpu_count() or 2) - 2)
    running = [start(script, call) for call in calls]
    running += [start(script, call, f"{part}/{cores}") for call in shared for part in range(cores)]
    for process in running:
        try:
            process.wait(max(0.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()


def start(script: str, arguments: Sequence[str], share: str | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Run `script` in a process of its own that leaves the other cores alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    if share is not None:
        environment[SHARE] = share
    options = {"stdout": subprocess.DEVNULL, **options}
    return subprocess.Popen([sys.executable, script, *arguments], env=environment, **options)
