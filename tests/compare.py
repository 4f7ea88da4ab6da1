"""How results are compared: one error, one floor, one calibrated tolerance."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max(1, max|b|); infinite where `a` is not finite."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if b.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    if not a.isfinite().all():
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


def floor(dtype: torch.dtype) -> float:
    """Rounding floor: eight units in the last place."""
    return 8 * torch.finfo(dtype).eps


def errors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """`error` by name; both must have the same names."""
    assert set(a) == set(b), f"{sorted(a)} and {sorted(b)}"
    return {name: error(a[name], b[name]) for name in b}


def too_large(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor], plain: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Entries of `found` further from `exact` than twice the plain path's error in `dtype` plus the rounding floor."""
    ours, theirs = errors(found, exact), errors(plain, exact)
    limits = {name: 2 * theirs[name] + floor(dtype) for name in ours}
    return {name: (ours[name], limits[name]) for name in ours if not ours[name] <= limits[name]}
