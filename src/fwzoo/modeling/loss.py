"""The language-model loss without the logits of the whole batch: output head and cross-entropy, a piece of tokens at a time."""

from __future__ import annotations

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
    """What transformers' causal-LM loss of `head(hidden)` is, with the same gradients; backward recomputes the logits.

    The head is applied through its forward, so adapters on it, quantisation and hooks count. (torch 2.13's
    `linear_cross_entropy` takes a weight matrix in place of a module.)

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

    def summed(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), target, ignore_index=IGNORED_LABEL, reduction="sum")

    size = max(1, LOGITS_AT_ONCE // vocab_size)
    if flat.shape[0] <= size or not torch.is_grad_enabled():
        sums = [summed(x, target) for x, target in zip(flat.split(size), targets.split(size), strict=True)]
    else:
        pieces = zip(flat.split(size), targets.split(size), strict=True)
        sums = [checkpoint(summed, x, target, use_reentrant=False) for x, target in pieces]
    count = (targets != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(sums).sum() / (count.to(hidden.device) if isinstance(count, Tensor) else count)
