"""The one place where a matrix product is called, FP8 or not; it counts what it really ran.

FP8 operands with one scale each are multiplied as their numbers, the scales are applied to the
FP32 accumulator. Without FP8 tensor cores the product runs in a wider format that holds every FP8
number exactly: BF16 with FP32 accumulation for BF16 work where the device is fast at it, FP32
otherwise. On a CPU there is one rounding to the output dtype, as on FP8 hardware; only the order of
accumulation differs. A GPU without FP8 tensor cores rounds twice in BF16 work.

Operands with a scale for each row or block are multiplied as their values. A power of two moves the
exponent alone, so the values stay exact in BF16; with other scales they are rounded to FP32 once.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path

import torch

from megafp8.precision.tensor import Fp8Tensor

Operand = torch.Tensor | Fp8Tensor


class GemmCounter:
    """FLOPs (2 per multiply-add) by (operand precision, place), counted at the call."""

    def __init__(self) -> None:
        self.flops: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, precision: str, place: str, flops: int) -> None:
        self.flops[precision, place] += flops

    def by_precision(self) -> dict[str, int]:
        totals: dict[str, int] = defaultdict(int)
        for (precision, _), flops in self.flops.items():
            totals[precision] += flops
        return dict(totals)

    def share(self, precision: str) -> float:
        """The share of all counted FLOPs; 0 when nothing was counted."""
        return self.by_precision().get(precision, 0) / max(1, sum(self.flops.values()))


@functools.cache
def cpu_is_fast_at_bf16() -> bool:
    """Whether this CPU has BF16 dot products (AVX512-BF16, AMX or Arm's BF16)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def wide_dtype(device: torch.device, work: torch.dtype) -> torch.dtype:
    """In which dtype FP8 numbers are multiplied where there are no FP8 tensor cores."""
    if work != torch.bfloat16 or (device.type == "cpu" and not cpu_is_fast_at_bf16()):
        return torch.float32
    return torch.bfloat16


def gemm(
    a: Operand,
    b: Operand,
    *,
    work: torch.dtype,
    counter: GemmCounter,
    place: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b (+ bias) for 2-d operands, both FP8 or both plain; returns `work` dtype."""
    if isinstance(a, Fp8Tensor) and isinstance(b, Fp8Tensor):
        precision = "fp8"
        wide = wide_dtype(a.payload.device, work)
        if a.block is None and b.block is None:
            dequant_scale: torch.Tensor | None = a.dequant_scale * b.dequant_scale
            a, b = a.numbers(wide), b.numbers(wide)
        else:
            dequant_scale = None
            wide = wide if a.is_power_2 and b.is_power_2 else torch.float32
            a, b = a.dequantize(wide), b.dequantize(wide)
            bias = None if bias is None else bias.to(wide)
    else:
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor), "mixed operands"
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[a.dtype]
        dequant_scale = None
    a = a.t() if transpose_a else a
    b = b.t() if transpose_b else b
    counter.add(precision, place, 2 * a.shape[0] * a.shape[1] * b.shape[1])
    if dequant_scale is None:
        return (torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)).to(work)
    return _scaled_product(a, b, dequant_scale, bias).to(work)


def _scaled_product(
    a: torch.Tensor, b: torch.Tensor, dequant_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """a @ b * dequant_scale (+ bias). On a CPU the scale enters before the one rounding."""
    if a.device.type != "cpu":
        product = torch.mm(a, b).float() * dequant_scale  # no wait for the device to read the scale
        return product if bias is None else product + bias
    if bias is None:
        empty = a.new_empty(()).expand(a.shape[0], b.shape[1])
        return torch.addmm(empty, a, b, beta=0, alpha=dequant_scale.item())
    return torch.addmm(bias.to(a.dtype), a, b, alpha=dequant_scale.item())
