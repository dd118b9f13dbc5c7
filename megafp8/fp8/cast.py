"""Quantize to FP8 and back.

The rule, on every device and for FP32, BF16 and FP16 input, is Transformer Engine's cast
(`cvt.rn.satfinite`): y = float32(x) * quant_scale in FP32; clamp to the largest finite magnitude,
so that infinities saturate; round to the nearest FP8 number, ties to even. A NaN stays a NaN. The
amax is max|x| of the unscaled input; a NaN anywhere makes it +inf, so that it survives a MAX
reduction.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from megafp8.fp8.engine import runs_triton
from megafp8.fp8.formats import E4M3, Fp8Format
from megafp8.fp8.kernels.compile import KINDS, library

_KINDS = {dtype: number for number, dtype in enumerate(KINDS)}
_NO_GRID = len(KINDS)


class Quantized(NamedTuple):
    """Hold the result of a cast; both tensors have the shape of the input.

    `payload` has an FP8 dtype. `grid`, if it was asked for, has exactly the same numbers in FP32 or
    BF16, not yet divided by the scale.
    """

    payload: torch.Tensor
    grid: torch.Tensor | None


def quantize(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype | None,
) -> Quantized:
    """Cast `x` (any shape) with a 0-d FP32 `quant_scale` on its device.

    `amax`, a 0-d FP32 tensor, is raised in place to max(amax, max|x|); None records nothing.
    `grid_dtype` is FP32 or BF16, which both hold every FP8 number; None makes no grid.
    """
    if x.device.type == "cpu" and (lib := library().lib) is not None:
        return _quantize_c(lib, x.contiguous(), quant_scale, fmt, amax, grid_dtype)
    return quantize_torch(x, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)


def quantize_and_sum(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype,
) -> tuple[Quantized, torch.Tensor]:
    """Run `quantize` on a matrix and add up its columns in the same pass.

    The sum, FP32 [N], is the gradient of a bias.
    """
    if x_MN.device.type == "cpu" and (lib := library().lib) is not None:
        total_N = torch.empty(x_MN.shape[1:])
        x_MN = x_MN.contiguous()
        return _quantize_c(lib, x_MN, quant_scale, fmt, amax, grid_dtype, total_N), total_N
    quantized = quantize_torch(x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
    return quantized, x_MN.float().sum(0)


def decode(payload: torch.Tensor, fmt: Fp8Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of an FP8 payload in FP32 or BF16; both hold every FP8 number exactly."""
    assert dtype in (torch.float32, torch.bfloat16), dtype
    if payload.device.type == "cpu" and (lib := library().lib) is not None:
        payload = payload.contiguous()
        grid = torch.empty(payload.shape, dtype=dtype)
        lib.megafp8_decode(
            _address(payload),
            ctypes.c_size_t(payload.numel()),
            0 if fmt.dtype == E4M3.dtype else 1,
            _address(grid),
            _KINDS[dtype],
            torch.get_num_threads(),
        )
        return grid
    return payload.to(dtype)


def quantize_torch(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype | None,
) -> Quantized:
    """Run `quantize` with torch operations: the same bits, on GPUs and without a compiler."""
    if amax is not None:
        amax.copy_(torch.maximum(amax, amax_of(x)))
    scaled = (x.float() * quant_scale).clamp_(-fmt.max, fmt.max)
    payload = scaled.to(fmt.dtype)
    return Quantized(payload, None if grid_dtype is None else payload.to(grid_dtype))


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| as a 0-d FP32 tensor: 0 for an empty tensor, +inf if there is a NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def raise_amax(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise `amax`, 0-d FP32, in place to max(amax, `amax_of(x)`); by one kernel on GPUs."""
    if runs_triton(x.device):
        from megafp8.fp8.kernels.triton_current import raise_amax_of

        raise_amax_of(amax, x.contiguous())
    else:
        amax.copy_(torch.maximum(amax, amax_of(x)))


def amax_along(x_MN: torch.Tensor, dim: int) -> torch.Tensor:
    """Return max|x| along one dim of a matrix, in FP32; that dim is kept with size 1.

    A NaN gives +inf, and a dim of size 0 gives 0.
    """
    if x_MN.shape[dim] == 0:
        return x_MN.new_zeros((x_MN.shape[0], 1) if dim == 1 else (1, x_MN.shape[1])).float()
    amax = x_MN.abs().amax(dim=dim, keepdim=True).float()
    return amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def quantize_scaled(scaled: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return the payload of an FP32 tensor that is scaled already."""
    if scaled.device.type == "cpu" and (lib := library().lib) is not None:
        one, scaled = torch.ones(()), scaled.contiguous()
        return _quantize_c(lib, scaled, one, fmt, None, None).payload
    return scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def _quantize_c(
    lib: ctypes.CDLL,
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype | None,
    column_sum: torch.Tensor | None = None,
) -> Quantized:
    """Run the cast in C; `column_sum`, if given, is written, and `x` is then a matrix."""
    payload, grid = torch.empty(x.shape, dtype=fmt.dtype), None
    if grid_dtype is not None:  # the kernels write BF16 for BF16 tensors alone
        is_bf16 = grid_dtype == x.dtype == torch.bfloat16
        grid = torch.empty(x.shape, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    sums = column_sum is not None
    sizes = [ctypes.c_size_t(size) for size in (x.shape if sums else (x.numel(),))]
    (lib.megafp8_quantize_and_sum if sums else lib.megafp8_quantize)(
        _address(x),
        *sizes,
        _KINDS[x.dtype],
        0 if fmt is E4M3 else 1,
        _address(quant_scale),
        _address(payload),
        _address(grid),
        _NO_GRID if grid is None else _KINDS[grid.dtype],
        _address(amax),
        *([_address(column_sum)] if sums else []),
        torch.get_num_threads(),
    )
    return Quantized(payload, None if grid is None or grid_dtype is None else grid.to(grid_dtype))


def _address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
