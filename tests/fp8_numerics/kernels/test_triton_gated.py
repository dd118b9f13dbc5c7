"""SwiGLU, both forms of GEGLU and their gradients against float64; their cast, bit for bit."""

from __future__ import annotations

from functools import partial
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
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(67, 131), (2, 128)])
def test_values_and_their_cast(
    device: torch.device,
    shape: tuple[int, int],
    kind: Literal["swiglu", "geglu", "geglu_tanh"],
    dtype: torch.dtype,
    backward: bool,
) -> None:
    """Once rounded to the dtype; FP32's own error below 2**-20 of the values' product."""
    rows, cols = shape
    x = (2 * torch.randn(rows, 2 * cols)).to(dtype).to(device)
    grad = torch.randn(rows, cols).to(dtype).to(device)
    amax, scale = torch.zeros((), device=device), torch.tensor(37.0, device=device)
    name = "e5m2" if backward else "e4m3"
    payload, payload_t, partial_sums, plain = cast(
        x, scale, FORMATS[name], activation=kind, grad_MN=grad if backward else None,
        amax=amax, with_columns=True, with_sums=True, with_plain=True,
    )  # fmt: skip
    assert payload is not None and payload_t is not None
    assert partial_sums is not None and plain is not None and plain.dtype == dtype
    x64 = x.double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    functions = {
        "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": partial(F.gelu, approximate="tanh")
    }  # fmt: skip
    expected = functions[kind](gate) * up
    if backward:
        (expected,) = torch.autograd.grad(expected, x64, grad.double())
    size = (x64.detach().abs().amax() + 1) ** 2 * (grad.double().abs().amax() + 1)
    unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    bound = unit * expected.abs() + 2.0**-21 * size
    assert plain.shape == expected.shape
    assert ((plain.double() - expected).abs() <= bound).all()
    assert_payload(payload, floats(plain), np.float32(37), name)
    assert np.array_equal(codes(payload_t), codes(payload).T)
    assert amax.item() == amax_of(floats(plain))
    assert torch.allclose(partial_sums.sum(0).double(), plain.double().sum(0), rtol=1e-5, atol=1e-4)


def test_an_empty_matrix(device: torch.device) -> None:
    one = torch.ones((), device=device)
    x = torch.empty(0, 8, device=device)
    result = cast(x, one, FORMATS["e4m3"], activation="swiglu", with_sums=True)
    assert result.payload is not None and result.payload.shape == (0, 4)
    assert result.partial_sums is not None and not result.partial_sums.sum(0).any()
