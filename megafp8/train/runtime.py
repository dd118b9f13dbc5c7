"""Process-wide settings, made once at start: allocator, matrix precision."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc


def keep_freed_memory() -> bool:
    """Tell glibc to keep large freed blocks instead of giving them back to the kernel.

    Every large tensor would otherwise be mapped and page-faulted anew: half of a CPU training step.
    Returns whether it applies (Linux with glibc).
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 << 20))
    return all(libc.mallopt(option, value) == 1 for option, value in settings)


def prepare_process(device: torch.device, *, fp32: bool, deterministic: bool = False) -> None:
    """Settings that every run wants on this device."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    if device.type == "cpu":
        keep_freed_memory()
        if fp32:
            choose_float32_precision()


def choose_float32_precision() -> str:
    """The fastest of torch's FP32 matmul settings that is still FP32: relative error below 1e-6.

    "medium" is faster on some CPUs at FP32's own error; on CPUs with AMX it means BF16, and a probe
    tells them apart.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 512, generator=generator)
    b = torch.randn(512, 256, generator=generator)
    exact = a.double() @ b.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("medium")
    error = float((a @ b - exact).norm() / exact.norm())
    if error >= 1e-6:
        torch.set_float32_matmul_precision("highest")
        return "highest"
    return "medium"
