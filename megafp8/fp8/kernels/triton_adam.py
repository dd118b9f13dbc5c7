"""Compute Adam's update over tensors in low precision, by the rule of `optim/scaled_adam.py`.

The first kernel makes one pass over memory. A scale follows from the amax of all that is stored
with it, which is known when the pass ends; so the pass writes with the scales of the last step and
keeps the old bytes. Scales are powers of two and seldom change. The second kernel reads the amaxes,
ends at once where all scales were right, and otherwise computes again from the old bytes. The host
waits for nothing.

Every operation is rounded by itself (no fused multiply-add, true divisions and roots), so that the
bits are those of torch operations and of the C kernel. No GPU has run these kernels yet.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megafp8.fp8.kernels.triton_launch import as_bytes, casts_in_hardware
from megafp8.fp8.kernels.triton_rounding import (
    INF_BITS,
    fp8_codes,
    magnitude_bits,
    narrowed,
    raise_amax,
    rounded,
    widened,
)
from megafp8.fp8.scaled import Dither, ScaledTensor

BLOCK = 1024  # elements of a program
WARPS = 4  # 8 elements a thread: 16 bytes of FP16, 8 bytes of FP8

_FACTORS = (
    "beta1", "one_minus_beta1", "beta2", "one_minus_beta2",
    "inverse_root", "eps", "step_size", "decay",
)  # fmt: skip
_KEYS = ("param_low", "param_high", "avg_low", "avg_high", "avg_sq_low", "avg_sq_high")


def adam(
    written: Sequence[ScaledTensor],
    grad: ScaledTensor,
    factors: Sequence[float],
    dithers: Sequence[Dither | None],
    backup: Sequence[torch.Tensor],
    *,
    is_l2: bool,
) -> None:
    """Update a parameter and its two moments, `written`, in place; all tensors are contiguous.

    `factors` are beta1, 1 - beta1, beta2, 1 - beta2, inverse_root, eps, step_size and decay, as
    `optim.scaled_adam.Constants` has them. `backup` has memory for the old bytes of each of
    `written`, of its dtype and size. FP32 moments need none, since what is written is exact.
    """
    num_elements = grad.payload.numel()
    device = grad.payload.device
    keys = [0 if dither is None else dither.key for dither in dithers]
    halves = [_signed(half) for key in keys for half in (key & 0xFFFFFFFF, key >> 32)]
    tensors = [_codes(stored.payload) for stored in (*written, grad)]
    kinds = [stored.fmt.name for stored in (*written, grad)]
    scratch = torch.zeros(6, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {
        **dict(zip(("param", "exp_avg", "exp_avg_sq", "grad"), tensors, strict=True)),
        **dict(zip(("old_param", "old_avg", "old_avg_sq"), map(_codes, backup), strict=True)),
        "param_scale": written[0].dequant_scale,
        "avg_scale": written[1].dequant_scale,
        "avg_sq_scale": written[2].dequant_scale,
        "grad_scale": grad.dequant_scale,
        "amax_bits": scratch[:3],
        "old_scales": scratch[3:].view(torch.float32),
        "num_elements": num_elements,
        **dict(zip(_FACTORS, factors, strict=True)),
        **dict(zip(_KEYS, halves, strict=True)),
        **dict(zip(("PARAM", "AVG", "AVG_SQ", "GRAD"), kinds, strict=True)),
        "SCALED": _mask(stored.fmt.max is not None for stored in written),
        "DITHERS": _mask(dither is not None for dither in dithers),
        "IS_L2": is_l2,
        "HARDWARE": casts_in_hardware(device),
        "BLOCK": BLOCK,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    grid = (max(1, -(-num_elements // BLOCK)),)
    _adam_kernel[grid](**arguments)
    if arguments["SCALED"]:
        _adam_again_kernel[grid](**arguments)


def _mask(flags: Iterable[bool]) -> int:
    """Return one bit for each flag, the first one lowest."""
    return sum(int(flag) << place for place, flag in enumerate(flags))


def _signed(half: int) -> int:
    """Return 32 bits as the int32 with these bits, the type that Triton gives to such a number."""
    return half - (1 << 32) if half >= 1 << 31 else half


def _codes(payload: torch.Tensor) -> torch.Tensor:
    return as_bytes(payload) if payload.element_size() == 1 else payload


@triton.jit
def _number(code, scale, KIND: tl.constexpr, HARDWARE: tl.constexpr):
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
def _random_bits(low, high, first, at):
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
def _stored(
    x, scale, low, high, first, at,
    KIND: tl.constexpr, IS_DITHERED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Return FP32 values as codes of a format, with a quant_scale."""
    if IS_DITHERED and KIND != "fp32":
        random = _random_bits(low, high, first, at)
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
def _old_scale(dequant_scale, KIND: tl.constexpr):
    """Return (dequant_scale, quant_scale) of the last step; (1, 1) for a format without."""
    dequant = tl.full((), 1.0, tl.float32)
    if KIND != "fp32" and KIND != "bf16":
        dequant = tl.load(dequant_scale)
    return dequant, tl.div_rn(tl.full((), 1.0, tl.float32), dequant)


