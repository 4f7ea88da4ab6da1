"""The small steps around an operator in one kernel equal the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compare import error, floor

pytestmark = pytest.mark.triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_steps(dtype: torch.dtype) -> None:
    from fwzoo.kernels import pointwise

    torch.manual_seed(0)
    x, gate, weight = (torch.randn(*shape).to(DEVICE, dtype) for shape in ((2, 3, 5, 36), (2, 3, 180), (36,)))
    wide, gates = x.double(), gate.double()
    normed = F.rms_norm(wide, (36,), eps=1e-2) * weight.double()
    pairs = [
        (pointwise.gated_norm(x, weight, 1e-2, None), normed),
        (pointwise.gated_norm(x, weight, 1e-2, gate), normed * F.silu(gates).view_as(normed)),
        (
            pointwise.swiglu(gate, x.flatten(-2).transpose(0, 1).contiguous().transpose(0, 1)),
            F.silu(gates) * wide.flatten(-2),
        ),
        (pointwise.scaled_sigmoid(gate, 2.0), 2 * gates.sigmoid()),
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape and error(found, expected) <= floor(dtype)
    wrong = pointwise.gated_norm(x, weight, 1e-6, gate)
    assert error(wrong, pairs[1][1]) > 1e-3 and pairs[3][0].dtype == torch.float32
