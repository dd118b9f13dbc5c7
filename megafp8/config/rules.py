"""Rules over settings: what a rule is, what it finds, and the one rule for keys without effect.

A rule names the keys it reads and runs only where all of them are good by themselves, so one bad
value is reported once and not again by every rule that it would break. Rules see keys without
effect at their defaults, so no rule asks for the switch that a key depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megafp8.config.errors import DEFAULT, Origin
from megafp8.config.keys import Need, Values
from megafp8.config.schema import all_keys

Origins = Mapping[str, Origin]


class Finding(NamedTuple):
    """What a rule has to say about one key."""

    key: str
    reason: str
    hint: str


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
        """Yield what the rules find whose keys are all in `values`."""
        for keys, check in self._rules:
            if all(key in values for key in keys):
                yield from check(values)


# --- keys without effect --------------------------------------------------------------------------


class Unused(NamedTuple):
    """A key that was given a value, and a setting of another key that leaves it without effect."""

    key: str
    need: Need
    setting: str  # of the other key, as `model.fp8=False`


def unmet_need(path: str, values: Values) -> Need | None:
    """Return what a key lacks to have an effect; the outermost where needs depend on others."""
    need = all_keys()[path].needs
    if need is None or need.key not in values:
        return None
    return unmet_need(need.key, values) or (None if need.holds(values) else need)


def effective(values: Values) -> dict[str, Any]:
    """Return the values with every key that has no effect at its default."""
    keys = all_keys()
    return {
        path: value if unmet_need(path, values) is None else keys[path].default
        for path, value in values.items()
    }


def unused(values: Values) -> Iterator[Unused]:
    """Yield each key that has another value than its default and no effect."""
    for path, value in values.items():
        need = unmet_need(path, values)
        if need is not None and not all_keys()[path].is_default(value):
            other = values[need.key]
            yield Unused(path, need, f"{need.key}={'null' if other is None else other}")


def is_mistake(found: Unused, origins: Origins | None) -> bool:
    """Whether a key without effect is an error: its user set it, and nothing stronger unset it.

    What a preset or a NeMo file sets is no mistake, nor what a stronger layer switched off, as
    `model.fp8=False` on the command line does with the recipe of a file. `origins` is None where
    all settings are one user's.
    """
    if origins is None:
        return True
    mine, others = (origins.get(key, DEFAULT) for key in (found.key, found.need.key))
    return mine.is_users and mine.strength >= others.strength


# --- sizes that would fit, for hints --------------------------------------------------------------

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
