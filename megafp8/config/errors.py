"""What is wrong with a configuration: every problem at once, each with its way out."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.config.secrets import HIDDEN, hide, is_secret_name
from megafp8.errors import ConfigError


class Origin(str):
    """Who set a value: a text for messages, and how it compares with other layers.

    Attributes:
        strength: Of two layers, the one with the larger strength wins.
        is_users: Whether its settings are a user's own; those of presets and NeMo's files are not.
    """

    strength: int
    is_users: bool

    def __new__(cls, text: str, strength: int = 0, *, is_users: bool = False) -> Origin:
        """Return the text with both attributes."""
        origin = super().__new__(cls, text)
        origin.strength, origin.is_users = strength, is_users
        return origin


DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line", 1_000_000, is_users=True)
PRESET = "preset"
"""Begins the origin of a preset's setting: `preset model=gpt3_125m`."""


class SettingError(ConfigError):
    """One setting that cannot be honoured, and where it was set."""

    def __init__(
        self, key: str, value: object, reason: str, hint: str, *, origin: str = ""
    ) -> None:
        if value is not None and is_secret_name(key):
            reason = reason.replace(repr(value), HIDDEN).replace(str(value) or HIDDEN, HIDDEN)
            value = HIDDEN
        super().__init__(key or "''", value, reason, hint)  # an empty argument has no name
        self.origin = origin
        self.args = (str(self),)

    def __str__(self) -> str:
        setting = self.key if self.value is None else f"{self.key}={self.value}"
        place = f" ({self.origin})" if self.origin else ""
        return hide(f"{setting}{place}: {self.reason}. {self.hint}")


class CombinedConfigError(ConfigError):
    """Several problems. `key`, `value`, `reason` and `hint` are those of the first one."""

    def __init__(self, problems: Sequence[SettingError]) -> None:
        first = problems[0]
        super().__init__(first.key, first.value, first.reason, first.hint)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{len(self.problems)} settings cannot be honoured:"]
        return "\n".join(lines + [f"  - {problem}" for problem in self.problems])


def raise_if_any(problems: Sequence[SettingError]) -> None:
    """Raise the one problem as itself, several as `CombinedConfigError`, none not at all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CombinedConfigError(problems)
