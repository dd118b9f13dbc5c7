"""Measure how fast a device multiplies matrices, where no data sheet says it."""

from __future__ import annotations

import time

import torch

SECONDS = 0.1
"""About how long a measurement takes, after a first product that warms the device up."""
SIZES = (256, 512, 1024, 2048, 4096, 8192)
REPEATS = 3


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the 10^12 operations a second of a square product, the fastest of several.

    The product is the largest of `SIZES` with which `REPEATS` products take about `SECONDS`. It
    uses the threads that torch has at the time of the call. No random numbers are drawn.
    """
    size = SIZES[0]
    _seconds(size, device, dtype)  # libraries and threads start here
    rate = 2 * size**3 / _seconds(size, device, dtype)
    size = max(n for n in SIZES if n == SIZES[0] or REPEATS * 2 * n**3 / rate <= SECONDS)
    fastest = min(_seconds(size, device, dtype) for _ in range(REPEATS))
    return max(rate, 2 * size**3 / fastest) / 1e12


def _seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    _wait(device)
    began = time.perf_counter()
    torch.mm(a, a, out=out)
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
