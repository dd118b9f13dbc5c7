"""Round inside Triton kernels: to FP8 codes and to the dtype of a tensor; make amaxes and scales.

`HARDWARE` chooses between the device's own conversions (cvt.rn.satfinite) and integer arithmetic
that gives the same bits on anything that runs Triton, its interpreter included. Products that are
rounded here are never followed by an addition, so no compiler can contract them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
TORCHAO_SMALLEST_AMAX = tl.constexpr(1e-12)


@triton.jit
def widened(x):
    """Return FP32, BF16 or FP16 as FP32, exactly.

    BF16 is widened by its bits, because Triton's interpreter loses its subnormals.
    """
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as int32, a NaN as +inf; they are ordered as the magnitudes are."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INF_BITS)


@triton.jit
def known_bits(x):
    """Return the bits of |x| as int32, a NaN as 0, so that a maximum of them ignores NaN."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > INF_BITS, 0, bits)


@triton.jit
def raise_amax(amax_bits, newest):
    """Raise the amax to `newest`, atomically, after a plain read that spares most atomics.

    `relaxed`: only later launches read it. Otherwise a fence goes before each atomic, and the SM
    forgets what its cache holds.
    """
    tl.atomic_max(amax_bits, newest, mask=newest > tl.load(amax_bits), sem="relaxed")


@triton.jit
def fp8_codes(y, IS_E4M3: tl.constexpr, HARDWARE: tl.constexpr):
    """Return FP32 as FP8 codes (uint8): clamped, nearest, ties to even; a NaN gives 0x7f."""
    largest = 448.0 if IS_E4M3 else 57344.0
    y = tl.where(y > largest, largest, y)
    y = tl.where(y < -largest, -largest, y)  # a NaN passes both comparisons
    if HARDWARE:
        if IS_E4M3:
            codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return tl.where(y == y, codes, 0x7F).to(tl.uint8)
    mantissa_bits: tl.constexpr = 3 if IS_E4M3 else 2
    bias: tl.constexpr = 7 if IS_E4M3 else 15
    bits = y.to(tl.int32, bitcast=True)
    codes = nearest_codes(bits & 0x7FFFFFFF, mantissa_bits, bias) | ((bits >> 24) & 0x80)
    return tl.where(y == y, codes, 0x7F).to(tl.uint8)


@triton.jit
def nearest_codes(magnitude, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Return the codes (int32, without a sign) of the nearest numbers of a format, ties to even.

    `magnitude` are the bits of FP32 magnitudes, clamped to the format's largest one.
    """
    shift: tl.constexpr = 23 - MANTISSA_BITS
    # Normal numbers: half a unit less one, and one more where the kept mantissa is odd.
    odd = (magnitude >> shift) & 1
    normal = ((magnitude + ((1 << (shift - 1)) - 1) + odd) >> shift) - (
        (127 - BIAS) << MANTISSA_BITS
    )
    # Subnormals: a sum with a number whose last bit is the smallest of the format rounds for us.
    unit_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    unit = tl.full(magnitude.shape, unit_bits, tl.int32)
    total = magnitude.to(tl.float32, bitcast=True) + unit.to(tl.float32, bitcast=True)
    subnormal = total.to(tl.int32, bitcast=True) - unit_bits
    smallest_normal: tl.constexpr = (128 - BIAS) << 23
    return tl.where(magnitude < smallest_normal, subnormal, normal)


@triton.jit
def rounded(y, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the FP32 number nearest to `y` that `dtype` (FP32, BF16, FP16) holds, ties to even."""
    if dtype == tl.float32:
        return y
    if HARDWARE or dtype == tl.float16:
        return y.to(dtype).to(tl.float32)
    bits = y.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(y == y, near.to(tl.float32, bitcast=True), y)


@triton.jit
def narrowed(y, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Return FP32 numbers that `dtype` (FP32, BF16, FP16) holds in this dtype, exactly.

    BF16 is made by its bits in Triton's interpreter, which loses its subnormals.
    """
    if dtype == tl.bfloat16 and not HARDWARE:
        bits = y.to(tl.int32, bitcast=True) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y.to(dtype)


@triton.jit
def scales_of_amax(amax, IS_E4M3: tl.constexpr, TORCHAO: tl.constexpr, POWER_2: tl.constexpr):
    """Return quant_scales of FP32 amaxes: 1 where an amax is not finite or, by TE's rule, is 0.

    With TORCHAO a scale is fp8_max / max(amax, 1e-12) in FP64, rounded to FP32; otherwise it is
    Transformer Engine's, fp8_max / amax in FP32, the largest finite number where that overflows.
    """
    fp8_max: tl.constexpr = 448.0 if IS_E4M3 else 57344.0
    is_good = amax < float("inf")
    if TORCHAO:
        clamped = tl.maximum(amax.to(tl.float64), TORCHAO_SMALLEST_AMAX)
        scale = (tl.full(amax.shape, fp8_max, tl.float64) / clamped).to(tl.float32)
    else:
        is_good = is_good & (amax > 0.0)
        target = tl.full(amax.shape, fp8_max, tl.float32)
        scale = tl.div_rn(target, tl.where(is_good, amax, 1.0))
        scale = tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & INF_BITS).to(tl.float32, bitcast=True)
    return tl.where(is_good, scale, 1.0)


@triton.jit
def dequant_of(quant_scale):
    """Return the reciprocal, by a true division."""
    return tl.div_rn(tl.full(quant_scale.shape, 1.0, tl.float32), quant_scale)
