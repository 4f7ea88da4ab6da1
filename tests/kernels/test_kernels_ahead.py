"""The first call compiles all that it and its backward pass launch, side by side. Without a GPU nothing is compiled and nothing runs."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import falcon_cases
import pytest
import recurrence_cases
import torch
from torch import Tensor

from fwzoo.kernels import GatedDeltaState, contract
from fwzoo.kernels.falcon import _check_options

pytestmark = pytest.mark.skipif(
    contract.NO_TRITON is not None or contract.INTERPRETING, reason="needs triton, not interpreting"
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run on the GPU")
NAMES = ["falcon1", "falcon2", "falcon3", "falcon1a", "falcon2a", "falcon3a", "gated_delta", "linear_attention"]
DTYPES = [torch.bfloat16, torch.float32]


class Card:
    """A driver of Triton for a card that is not there."""

    class utils:
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiler:
    """What Triton was asked for, kernels by their names and Triton's own keys: ahead of a launch, at one, and launched."""

    def __init__(self) -> None:
        self.ahead: list[Any] = []
        self.late: list[Any] = []
        self.launched: list[Any] = []
        self.seconds = 0.0  # that it takes

    def compile(self, kernel: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
        """In place of JITFunction's way to a compiled kernel."""
        warmup = others[-1]
        time.sleep(self.seconds)
        (self.ahead if warmup else self.late).append((kernel.__name__, key))
        kernel.device_caches[device][0][key] = made = Kernel(self, (kernel.__name__, key))
        return made

    def new(self) -> tuple[list[str], list[str]]:
        """Names of what was compiled ahead and late since the last call, forgotten then."""
        found = tuple([name for name, _ in compiled] for compiled in (self.ahead, self.late))
        self.ahead, self.late = [], []
        return found


class Kernel:
    """A compiled kernel that does nothing."""

    function, packed_metadata = 1, ()

    def __init__(self, compiler: Compiler, name: Any) -> None:
        self._compiler, self._name = compiler, name

    def launch_metadata(self, *_: Any) -> None:
        """There is none."""

    def run(self, *arguments: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._compiler.launched.append("fake" if any(isinstance(x, FakeTensor) for x in arguments) else self._name)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has launched nothing."""
    from triton.runtime import JITFunction

    from fwzoo.kernels import gpu, plans

    monkeypatch.setattr(gpu, "_COMPILED", {})
    monkeypatch.setattr(plans, "_plans", {})
    for kernel in [x for x in gc.get_objects() if type(x) is JITFunction]:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A card that is not there, and a compiler that makes nothing."""
    from triton.runtime import JITFunction, driver

    found = Compiler()
    monkeypatch.setattr(driver, "_active", Card())
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *arguments: found.compile(kernel, *arguments))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return found


def draw(name: str, dtype: torch.dtype, device: str = "cpu", offset: int = 0) -> list[Tensor]:
    """The operator's tensors, `offset` numbers behind an address that all kinds of loads can take."""
    cases = recurrence_cases if name in recurrence_cases.OPERATORS else falcon_cases
    drawn = cases.draw(name, batch=1, tokens=70, heads=2, k_size=32, v_size=32)
    found = []
    for key, x in drawn.items():
        x = x.to(device, dtype if key in "qkv" else torch.float32)
        room = torch.empty(offset + x.numel(), dtype=x.dtype, device=device)
        found.append(room[offset:].view(x.shape).copy_(x).requires_grad_())
    return found


def run(name: str, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Output, new S and z."""
    if name == "gated_delta":
        from fwzoo.kernels.gated_delta.triton import gated_delta_triton

        state = GatedDeltaState(torch.zeros(1, 2, 32, 32, device=leaves[0].device))
        o, state = gated_delta_triton(*leaves, 1.0, state, None, None)
    elif name == "linear_attention":
        from fwzoo.kernels.linear_attention.triton import linear_attention_triton

        o, state = linear_attention_triton(*leaves, True, 1e-6, None, None, None)
        return o, *state
    else:
        from fwzoo.kernels.falcon.triton import falcon_triton

        options = _check_options(name, 4, "shifted", "read_after_write", "beta", False, 1e-6, 1e-4)
        o, state = falcon_triton(*leaves, options, None, None, None)
    return o, state.S


def differentiate(leaves: list[Tensor], *results: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(sum(x.float().sum() for x in results), leaves, allow_unused=True))


@without_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_first_call(name: str, dtype: torch.dtype, compiler: Compiler, fresh: None) -> None:
    """It asks for all that it and its backward pass launch, with and without a gradient of the state, and for nothing else."""
    leaves = draw(name, dtype)
    o, *_ = run(name, leaves)
    asked, seen = set(compiler.ahead), len(set(compiler.launched))
    ahead, late = compiler.new()
    assert len(ahead) == len(asked) > seen and not late
    differentiate(leaves, o)
    differentiate(leaves, *run(name, leaves))
    assert compiler.new() == ([], []) and set(compiler.launched) == asked


@without_gpu
@pytest.mark.parametrize("name", NAMES)
def test_first_call_without_gradients(name: str, compiler: Compiler, fresh: None) -> None:
    """It asks for its own kernels; the first backward pass asks for its own, together."""
    leaves = draw(name, torch.bfloat16)
    with torch.inference_mode():
        run(name, [x.detach() for x in leaves])
    assert set(compiler.launched) == set(compiler.ahead)
    forward, late = compiler.new()
    assert len(forward) >= 2 and not late
    differentiate(leaves, run(name, leaves)[0])
    ahead, late = compiler.new()
    assert len(ahead) >= 4 and not late


@without_gpu
@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("name", ["falcon2", "falcon3", "gated_delta"])
def test_alignment(name: str, offset: int, compiler: Compiler, fresh: None) -> None:
    """Tensors that begin somewhere are noted as such: other code is compiled for them."""
    differentiate(leaves := draw(name, torch.bfloat16), *run(name, leaves))
    before, _ = compiler.new()
    differentiate(leaves := draw(name, torch.bfloat16, offset=offset), *run(name, leaves))
    ahead, late = compiler.new()
    assert before and not late and bool(ahead) == (offset % 8 != 0)


@without_gpu
@pytest.mark.parametrize("name", ["falcon3", "linear_attention"])
def test_nothing_is_ahead_without_a_rehearsal(
    name: str, compiler: Compiler, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would see if it did nothing."""
    from fwzoo.kernels import gpu

    monkeypatch.setattr(gpu, "compile_call", lambda _: None)
    differentiate(leaves := draw(name, torch.bfloat16), *run(name, leaves))
    assert not compiler.ahead and len(compiler.late) == len(set(compiler.late)) >= 6


@without_gpu
def test_threads(compiler: Compiler, fresh: None) -> None:
    """Of calls that come at the same time one compiles what both need."""
    drawn, start = [draw("falcon3", torch.bfloat16) for _ in range(4)], threading.Barrier(4)
    compiler.seconds = 0.01

    def call(leaves: list[Tensor]) -> None:
        start.wait()
        differentiate(leaves, run("falcon3", leaves)[0])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, drawn))
    asked = compiler.ahead + compiler.late
    assert not compiler.late and len(asked) == len(set(asked)) and len(compiler.launched) >= 4 * len(asked) - 4


