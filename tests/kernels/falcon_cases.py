"""Inputs for the Falcon operator, and one way to run it: outputs, state and every gradient by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from fwzoo.kernels import FalconState, falcon
from fwzoo.kernels.falcon import RULES

VECTORS = sorted((Path(__file__).parents[1] / "data" / "falcon").glob("*/*.safetensors"))


def load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Options, arguments (`in.*`, `state_in.*`, `cotangent.*`) and expected results (`o`, `state.*`, `grad.*`) of a vector."""
    with safe_open(path, "pt") as f:
        options = json.loads(f.metadata()["options"])
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    expected = {}
    for name, value in tensors.items():
        if name == "out.o":
            expected["o"] = value
        elif name.startswith("state_out."):
            expected["state." + name.removeprefix("state_out.")] = value
        elif name.startswith("grad."):
            expected[name] = value
    given = {name: x for name, x in tensors.items() if name.startswith(("in.", "state_in.", "cotangent."))}
    return options, given, expected


def run(
    given: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype, operator: Any = falcon
) -> dict[str, Tensor]:
    """Run the operator on `given` (names as in a vector) and differentiate; results named as in `load`."""
    leaves = {
        name: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
        if not name.startswith("cotangent.")
    }
    arguments = {name.removeprefix("in."): x for name, x in leaves.items() if name.startswith("in.")}
    fields = {name.removeprefix("state_in."): x for name, x in leaves.items() if name.startswith("state_in.")}
    if fields:
        state = FalconState(**fields)
    else:
        state = _zero_state(arguments, options, dtype)
        leaves["state_in.S"] = state.S
    o, new = operator(**arguments, **options, state=state)
    loss = (o * given["cotangent.o"].to(dtype)).sum() + (new.S * given["cotangent.S"].to(new.S.dtype)).sum()
    for name in ("key", "tail_x", "tail_v"):
        if f"cotangent.{name}" in given:
            loss = loss + (getattr(new, name) * given[f"cotangent.{name}"].to(dtype)).sum()
    names = [name for name, x in leaves.items() if x.is_floating_point()]
    grads = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    results = {"o": o, **{f"state.{name}": x for name, x in new._asdict().items()}}
    for name, grad in zip(names, grads, strict=True):
        grad = torch.zeros_like(leaves[name]) if grad is None else grad
        results["grad." + name.removeprefix("in.")] = grad
    return results


def _zero_state(arguments: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> FalconState:
    q, v = arguments["q"], arguments["v"]
    documents = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else q.shape[0]
    window = options.get("window", 4) if RULES[options["rule"]].sliding else 1
    heads, k_size, v_size, device = q.shape[2], q.shape[3], v.shape[3], q.device
    wide = torch.promote_types(dtype, torch.float32)
    return FalconState(
        torch.zeros(documents, heads, k_size, v_size, dtype=wide, device=device).requires_grad_(),
        torch.zeros(documents, heads, k_size, dtype=dtype, device=device),
        torch.zeros(documents, dtype=torch.bool, device=device),
        torch.zeros(documents, window - 1, heads, k_size, dtype=dtype, device=device),
        torch.zeros(documents, window - 1, heads, v_size, dtype=dtype, device=device),
        torch.zeros(documents, dtype=torch.long, device=device),
    )


def draw(
    rule: str,
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    k_size: int = 5,
    v_size: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random arguments q, k, v, beta, ridge for a rule."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    columns = (v_size,) if RULES[rule].per_column else ()
    return {
        "q": F.normalize(normal(batch, tokens, heads, k_size), dim=-1).to(dtype),
        "k": F.normalize(normal(batch, tokens, heads, k_size), dim=-1).to(dtype),
        "v": normal(batch, tokens, heads, v_size).to(dtype),
        "beta": (2 * normal(batch, tokens, heads, *columns).sigmoid()).to(dtype),
        "ridge": (0.4 * normal(batch, tokens, heads).sigmoid()).to(dtype),
    }


def as_given(arguments: dict[str, Tensor], seed: int = 1, state: FalconState | None = None) -> dict[str, Tensor]:
    """Arguments as a vector names them, with random cotangents for the output and the state."""
    generator = torch.Generator().manual_seed(seed)
    q, v = arguments["q"], arguments["v"]
    documents = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else q.shape[0]
    given = {f"in.{name}": x for name, x in arguments.items()}
    if state is not None:
        given.update({f"state_in.{name}": x for name, x in state._asdict().items()})
    given["cotangent.o"] = torch.randn(v.shape, generator=generator, dtype=torch.float64)
    given["cotangent.S"] = torch.randn(
        (documents, q.shape[2], q.shape[3], v.shape[3]), generator=generator, dtype=torch.float64
    )
    return given
