"""The FP8 formats and the cast into them, by enumeration of their 256 codes.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1, and
Transformer Engine's cast, which saturates (`cvt.rn.satfinite`). The two formats of AMD are those of
Noune et al. 2022, "8-bit Numerical Formats for Deep Neural Networks" (arXiv 2206.02915), with the
same cast. Rules of the cast:

1. y = x * quant_scale, rounded to float32. BF16, FP16 and FP32 inputs are exact in float32.
2. Clamp y to [-max, max]; infinities saturate too.
3. Take the nearest finite code; of two equally near ones the one with the even mantissa.
4. The sign of y is kept, also where it rounds to zero: -0 and small negatives give 0x80. AMD's
   formats have one zero, 0x00.
5. NaN gives a NaN code. Which one is not specified: compare payloads with `same_codes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]

CODES = range(256)


@dataclass(frozen=True)
class Format:
    """One sign bit, then `exponent_bits`, then `mantissa_bits`.

    With `has_infinity` (IEEE 754's way) the highest exponent holds infinity and NaNs. Without it
    ("fn") that exponent holds numbers too, except that all ones in exponent and mantissa are NaN.
    With `is_fnuz` all codes are numbers but 0x80, the only NaN, and the bias is larger by one.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool
    is_fnuz: bool = False

    @property
    def nan_code(self) -> int:
        """A NaN of the format."""
        return 0x80 if self.is_fnuz else 0x7F

    def value(self, code: int) -> float:
        """The number that one code stands for (exact: a double holds far more digits)."""
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        highest_exponent = (1 << self.exponent_bits) - 1
        highest_mantissa = (1 << self.mantissa_bits) - 1
        bias = (1 << (self.exponent_bits - 1)) - (0 if self.is_fnuz else 1)

        if self.is_fnuz:
            if code == self.nan_code:
                return math.nan
        elif exponent == highest_exponent:
            if self.has_infinity:
                return sign * math.inf if mantissa == 0 else math.nan
            if mantissa == highest_mantissa:
                return math.nan
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - bias)  # zero and the subnormals
        return sign * (1 + fraction) * 2.0 ** (exponent - bias)

    @cached_property
    def table(self) -> Floats64:
        """The values of all 256 codes."""
        return np.array([self.value(code) for code in CODES], dtype=np.float64)

    @cached_property
    def finite_magnitudes(self) -> Floats64:
        """The finite non-negative numbers. The index is the code; a larger code is a larger
        number; an even code has an even mantissa."""
        magnitudes = [self.value(code) for code in CODES if code < 0x80]
        return np.array([value for value in magnitudes if math.isfinite(value)], dtype=np.float64)

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        return float(self.finite_magnitudes[-1])


E4M3 = Format("e4m3", exponent_bits=4, mantissa_bits=3, has_infinity=False)
E5M2 = Format("e5m2", exponent_bits=5, mantissa_bits=2, has_infinity=True)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, has_infinity=False, is_fnuz=True)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, has_infinity=False, is_fnuz=True)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
FNUZ_FORMATS = {"e4m3fnuz": E4M3FNUZ, "e5m2fnuz": E5M2FNUZ}
ALL_FORMATS = FORMATS | FNUZ_FORMATS


def scaled(x: Floats32, quant_scale: np.float32 | Floats32) -> Floats32:
    """Rule 1: one float32 multiplication, rounded once, overflowing to infinity."""
    if {x.dtype, getattr(quant_scale, "dtype", None)} != {np.dtype(np.float32)}:
        raise TypeError(f"expected float32, got {x.dtype} and {type(quant_scale).__name__}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.multiply(x, quant_scale)


def quantize_value(x: float, quant_scale: np.float32, fmt: Format) -> int:
    """The cast of one number: try every finite code, in exact arithmetic. `x` fits in float32."""
    if not math.isnan(x) and float(np.float32(x)) != x:
        raise ValueError(f"{x!r} is not a float32")
    y = float(scaled(np.array([x], dtype=np.float32), quant_scale)[0])
    if math.isnan(y):
        return fmt.nan_code
    clamped = Fraction(min(max(y, -fmt.max), fmt.max))
    candidates = [
        code
        for code in CODES
        if math.isfinite(fmt.value(code))
        and (
            math.copysign(1.0, fmt.value(code)) == math.copysign(1.0, y)
            or (fmt.is_fnuz and code == 0)
        )
    ]

    def distance_then_oddness(code: int) -> tuple[Fraction, int]:
        return abs(Fraction(fmt.value(code)) - clamped), code & 1

    return min(candidates, key=distance_then_oddness)


def quantize(x: Floats32, quant_scale: np.float32 | Floats32, fmt: Format) -> Codes:
    """The same cast of a whole array, any shape, with one scale or one for each element.

    A magnitude lies between two neighbouring codes; their midpoint (exact in float64) decides.
    """
    y = scaled(x, quant_scale)
    magnitude = np.minimum(np.abs(y.astype(np.float64)), fmt.max)  # NaN stays NaN
    grid = fmt.finite_magnitudes
    midpoints = (grid[:-1] + grid[1:]) / 2

    # The number of midpoints below the magnitude is the nearest code, at a tie the lower one ...
    codes = np.searchsorted(midpoints, magnitude, side="left")
    # ... and a tie belongs to the even one.
    lower = np.minimum(codes, len(midpoints) - 1)
    is_tie = magnitude == midpoints[lower]
    codes = np.where(is_tie & (codes % 2 == 1), codes + 1, codes)

    has_sign = np.signbit(y) & ((codes > 0) | (not fmt.is_fnuz))
    codes = np.where(has_sign, codes + 0x80, codes)
    codes = np.where(np.isnan(y), fmt.nan_code, codes)
    return codes.astype(np.uint8)


def dequantize(codes: Codes, fmt: Format) -> Floats64:
    """The grid values of a payload, before any scale, exact in float64."""
    return fmt.table[codes]


def same_codes(left: Codes, right: Codes, fmt: Format) -> bool:
    """Are two payloads equal bit for bit, any NaN code counting as any other?"""
    if left.shape != right.shape:
        return False
    both_nan = np.isnan(fmt.table[left]) & np.isnan(fmt.table[right])
    return bool(np.all((left == right) | both_nan))
