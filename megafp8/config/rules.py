"""Rules over settings: what a rule is, and how it says what is wrong.

A rule names the keys it reads and runs only where all of them are good by themselves, so one bad
value is reported once and not again by every rule that it would break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Values = Mapping[str, Any]
Origins = Mapping[str, str]


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

    def excludes(
        self,
        key: str,
        other: str,
        allowed: Sequence[str],
        reason: str,
        way_out: str,
        is_on: Callable[[Any], bool] = bool,
    ) -> None:
        """Registers that `key`, where it is on, leaves `other` no value but the `allowed` ones.

        `reason` follows "other=value"; `way_out` is what to do about `key` instead.
        """

        def check(values: Values) -> Iterator[Finding]:
            if is_on(values[key]) and values[other] not in allowed:
                good = " or ".join(value for value in allowed if value != "auto")
                yield Finding(
                    key, f"{other}={values[other]} {reason}", f"Use {other}={good}, or {way_out}"
                )

        self(key, other)(check)

    def findings(self, values: Values) -> Iterator[Finding]:
        """What the rules say whose keys are all in `values`."""
        for keys, check in self._rules:
            if all(key in values for key in keys):
                yield from check(values)
