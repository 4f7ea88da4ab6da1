"""What a model costs, layer by layer, by formula: parameters, FLOPs a token, bytes moved a token, bytes of state.

Every module tells its own cost (its method `cost`, see `fwzoo.kernels.costs.Cost`); linear maps are added here. The
figures are those of a forward pass of one sequence; training costs about three times as many FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..kernels.costs import Cost

LINES = ("flops", "moved", "state_bytes")


@dataclass(frozen=True)
class LayerCost:
    """One layer, or the embeddings and the head (layer None), in a call of T tokens.

    Attributes:
        layer: its number. mixer, feed_forward: what is in it.
        slow: learned parameters. fast: parameters that are written while it reads.
        flops: of matrix products, a token: those of the whole call over T.
        moved: bytes that the next token reads and writes: weights and state.
        state_bytes: of the cache, after the T tokens.
    """

    layer: int | None
    mixer: str
    feed_forward: str
    slow: int
    fast: int
    flops: float
    moved: int
    state_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """What a model costs at a context of `tokens` tokens: its `layers`, the embeddings and the head last."""

    tokens: int
    layers: list[LayerCost]

    @property
    def total(self) -> LayerCost:
        """The sum over the layers."""
        numbers = ("slow", "fast", *LINES)
        return LayerCost(None, "", "", **{name: sum(getattr(x, name) for x in self.layers) for name in numbers})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "layers": [asdict(x) for x in self.layers],
            "total": {name: getattr(self.total, name) for name in ("slow", "fast", *LINES)},
        }


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration without storage for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def model_cost(model: Any, tokens: int) -> ModelCost:
    """The cost of every layer of `model` for `tokens` tokens (of one sequence, at least 5, level "chunk").

    Example:
        >>> print(model_cost(model, 4096).total.flops)
    """
    if tokens < 5:
        raise ValueError(f"tokens is {tokens}; it must be at least 5, beyond the token loop of short calls")
    config, rows = model.config, []
    for i, block in enumerate(model.get_decoder().layers):
        cost = [0.0] * 3
        fast = 0
        for module in (block.mixer, block.feed_forward, block.memory):
            if module is None:
                continue
            own = module.cost(tokens) if hasattr(module, "cost") else Cost()
            weights = sum(x.numel() * x.element_size() for x in module.parameters())
            cost[0] += own.flops / tokens + linear_flops(module)
            cost[1] += own.moved + weights - own.unread
            cost[2] += own.state_bytes
            fast += own.fast
        slow = sum(x.numel() for x in block.parameters())
        rows.append(
            LayerCost(i, config.mixers[i], config.feed_forwards[i], slow, fast, cost[0], int(cost[1]), int(cost[2]))
        )
    head = model.lm_head.weight
    slow = sum(x.numel() for x in model.parameters()) - sum(x.slow for x in rows)
    rows.append(LayerCost(None, "", "", slow, 0, linear_flops(model.lm_head), head.numel() * head.element_size(), 0))
    return ModelCost(tokens, rows)


def linear_flops(module: nn.Module) -> int:
    """FLOPs a token of the linear maps of a module."""
    return sum(2 * x.in_features * x.out_features for x in module.modules() if isinstance(x, nn.Linear))


@torch.no_grad()
def achieved_flops(model: Any, tokens: int, repeats: int = 5) -> float:
    """FLOP/s of a forward pass of `tokens` tokens: the formula's FLOPs over the median time of `repeats` passes."""
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=model.device)
    seconds = []
    for _ in range(repeats + 2):  # the first two warm up
        _wait(model.device)
        began = time.perf_counter()
        model(ids, use_cache=False)
        _wait(model.device)
        seconds.append(time.perf_counter() - began)
    return model_cost(model, tokens).total.flops * tokens / sorted(seconds[2:])[repeats // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plot_costs(path: Any, curves: dict[str, Sequence[ModelCost]]) -> bool:
    """Draw the totals against the context length, one panel a figure; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    titles = ("FLOPs a token, forward", "bytes moved by the next token", "bytes of state a sequence")
    for axes, line, title in zip(figure.subplots(1, 3), LINES, titles, strict=True):
        for name, costs in curves.items():
            axes.loglog([x.tokens for x in costs], [getattr(x.total, line) for x in costs], marker=".", label=name)
        axes.set(xlabel="context, tokens", title=title)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True
