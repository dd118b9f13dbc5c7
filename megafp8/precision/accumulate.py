"""Add a gradient into its FP32 sum."""

from __future__ import annotations

import ctypes

import torch

from megafp8.precision.kernels.compile import library


def accumulate(total: torch.Tensor, grad: torch.Tensor, *, is_first: bool) -> None:
    """total += grad, or total = grad if it is the first; `total` FP32, `grad` FP32, BF16 or FP16.

    torch adds BF16 to FP32 in two passes over memory, the compiled kernel in one; the same bits.
    """
    if is_first:
        total.copy_(grad)
    elif _fits_kernel(total, grad) and (lib := library().lib) is not None:
        lib.megafp8_accumulate(
            ctypes.c_void_p(total.data_ptr()),
            ctypes.c_void_p(grad.data_ptr()),
            ctypes.c_size_t(total.numel()),
            torch.get_num_threads(),
        )
    else:
        total.add_(grad)


def _fits_kernel(total: torch.Tensor, grad: torch.Tensor) -> bool:
    on_cpu = total.device.type == "cpu" and grad.dtype == torch.bfloat16
    return on_cpu and total.is_contiguous() and grad.is_contiguous()
