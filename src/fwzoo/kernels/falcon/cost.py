"""FLOPs of the chunk forms, one head. Axis letters as in `chunk.py`."""

from __future__ import annotations

from ..costs import chunks
from .chunk import chunk_size
from .rules import Rule


def falcon_flops(rule: Rule, window: int, energy: bool, tokens: int, key_size: int, value_size: int) -> int:
    """A call of `tokens` tokens of one head; window 1 for rules without one; energy: whether it enters at all."""
    size = chunk_size(rule, window, tokens)
    if rule.regression:
        each = regression_columns_flops if rule.per_column else regression_flops
    else:
        each = inner_product_columns_flops if rule.per_column else inner_product_flops
    flops = each(size, key_size, value_size, window)
    if rule.regression and rule.sliding and energy:
        flops += 2 * size * window**2 * key_size  # Gram matrices of the windows
    return chunks(tokens, size) * flops


def scan_flops(regression: bool, tokens: int, key_size: int, value_size: int) -> int:
    """A call of one head through `scan_documents`: chunks of 64, or fewer for short calls."""
    size = 64
    while size > 16 and size * 2 > tokens:
        size //= 2
    each = regression_flops if regression else inner_product_flops
    return chunks(tokens, size) * each(size, key_size, value_size)


def inner_product_flops(C: int, K: int, V: int, W: int = 1) -> int:
    """Rules 1A and 3A: scores and their sum over the pairs, what is written, what is read of S."""
    E = C + W - 1
    return 2 * (C * E * (K + V) + E * K * V + C * K * V)


def regression_flops(C: int, K: int, V: int, W: int = 1) -> int:
    """Rules 1 and 3: Gram matrix, scores, sums, and the residuals' share of S before and after the chunk."""
    E = C + W - 1
    flops = 2 * (E * E * K + C * E * K)
    flops += 2 * (2 * E * K * V + C * W * K * V + C * K * V + C * C * W * V)
    if W > 1:  # forward substitution over the tokens of the chunk, token by token
        flops += 2 * (K + V) * ((C - 1) * W * W + W * C * (C - 1) // 2)
    return flops


def inner_product_columns_flops(C: int, K: int, V: int, W: int = 1) -> int:
    """Rule 2A: scores, their sum by halving, what is written, what is read of S."""
    return 2 * C * C * K + C * (C - 1) * V + 4 * C * K * V


def regression_columns_flops(C: int, K: int, V: int, W: int = 1) -> int:
    """Rule 2: rule 2A, the Gram matrix and what the chunk's keys read of S."""
    return inner_product_columns_flops(C, K, V) + 2 * C * C * K + 2 * C * K * V
