"""Scales from a tensor's own amaxes: one a tensor, a row, a column or a block.

Sources. "te": Transformer Engine's `compute_scale_from_amax` (recipe_common.cuh), the rule of its
Float8CurrentScaling and Float8BlockScaling. "torchao": `amax_to_scale` (torchao/float8), the rule
of its rowwise recipes.

    te        s = fp8_max / amax in float32, the largest float32 where that overflows;
              1 where amax is 0 or not finite
    torchao   s = fp8_max / max(amax, 1e-12) in float64, then float32; 1 where amax is not finite
              (torchao itself would make it 0 or NaN)
    power_2   s becomes the largest power of two that is not above it

The amax of a group that holds a NaN or an infinity is +inf; that of an empty one is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.spec.delayed import dequant_scale_of
from tests.spec.formats import Codes, Floats32, Floats64, Format, dequantize, quantize

FLOAT32_MAX = np.finfo(np.float32).max
Rule = Literal["te", "torchao"]


@dataclass(frozen=True)
class Scaled:
    """A quantized matrix; `dequant_scale` has the matrix's shape, each group's repeated in it."""

    codes: Codes
    fmt: Format
    quant_scale: Floats32
    dequant_scale: Floats32

    @property
    def values(self) -> Floats64:
        return dequantize(self.codes, self.fmt) * self.dequant_scale.astype(np.float64)


def amax_of(group: Floats32) -> np.float32:
    if group.size == 0:
        return np.float32(0)
    magnitudes = np.abs(group)
    return np.float32(math.inf) if np.isnan(magnitudes).any() else np.max(magnitudes)


def scale_of(amax: np.float32, fmt: Format, rule: Rule, power_2: bool) -> np.float32:
    if not math.isfinite(amax) or (rule == "te" and amax == 0):
        return np.float32(1)
    if rule == "te":
        with np.errstate(over="ignore"):
            scale = np.float32(fmt.max) / amax
        scale = min(scale, FLOAT32_MAX)
    else:
        scale = np.float32(np.float64(fmt.max) / max(np.float64(amax), 1e-12))
    if power_2:
        mantissa, exponent = math.frexp(
            float(scale)
        )  # scale = mantissa * 2**exponent, 1/2 <= m < 1
        scale = np.float32(math.ldexp(0.5, exponent))
    return np.float32(scale)


def quantize_groups(
    x: Floats32, group: tuple[int, int], fmt: Format, rule: Rule, power_2: bool
) -> Scaled:
    """One scale for each `group` of rows x columns; groups at the ends may be cut off."""
    rows, cols = x.shape
    quant_scale = np.ones(x.shape, dtype=np.float32)
    dequant_scale = np.ones(x.shape, dtype=np.float32)
    for top in range(0, rows, max(1, group[0])):
        for left in range(0, cols, max(1, group[1])):
            at = (slice(top, top + group[0]), slice(left, left + group[1]))
            scale = scale_of(amax_of(x[at]), fmt, rule, power_2)
            quant_scale[at] = scale
            dequant_scale[at] = dequant_scale_of(scale)
    return Scaled(quantize(x, quant_scale, fmt), fmt, quant_scale, dequant_scale)
