"""Inputs for the gated delta rule and linear attention, and one way to run them: outputs, state and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fwzoo.kernels import GatedDeltaState, LinearAttentionState, gated_delta, linear_attention

OPERATORS: dict[str, Any] = {"gated_delta": gated_delta, "linear_attention": linear_attention}
STATES: dict[str, Any] = {"gated_delta": GatedDeltaState, "linear_attention": LinearAttentionState}
DATA = Path(__file__).parents[1] / "data"
VECTORS = [path for name in OPERATORS for path in sorted((DATA / name).glob("*.safetensors"))]


def run(
    name: str, given: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype, operator: Any = None
) -> dict[str, Tensor]:
    """Run the operator `name` on `given` (names as in a vector) and differentiate; results named as in `load`."""
    leaves = {
        key: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for key, x in given.items()
        if not key.startswith("cotangent.")
    }
    arguments = {key.removeprefix("in."): x for key, x in leaves.items() if key.startswith("in.")}
    fields = {key.removeprefix("state_in."): x for key, x in leaves.items() if key.startswith("state_in.")}
    if not fields:
        q, v = arguments["q"], arguments["v"]
        documents = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else q.shape[0]
        wide = torch.promote_types(dtype, torch.float32)
        S = torch.zeros(documents, q.shape[2], q.shape[3], v.shape[3], dtype=wide, device=q.device).requires_grad_()
        leaves["state_in.S"], fields = S, {"S": S}
        if name == "linear_attention":
            fields["z"] = torch.zeros_like(S[..., 0])
    o, new = (operator or OPERATORS[name])(**arguments, **options, state=STATES[name](**fields))
    loss = (o * given["cotangent.o"].to(o)).sum() + (new.S * given["cotangent.S"].to(new.S)).sum()
    if "cotangent.z" in given:
        loss = loss + (new.z * given["cotangent.z"].to(new.z)).sum()
    names = [key for key, x in leaves.items() if x.is_floating_point()]
    grads = torch.autograd.grad(loss, [leaves[key] for key in names], allow_unused=True)
    results = {"o": o, **{f"state.{key}": x for key, x in new._asdict().items()}}
    for key, grad in zip(names, grads, strict=True):
        results["grad." + key.removeprefix("in.")] = torch.zeros_like(leaves[key]) if grad is None else grad
    return results


def draw(
    name: str,
    batch: int = 2,
    tokens: int = 20,
    heads: int = 2,
    k_size: int = 5,
    v_size: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random arguments of an operator."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, tokens, heads, k_size), normal(batch, tokens, heads, k_size)
    v, gate = normal(batch, tokens, heads, v_size), normal(batch, tokens, heads)
    if name == "gated_delta":
        arguments = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
        arguments["log_decay"] = -0.2 * F.softplus(gate)
        arguments["beta"] = 2 * normal(batch, tokens, heads).sigmoid()
    else:
        arguments = {"q": F.elu(q) + 1, "k": F.elu(k) + 1, "v": v, "log_decay": -0.2 * F.softplus(gate)}
    return {key: x.to(dtype) for key, x in arguments.items()}


def as_given(name: str, arguments: dict[str, Tensor], seed: int = 1, state: Any = None) -> dict[str, Tensor]:
    """Arguments as a vector names them, with random cotangents for the output and the state."""
    generator = torch.Generator().manual_seed(seed)
    q, v = arguments["q"], arguments["v"]
    documents = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else q.shape[0]
    given = {f"in.{key}": x for key, x in arguments.items()}
    if state is not None:
        given.update({f"state_in.{key}": x for key, x in state._asdict().items()})
    shape = (documents, q.shape[2], q.shape[3], v.shape[3])
    given["cotangent.o"] = torch.randn(v.shape, generator=generator, dtype=torch.float64)
    given["cotangent.S"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "linear_attention":
        given["cotangent.z"] = torch.randn(shape[:3], generator=generator, dtype=torch.float64)
    return given
