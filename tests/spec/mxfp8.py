"""MXFP8: blocks of 32 elements share a power of two, which one byte (E8M0) holds.

Source: Transformer Engine's `MXFP8BlockScaling` (common/recipe/__init__.py; the cast is
common/cast/mxfp8/quantize_mxfp8.cuh) from version 2.13 on, and the OCP Microscaling Formats
Specification 1.0 for the formats. The specification of OCP rounds the scale down, so that a block's
largest elements saturate; Transformer Engine rounds it up, and so does this page.

1. A block is 32 elements of a row, along the dim that the product sums over. Rows and columns are
   quantized separately, each from high precision. All tensors are in E4M3.
2. amax is the largest magnitude of the block. It ignores NaN.
3. v = amax * float32(1 / max) in float32. The code c of the scale is the smallest of 0 .. 254 with
   2**(c - 127) >= v; it is 254 where none is large enough.
4. An element is x * 2**(127 - c), in float32, cast with saturation (see `formats.py`).
   A value is code * 2**(c - 127).

Earlier versions have other factors for the two ends of the codes (`FACTORS_OF_2_12`): their
`exp2f_rcp` in common/util/ptx.cuh (common/utils.cuh before 2.6), which the commit 71971e33d mended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.spec.formats import E4M3, Codes, Floats32, Floats64, Format, dequantize, quantize

BLOCK = 32
LARGEST_CODE = 254
"""The code 255 stands for NaN."""
POWERS: Floats64 = 2.0 ** (np.arange(LARGEST_CODE + 1) - 127.0)


Factors = dict[int, float]
"""The factor of elements by the code of the scale, where it is not 2**(127 - c)."""
FACTORS_OF_2_5: Factors = {0: 1.0}
FACTORS_OF_2_12: Factors = {0: 1.0, 254: 0.0}
"""From 2.6 to 2.12; an infinite element times 0 is NaN."""


@dataclass(frozen=True)
class Microscaled:
    """A matrix [M, K] with the codes of its scales [M, K / 32]."""

    codes: Codes
    scale_codes: Codes
    fmt: Format

    @property
    def dequant_scale(self) -> Floats64:
        """Each element's scale, exact: [M, K]."""
        return np.repeat(POWERS[self.scale_codes], BLOCK, axis=1)

    @property
    def values(self) -> Floats64:
        return dequantize(self.codes, self.fmt) * self.dequant_scale


def amax_of(block: Floats32, axis: int | tuple[int, ...] | None = None) -> Floats32:
    """The largest magnitude, of all elements or along `axis`; NaN is ignored, and a block of NaN
    alone has 0."""
    magnitudes = np.abs(block)
    return np.max(np.where(np.isnan(magnitudes), np.float32(0), magnitudes), axis)  # type: ignore[no-any-return]


def code_of(amax: np.float32, fmt: Format = E4M3) -> int:
    """The code of a block's scale: rounded up, saturating."""
    return int(codes_of(np.array(amax), fmt))


def codes_of(amax: Floats32, fmt: Format = E4M3) -> Codes:
    """The codes of the scales of many blocks."""
    v = amax * np.float32(1 / fmt.max)
    fitting = np.searchsorted(POWERS, v)  # the first power that is not below v
    return np.minimum(fitting, LARGEST_CODE).astype(np.uint8)


def quantize_rows(x: Floats32, fmt: Format = E4M3, factors: Factors | None = None) -> Microscaled:
    """Quantize blocks of 32 elements along the rows of x [M, K]; K is a multiple of 32."""
    rows, cols = x.shape
    if cols % BLOCK:
        raise ValueError(f"{cols} is not a multiple of {BLOCK}")
    scale_codes = codes_of(amax_of(x.reshape(rows, cols // BLOCK, BLOCK), -1), fmt)
    factor_of = 2.0 ** (127.0 - np.arange(LARGEST_CODE + 1))
    for code, factor in (factors or {}).items():
        factor_of[code] = factor
    by_element = np.repeat(factor_of[scale_codes].astype(np.float32), BLOCK, axis=1)
    return Microscaled(quantize(x, by_element, fmt), scale_codes, fmt)
