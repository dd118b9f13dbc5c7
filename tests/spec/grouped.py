"""Moments in FP8 by groups of 128 with range expansion, group by group, in FP64.

Source: COAT (arXiv 2410.19313, section 4.1). Rules:

1. Groups run along the last dim; the last one of a row may be shorter.
2. Magnitudes below 2^-126 count as 0. a is the largest magnitude of a group, b the smallest that is
   not 0.
3. k = floor(16 * log2(max^2 / 2) / log2(a / b)) / 16, at least 1/16 and at most 16; 1 if all is 0.
4. A number is max * (|x| / a)^k, rounded to the nearest one of the format, with the sign of x.
5. Its value is a * (|number| / max)^(1 / k).

The code computes the logarithm and the power in FP32 by polynomials, so numbers within a relative
distance of about 1e-5 from the middle of two neighbours may be rounded to either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.spec.formats import Floats32
from tests.spec.scaled import FORMATS, number_of

GROUP = 128


@dataclass(frozen=True)
class Group:
    """One group: its largest magnitude, its power, and the numbers before they are rounded."""

    largest: float
    power: float
    exact: list[float]


def groups_of(row: Floats32, name: str) -> list[Group]:
    """Rules 1 to 4, but for the rounding."""
    top, found = FORMATS[name].max, []
    assert top is not None
    for begin in range(0, len(row), GROUP):
        xs = [float(x) if abs(float(x)) >= 2.0**-126 else 0.0 for x in row[begin : begin + GROUP]]
        magnitudes = [abs(x) for x in xs if x]
        if not magnitudes:
            found.append(Group(0.0, 1.0, [0.0] * len(xs)))
            continue
        a, b = max(magnitudes), min(magnitudes)
        power = 16.0
        if a > b:
            sixteenths = math.floor(16 * math.log2(top**2 / 2) / math.log2(a / b))
            power = min(max(sixteenths, 1), 256) / 16
        exact = [math.copysign(top * (abs(x) / a) ** power if x else 0.0, x) for x in xs]
        found.append(Group(a, power, exact))
    return found


def rounded(number: float, name: str) -> float:
    """Rule 4's rounding."""
    return number_of(number, FORMATS[name], None)


def value(number: float, group: Group, name: str) -> float:
    """Rule 5."""
    top = FORMATS[name].max
    assert top is not None
    if number == 0:
        return 0.0
    size = group.largest * (abs(number) / top) ** (1 / group.power)
    return math.copysign(size, number)
