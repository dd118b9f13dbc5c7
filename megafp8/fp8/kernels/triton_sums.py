"""Add to tensors that are stored in low precision, and sum their squares (FP8-LM's gradients).

A sum takes two kernels, since its scale follows from the amax of the whole sum: the first one finds
the amax, and the second one computes the same sums again and writes them. Both read the old numbers
and the addend, so that no sum in FP32 is written.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from fp8_numerics.kernels.triton_launch import as_bytes, casts_in_hardware
from fp8_numerics.kernels.triton_rounding import widened
from megafp8.fp8.kernels.triton_stored import new_scale, number, old_scale, raised, stored_code
from megafp8.fp8.stored_formats import StorageFormat

BLOCK = 1024  # elements of a program
WARPS = 4  # 8 elements a thread: 32 bytes of FP32, 8 bytes of FP8
PROGRAMS = 1024  # for each tensor whose squares are summed


class Stored(Protocol):
    """Describe a tensor in low precision, as `fp8/scaled.py` keeps it."""

    payload: torch.Tensor
    dequant_scale: torch.Tensor
    fmt: StorageFormat


def add(total: Stored, more: torch.Tensor, *, is_first: bool) -> None:
    """Add FP32, BF16 or FP16 to a tensor with a scale, in place; the first one overwrites.

    Both are contiguous. The sum is in FP32, and its scale is new.
    """
    num_elements = more.numel()
    scratch = torch.zeros(2, dtype=torch.int32, device=more.device)
    arguments: dict[str, Any] = {
        "total": _codes(total.payload),
        "more": more,
        "dequant_scale": total.dequant_scale,
        "amax_bits": scratch[:1],
        "scale_before": scratch[1:].view(torch.float32),
        "num_elements": num_elements,
        "KIND": total.fmt.name,
        "IS_FIRST": is_first,
        "HARDWARE": casts_in_hardware(more.device),
        "BLOCK": BLOCK,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    grid = (max(1, -(-num_elements // BLOCK)),)
    _amax_of_sum_kernel[grid](**arguments)
    _write_sum_kernel[grid](**arguments)


def sums_of_squares(tensors: Sequence[Stored]) -> torch.Tensor:
    """Return the sum of the squared values of each contiguous tensor, FP64 [tensors].

    The order in which the squares are added depends on the number of elements alone.
    """
    device = tensors[0].payload.device
    sums = torch.empty(len(tensors), PROGRAMS, dtype=torch.float64, device=device)
    for row, tensor in zip(sums.unbind(), tensors, strict=True):
        _squares_kernel[(PROGRAMS,)](
            _codes(tensor.payload),
            row,
            tensor.payload.numel(),
            KIND=tensor.fmt.name,
            HARDWARE=casts_in_hardware(device),
            PROGRAMS=PROGRAMS,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    scales = torch.stack([tensor.dequant_scale for tensor in tensors])
    return sums.sum(dim=1).mul_(scales.double().square_())


def _codes(payload: torch.Tensor) -> torch.Tensor:
    """Return a payload of any storage format as kernels see it."""
    return as_bytes(payload) if payload.element_size() == 1 else payload


@triton.jit
def _sum(total, more, place, inside, scale, KIND: tl.constexpr, IS_FIRST: tl.constexpr,
         HARDWARE: tl.constexpr):  # fmt: skip
    """Return the sums of a program's elements in FP32."""
    x = widened(tl.load(more + place, mask=inside, other=0))
    if not IS_FIRST:
        x = number(tl.load(total + place, mask=inside, other=0), scale, KIND, HARDWARE) + x
    return x


@triton.jit
def _amax_of_sum_kernel(
    total, more, dequant_scale, amax_bits, scale_before, num_elements,
    KIND: tl.constexpr, IS_FIRST: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    scale, _ = old_scale(dequant_scale, KIND)
    if tl.program_id(0) == 0:
        tl.store(scale_before, scale)
    x = _sum(total, more, place, inside, scale, KIND, IS_FIRST, HARDWARE)
    raised(amax_bits, x, inside, KIND)


@triton.jit
def _write_sum_kernel(
    total, more, dequant_scale, amax_bits, scale_before, num_elements,
    KIND: tl.constexpr, IS_FIRST: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    x = _sum(total, more, place, inside, tl.load(scale_before), KIND, IS_FIRST, HARDWARE)
    dequant, quant = new_scale(amax_bits, KIND)
    if tl.program_id(0) == 0:  # no program of this launch reads it
        tl.store(dequant_scale, dequant)
    code = stored_code(x, quant, 0, 0, 0, 0, KIND, False, HARDWARE)
    tl.store(total + place, code, mask=inside)


@triton.jit
def _squares_kernel(
    payload, sums, num_elements,
    KIND: tl.constexpr, HARDWARE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of the squared numbers of every `PROGRAMS`th block, without their scale."""
    found = tl.zeros((BLOCK,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for begin in range(first, num_elements, PROGRAMS * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        code = tl.load(payload + place, mask=place < num_elements, other=0)
        x = number(code, 1.0, KIND, HARDWARE).to(tl.float64)
        found += x * x
    tl.store(sums + tl.program_id(0), tl.sum(found, axis=0))
