"""Products with a factor are right, whatever torch's BLAS library does with the factor."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch

from fp8_numerics.addmm import factor, scaled_addmm, times_scales, torch_scales_products

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


def test_two_scales_are_applied_in_an_order_that_keeps_what_is_normal() -> None:
    """As GPUs apply them, which do not wait for their values. Where the scales' product is a normal
    number, it is the factor, as it always was; elsewhere each factor rounds once."""
    exponents = torch.randn(2, 500, generator=torch.Generator().manual_seed(1)) * 25
    product = torch.tensor([0.0, 2.0**-25, -1.5, 77.0, 2.0**40])
    for a, b in (10.0 ** exponents.clamp(-38.4, 35)).unbind(1):
        got, both = times_scales(product, (a, b)), a * b
        if torch.finfo(torch.float32).tiny <= both <= torch.finfo(torch.float32).max:
            assert torch.equal(got, product * both)
        exact = product.double() * factor((a, b))
        bound = 2.0**-22 * exact.abs() + 2.0**-149
        is_finite = exact.abs() + bound <= torch.finfo(torch.float32).max
        assert ((got.double() - exact).abs() <= bound)[is_finite].all()
        assert got[~is_finite].isinf().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_ordinary_factor_is_torch_s_own(dtype: torch.dtype) -> None:
    """The factor is given in FP64 and rounded to FP32 once, as the FP32 product of two scales is,
    so that no bit of ordinary runs depends on what the others need."""
    a, b = torch.randn(9, 30).to(dtype), torch.randn(30, 7).to(dtype)
    start = torch.randn(9, 7).to(dtype)
    for exponents in torch.randn(100, 2) * 5:
        x, y = (10.0 ** exponents.clamp(-15, 15)).unbind()
        if not torch_scales_products(dtype):
            pytest.skip("torch's own factor is wrong on this CPU")
        expected = torch.addmm(start, a, b, alpha=(x * y).item())
        assert torch.equal(scaled_addmm(start, a, b, factor((x, y))), expected)
