"""Falcon's Triton kernels become Triton's IR for Hopper, without a GPU: the interpreter takes what the compiler does not."""

from __future__ import annotations

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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched: they are compiled, as far as to Triton's IR, and not run."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import JITFunction

    target = GPUTarget("cuda", 90, 32)
    backend, names = make_backend(target), set[str]()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = {**dict(zip(kernel.arg_names, given, strict=False)), **named}
        signature, constants = {}, {}
        for i, parameter in enumerate(kernel.params):
            x = arguments[parameter.name]
            if parameter.is_constexpr or x is None:
                signature[parameter.name], constants[(i,)] = "constexpr", x
            elif isinstance(x, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[x.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(x, float) else "i32"
        options = backend.parse_options({name: x for name, x in named.items() if name.startswith("num_")})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        modules, functions = backend.get_module_map(), backend.get_codegen_implementation(options)
        ASTSource(kernel, signature, constants).make_ir(target, options, functions, modules, context)
        names.add(kernel.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    return names


@pytest.mark.skipif(contract.NO_TRITON is not None or contract.INTERPRETING, reason="needs triton, not interpreting")
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run on the GPU")
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
    from fwzoo.kernels.falcon.triton import falcon_triton

    arguments = falcon_cases.draw(rule, batch=1, tokens=70, heads=2, k_size=16, v_size=16)
    given = {name: x.to(dtype if name in "qkv" else torch.float32) for name, x in arguments.items()}
    leaves = [x.requires_grad_() for x in given.values()]
    options = _check_options(rule, 4, "shifted", "read_after_write", "beta", False, 1e-6, 1e-4)
    o, state = falcon_triton(*leaves, options, None, None, None)
    torch.autograd.grad(o.float().sum() + state.S.sum(), leaves)
    assert len(compiled) >= 6
