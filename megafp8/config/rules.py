"""Define rules between settings, and the one rule for keys without effect.

A rule names the keys that it reads, and runs only if each of them is valid by itself, so that one
wrong value is reported once and not by every rule that reads it. Keys without effect have their
defaults when rules run, so a rule need not check the setting that a key depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megafp8.config.errors import DEFAULT, Origin
from megafp8.config.keys import Need, Values
from megafp8.config.schema import all_keys
from megafp8.config.values import plain

Origins = Mapping[str, Origin]

SEARCH_LIMIT = 10_000
"""How many numbers a hint tries on either side of a wrong one."""


class Finding(NamedTuple):
    """Say what is wrong with one key, and what to do."""

    key: str
    reason: str
    hint: str


Rule = Callable[[Values], Iterator[Finding]]


class Rules:
    """Collect the rules of one subject; `@rule("model.a", "model.b")` adds one that reads both."""

    def __init__(self) -> None:
        self._rules: list[tuple[frozenset[str], Rule]] = []

    def __call__(self, *keys: str) -> Callable[[Rule], Rule]:
        def register(check: Rule) -> Rule:
            self._rules.append((frozenset(keys), check))
            return check

        return register

    def findings(self, values: Values) -> Iterator[Finding]:
        """Yield what the rules find; a rule runs if all its keys are in `values`."""
        for keys, check in self._rules:
            if keys <= values.keys():
                yield from check(values)


# --- keys without effect --------------------------------------------------------------------------


class Unused(NamedTuple):
    """Name a key that has no effect, what it needs, and the setting that it has instead."""

    key: str
    need: Need
    setting: str  # the setting of the key that `need` names, as `model.fp8=False`


def unmet_need(path: str, values: Values) -> Need | None:
    """Return what must be set for a key to have an effect, or None if it has one.

    If the needed key itself has no effect, its own need is returned. Where one of several keys can
    meet a need, that is the need of one that is set and has no effect.
    """
    need = all_keys()[path].needs
    return None if need is None else _unmet(need, values, {})


def unmet_needs(values: Values) -> dict[str, Need]:
    """Return what must be set for each key that has no effect, by the key."""
    keys, known = all_keys(), dict[int, Need | None]()
    needs = ((path, keys[path].needs) for path in values)
    found = {path: _unmet(need, values, known) for path, need in needs if need is not None}
    return {path: need for path, need in found.items() if need is not None}


def _unmet(need: Need, values: Values, known: dict[int, Need | None]) -> Need | None:
    """Return what must be set for a need to be met, or None if it is.

    Many keys share a need, so that `known` has what was found for the needs so far, by identity.
    """
    if id(need) in known:
        return known[id(need)]
    unmet = None
    if need.key in values:
        if not need.others:
            below = all_keys()[need.key].needs
            unmet = None if below is None else _unmet(below, values, known)
        if unmet is None and not need.holds(values):
            unmet = _unmet_by_several(need, values, known) if need.others else need
        if unmet is None and need.also is not None:
            unmet = _unmet(need.also, values, known)
    known[id(need)] = unmet
    return unmet


def _unmet_by_several(need: Need, values: Values, known: dict[int, Need | None]) -> Need:
    for key in (need.key, *need.others):
        below = all_keys()[key].needs
        if below is not None and key in values and not _is_default(key, values):
            if (unmet := _unmet(below, values, known)) is not None:
                return unmet
    return need


def effective(values: Values, unmet: Mapping[str, Need] | None = None) -> dict[str, Any]:
    """Return the values, with the default for every key that has no effect.

    `unmet` is what `unmet_needs` returns, if it is known.
    """
    keys, unmet = all_keys(), unmet_needs(values) if unmet is None else unmet
    return {path: keys[path].default if path in unmet else v for path, v in values.items()}


def unused(values: Values, unmet: Mapping[str, Need] | None = None) -> Iterator[Unused]:
    """Yield each key that has no effect and another value than its default.

    `unmet` is what `unmet_needs` returns, if it is known.
    """
    for path, need in (unmet_needs(values) if unmet is None else unmet).items():
        if not _is_default(path, values):
            yield Unused(path, need, _setting_in_the_way(need, values))


def _setting_in_the_way(need: Need, values: Values) -> str:
    """Return the setting that leaves a need unmet: one that was given, where several keys can."""
    given = (key for key in need.others if key in values and not _is_default(key, values))
    key = next(given, need.key)
    return f"{key}={plain(values[key])}"


def _is_default(key: str, values: Values) -> bool:
    """Whether a key has its default, or NeMo's where null is ours, as in every file of NeMo's."""
    known, value = all_keys()[key], values[key]
    if type(value) is type(known.default) and value == known.default:
        return True  # it need not be spelled in one way; no value is `???`
    return known.is_default(value) or (known.default is None and value == known.nemo)


def is_mistake(found: Unused, origins: Origins | None) -> bool:
    """Whether a key without effect is an error of the user.

    It is if a user set it, unless a stronger layer switched it off, as `model.fp8=False` on the
    command line does with a recipe in a file. What a preset or a NeMo file sets is an error only
    of a key that would change the numbers of an FP8 run. `origins` is None if one user set
    everything.
    """
    if origins is None:
        return True
    mine = origins.get(found.key, DEFAULT)
    if all_keys()[found.key].never_idle and not mine.is_users:
        return found.need.key != "model.fp8"
    needed = (origins.get(key, DEFAULT) for key in (found.need.key, *found.need.others))
    return mine.is_users and all(mine.strength >= other.strength for other in needed)


# --- texts for messages and hints -----------------------------------------------------------------


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` next to `value` as a text, without 0: `240 or 256`."""
    below = value // step * step
    near = [below] if below == value else [m for m in (below, below + step) if m > 0]
    return " or ".join(str(m) for m in near)


def nearest_divisors(value: int, wanted: int) -> str:
    """Return the divisors of `value` next to `wanted` as a text: `2 or 4`."""
    start = min(wanted, value)
    down = range(start, max(0, start - SEARCH_LIMIT), -1)
    up = range(wanted + 1, min(value, wanted + SEARCH_LIMIT) + 1)
    near = [next((d for d in side if value % d == 0), None) for side in (down, up)]
    return " or ".join(str(d) for d in near if d is not None) or "1"
