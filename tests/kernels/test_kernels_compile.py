"""Falcon's Triton kernels are compiled for Hopper, without a GPU: the interpreter takes what the compilers do not."""

from __future__ import annotations

import re
from typing import Any

import falcon_cases
import pytest
import torch

from fwzoo.kernels import contract
from fwzoo.kernels.falcon import _check_options

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def as_source(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles for a launch, and the launch's options."""
    from triton.compiler import ASTSource

    arguments = {**dict(zip(kernel.arg_names, given, strict=False)), **named}
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        x = arguments[parameter.name]
        if parameter.is_constexpr or x is None:
            signature[parameter.name], constants[(i,)] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[parameter.name], aligned[(i,)] = "*" + TYPES[x.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(x, float) else "i32"
    options = {name: x for name, x in named.items() if name.startswith(("num_", "maxnreg"))}
    return ASTSource(kernel, signature, constants, aligned), options


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched: they are compiled, as far as to Triton's IR, and not run."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import JITFunction

    target = GPUTarget("cuda", 90, 32)
    backend, names = make_backend(target), set[str]()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        source, options = as_source(kernel, given, named)
        options = backend.parse_options(options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        modules, functions = backend.get_module_map(), backend.get_codegen_implementation(options)
        source.make_ir(target, options, functions, modules, context)
        names.add(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    return names


def run_falcon(rule: str, dtype: torch.dtype, k_size: int, v_size: int) -> None:
    """Forward and backward of a call whose kernels do not run."""
    from fwzoo.kernels.falcon.triton import falcon_triton

    arguments = falcon_cases.draw(rule, batch=1, tokens=70, heads=2, k_size=k_size, v_size=v_size)
    given = {name: x.to(dtype if name in "qkv" else torch.float32) for name, x in arguments.items()}
    leaves = [x.requires_grad_() for x in given.values()]
    options = _check_options(rule, 4, "shifted", "read_after_write", "beta", False, 1e-6, 1e-4)
    o, state = falcon_triton(*leaves, options, None, None, None)
    torch.autograd.grad(o.float().sum() + state.S.sum(), leaves)


pytestmark = [
    pytest.mark.skipif(
        contract.NO_TRITON is not None or contract.INTERPRETING, reason="needs triton, not interpreting"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run on the GPU"),
]


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("falcon1a", torch.float32),
        ("falcon2", torch.float32),
        ("falcon2", torch.bfloat16),
        ("falcon2a", torch.bfloat16),
        ("falcon3", torch.bfloat16),
        ("falcon3a", torch.bfloat16),
    ],
    ids=str,
)
def test_falcon(rule: str, dtype: torch.dtype, compiled: set[str]) -> None:
    run_falcon(rule, dtype, 16, 16)
    assert len(compiled) >= 6


def used_too_early(code: str) -> list[str]:
    """Additions to 64 bit addresses of shared memory in machine code that read a register which nothing has written yet."""
    written: set[str] = set()
    found = []
    for line in code.splitlines():
        to = re.search(r"\t(?:@!?\w+ )?(\S+) (UR\d+),", line)
        if re.search(r"\tUIADD3(\.X)? ", line) and set(re.findall(r"UR\d+", line)[1:]) - written:
            found.append(line)
        if to:
            first = int(to[2][2:])
            written |= {f"UR{first}", *([f"UR{first + 1}"] if "64" in to[1] or "WIDE" in to[1] else [])}
    return found


@pytest.mark.parametrize(("k_size", "v_size"), [(16, 128), (32, 16), (32, 96), (64, 32)])
def test_falcon2_reads_no_register_before_it_is_written(
    k_size: int, v_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ptxas 12.8 makes such code of products with fewer than 64 columns: an illegal access on a Hopper card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction

    codes = {}

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        name = kernel.fn.__name__
        if name in ("scores_kernel", "products_kernel"):
            source, options = as_source(kernel, given, named)
            codes[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["sass"]

    monkeypatch.setattr(JITFunction, "run", run)
    run_falcon("falcon2", torch.bfloat16, k_size, v_size)
    assert set(codes) == {"scores_kernel", "products_kernel"}
    assert all(code.count("HGMMA") >= 8 and not used_too_early(code) for code in codes.values())
    assert used_too_early("\tUMOV UR6, 0x400;\n\tUIADD3 UR22, UP0, UR7, 0x40, URZ;")