@triton.jit
def _new_scale(amax_bits, KIND: tl.constexpr):
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
def _fresh(
    p, m, v, g,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
    IS_L2: tl.constexpr, HAS_M: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Return the parameter and moments after the step; HAS_M: `m` is that of this step already."""
    if IS_L2:
        g = g + decay * p
    else:
        p = p * decay
    if not HAS_M:
        m = m * beta1 + g * one_minus_beta1
    if not HAS_V:
        v = v * beta2 + (g * g) * one_minus_beta2
    divisor = tl.sqrt_rn(v) * inverse_root + eps
    return p - tl.div_rn(m, divisor) * step_size, m, v


@triton.jit
def _raise(amax_bits, values, inside, KIND: tl.constexpr):
    if KIND != "fp32" and KIND != "bf16":
        raise_amax(amax_bits, tl.max(tl.where(inside, magnitude_bits(values), 0), axis=0))


@triton.jit(do_not_specialize=_KEYS)
def _adam_kernel(
    param, exp_avg, exp_avg_sq, grad, old_param, old_avg, old_avg_sq,
    param_scale, avg_scale, avg_sq_scale, grad_scale, amax_bits, old_scales, num_elements,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
    param_low, param_high, avg_low, avg_high, avg_sq_low, avg_sq_high,
    PARAM: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, GRAD: tl.constexpr,
    SCALED: tl.constexpr, DITHERS: tl.constexpr, IS_L2: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = first + at < num_elements
    p = tl.load(param + first + at, mask=inside, other=0)
    m = tl.load(exp_avg + first + at, mask=inside, other=0)
    v = tl.load(exp_avg_sq + first + at, mask=inside, other=0)
    g = tl.load(grad + first + at, mask=inside, other=0)
    if SCALED > 0:
        tl.store(old_param + first + at, p, mask=inside)
        if AVG != "fp32":
            tl.store(old_avg + first + at, m, mask=inside)
        if AVG_SQ != "fp32":
            tl.store(old_avg_sq + first + at, v, mask=inside)
    p_scale, p_quant = _old_scale(param_scale, PARAM)
    m_scale, m_quant = _old_scale(avg_scale, AVG)
    v_scale, v_quant = _old_scale(avg_sq_scale, AVG_SQ)
    if SCALED > 0 and tl.program_id(0) == 0:
        tl.store(old_scales, p_scale)
        tl.store(old_scales + 1, m_scale)
        tl.store(old_scales + 2, v_scale)
    g_scale, _ = _old_scale(grad_scale, GRAD)
    p, m, v = _fresh(
        _number(p, p_scale, PARAM, HARDWARE), _number(m, m_scale, AVG, HARDWARE),
        _number(v, v_scale, AVG_SQ, HARDWARE), _number(g, g_scale, GRAD, HARDWARE),
        beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
        IS_L2, False, False,
    )  # fmt: skip
    p_code = _stored(p, p_quant, param_low, param_high, first, at, PARAM, DITHERS & 1 > 0, HARDWARE)
    m_code = _stored(m, m_quant, avg_low, avg_high, first, at, AVG, DITHERS & 2 > 0, HARDWARE)
    v_code = _stored(
        v, v_quant, avg_sq_low, avg_sq_high, first, at, AVG_SQ, DITHERS & 4 > 0, HARDWARE
    )
    tl.store(param + first + at, p_code, mask=inside)
    tl.store(exp_avg + first + at, m_code, mask=inside)
    tl.store(exp_avg_sq + first + at, v_code, mask=inside)
    _raise(amax_bits, p, inside, PARAM)
    _raise(amax_bits + 1, m, inside, AVG)
    _raise(amax_bits + 2, v, inside, AVG_SQ)


@triton.jit(do_not_specialize=_KEYS)
def _adam_again_kernel(
    param, exp_avg, exp_avg_sq, grad, old_param, old_avg, old_avg_sq,
    param_scale, avg_scale, avg_sq_scale, grad_scale, amax_bits, old_scales, num_elements,
    beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
    param_low, param_high, avg_low, avg_high, avg_sq_low, avg_sq_high,
    PARAM: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, GRAD: tl.constexpr,
    SCALED: tl.constexpr, DITHERS: tl.constexpr, IS_L2: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    p_scale, p_guess = _old_scale(old_scales, PARAM)
    m_scale, m_guess = _old_scale(old_scales + 1, AVG)
    v_scale, v_guess = _old_scale(old_scales + 2, AVG_SQ)
    p_dequant, p_quant = _new_scale(amax_bits, PARAM)
    m_dequant, m_quant = _new_scale(amax_bits + 1, AVG)
    v_dequant, v_quant = _new_scale(amax_bits + 2, AVG_SQ)
    if tl.program_id(0) == 0:  # no program of this launch reads these
        if SCALED & 1 > 0:
            tl.store(param_scale, p_dequant)
        if SCALED & 2 > 0:
            tl.store(avg_scale, m_dequant)
        if SCALED & 4 > 0:
            tl.store(avg_sq_scale, v_dequant)
    # A guess is NaN where the old scale is: then nothing equals it.
    is_right = (p_quant == p_guess) & (m_quant == m_guess) & (v_quant == v_guess)
    if not is_right:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.arange(0, BLOCK)
        inside = first + at < num_elements
        # FP32 moments are those of this step already, and have no second copy.
        avg = exp_avg if AVG == "fp32" else old_avg
        avg_sq = exp_avg_sq if AVG_SQ == "fp32" else old_avg_sq
        p = tl.load(old_param + first + at, mask=inside, other=0)
        m = tl.load(avg + first + at, mask=inside, other=0)
        v = tl.load(avg_sq + first + at, mask=inside, other=0)
        g = tl.load(grad + first + at, mask=inside, other=0)
        g_scale, _ = _old_scale(grad_scale, GRAD)
        p, m, v = _fresh(
            _number(p, p_scale, PARAM, HARDWARE), _number(m, m_scale, AVG, HARDWARE),
            _number(v, v_scale, AVG_SQ, HARDWARE), _number(g, g_scale, GRAD, HARDWARE),
            beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, decay,
            IS_L2, AVG == "fp32", AVG_SQ == "fp32",
        )  # fmt: skip
        p_code = _stored(
            p, p_quant, param_low, param_high, first, at, PARAM, DITHERS & 1 > 0, HARDWARE
        )
        m_code = _stored(m, m_quant, avg_low, avg_high, first, at, AVG, DITHERS & 2 > 0, HARDWARE)
        v_code = _stored(
            v, v_quant, avg_sq_low, avg_sq_high, first, at, AVG_SQ, DITHERS & 4 > 0, HARDWARE
        )
        if SCALED & 1 > 0:
            tl.store(param + first + at, p_code, mask=inside)
        if SCALED & 2 > 0:
            tl.store(exp_avg + first + at, m_code, mask=inside)
        if SCALED & 4 > 0:
            tl.store(exp_avg_sq + first + at, v_code, mask=inside)
