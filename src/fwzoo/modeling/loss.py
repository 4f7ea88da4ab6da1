"""The language-model loss without the logits of the whole batch: output head and cross-entropy, a piece of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED_LABEL = -100
LOGITS_AT_ONCE = 1 << 24
"""Logits that exist at a time; more tokens of a larger vocabulary go through the head in more pieces."""


def head_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
) -> Tensor:
    """What transformers' causal-LM loss of `head(hidden)` is, with the same gradients.

    torch's own `linear_cross_entropy` where it fits; else the head's forward piece by piece, which backward recomputes.

    Args:
        head: hidden `[n, D]` to logits `[n, V]`.
        hidden: `[B, T, D]`.
        labels: int64 `[B, T]`, to be shifted here, or shift_labels, shifted already; -100 is ignored.
        vocab_size: V. num_items_in_batch: what to divide the sum by; None means the number of labels not ignored.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden.device)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if targets.shape[0] != flat.shape[0]:
        raise ValueError(f"shift_labels has shape {list(shift_labels.shape)}; it must be {list(hidden.shape[:2])}")

    count = (targets != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(hidden.device)
    if _fits_torch(head, hidden):
        options = {"ignore_index": IGNORED_LABEL, "options": nn.LinearCrossEntropyOptions()}
        return F.linear_cross_entropy(flat, head.weight, targets, reduction="sum", **options) / count

    def summed(call: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(call(x).float(), target, ignore_index=IGNORED_LABEL, reduction="sum")

    size = max(1, LOGITS_AT_ONCE // vocab_size)
    first, *rest = zip(flat.split(size), targets.split(size), strict=True)
    # The hooks of a head that FSDP2 shards gather its weight, and expect one call a pass; it then stays gathered.
    call = head.forward if hasattr(head, "set_reshard_after_forward") else head
    sums = [summed(head, *first)]
    for piece in rest:
        sums.append(checkpoint(summed, call, *piece, use_reentrant=False))
    return torch.stack(sums).sum() / count


def _fits_torch(head: nn.Module, hidden: Tensor) -> bool:
    """Whether torch's loss computes what the head's forward does: a plain float32 matrix, torch 2.13 or newer.

    In 16 bits it would round the loss itself. It does not know autocast, and nothing that is not the weight: adapters,
    quantisation, hooks.
    """
    return (
        hasattr(F, "linear_cross_entropy")
        and type(head) is nn.Linear
        and type(head.weight) is nn.Parameter
        and head.bias is None
        and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))
        and hidden.dtype == head.weight.dtype == torch.float32
        and not torch.is_autocast_enabled(hidden.device.type)
    )