def operator(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One with only a forward pass."""
    from fwzoo.kernels.gpu import custom

    def backward(d: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (d,)

    return custom(
        "first_calls",
        forward,
        backward,
        lambda x: (torch.empty_like(x),),
        lambda d, *_: (d,),
        outputs=1,
        inputs=(0,),
        module=__name__,
    )


@pytest.fixture
def launched() -> tuple[Any, dict[str, Any]]:
    """Some kernel and the arguments of a launch."""
    from fwzoo.kernels.gpu import _out_of_chunks, tables
    from fwzoo.kernels.ranks import make_ranks

    return _out_of_chunks, {**tables(make_ranks(torch.zeros(1, 64, 2), None, None)), "H": 2, "OVERLAP": 0, "BH": 2}


@without_gpu
@pytest.mark.parametrize("kind", ["number", "own way", "none"])
def test_functions(kind: str, launched: tuple[Any, dict[str, Any]], compiler: Compiler, fresh: None) -> None:
    """A function that asks for a number, or launches by Triton's own way, does the same as ever."""
    from fwzoo.kernels.gpu import launch

    kernel, given = launched

    def forward(x: Tensor) -> tuple[Tensor]:
        y = torch.empty_like(x)
        launch(kernel, (1,), **given, x=x, out=y)
        if kind == "number":
            assert x.sum().item() == 0
        elif kind == "own way":
            kernel[(1,)](*map({**given, "x": x, "out": y}.get, kernel.arg_names))
        launch(kernel, (1,), **given, x=x, out=y, num_warps=8)
        launch(kernel, (1,), **given, x=x, out=y.view(-1)[1:], num_warps=2)
        return (y,)

    operator(forward)(torch.zeros(1, 64, 2))
    if kind == "none":
        assert compiler.new() == (["_out_of_chunks"] * 3, [])
    else:
        assert compiler.new() == ([], ["_out_of_chunks"] * 3)
    assert len(compiler.launched) == (4 if kind == "own way" else 3)


@without_gpu
def test_loops(
    launched: tuple[Any, dict[str, Any]], compiler: Compiler, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal does not go through all chunks of a long call."""
    from fwzoo.kernels import ahead
    from fwzoo.kernels.gpu import launch

    (kernel, given), note, noted = launched, ahead.Rehearsal.note, []

    def count(rehearsal: Any, *launch: Any) -> None:
        noted.append(launch)
        note(rehearsal, *launch)

    def forward(x: Tensor) -> tuple[Tensor]:
        y = torch.empty_like(x)
        for i in range(1000):
            launch(kernel, (1,), **given, x=x, out=y, num_warps=2 << i % 2)
        return (y,)

    monkeypatch.setattr(ahead.Rehearsal, "note", count)
    operator(forward)(torch.zeros(1, 64, 2))
    assert compiler.new() == (["_out_of_chunks"] * 2, []) and len(compiler.launched) == 1000
    assert 2 < len(noted) < 200


@without_gpu
def test_nothing_fake_is_kept(compiler: Compiler, fresh: None) -> None:
    """A table that a function keeps from its first call is one of numbers."""
    from fwzoo.kernels import product_key_search
    from fwzoo.kernels.pkm.triton import pkm_triton

    product_key_search._pairs.cache_clear()
    q, keys, values = torch.randn(1, 20, 2, 16), torch.randn(2, 2, 32, 8), torch.randn(32 * 32, 24)
    pkm_triton(q, keys, values.requires_grad_(), 4, "dot", 1e-6)[0].sum().backward()
    ahead, late = compiler.new()
    assert "_sum_readers" in ahead and "_read" in ahead and not late
    assert product_key_search._pairs.cache_info().currsize == 1
    assert type(product_key_search._pairs(4, q.device)) is Tensor
    product_key_search._pairs.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["falcon2", "falcon3", "gated_delta", "linear_attention"])
def test_backward_compiles_nothing(name: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first call; the results are those of the next call."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    leaves = draw(name, torch.bfloat16, "cuda")
    results = run(name, leaves)
    ahead, compiled[:] = len(compiled), []
    grads = differentiate(leaves, *results)
    assert ahead >= 6 and not compiled
    again = run(name, leaves)
    torch.testing.assert_close((*results, *grads), (*again, *differentiate(leaves, *again)))
