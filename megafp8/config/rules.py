"""Rules over settings: what a rule is, and how it says what is wrong.

A rule names the keys it reads and runs only where all of them are good by themselves, so one bad
value is reported once and not again by every rule that it would break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]
Origins = Mapping[str, str]

_SEARCH_LIMIT = 10_000


class Finding(NamedTuple):
    """What a rule has to say about one key."""

    key: str
    reason: str
    way_out: str


Rule = Callable[[Values], Iterator[Finding]]


class Rules:
    """The rules of one subject: `@rule("model.a", "model.b")` registers one that reads these."""

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Rule]] = []

    def __call__(self, *keys: str) -> Callable[[Rule], Rule]:
        def register(check: Rule) -> Rule:
            self._rules.append((keys, check))
            return check

        return register

    def findings(self, values: Values) -> Iterator[Finding]:
        """What the rules say whose keys are all in `values`."""
        for keys, check in self._rules:
            if all(key in values for key in keys):
                yield from check(values)


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
