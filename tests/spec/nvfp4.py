"""NVFP4: blocks of 16 elements in E2M1 with a scale in E4M3, and one factor for the whole tensor.

Source: Transformer Engine's `NVFP4BlockScaling` (common/recipe/__init__.py; the casts are in
common/cast/nvfp4) from version 2.14 on. All arithmetic is float32, one rounding an operation.

1. A block is 16 elements of a row along the dim that the product sums over; a weight's is 16 x 16.
2. The amax of the tensor and of a block ignore NaN.
3. S = 2688 / amax (2688 = 6 * 448), at most the largest float32; 1 where amax or S is 0.
4. A block's scale is s = E4M3(block_amax * (S * float32(1 / 6))), to nearest, saturating.
5. An element is E2M1(x * enc) with enc = 1 / (s * (1 / S)), at most the largest float32. Where s
   is 0, elements other than 0 so become 6, and their values are 0.
6. E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. To nearest, a tie goes to the even code.
   The sign is kept, also of a zero. Larger magnitudes saturate; NaN becomes +6.
7. A value is code * s * amax / 2688; the last factor is applied to a product's result.

More rules apply to some operands:

* **Random rounding** (gradients): with a random byte u, t = |x| + u / 256 * step rounded to
  float32, then rounded down to a multiple of its own step; the step is 0.5 below 2, 1 below 4, and
  2 from there on.
* **Rotation** (both operands of the gradient of a weight): each 16 elements along the sum times
  diag(SIGNS) @ H / 4, where H is Sylvester's Hadamard matrix. Input and result are BF16.
* The amax of a rotated operand is that of the rotated tensor.

* **Four over six** (from 2.17 on, `four_over_six`): a block has two candidates, by the scales
  s6 = E4M3(block_amax / 6 * S) and s4 = E4M3(block_amax / 6 * S * 1.5), and steps 5 and 6. The
  error of a number is |code * s * amax / 2688 - x|, or its square, or, `scaled`, that of
  code * s - x * S; they are added up along a row, then over the rows of a square by halves. The
  candidate of s4 is taken where its error is less. With `largest` = 256 in place of 448, 2688 is
  1536 throughout.
* **Scaled rows** (from 2.16 on): each row is a tensor of its own.

Up to 2.13 step 4 is s = E4M3(block_amax / 6 * S), which rounds at other places (`sixth_first`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.spec.formats import E4M3, Codes, Floats32, Floats64, dequantize, quantize
from tests.spec.mxfp8 import amax_of

BLOCK = 16
MAGNITUDES: Floats64 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST = np.float32(6 * E4M3.max)
FLOAT32_MAX = np.finfo(np.float32).max
ONE = np.float32(1)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=np.float64)


@dataclass(frozen=True)
class FourBit:
    """A matrix [M, K]: a code an element, a code in E4M3 for each [M / rows, K / 16], the amax."""

    codes: Codes
    scale_codes: Codes
    amax: np.float32
    rows: int

    @property
    def unscaled(self) -> Floats64:
        """The values without the factor of the whole tensor, exact."""
        magnitudes = MAGNITUDES[self.codes & 7]
        signed = np.where(self.codes & 8, -magnitudes, magnitudes)
        scales = dequantize(self.scale_codes, E4M3)
        return signed * np.repeat(np.repeat(scales, self.rows, axis=0), BLOCK, axis=1)

    @property
    def values(self) -> Floats64:
        return self.unscaled * float(self.amax) / float(LARGEST)


def to_e2m1(x: Floats32) -> Codes:
    """Round to nearest: the midpoint between two magnitudes belongs to the even code."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), MAGNITUDES[-1])
    midpoints = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    codes = np.searchsorted(midpoints, magnitude, side="left")  # a tie is below: the lower code
    lower = np.minimum(codes, len(midpoints) - 1)
    codes = np.where((magnitude == midpoints[lower]) & (codes % 2 == 1), codes + 1, codes)
    codes = np.where(np.signbit(x), codes + 8, codes)
    return np.where(np.isnan(x), 7, codes).astype(np.uint8)


def to_e2m1_at_random(x: Floats32, byte: Codes) -> Codes:
    """Round up with the chance that the byte says; `byte` has the shape of x."""
    magnitude = np.abs(x)
    with np.errstate(over="ignore"):
        moved = magnitude.astype(np.float64) + byte / 256 * _step(magnitude)
    t = np.minimum(moved.astype(np.float32), np.float32(6)).astype(np.float64)  # one rounding
    floored = np.floor(t / _step(t)) * _step(t)
    codes = np.searchsorted(MAGNITUDES, floored)
    codes = np.where(np.signbit(x), codes + 8, codes)
    return np.where(np.isnan(x), 7, codes).astype(np.uint8)


