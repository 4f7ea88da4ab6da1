"""FLOPs of LaCT's memory, one head."""

from __future__ import annotations

from ..costs import chunks
from .rules import NEWTON_SCHULZ, Options


def lact_flops(options: Options, tokens: int, size: int, hidden: int) -> int:
    """A call of `tokens` tokens with keys of `size` and `hidden` units: every token reads, every full chunk updates."""
    tile = min(options.chunk, tokens)
    read = chunks(tokens, tile) * tile * 6 * size * hidden
    update = options.chunk * 12 * size * hidden
    if options.muon:
        short, long = sorted((size, hidden))
        update += 3 * len(NEWTON_SCHULZ) * (4 * short**2 * long + 2 * short**3)
    return read + tokens // options.chunk * update
