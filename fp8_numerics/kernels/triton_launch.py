"""Say whether Triton's kernels can run here, and what each launch has to know about the device.

This module does not import the kernels, so `unavailable` answers on machines without Triton too.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager

import torch

from fp8_numerics.caches import why_unsafe
from fp8_numerics.formats import Fp8Format

CACHE = {"TRITON_CACHE_DIR": "triton"}  # the variable of Triton's folder of compiled code
# The first NVIDIA GPUs that every supported Triton lets convert FP32 to FP8 with one rounding. For
# those of 8.9, which can, Triton 3.6 and 3.7 cut numbers off to FP16 before.
FP8_CAPABILITY = (9, 0)


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter (TRITON_INTERPRET=1).

    The variable must be set before the kernels are imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device) -> str | None:
    """Return why the kernels cannot run on `device`, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not interpreting():
        return "on a CPU Triton's kernels run in its interpreter only (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels are not tested on {device.type}"
    return None if interpreting() else _unsafe_cache()


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on this GPU; for a CPU this is false, whatever interprets."""
    return device.type == "cuda" and unavailable(device) is None


@functools.cache
def _unsafe_cache() -> str | None:
    return why_unsafe(CACHE)


@functools.cache  # each launch asks
def casts_in_hardware(device: torch.device) -> bool:
    """Whether kernels let the device round to FP8 and BF16; otherwise they round with integers.

    Triton's interpreter cannot, since its casts to FP8 and BF16 do not round to nearest even.
    """
    if interpreting() or device.type != "cuda":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context whose current GPU is that of `tensor`; without a GPU it does nothing.

    Triton launches on the current GPU, wherever its arguments are. Training makes its GPU the
    current one, and autograd does so in backward passes; other callers may have left another one.
    """
    context: AbstractContextManager[None] = torch.cuda.device_of(tensor)
    return context


def as_bytes(payload: torch.Tensor) -> torch.Tensor:
    """Return the payload as kernels see it."""
    return payload.view(torch.uint8)


def empty_payload(*shape: int, fmt: Fp8Format, device: torch.device) -> torch.Tensor:
    """Allocate a payload of this shape and format."""
    return torch.empty(shape, dtype=fmt.dtype, device=device)


def amax_bits(amax: torch.Tensor | None, otherwise: torch.Tensor) -> torch.Tensor:
    """Return the amax's bits, which are ordered as the amaxes are, since no amax is negative.

    `otherwise` is any tensor of the device; it is returned where no amax is recorded.
    """
    return otherwise if amax is None else amax.view(torch.int32)


def check_matrix(name: str, x_MN: torch.Tensor) -> None:
    """Check that `x_MN` is a contiguous matrix of FP32, BF16 or FP16.

    Raises:
        ValueError: It is not; the message calls it `name`.
    """
    if x_MN.dim() != 2 or not x_MN.is_contiguous():
        raise ValueError(f"{name}: a contiguous matrix is needed, got {tuple(x_MN.shape)}")
    if x_MN.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: {x_MN.dtype} is none of float32, bfloat16, float16")
