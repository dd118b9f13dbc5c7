"""Multiply matrices with a factor on CPUs, also where torch's BLAS library applies it wrongly."""

from __future__ import annotations

from functools import cache

import torch


def scaled_addmm(
    start_MN: torch.Tensor,
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    alpha: float,
    *,
    beta: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return beta * start + alpha * (a @ b) on a CPU, [M, N], as `torch.addmm` does.

    Where torch's own factor is wrong, an FP32 product is scaled after it was rounded, and the
    result is rounded to the operands' dtype, which needs memory. With `beta` 0 the start is not
    read.
    """
    if alpha == 1.0 or a_MK.is_meta or torch_scales_products(a_MK.dtype):
        return torch.addmm(start_MN, a_MK, b_KN, beta=beta, alpha=alpha, out=out)
    product = torch.mm(a_MK.float(), b_KN.float()).mul_(alpha)
    if beta:
        product.add_(start_MN, alpha=beta)
    return product.to(a_MK.dtype) if out is None else out.copy_(product)


@cache
def torch_scales_products(dtype: torch.dtype) -> bool:
    """Whether `torch.addmm` applies its factor to every element of a product on this CPU.

    The BLAS library of torch 2.13 for Arm (NVPL) did not, on emulated CPUs with SVE: in the last
    columns of FP32 products, and in BF16 products whose inner dimension is odd. Sums of small whole
    numbers are exact, so right products are equal.
    """
    return all(
        torch.equal(torch.addmm(zeros, a, b, alpha=0.5), (a.double() @ b.double() / 2).to(dtype))
        for rows, inner, columns in ((16, 16, 67), (65, 33, 129))
        for zeros in [torch.zeros(rows, columns, dtype=dtype, device="cpu")]
        for a in _both_orders(rows, inner, dtype)
        for b in _both_orders(inner, columns, dtype)
    )


def _both_orders(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -6 to 6 with rows, and with columns, in contiguous memory."""
    numbers = (torch.arange(rows * columns, device="cpu").remainder(13) - 6).to(dtype)
    return numbers.view(rows, columns), numbers.view(columns, rows).t()
