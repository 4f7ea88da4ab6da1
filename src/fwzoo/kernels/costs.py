"""What an operator costs, by formula: each operator's own is next to it, in its `cost.py`.

FLOPs are those of matrix products, two for a multiply-add, as `torch.utils.flop_counter.FlopCounterMode` counts them: the
whole rectangle of attention scores, causal or not, and the tiles of a chunk form with their free slots. Element-wise work,
triangular solves and sums of table rows are not counted.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """What a module needs beside its linear maps, for one sequence.

    Attributes:
        flops: of a call that reads all its T tokens, nothing before them.
        fast: fast parameters: numbers that are written while the module reads.
        state_bytes: what the cache holds of it after T tokens.
        moved: bytes of state that one more token reads and writes.
        unread: bytes of its learned parameters that a token does not read.
    """

    flops: int = 0
    fast: int = 0
    state_bytes: int = 0
    moved: int = 0
    unread: int = 0


def attention_flops(queries: int, keys: int, key_size: int, value_size: int) -> int:
    """Scores and weighted sum of one head."""
    return 2 * queries * keys * (key_size + value_size)


def chunks(tokens: int, size: int) -> int:
    """Number of chunks, the last one perhaps not full."""
    return -(-tokens // size)
