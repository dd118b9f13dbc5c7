"""What a check over several settings is: it names the keys it reads and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]


class Finding(NamedTuple):
    """What a rule has to say about one key."""

    key: str
    reason: str
    way_out: str


Rule = Callable[[Values], Iterator[Finding]]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a check of values alone; it reads exactly these keys."""

    def register(check: Rule) -> Rule:
        RULES.append((keys, check))
        return check

    return register


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, never 0: `240 or 256`."""
    below = value // step * step
    near = [below] if below == value else [m for m in (below, below + step) if m > 0]
    return " or ".join(str(m) for m in near)
