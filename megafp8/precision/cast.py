"""Quantize to FP8 and back.

The rule, on every device and for FP32, BF16 and FP16 input (Transformer Engine's cast:
`cvt.rn.satfinite`): y = float32(x) * quant_scale in FP32; clamp to the largest finite magnitude, so
that infinities saturate; round to the nearest FP8 number, ties to even. A NaN stays a NaN. The amax
is max|x| of the unscaled input; a NaN anywhere makes it +inf, so that it survives a MAX reduction.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from megafp8.precision.formats import E4M3, Fp8Format
from megafp8.precision.kernels.compile import library

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Quantized(NamedTuple):
    """`payload` in an FP8 dtype; `grid`, if asked for, the same numbers in BF16; both x's shape."""

    payload: torch.Tensor
    grid: torch.Tensor | None


def quantize(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    with_grid: bool,
) -> Quantized:
    """Cast `x` (any shape) with a 0-d FP32 `quant_scale` on its device.

    `amax`, a 0-d FP32 tensor, is raised in place to max(amax, max|x|); None records nothing.
    """
    if x.device.type == "cpu" and (lib := library().lib) is not None:
        return _quantize_c(lib, x.contiguous(), quant_scale, fmt, amax, with_grid, sums=False)[0]
    return quantize_torch(x, quant_scale, fmt, amax=amax, with_grid=with_grid)


def quantize_and_sum(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    with_grid: bool,
) -> tuple[Quantized, torch.Tensor]:
    """`quantize` a matrix and add up its columns in the same pass: a bias gradient, FP32 [N]."""
    if x_MN.device.type == "cpu" and (lib := library().lib) is not None:
        return _quantize_c(lib, x_MN.contiguous(), quant_scale, fmt, amax, with_grid, sums=True)
    quantized = quantize_torch(x_MN, quant_scale, fmt, amax=amax, with_grid=with_grid)
    return quantized, x_MN.float().sum(0)


def decode(payload: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The numbers of an FP8 payload in BF16, exactly (every FP8 number is a BF16 number)."""
    if payload.device.type == "cpu" and (lib := library().lib) is not None:
        payload = payload.contiguous()
        grid = torch.empty(payload.shape, dtype=torch.bfloat16)
        lib.megafp8_decode(
            ctypes.c_void_p(payload.data_ptr()),
            ctypes.c_size_t(payload.numel()),
            0 if fmt is E4M3 else 1,
            ctypes.c_void_p(grid.data_ptr()),
            torch.get_num_threads(),
        )
        return grid
    return payload.to(torch.bfloat16)


def quantize_torch(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    with_grid: bool,
) -> Quantized:
    """The same bits by torch operations, for GPUs and machines without a compiler."""
    if amax is not None:
        amax.copy_(torch.maximum(amax, amax_of(x)))
    scaled = (x.float() * quant_scale).clamp_(-fmt.max, fmt.max)
    payload = scaled.to(fmt.dtype)
    return Quantized(payload, payload.to(torch.bfloat16) if with_grid else None)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """max|x| as a 0-d FP32 tensor: 0 for an empty tensor, +inf if there is a NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def amax_along(x_MN: torch.Tensor, dim: int) -> torch.Tensor:
    """max|x| along one dim of a matrix, kept as a dim of size 1: FP32; NaN gives +inf, none 0."""
    if x_MN.shape[dim] == 0:
        return x_MN.new_zeros((x_MN.shape[0], 1) if dim == 1 else (1, x_MN.shape[1])).float()
    amax = x_MN.abs().amax(dim=dim, keepdim=True).float()
    return amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def quantize_scaled(scaled: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The cast of what is scaled already, FP32; returns the payload."""
    if scaled.device.type == "cpu" and (lib := library().lib) is not None:
        one, scaled = torch.ones(()), scaled.contiguous()
        return _quantize_c(lib, scaled, one, fmt, None, with_grid=False, sums=False)[0].payload
    return scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _quantize_c(
    lib: ctypes.CDLL,
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    amax: torch.Tensor | None,
    with_grid: bool,
    *,
    sums: bool,
) -> tuple[Quantized, torch.Tensor]:
    payload = torch.empty(x.shape, dtype=fmt.dtype)
    grid = torch.empty(x.shape, dtype=torch.bfloat16) if with_grid else None
    column_sum = torch.empty(x.shape[-1:] if sums else (0,))
    sizes = [ctypes.c_size_t(size) for size in (x.shape if sums else (x.numel(),))]
    (lib.megafp8_quantize_and_sum if sums else lib.megafp8_quantize)(
        ctypes.c_void_p(x.data_ptr()),
        *sizes,
        _KINDS[x.dtype],
        0 if fmt is E4M3 else 1,
        ctypes.c_void_p(quant_scale.data_ptr()),
        ctypes.c_void_p(payload.data_ptr()),
        ctypes.c_void_p(None if grid is None else grid.data_ptr()),
        ctypes.c_void_p(None if amax is None else amax.data_ptr()),
        *([ctypes.c_void_p(column_sum.data_ptr())] if sums else []),
        torch.get_num_threads(),
    )
    return Quantized(payload, grid), column_sum
