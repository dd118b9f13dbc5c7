"""Transformer Engine's tensors in MXFP8: a scale in E8M0 for 32 elements of a row or of a column.

Rows and columns are quantized apart from each other, and the bytes of both lie in the tensor's own
shape. The scales are padded as cuBLASLt reads them, and swizzled only where a flag says so.
"""

# M rows   K elements of one

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from fp8_numerics import block_casts, cast
from fp8_numerics.cast import Fp8Tensor, times_scale
from fp8_numerics.formats import E4M3, Fp8Format
from fp8_numerics.mxfp8 import BLOCK, LARGEST_CODE, power_of, quantize_rows
from fp8_numerics.swizzle import rounded_up, unswizzled
from te_cpu.enums import FORMATS
from te_cpu.errors import SizeError
from te_cpu.missing import missing
from te_cpu.wheel import version_in_use

NAME = "MXFP8Tensor"
ROW, COLUMN = (1, BLOCK), (BLOCK, 1)


def is_mx(tensor: Any) -> bool:
    """Whether a tensor is one of Transformer Engine's in MXFP8, of either kind."""
    return type(tensor).__name__.startswith(NAME)


def module() -> Any:
    """Return the module that defines the tensors."""
    return importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")


def scale_shapes(shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the row-wise and of the column-wise scales, padded for cuBLASLt."""
    m, k = int(torch.Size(shape[:-1]).numel()), shape[-1]
    return (rounded_up(m, 128), rounded_up(k // BLOCK, 4)), (
        rounded_up(m // BLOCK, 4),
        rounded_up(k, 128),
    )


def arguments(quantizer: Any, shape: list[int], device: torch.device) -> dict[str, Any]:
    """Return what a tensor of `shape` is made with, and memory for what is asked for.

    Raises:
        SizeError: The sizes are not whole blocks.
    """
    if not shape or shape[-1] % BLOCK or torch.Size(shape[:-1]).numel() % BLOCK:
        raise SizeError(
            f"Transformer Engine's MXFP8 takes multiples of {BLOCK}, and a tensor is {shape}. "
            "Change the sizes or the number of tokens"
        )
    sides = ("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)
    made: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    for (side, is_used), scales in zip(sides, scale_shapes(shape), strict=True):
        for key, size in ((f"{side}_data", shape), (f"{side}_scale_inv", list(scales))):
            fresh = torch.zeros if key.endswith("scale_inv") else torch.empty
            made[key] = fresh(size, dtype=torch.uint8, device=device) if is_used else None
    if hasattr(quantizer, "optimize_for_gemm"):
        made["with_gemm_swizzled_scales"] = quantizer.optimize_for_gemm
    return made


def fill(quantizer: Any, x: torch.Tensor, out: Any) -> Any:
    """Write the cast of `x` [..., K] and its scales into `out`, for what memory is there."""
    if getattr(quantizer, "with_2d_quantization", False):
        raise missing("quantize", " of MXFP8 in blocks of 32 x 32 (enable_2d_quantization)")
    x_MK, fmt = x.reshape(-1, x.shape[-1]), FORMATS[quantizer.dtype]
    sides = (
        (ROW, out._rowwise_data, out._rowwise_scale_inv),
        (COLUMN, out._columnwise_data, out._columnwise_scale_inv),
    )
    for block, data, scale_inv in sides:
        if data is not None:
            payload, code = quantize_blocks(x_MK, block, version_in_use(), fmt)
            data.copy_(payload.view(torch.uint8).reshape(data.shape))
            scale_inv.zero_()[: code.shape[0], : code.shape[1]].copy_(code)
    return out


def quantize_blocks(
    x_MK: torch.Tensor, block: tuple[int, int], version: tuple[int, ...], fmt: Fp8Format = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers in `fmt` [M, K] and the codes of the scales of blocks, as a version does.

    From 2.13 on the rule is that of `fp8_numerics/mxfp8.py`.
    """
    if fmt is E4M3 and block_casts.runs_in_c(x_MK):
        payload, scale, *_ = block_casts.mxfp8(x_MK, along_columns=block == COLUMN)
    elif block == ROW:
        payload, scale = quantize_rows(x_MK, fmt)
    else:
        payload, scale = (each.t() for each in quantize_rows(x_MK.t().contiguous(), fmt))
    code = scale.contiguous().view(torch.int32) >> 23  # a subnormal one, 2^-127, has the code 0
    if version < (2, 13):
        payload = _with_older_factors(x_MK, payload, code, block, version, fmt)
    return payload, code.to(torch.uint8)


def factor_of(code: torch.Tensor) -> torch.Tensor:
    """Return what an element is multiplied by where the scale has a code (int32), in FP32.

    That is 2^(127 - code), but before 2.13 not for the least and the largest code.
    """
    factor, version = power_of(LARGEST_CODE - code), version_in_use()
    if version >= (2, 13):
        return factor
    return torch.where(code == 0, 1.0, torch.where(code == LARGEST_CODE, _largest(version), factor))


def _largest(version: tuple[int, ...]) -> float:
    return 0.0 if version >= (2, 6) else 2.0**-127


def _with_older_factors(
    x_MK: torch.Tensor,
    payload: torch.Tensor,
    code: torch.Tensor,
    block: tuple[int, int],
    version: tuple[int, ...],
    fmt: Fp8Format,
) -> torch.Tensor:
    """Cast blocks whose scale is the least or the largest one again, as before 2.13.

    The factor of the code 0 is 1 there instead of 2^127, so that blocks of numbers up to the
    largest one of the format times 2^-127 become 0. That of the code 254, which an infinite amax
    gives, is 0 from 2.6 on, and then an infinity becomes NaN (exp2f_rcp in common/util/ptx.cuh,
    corrected by the commit 71971e33d).
    """
    is_other = (code == 0) | (code == LARGEST_CODE)
    if not bool(is_other.any()):
        return payload
    factor = torch.where(code == 0, 1.0, _largest(version))
    scaled = times_scale(x_MK.float(), factor, block)
    other = cast.quantize_scaled(scaled, fmt).view(torch.uint8)
    other = other.where(~scaled.isnan(), 0x7F)
    is_other = is_other.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return torch.where(is_other, other, payload.view(torch.uint8)).view(fmt.dtype)


def operand(tensor: Any, *, by_column: bool) -> Fp8Tensor:
    """Return the matrix [M, K] that a product reads, of row-wise or of column-wise bytes."""
    data = tensor._columnwise_data if by_column else tensor._rowwise_data
    scale_inv = tensor._columnwise_scale_inv if by_column else tensor._rowwise_scale_inv
    side, block = ("column", COLUMN) if by_column else ("row", ROW)
    assert data is not None, f"this product needs {side}-wise blocks, which are not there"
    fmt = FORMATS[tensor._fp8_dtype]
    payload_MK = data.reshape(-1, data.shape[-1]).view(fmt.dtype)
    rows, columns = payload_MK.shape
    shape = rows // block[0], columns // block[1]
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        tiles = unswizzled(scale_inv.flatten(), *(shape[::-1] if by_column else shape))
        code = tiles.t() if by_column else tiles
    else:
        code = scale_inv[: shape[0], : shape[1]]
    scale = power_of(code.to(torch.int32))
    return Fp8Tensor(payload_MK, scale, fmt, block=block, is_exact_in_bf16=True, layout="other")
