"""The fused convolution, SiLU and norm equal the plain path: outputs, new past and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compare import error, errors, floor
from fwzoo.kernels.contract import overwriting_states
from fwzoo.modeling.blocks import ShortConvolution, head_norm

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    fused: bool, mask: Tensor | None, bounds: list[int] | None, norm: str | None, started: bool, taps: int
) -> dict[str, Tensor]:
    """Three parts, the last one without a norm, with heads of 20 channels, or with 3 taps of 20, 20 and 24."""
    torch.manual_seed(0)
    sizes, norms = (20, 20, 24 if taps == 3 else 20), (norm, norm, None)
    conv = ShortConvolution(2 * sum(sizes), taps).to(DEVICE)
    torch.nn.init.normal_(conv.weight)
    batch, tokens = (2, 70) if bounds is None else (1, bounds[-1])
    documents = batch if bounds is None else len(bounds) - 1
    parts = [torch.randn(batch, tokens, 2 * size).to(DEVICE).requires_grad_() for size in sizes]
    past = torch.randn(documents, taps - 1, 2 * sum(sizes)).to(DEVICE).requires_grad_() if started else None
    cut = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    if fused:
        heads, new = conv.fused(parts, sizes, norms, 1e-6, past, mask, cut)
    else:
        y, new = conv(torch.cat(parts, -1), past, mask, cut)
        split = y.split([2 * size for size in sizes], -1)
        heads = [head_norm(x.unflatten(-1, (2, -1)), n, 1e-6) for x, n in zip(split, norms, strict=True)]
    loss = sum((x * torch.randn(x.shape).to(DEVICE)).sum() for x in [*heads, new])
    leaves = [*parts, conv.weight, *([past] if past is not None else [])]
    grads = torch.autograd.grad(loss, leaves)
    return {str(i): x for i, x in enumerate([*heads, new, *grads])}


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
@pytest.mark.parametrize(
    ("bounds", "holes", "started", "taps"),
    [(None, False, True, 4), (None, True, False, 3), ([0, 3, 3, 80, 82], False, True, 4), ([0, 30, 70], True, True, 4)],
)
def test_equals_the_plain_path(
    norm: str | None, bounds: list[int] | None, holes: bool, started: bool, taps: int
) -> None:
    mask = None
    if holes:
        mask = (
            torch.rand((2, 70) if bounds is None else (1, bounds[-1]), generator=torch.Generator().manual_seed(1)) > 0.3
        )
        mask = mask.to(DEVICE)
    found, expected = (run(fused, mask, bounds, norm, started, taps) for fused in (True, False))
    assert max(errors(found, expected).values()) <= 2 * floor(torch.float32)
    if norm == "rms":  # the other norm must be told apart
        wrong = run(True, mask, bounds, "l2", started, taps)
        assert errors(wrong, expected)["0"] > 1e-2


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("taps", [1, 4])
def test_one_token_equals_the_plain_path(norm: str | None, masked: bool, taps: int) -> None:
    torch.manual_seed(0)
    sizes, norms = (20, 20, 24), (norm, norm, None)
    conv = ShortConvolution(2 * sum(sizes), taps).to(DEVICE)
    torch.nn.init.normal_(conv.weight)
    parts = [torch.randn(2, 1, 2 * size).to(DEVICE) for size in sizes]
    past = torch.randn(2, taps - 1, 2 * sum(sizes)).to(DEVICE)
    mask = None
    if masked:
        mask = torch.tensor([[False], [True]], device=DEVICE)
        for x in parts:
            x[0] = float("nan")
    with torch.no_grad():
        y, new = conv(torch.cat(parts, -1), past, mask, None)
        split = y.split([2 * size for size in sizes], -1)
        expected = [head_norm(x.unflatten(-1, (2, -1)), n, 1e-6) for x, n in zip(split, norms, strict=True)]
        heads, kept = conv.fused(parts, sizes, norms, 1e-6, past.clone(), mask, None)
        with overwriting_states():
            own = past.clone()
            again, in_place = conv.fused(parts, sizes, norms, 1e-6, own, mask, None)
    assert in_place.data_ptr() == own.data_ptr()
    for found, last in ((heads, kept), (again, in_place)):
        pairs = zip([*found, last], [*expected, new], strict=True)
        assert max(error(a, b) for a, b in pairs) <= floor(torch.float32)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    from fwzoo.kernels.convolution import convolution
    from fwzoo.kernels.ranks import make_ranks

    channels = 2048
    x = torch.randn(1, 2**31 // channels + 500, channels, device="cuda", dtype=torch.bfloat16)
    weight, end = torch.randn(channels, 4, device="cuda"), x[:, -300:].clone()
    with torch.no_grad():
        (y,) = convolution([x], weight, None, make_ranks(x, None, None), head=64, norms=[None])
        (expected,) = convolution([end], weight, None, make_ranks(end, None, None), head=64, norms=[None])
    assert torch.equal(y[:, -200:], expected[:, -200:])
