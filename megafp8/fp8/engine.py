"""Choose how FP8 runs on a device: what casts, and which products FP8 tensor cores run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fp8_numerics.gemm import EMULATED, Engine
from fp8_numerics.kernels import triton_launch
from fp8_numerics.scaled_mm import Layout, writes_fp32
from megafp8.specs.gpus import why_no_product
from megafp8.specs.precision import ModulePrecision
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe

LAYOUTS: tuple[Layout, ...] = ("tensor", "row", "block", "square", "mx", "nv")
FIRST_CUDA = {"mx": (12, 8), "nv": (12, 8), "block": (12, 9), "square": (12, 9)}
"""The first CUDA whose cuBLASLt takes such scales; torch checks it where it multiplies."""


def engine_of(device: torch.device) -> Engine:
    """Return the engine with everything that `device` supports."""
    if device.type != "cuda":
        return EMULATED
    return Engine(
        uses_triton=triton_launch.unavailable(device) is None,
        layouts=frozenset(name for name in LAYOUTS if unsupported(device, name) is None),
        fp32_results=frozenset(name for name in LAYOUTS if writes_fp32(device, name)),
    )


def unsupported(device: torch.device, layout: Layout = "tensor") -> str | None:
    """Return why the device has no FP8 product for these scales, or None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type}: FP8 tensor cores are used on NVIDIA GPUs only"
    known = None if layout == "other" else layout
    if (why := why_no_product(torch.cuda.get_device_capability(device), known)) is not None:
        return why
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    first = FIRST_CUDA.get(known or "", (0, 0))
    if cuda < first:
        return f"torch {torch.__version__}: such scales need CUDA {first[0]}.{first[1]}"
    return None


def slow_parts(device: torch.device, recipes: Iterable[ModulePrecision]) -> list[str]:
    """Return what of these recipes a GPU computes without its FP8 hardware, and why.

    The numbers are the same. On a CPU that is so for all recipes, and nothing is returned.
    """
    if device.type != "cuda":
        return []
    found = []
    for name in dict.fromkeys(recipes):
        layouts = () if name == HIGH_PRECISION else find_recipe(name).traits.layouts
        reasons = (unsupported(device, layout or "other") for layout in layouts)
        if (why := next((reason for reason in reasons if reason is not None), None)) is not None:
            found.append(f"{name}: products are emulated, no faster than high precision ({why})")
    if (why := triton_launch.unavailable(device)) is not None:
        found.append(f"casts to FP8 run as separate torch operations ({why})")
    return found
