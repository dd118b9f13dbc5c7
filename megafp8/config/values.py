"""Values that may be written in more than one way, and the one meaning they have."""

from __future__ import annotations

import math
import re
from typing import Literal

from megafp8.specs.precision import HIGH_PRECISION, RECIPES, ModuleRule

PRECISIONS: dict[int | str, Literal["bf16", "fp32"]] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    32: "fp32",
    "32": "fp32",
    "32-true": "fp32",
}
HALF_PRECISIONS: tuple[int | str, ...] = (16, "16", "16-mixed")

ADAMW_NAMES = ("adamw", "fused_adam")
"""NeMo's `fused_adam` is Apex's with `adam_w_mode=True`: decoupled decay, on matrices alone."""

DEFAULT_EXP_DIR = "runs"

_SEARCH_LIMIT = 10_000
_CLOCK = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):([0-5]?\d):([0-5]?\d)", re.ASCII)


def parse_interval_seconds(value: object) -> float | None:
    """Seconds of `90`, `"90"`, `"HH:MM:SS"` or `"DD:HH:MM:SS"`; None if it is none of these."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and (clock := _CLOCK.fullmatch(value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return _finite(value)


def parse_splits(value: object) -> tuple[float, ...] | None:
    """Numbers of `"900,50,50"` or `[900, 50, 50]`; None if one of them is not a number."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        return None
    numbers = [_finite(part) for part in parts]
    return None if None in numbers else tuple(n for n in numbers if n is not None)


def parse_modules(value: object) -> tuple[ModuleRule, ...] | None:
    """The rules of `["*.fc2:high_precision"]`; None if one of them is none."""
    if not isinstance(value, (list, tuple)):
        return None
    rules = []
    for text in value:
        pattern, _, choice = str(text).rpartition(":")
        if not pattern or choice not in (*RECIPES, HIGH_PRECISION):
            return None
        rules.append(ModuleRule(pattern, choice))
    return tuple(rules)


def parse_layout(value: object) -> tuple[int, ...] | None:
    """The whole numbers of `"4,4,3,5"`, each at least 1; None if it is anything else."""
    parts = str(value).split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        return None
    layers = tuple(int(part) for part in parts)
    return layers if min(layers) > 0 else None


def format_number(number: float) -> str:
    """The shortest spelling: `50`, not `50.0`."""
    return str(int(number)) if number == int(number) else repr(number)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(value: object) -> str:
    """A value as YAML has it: `null`, `True`, `10`."""
    return "null" if value is None else str(value)


def one_line(value: object) -> str:
    """As `plain`, for a line of a report."""
    text = plain(value)
    return text if text.isprintable() else repr(text)


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, never 0: `240 or 256`."""
    below = value // step * step
    near = [below] if below == value else [m for m in (below, below + step) if m > 0]
    return " or ".join(str(m) for m in near)


def nearest_divisors(value: int, wanted: int) -> str:
    """The divisors of `value` around `wanted`: `2 or 4`."""
    start = min(wanted, value)
    down = range(start, max(0, start - _SEARCH_LIMIT), -1)
    up = range(wanted + 1, min(value, wanted + _SEARCH_LIMIT) + 1)
    near = [next((d for d in side if value % d == 0), None) for side in (down, up)]
    return " or ".join(str(d) for d in near if d is not None) or "1"
