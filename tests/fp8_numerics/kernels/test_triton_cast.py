"""Amax, cast, transposed copy and column sums in one pass, against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8_numerics.formats import FORMATS
from fp8_numerics.kernels.triton_cast import cast, transpose_payload
from tests.fp8_numerics.kernels.helpers import assert_payload, codes, floats, hard_matrix
from tests.spec.delayed import amax_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from numpy
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-20, 2.0**30])
def test_both_orientations_are_the_specification(
    device: torch.device, name: str, dtype: torch.dtype, scale: float
) -> None:
    x = hard_matrix(67, 131, dtype).to(device)
    amax = torch.zeros((), device=device)
    quant_scale = torch.tensor(scale, device=device)
    result = cast(x, quant_scale, FORMATS[name], amax=amax, with_columns=True)
    assert result.payload is not None and result.payload_t is not None
    assert_payload(result.payload, floats(x), np.float32(scale), name)
    assert np.array_equal(codes(result.payload_t), codes(result.payload).T)
    assert result.payload_t.is_contiguous()
    assert amax.item() == amax_of(floats(x)) == np.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 129), (3, 300), (200, 1)])
def test_amax_of_finite_values_and_odd_shapes(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape).to(dtype).to(device)
    amax = torch.zeros((), device=device)
    one = torch.ones((), device=device)
    result = cast(x, one, FORMATS["e4m3"], amax=amax, with_rows=False, with_columns=True)
    assert result.payload is None and result.payload_t is not None
    assert amax.item() == amax_of(floats(x))
    assert_payload(result.payload_t.t(), floats(x), np.float32(1), "e4m3")


def test_amax_is_raised_never_lowered_and_a_nan_is_infinite(device: torch.device) -> None:
    one, fmt = torch.ones((), device=device), FORMATS["e5m2"]
    amax = torch.tensor(5.0, device=device)
    cast(torch.full((2, 2), -3.0, device=device), one, fmt, amax=amax)
    assert amax.item() == 5
    cast(torch.full((2, 2), -7.0, device=device), one, fmt, amax=amax)
    assert amax.item() == 7
    cast(torch.full((2, 2), float("nan"), device=device), one, fmt, amax=amax)
    assert amax.item() == torch.inf


def test_column_sums(device: torch.device) -> None:
    """Within FP32's error of a sum, and equal in every run."""
    x = torch.randn(300, 150).bfloat16().to(device)
    one, fmt = torch.ones((), device=device), FORMATS["e5m2"]
    parts = [cast(x, one, fmt, with_sums=True).partial_sums for _ in range(2)]
    assert parts[0] is not None and parts[1] is not None
    assert torch.equal(parts[0], parts[1])
    total = parts[0].sum(0)
    exact, magnitude = x.double().sum(0), x.double().abs().sum(0)
    assert ((total - exact).abs() <= 300 * 2.0**-24 * magnitude).all()


def test_an_empty_matrix(device: torch.device) -> None:
    amax, one = torch.zeros((), device=device), torch.ones((), device=device)
    result = cast(torch.empty(0, 5, device=device), one, FORMATS["e4m3"], amax=amax, with_sums=True)
    assert result.payload is not None and result.payload.shape == (0, 5)
    sums = result.partial_sums
    assert sums is not None and torch.equal(sums.sum(0).cpu(), torch.zeros(5))
    assert amax.item() == 0


@pytest.mark.parametrize("shape", [(1, 1), (70, 200), (0, 3)])
def test_transposed_bytes(device: torch.device, shape: tuple[int, int]) -> None:
    payload = torch.randint(256, shape, dtype=torch.uint8).to(device).view(torch.float8_e5m2)
    transposed = transpose_payload(payload)
    assert np.array_equal(codes(transposed), codes(payload).T) and transposed.is_contiguous()


def test_what_is_no_contiguous_matrix_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        cast(torch.ones(4, 3, device=device).t(), torch.ones((), device=device), FORMATS["e4m3"])
