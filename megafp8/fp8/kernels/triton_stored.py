"""Read and write numbers that are stored in low precision with one scale, inside of kernels.

`fp8/scaled.py` has the rule. Every operation is rounded by itself (true divisions, and no fused
multiply-add where a kernel is compiled with `enable_fp_fusion=False`), so that the bits are those
of torch operations and of the C kernel.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from fp8_numerics.kernels.triton_rounding import (
    INF_BITS,
    fp8_codes,
    magnitude_bits,
    narrowed,
    raise_amax,
    rounded,
    widened,
)


@triton.jit
def number(code, scale, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """Return stored codes as FP32 values; the scale of a format without one is not used."""
    if KIND == "fp32" or KIND == "bf16":
        value = widened(code)
    elif KIND == "fp16":
        value = code.to(tl.float32) * scale
    elif KIND == "fp8_e5m2":  # the upper half of an FP16 number
        half = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * scale
    elif HARDWARE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    else:  # FP16 with the same bits behind the sign is 2^-8 of the number
        bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), number) * scale
    return value


@triton.jit
def _mixed(x):
    """Return uint32 as MurmurHash3's finalizer mixes it."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def random_bits(low, high, first, at):
    """Return 32 random bits of a key, in halves, and each element's index, `first` + `at`."""
    index = (first & 0xFFFFFFFF).to(tl.uint32) + at.to(tl.uint32)
    above = (first >> 32).to(tl.uint32)
    return _mixed(_mixed(index ^ low.to(tl.uint32)) ^ high.to(tl.uint32) ^ above)


@triton.jit
def _dithered_bf16(x, random):
    """Return FP32 as BF16, its magnitude rounded up if the random bits are below its lower half."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, 0x7F7F0000)
    up = ((random >> 16).to(tl.int32) < (finite & 0xFFFF)).to(tl.int32)
    code = tl.where(magnitude > INF_BITS, 0x7FC0, (finite >> 16) + up) | ((bits >> 16) & 0x8000)
    return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _dithered(y, random, KIND: tl.constexpr):
    """Return scaled FP32 in FP16 or FP8, rounded up where the random number is below the fraction.

    The fraction is what lies above the number below, in steps of the format there; it is exact.
    """
    mantissa_bits: tl.constexpr = 10 if KIND == "fp16" else 3 if KIND == "fp8" else 2
    smallest: tl.constexpr = (127 - 6 if KIND == "fp8" else 127 - 14) << 23
    largest: tl.constexpr = (
        0x477FE000 if KIND == "fp16" else 0x43E00000 if KIND == "fp8" else 0x47600000
    )
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, largest)
    exponent = tl.maximum(finite & INF_BITS, smallest)
    inverse_step = ((254 + mantissa_bits) - (exponent >> 23)) << 23
    steps = finite.to(tl.float32, bitcast=True) * inverse_step.to(tl.float32, bitcast=True)
    whole = steps.to(tl.int32)
    share = (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    up = (share < steps - whole.to(tl.float32)).to(tl.int32)
    code = ((exponent - smallest) >> (23 - mantissa_bits)) + whole + up
    is_nan = magnitude > INF_BITS
    if KIND == "fp16":
        wide = tl.where(is_nan, 0x7E00, code) | ((bits >> 16) & 0x8000)
        stored = wide.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        stored = (tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return stored


@triton.jit
def stored_code(
    x, scale, low, high, first, at,
    KIND: tl.constexpr, IS_DITHERED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return FP32 values as codes of a format, with a quant_scale."""
    if IS_DITHERED and KIND != "fp32":
        random = random_bits(low, high, first, at)
    if KIND == "fp32":
        code = x
    elif KIND == "bf16" and IS_DITHERED:
        code = _dithered_bf16(x, random)
    elif KIND == "bf16":
        code = narrowed(rounded(x, tl.bfloat16, HARDWARE), tl.bfloat16, HARDWARE)
    elif IS_DITHERED:
        code = _dithered(x * scale, random, KIND)
    elif KIND == "fp16":  # a NaN passes both comparisons
        y = x * scale
        y = tl.where(y > 65504.0, 65504.0, y)
        code = tl.where(y < -65504.0, -65504.0, y).to(tl.float16)
    else:
        code = fp8_codes(x * scale, KIND == "fp8", HARDWARE)
    return code


@triton.jit
def old_scale(dequant_scale, KIND: tl.constexpr):
    """Return (dequant_scale, quant_scale) of the last step; (1, 1) for a format without."""
    dequant = tl.full((), 1.0, tl.float32)
    if KIND != "fp32" and KIND != "bf16":
        dequant = tl.load(dequant_scale)
    return dequant, tl.div_rn(tl.full((), 1.0, tl.float32), dequant)


@triton.jit
def new_scale(amax_bits, KIND: tl.constexpr):
    """Return (dequant_scale, quant_scale) for the bits of an amax, `fp8/scaled.py`'s rule."""
    dequant = tl.full((), 1.0, tl.float32)
    quant = dequant
    if KIND != "fp32" and KIND != "bf16":
        largest = 65504.0 if KIND == "fp16" else 448.0 if KIND == "fp8" else 57344.0
        bits = tl.load(amax_bits)
        amax = bits.to(tl.float32, bitcast=True)
        is_good = (bits > 0) & (bits < INF_BITS)
        target = tl.full((), largest, tl.float32)
        ratio = tl.div_rn(target, tl.where(is_good, amax, 1.0)).to(tl.int32, bitcast=True)
        power = tl.where(is_good, tl.minimum(ratio & INF_BITS, 253 << 23), 127 << 23)
        quant = power.to(tl.float32, bitcast=True)
        dequant = ((254 << 23) - power).to(tl.float32, bitcast=True)
        dequant = tl.where(bits < INF_BITS, dequant, float("nan"))
    return dequant, quant


@triton.jit
def raised(amax_bits, values, inside, KIND: tl.constexpr):
    """Raise the bits of an amax to those of a program's values, if the format has a scale."""
    if KIND != "fp32" and KIND != "bf16":
        raise_amax(amax_bits, tl.max(tl.where(inside, magnitude_bits(values), 0), axis=0))
