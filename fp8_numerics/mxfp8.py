"""Quantize to MXFP8: 32 elements of a row share a power of two, which is rounded up.

The rule is that of Transformer Engine's `MXFP8BlockScaling` from version 2.13 on
(common/cast/mxfp8/quantize_mxfp8.cuh): the code of the scale is rounded up, so that no finite
number of a block saturates. The amax of a block ignores NaN.
"""

# M rows   K elements of a row

from __future__ import annotations

import torch

from fp8_numerics.dtypes import described
from fp8_numerics.formats import E4M3, Fp8Format, not_a_format
from fp8_numerics.scales import widened

BLOCK = 32
LARGEST_CODE = 254
"""The code of the largest scale, 2^127; the code 255 of E8M0 stands for NaN."""


def quantize_rows(x_MK: torch.Tensor, fmt: Fp8Format = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers [M, K], and the scale of each 32 elements of a row, FP32 [M, K / 32].

    The values are the numbers times the scales.

    Raises:
        TypeError: `fmt` is no format, or `x_MK` is neither FP32, BF16 nor FP16.
        ValueError: `x_MK` is no matrix, or 32 does not divide K.
    """
    if not isinstance(x_MK, torch.Tensor) or x_MK.dim() != 2 or x_MK.shape[1] % BLOCK:
        raise ValueError(
            f"x is {described(x_MK)}, and not a matrix whose rows are whole blocks of {BLOCK}: "
            "fill them up with zeros"
        )
    tiles = widened(x_MK, "x").unflatten(1, (-1, BLOCK))
    amax = tiles.abs().nan_to_num_(nan=0.0, posinf=float("inf")).amax(-1)
    inverse, scale = scales_of(amax, fmt)
    payload = (tiles * inverse[..., None]).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    return payload.flatten(1), scale


def scales_of(amax: torch.Tensor, fmt: Fp8Format = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the powers of two from values to numbers, and back, for amaxes in FP32.

    Those in BF16 or FP16 are widened, and other dtypes refused (TypeError).
    """
    if getattr(amax, "dtype", None) != torch.float32:
        amax = widened(amax)
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    code = _code(amax * (1.0 / fmt.max))
    return power_of(LARGEST_CODE - code), power_of(code)


def _code(v: torch.Tensor) -> torch.Tensor:
    """Return the least code c (int32) with 2^(c - 127) >= v, for FP32 v >= 0; 254 at most."""
    bits = v.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    is_least = (exponent == 0) & (mantissa <= 0x400000)  # 2^-127 is large enough
    return (exponent + ((mantissa > 0) & ~is_least)).clamp_(max=LARGEST_CODE)


def power_of(code: torch.Tensor) -> torch.Tensor:
    """Return 2^(code - 127) in FP32, for codes in int32; that of 0 is subnormal."""
    if code.dtype != torch.int32:  # a byte would be shifted out
        raise TypeError(f"code is {described(code)}, and is read in torch.int32: code.int()")
    return torch.where(code == 0, 0x400000, code << 23).to(torch.int32).view(torch.float32)
