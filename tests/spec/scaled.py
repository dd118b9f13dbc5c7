"""Tensors stored in low precision with one scale, and Adam's update over them, element by element.

Source: FP8-LM (arXiv 2310.18313) and MS-AMP's rules for it. Rules:

1. The scale is 2^floor(log2(max / amax)) with the format's largest magnitude `max`; 1 where the
   amax is 0, and at most 2^126. The value of an element is its number times the inverse scale.
2. An amax that is not finite makes all values NaN.
3. x * scale is one float32 multiplication; then clamp to [-max, max] and take the nearest number,
   of two equally near ones the one with the even mantissa.
4. BF16 and FP32 have no scale.
5. Stochastic rounding takes the number above instead of the one below where a random number of 24
   bits (for BF16 16 bits) is below the fraction that lies between. The random number of element i
   is a hash of the key and i.
6. The fresh moments of this step make the update, from before they are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tests.spec.formats import Floats32

F = np.float32


@dataclass(frozen=True)
class Stored:
    """A format by its mantissa bits and the exponent of its smallest normal number."""

    name: str
    mantissa_bits: int
    smallest_exponent: int
    max: float | None  # None: no scale


FORMATS = {
    "bf16": Stored("bf16", 7, -126, None),
    "fp16": Stored("fp16", 10, -14, 65504.0),
    "fp8": Stored("fp8", 3, -6, 448.0),
    "fp8_e5m2": Stored("fp8_e5m2", 2, -14, 57344.0),
}


def scale_of(amax: float, fmt: Stored) -> float:
    """Rules 1 and 4, in exact arithmetic; the amax is finite."""
    if fmt.max is None or amax == 0:
        return 1.0
    ratio, exponent = Fraction(fmt.max) / Fraction(amax), 0
    while Fraction(2) ** (exponent + 1) <= ratio:
        exponent += 1
    while Fraction(2) ** exponent > ratio:
        exponent -= 1
    return math.ldexp(1.0, min(exponent, 126))


def mixed(x: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def random_bits(key: int, index: int) -> int:
    first = mixed(index % 2**32 ^ key % 2**32)
    return mixed(first ^ key >> 32 ^ index >> 32)


def number_of(y: float, fmt: Stored, random: int | None) -> float:
    """Rules 3 and 5: the number of the format that a scaled value is stored as."""
    if fmt.max is not None or random is not None:
        largest = fmt.max or math.ldexp(2 - 2.0**-7, 127)
        y = math.copysign(min(abs(y), largest), y)
    magnitude = Fraction(abs(y))
    exponent = fmt.smallest_exponent
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    step = Fraction(2) ** (exponent - fmt.mantissa_bits)
    below = magnitude // step
    fraction = magnitude / step - below
    if random is None:
        is_up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and below % 2 == 1)
    else:
        bits = 24 if fmt.max is not None else 16
        is_up = Fraction(random >> (32 - bits), 2**bits) < fraction
    return math.copysign(float((below + is_up) * step), y)


def stored(values: Floats32, name: str, key: int | None = None) -> Floats32:
    """What comes back of values that were stored; BF16 may overflow to infinity."""
    if name == "fp32":
        return values.copy()
    fmt, flat = FORMATS[name], values.ravel()
    amax = max((abs(float(x)) for x in flat), default=0.0)
    if fmt.max is not None and not all(math.isfinite(x) for x in flat):
        return np.full(values.shape, np.nan, F)
    scale = scale_of(amax, fmt)
    found = []
    for i, x in enumerate(flat):
        random = None if key is None else random_bits(key, i)
        if not math.isfinite(x) and random is None:
            found.append(float(x))
            continue
        number = number_of(float(x * F(scale)), fmt, random)
        found.append(float(F(number) * F(1 / scale)))
    with np.errstate(over="ignore"):
        return np.array(found, dtype=np.float64).astype(F).reshape(values.shape)


@dataclass(frozen=True)
class Adam:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_l2: bool
    t: int


def adam(state: list[Floats32], g: Floats32, a: Adam) -> list[Floats32]:
    """Fresh p, m and v of a `state` of these (rule 6), each operation rounded to float32."""
    p, m, v = state
    if a.is_l2:
        g = g + p * F(a.weight_decay)
    else:
        p = p * F(1 - a.lr * a.weight_decay)
    m = m * F(a.beta1) + g * F(1 - a.beta1)
    v = v * F(a.beta2) + (g * g) * F(1 - a.beta2)
    root = np.sqrt(v) * F(1 / math.sqrt(1 - a.beta2**a.t)) + F(a.eps)
    p = (p - (m / root) * F(a.lr / (1 - a.beta1**a.t))).astype(F)
    assert all(x.dtype == F for x in (p, m, v))
    return [p, m, v]
