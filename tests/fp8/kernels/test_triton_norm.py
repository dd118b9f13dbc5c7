"""LayerNorm and RMSNorm with their cast, and their backward, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8_numerics.formats import FORMATS
from megafp8.fp8.kernels import triton_norm
from megafp8.fp8.kernels.triton_norm import norm_backward, norm_cast
from tests.fp8_numerics.kernels.helpers import assert_payload, codes, floats, hard_matrix
from tests.spec.delayed import amax_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EPSILON = 1e-5
pairs = pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),  # an FP32 residual stream
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)


def inputs(
    shape: tuple[int, int], dtype: torch.dtype, is_layernorm: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    rows, cols = shape
    x = torch.randn(rows, cols, generator=generator) * torch.logspace(-2, 2, rows)[:, None] + 0.3
    weight = 1 + 0.2 * torch.randn(cols, generator=generator)
    bias = 0.1 * torch.randn(cols, generator=generator) if is_layernorm else None
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    return x, weight, None if bias is None else bias.to(device, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, EPSILON)
    return F.layer_norm(x, weight.shape, weight, bias, EPSILON)


@pairs
@pytest.mark.parametrize("is_layernorm", [False, True])
@pytest.mark.parametrize("shape", [(67, 131), (3, 300), (1, 1)])
def test_norm_and_its_cast(
    device: torch.device,
    shape: tuple[int, int],
    is_layernorm: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    """Bound: one rounding to the output's dtype, and FP32's: means over D, three products."""
    x, weight, bias = inputs(shape, dtype, is_layernorm, device)
    amax, scale = torch.zeros((), device=device), torch.tensor(37.0, device=device)
    result = norm_cast(
        x, weight, bias, EPSILON, scale, FORMATS["e4m3"],
        out_dtype=out_dtype, amax=amax, with_columns=True, with_plain=True,
    )  # fmt: skip
    payload, payload_t, plain, *_ = result
    assert payload is not None and payload_t is not None and plain is not None
    expected = exact(x.double(), weight.double(), None if bias is None else bias.double())
    centre = x.double().abs().amax(1, keepdim=True) if is_layernorm else x.double().abs()
    rstd = (expected - (0 if bias is None else bias.double())).abs()
    spread = x.double().std(1, correction=0, keepdim=True) if is_layernorm else 1.0
    error = 16 * 2.0**-24 * (rstd + (centre / (spread + EPSILON**0.5) if is_layernorm else 0) + 1)
    bound = 1.01 * UNIT[out_dtype] * expected.abs() + error
    assert plain.dtype == out_dtype
    assert ((plain.double() - expected).abs() <= bound).all()
    assert_payload(payload, floats(plain), np.float32(37), "e4m3")
    assert np.array_equal(codes(payload_t), codes(payload).T)
    assert amax.item() == amax_of(floats(plain))
    alone = norm_cast(
        x, weight, bias, EPSILON, scale, FORMATS["e4m3"],
        out_dtype=out_dtype, with_rows=False, with_columns=True,
    )  # fmt: skip
    assert alone.payload is None and alone.payload_t is not None
    assert np.array_equal(codes(alone.payload_t), codes(payload_t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_layernorm", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("shape", [(67, 131), (1, 40)])
def test_backward(
    device: torch.device,
    shape: tuple[int, int],
    is_wide: bool,
    is_layernorm: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`is_wide`: by the kernels of rows that no program's registers hold."""
    if is_wide:
        monkeypatch.setattr(triton_norm, "WIDEST_ROW", 32)
        monkeypatch.setattr(triton_norm, "CHUNK", 64)
    x, weight, bias = inputs(shape, dtype, is_layernorm, device)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
    one = torch.ones((), device=device)
    statistics = norm_cast(
        x, weight, bias, EPSILON, one, FORMATS["e4m3"], out_dtype=dtype
    ).statistics
    grad_x, of_weight, of_bias = norm_backward(grad, x, weight, statistics)
    grad_weight = of_weight.sum(0)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    bias64 = torch.zeros(shape[1], dtype=torch.float64, device=device).requires_grad_()
    exact(x64, weight64, bias64 if is_layernorm else None).backward(grad.double())
    assert x64.grad is not None and weight64.grad is not None
    assert grad_x.dtype == dtype
    # Each row's gradient is a difference of terms as large as rstd * |g w|.
    size = (grad.double() * weight64).abs().amax(1, keepdim=True) * statistics.rstd[:, None]
    bound = 1.01 * UNIT[dtype] * x64.grad.abs() + 2.0**-18 * size
    assert ((grad_x.double() - x64.grad).abs() <= bound).all()
    torch.testing.assert_close(grad_weight.double(), weight64.grad, rtol=1e-4, atol=1e-4)
    if is_layernorm:
        assert bias64.grad is not None
        assert of_bias is not None
        torch.testing.assert_close(of_bias.sum(0).double(), bias64.grad, rtol=1e-5, atol=1e-5)
    again = norm_backward(grad, x, weight, statistics)
    assert torch.equal(again.weight_parts, of_weight)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bits, with one pattern for all NaNs."""
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
def test_sums_of_the_residual_stream(
    device: torch.device, is_wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward have the bits of a sum that is computed apart from the norm."""
    if is_wide:
        monkeypatch.setattr(triton_norm, "WIDEST_ROW", 32)
        monkeypatch.setattr(triton_norm, "CHUNK", 64)
    shape, one = (37, 70), torch.ones((), device=device)
    x, weight, bias = inputs(shape, dtype, True, device)
    addend = hard_matrix(*shape, torch.bfloat16).to(device)
    options = {"out_dtype": torch.bfloat16, "with_columns": True}
    args = (weight, bias, EPSILON, one, FORMATS["e4m3"])
    found = norm_cast(x, *args, addend_MD=addend, **options)
    total = x + addend
    assert found.total is not None and total.dtype == dtype
    assert torch.equal(bits_of(found.total), bits_of(total))
    apart = norm_cast(total, *args, **options)
    assert found.payload is not None and apart.payload is not None
    assert np.array_equal(codes(found.payload), codes(apart.payload))
    assert apart.total is None
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
    statistics = norm_cast(x, *args, **options).statistics
    alone = norm_backward(grad, x, weight, statistics)
    more = hard_matrix(*shape, dtype).to(device)
    both = norm_backward(grad, x, weight, statistics, more)
    assert torch.equal(bits_of(both.input), bits_of(alone.input + more))
    assert torch.equal(both.weight_parts, alone.weight_parts)


def test_an_empty_matrix(device: torch.device) -> None:
    x, weight, one = (torch.ones(size, device=device) for size in ((0, 8), (8,), ()))
    result = norm_cast(x, weight, None, EPSILON, one, FORMATS["e4m3"], out_dtype=torch.float32)
    assert result.payload is not None and result.payload.shape == (0, 8)
    grad_x, of_weight, _ = norm_backward(x, x, weight, result.statistics)
    assert grad_x.shape == (0, 8) and not of_weight.sum(0).any()
