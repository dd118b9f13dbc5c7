"""Multiply matrices with a factor, also where torch's BLAS library applies it wrongly.

Here a product's factor is a pair of FP32 scales, those of its two operands, because their product
can be subnormal (few bits) or infinite although the scaled result is a normal number.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8_numerics import bf16, cpu
from fp8_numerics.meta import device_kind

Scales = tuple[torch.Tensor, torch.Tensor]  # each 0-d FP32, positive
FP32 = torch.finfo(torch.float32)
FACTORS = 2.0**-110, 2.0**111
"""The factors for which `torch.addmm` is exact enough: MKL applies one to an operand, and times an
FP8 number (2**-16 at the least, 57344 at the most) it must stay a normal FP32 number."""


def factor(scales: Scales) -> float:
    """Return the product of two scales as the host reads it; it has no rounding error.

    On the meta device it is 1.
    """
    return 1.0 if scales[0].is_meta else float(scales[0].item() * scales[1].item())


def times_scales(product: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return an FP32 product times both scales, without reading them on the host.

    They are multiplied with each other first where that is a normal number; otherwise the larger
    one is applied before the smaller one.
    """
    both_scales = scales[0] * scales[1]
    is_normal = both_scales.clamp(FP32.tiny, FP32.max) == both_scales
    first = torch.where(is_normal, both_scales, torch.maximum(*scales))
    return (product * first).mul_(torch.where(is_normal, 1.0, torch.minimum(*scales)))


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
    result is rounded to the operands' dtype, which needs memory. A factor outside of `FACTORS` is
    applied in FP64. With `beta` 0 the start is not read, and may have any shape that broadcasts.
    """
    is_moderate = FACTORS[0] <= alpha <= FACTORS[1]
    if a_MK.is_meta or alpha == 1.0 or (is_moderate and torch_scales_products(a_MK.dtype)):
        return torch.addmm(start_MN, a_MK, b_KN, beta=beta, alpha=alpha, out=out)
    product = torch.mm(a_MK.float(), b_KN.float())
    product = (product if is_moderate else product.double()).mul_(alpha)
    if beta:
        product.add_(start_MN, alpha=beta)
    return product.to(a_MK.dtype) if out is None else out.copy_(product)


def mm_into(
    total_MN: torch.Tensor,
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    *,
    is_first: bool,
    scales: Scales | None = None,
) -> torch.Tensor | None:
    """Return a @ b, times both scales, in FP32, not rounded to the operands' dtype.

    None says that torch has no such product.
    The result is `total_MN` (FP32) itself if the product was added to it or, with `is_first`,
    overwrote it; otherwise the caller has to do that. On a CPU the product adds its terms to the
    sum. CPUs with BF16 instructions have such products, but torch 2.13 does not offer them.
    """
    if a_MK.dtype == torch.bfloat16 and not cpu.FAST_AT_BF16 and bf16.is_widened(a_MK):
        a_MK, b_KN = a_MK.float(), b_KN.float()
    on_cpu = a_MK.is_cpu or device_kind(a_MK.device) == "cpu"
    if on_cpu and a_MK.dtype == torch.float32:
        beta = 0 if is_first else 1
        if scales is None:
            return torch.addmm(total_MN, a_MK, b_KN, beta=beta, out=total_MN)
        return scaled_addmm(total_MN, a_MK, b_KN, factor(scales), beta=beta, out=total_MN)
    out_MN = total_MN if is_first else None
    if a_MK.dtype == torch.float32:
        product = torch.mm(a_MK, b_KN, out=out_MN)
    elif on_cpu or a_MK.dtype not in (torch.bfloat16, torch.float16):
        return None
    elif out_MN is None:
        product = torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    else:
        product = torch.mm(a_MK, b_KN, out_dtype=torch.float32, out=out_MN)
    return product if scales is None else times_scales(product, scales)


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
