"""Products with a factor are right, whatever torch's BLAS library does with the factor."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch

from megafp8.hardware.addmm import scaled_addmm, torch_scales_products

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_this_cpu_scales_products(dtype: torch.dtype) -> None:
    """Otherwise products are right but slower, which someone should know."""
    torch_scales_products.cache_clear()
    if platform.machine() == "aarch64" and not torch_scales_products(dtype):
        pytest.skip("known of torch 2.13 on Arm: products are scaled afterwards")
    assert torch_scales_products(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("has_out", [False, True], ids=["new", "in place"])
def test_a_library_that_forgets_the_factor_is_found_and_not_used(
    dtype: torch.dtype, beta: int, has_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVPL did on an emulated Arm CPU: columns behind the last multiple of 32 were wrong."""
    in_truth = torch.addmm

    def forgets(*args: Any, alpha: float = 1.0, **options: Any) -> torch.Tensor:
        found = in_truth(*args, alpha=alpha, **options)
        found[:, found.shape[1] // 32 * 32 :] /= alpha
        return found

    monkeypatch.setattr(torch, "addmm", forgets)
    torch_scales_products.cache_clear()
    try:
        a, b = torch.randn(17, 9).to(dtype), torch.randn(9, 35).to(dtype)
        start = torch.randn(17, 35).to(dtype)
        if not beta:
            start.fill_(float("nan"))
        expected = 0.1 * (a.double() @ b.double()) + (start.double() if beta else 0)
        out = start.clone() if has_out else None
        got = scaled_addmm(start if out is None else out, a, b, 0.1, beta=beta, out=out)
        assert not torch_scales_products(dtype)
        assert got.dtype == dtype
        assert out is None or got is out
        # FP32 rounds nine sums, the factor, and the sum with the start; then the dtype rounds once.
        largest = (a.double().abs() @ b.double().abs()).max() * 0.1 + 2 * expected.abs().max()
        bound = 11 * torch.finfo(torch.float32).eps * largest
        bound = bound + torch.finfo(dtype).eps / 2 * expected.abs() + torch.finfo(dtype).tiny
        assert ((got.double() - expected).abs() <= bound).all()
    finally:
        torch_scales_products.cache_clear()
