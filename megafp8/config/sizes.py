"""Sizes that would fit, for the way out of an error."""

from __future__ import annotations

import math

from megafp8.config.fp8_rules import size_multiple
from megafp8.config.rules import Values

_SEARCH_LIMIT = 10_000


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


def hidden_step(v: Values) -> int:
    """What a hidden size must be a multiple of, as far as the other keys are known."""
    heads, tp = v.get("model.num_attention_heads", 1), v.get("model.tensor_model_parallel_size", 1)
    if v.get("model.kv_channels"):
        heads = 1  # heads have a width of their own
    return math.lcm(heads, size_multiple(v) * tp if v.get("model.fp8") else 1)