def _step(magnitude: Floats32 | Floats64) -> Floats64:
    return np.where(magnitude >= 4, 2.0, np.where(magnitude >= 2, 1.0, 0.5))


def encoding_scale(amax: np.float32, largest: np.float32 = LARGEST) -> np.float32:
    """S, which maps the tensor's amax to the largest value of element times scale."""
    with np.errstate(over="ignore", divide="ignore"):
        scale = min(largest / np.float32(amax), FLOAT32_MAX)
    return ONE if amax == 0 or scale == 0 else np.float32(scale)


def quantize_blocks(
    x: Floats32,
    rows: int = 1,
    amax: np.float32 | None = None,
    byte: Codes | None = None,
    *,
    sixth_first: bool = False,
) -> FourBit:
    """Quantize blocks of `rows` x 16 elements of x [M, K], whose sizes are multiples of them.

    `amax` is that of the whole tensor, where x is a part of it. `byte` asks for random rounding,
    and `sixth_first` for the rule up to 2.13.
    """
    if x.shape[0] % rows or x.shape[1] % BLOCK:
        raise ValueError(f"{x.shape} is not a multiple of {rows} x {BLOCK}")
    amax = amax_of(x) if amax is None else amax
    scale = encoding_scale(amax)
    down, right = x.shape[0] // rows, x.shape[1] // BLOCK
    of_block = amax_of(x.reshape(down, rows, right, BLOCK), (1, 3))
    factor = scale if sixth_first else scale * (ONE / np.float32(6))
    of_block = of_block / np.float32(6) if sixth_first else of_block
    scale_codes = quantize(of_block, np.float32(factor), E4M3)
    s = dequantize(scale_codes, E4M3).astype(np.float32)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        enc = np.minimum(ONE / (s * (ONE / scale)), FLOAT32_MAX)
        scaled = x * np.repeat(np.repeat(enc, rows, axis=0), BLOCK, axis=1)
    codes = to_e2m1(scaled) if byte is None else to_e2m1_at_random(scaled, byte)
    return FourBit(codes, scale_codes, np.float32(amax), rows)


def four_over_six(
    x: Floats32, rows: int = 1, largest: int = 448, *, squared: bool = False, scaled: bool = False
) -> FourBit:
    """Quantize blocks of `rows` x 16 elements of x [M, K], each by the better of two scales."""
    amax, largest_value = amax_of(x), np.float32(6 * largest)
    scale = encoding_scale(amax, largest_value)
    codes = np.zeros(x.shape, dtype=np.uint8)
    scale_codes = np.zeros((x.shape[0] // rows, x.shape[1] // BLOCK), dtype=np.uint8)
    for down, right in np.ndindex(scale_codes.shape):
        at = slice(down * rows, (down + 1) * rows), slice(right * BLOCK, (right + 1) * BLOCK)
        base = amax_of(x[at]) / np.float32(6) * scale
        found = []
        for expand in (np.float32(1.5), ONE):
            with np.errstate(all="ignore"):
                s_code = quantize(np.array([base * expand]), ONE, E4M3)[0]
                s = np.float32(dequantize(np.array([s_code]), E4M3)[0])
                own = to_e2m1(x[at] * np.float32(min(ONE / (s * (ONE / scale)), FLOAT32_MAX)))
                numbers = MAGNITUDES[own & 7].astype(np.float32) * np.where(own & 8, -1, 1)
                value = numbers.astype(np.float32) * s
                error = value - x[at] * scale if scaled else value * amax / largest_value - x[at]
                error = error * error if squared else np.abs(error)
            total = np.zeros(rows, dtype=np.float32)
            for column in error.T:
                total = total + column
            while len(total) > 1:
                total = total[: len(total) // 2] + total[len(total) // 2 :]
            found.append((total[0], s_code, own))
        four, six = found
        _, scale_codes[down, right], codes[at] = four if four[0] < six[0] else six
    return FourBit(codes, scale_codes, amax, rows)


def hadamard() -> Floats64:
    """Sylvester's Hadamard matrix of size 16 (entries 1 and -1)."""
    matrix = np.ones((1, 1))
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotate(x: Floats32) -> Floats64:
    """Rotate each 16 elements of the rows of x [M, K], in float64; the cast to BF16 comes after.

    Raises:
        ValueError: K is not a multiple of 16.
    """
    groups = x.astype(np.float64).reshape(x.shape[0], -1, BLOCK)
    return (groups @ (SIGNS[:, None] * hadamard() / 4)).reshape(x.shape)


def product(left: FourBit, right: FourBit) -> Floats64:
    """left [M, K] times right [N, K] transposed, in float64, with both tensors' factors."""
    factor = float(left.amax) * float(right.amax) / float(LARGEST) ** 2
    return left.unscaled @ right.unscaled.T * factor
