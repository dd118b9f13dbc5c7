"""Hold Megatron's settings that a script or a file gives, by their names in its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megafp8.config.api import NONE, megatron_flags
from megafp8_migrate.report import Migration


class GivenSetting(NamedTuple):
    """Hold a setting as it was given: the flag or key, its value, and whether a value stood there.

    A flag without a value stands for True or, as `--no-bias-gelu-fusion`, for False.
    """

    shown: str
    value: Any
    is_bare: bool = False

    @property
    def said(self) -> Any:
        """Return the value for the report, where a flag is given (True) whatever it means."""
        return True if self.is_bare else self.value


@dataclass
class MegatronSettings:
    """Hold the settings, of which each rule takes those that it reads.

    Attributes:
        source: Whose defaults hold for what is not given; empty if nothing may be assumed.
        given: The settings by name.
        unknown: The settings whose values are not known, as they are written.
        taken: The names that a rule has read.
        beside: Returns the text of a file beside the script, or None.
    """

    source: str
    given: dict[str, GivenSetting] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    beside: Callable[[str], str | None] = lambda name: None

    def add(self, name: str, given: GivenSetting, m: Migration) -> None:
        """Add a setting; a value that OmegaConf would read as another must be decided."""
        if "${" in str(given.value) or "???" in str(given.value):
            m.decide(given.shown, given.value, "is not a plain value", "Give the value itself")
            self.unknown[name] = str(given.value)
        else:
            self.given[name] = given

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, and remember that it was read."""
        self.taken.add(name)
        return self.given[name].value if name in self.given else default

    def value_or_default(self, name: str) -> Any:
        """Return the value of a setting, or the parser's default; None if nothing says it."""
        if name in self.given:
            return self.given[name].value
        row = megatron_flags().passed.get(name)
        known = self.source and row is not None and name not in self.unknown
        return row.default if known and row is not None and row.default is not NONE else None

    def has(self, name: str) -> bool:
        """Whether a setting is given, also with a value that is not known."""
        return name in self.given or name in self.unknown

    def label(self, *names: str) -> str:
        """Return how the settings were given, as `--bf16 --fp8-format`, or Megatron's default."""
        there = [self.given[name].shown for name in names if name in self.given]
        return " ".join(there) or (f"{names[0]} ({self.source})")

    def number(self, name: str, m: Migration, default: Any = None) -> Any:
        """Return a number of a setting; what is none must be decided, and counts as missing."""
        value = self.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if name in self.given and value is not None:
            shown = self.given[name].shown
            m.decide(shown, value, "is not a number", "Give a number")
            self.unknown[name] = str(value)
        return default if value is not default else value
