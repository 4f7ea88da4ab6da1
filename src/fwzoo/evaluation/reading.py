"""Reading long texts into a memory, piece by piece: what is held does not grow with the text where the model's state does not."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..modeling.cache import CACHE_KEY, FastWeightCache


@torch.no_grad()
def answers(model: Any, cache: FastWeightCache, questions: Tensor, values: Tensor) -> Tensor:
    """Whether the likeliest continuations are the values; the cache stays as it is.

    Args:
        cache: of B sequences. questions: int64 `[B, Q, K]`, each asked alone. values: `[B, Q, V]`.
    Returns: bool `[B, Q]`: all V tokens of a value are the likeliest after the question and the values before them.
    """
    asked = questions.shape[1]
    asking = copy.deepcopy(cache)
    asking.batch_repeat_interleave(asked)
    rows = torch.cat([questions, values[..., :-1]], 2).flatten(0, 1).to(model.device)
    logits = model(rows, use_cache=True, logits_to_keep=values.shape[2], **{CACHE_KEY: asking}).logits
    right = logits.argmax(-1).view_as(values) == values.to(logits.device)
    return right.all(-1)


class Reader:
    """Reads texts `[B, T]` in pieces into one memory, and says what every token cost.

    Attributes:
        cache: the memory. before: logits `[B, 1, vocabulary]` for the next token, None before the first.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = FastWeightCache(model.config)
        self.before: Tensor | None = None

    @torch.no_grad()
    def read(self, piece: Tensor) -> Tensor:
        """Nats of every token of the next piece `[B, T]`; nan for the first token of all, which nothing predicts."""
        piece = piece.to(self.model.device)
        logits = self.model(piece, use_cache=True, **{CACHE_KEY: self.cache}).logits.float()
        guesses = logits[:, :-1] if self.before is None else torch.cat([self.before, logits[:, :-1]], 1)
        targets = piece[:, 1:] if self.before is None else piece
        nats = F.cross_entropy(guesses.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        first, self.before = self.before is None, logits[:, -1:]
        return F.pad(nats, (1, 0), value=torch.nan) if first else nats
