"""Rules over several keys: what they say, how they are registered, and sizes that would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]

FP8_MULTIPLE = 16
"""FP8 tensor cores take operands whose sizes are multiples of it."""

_SEARCH_LIMIT = 10_000


class Finding(NamedTuple):
    """What a rule has to say about one key."""

    key: str
    reason: str
    way_out: str


Rule = Callable[[Values], Iterator[Finding]]
Rules = list[tuple[tuple[str, ...], Rule]]


def registrar(rules: Rules) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that adds a check to `rules`; it reads exactly the keys that it is given."""

    def rule(*keys: str) -> Callable[[Rule], Rule]:
        def register(check: Rule) -> Rule:
            rules.append((keys, check))
            return check

        return register

    return rule


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
    return math.lcm(heads, FP8_MULTIPLE * tp if v.get("model.fp8") else 1)
