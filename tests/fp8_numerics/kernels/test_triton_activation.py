"""GELU and its gradient against float64; the cast of what was computed, bit for bit."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8_numerics.formats import FORMATS
from fp8_numerics.kernels.triton_cast import cast
from tests.fp8_numerics.kernels.helpers import assert_payload, codes, floats
from tests.spec.delayed import amax_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_their_cast(
    device: torch.device, kind: Literal["gelu", "gelu_tanh"], dtype: torch.dtype, backward: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    x = (3 * torch.randn(67, 131, generator=generator)).to(dtype).to(device)
    grad = torch.randn(67, 131, generator=generator).to(dtype).to(device)
    amax, scale = torch.zeros((), device=device), torch.tensor(37.0, device=device)
    name = "e5m2" if backward else "e4m3"
    result = cast(
        x, scale, FORMATS[name], activation=kind, grad_MN=grad if backward else None,
        amax=amax, with_columns=True, with_sums=True, with_plain=True,
    )  # fmt: skip
    payload, payload_t, partial_sums, plain = result
    assert payload is not None and payload_t is not None
    assert partial_sums is not None and plain is not None and plain.dtype == dtype
    x64 = x.double().requires_grad_()
    expected = F.gelu(x64, approximate="tanh" if kind == "gelu_tanh" else "none")
    if backward:
        (expected,) = torch.autograd.grad(expected, x64, grad.double())
    unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    size = grad.double().abs().clamp_min(1) if backward else 1.0  # a derivative's terms cancel
    assert ((plain.double() - expected).abs() <= unit * expected.abs() + 4e-6 * size).all()
    assert_payload(payload, floats(plain), np.float32(37), name)
    assert np.array_equal(codes(payload_t), codes(payload).T)
    assert amax.item() == amax_of(floats(plain))
    assert torch.allclose(partial_sums.sum(0).double(), plain.double().sum(0), rtol=1e-5, atol=1e-4)
