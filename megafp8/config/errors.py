"""Define the errors of a configuration: all problems are reported together, each with a hint."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.errors import ConfigError
from megafp8.secrets import redacted, shown


class Origin(str):
    """Name the layer that set a value; the text is for messages.

    Attributes:
        strength: Of two layers, the one with the larger strength wins.
        is_users: Whether a user set the values. Presets and NeMo's files are not a user's.
    """

    strength: int
    is_users: bool

    def __new__(cls, text: str, strength: int = 0, *, is_users: bool = False) -> Origin:
        """Return the text with the two attributes."""
        origin = super().__new__(cls, text)
        origin.strength, origin.is_users = strength, is_users
        return origin

    @property
    def is_nemos(self) -> bool:
        """Whether the layer is a file of NeMo."""
        return self.strength > 0 and not self.is_users and not self.startswith(f"{PRESET} ")


PRESET = "preset"
"""The first word of the origin of a preset's setting: `preset model=gpt3_125m`."""
DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line", 1_000_000, is_users=True)


class SettingError(ConfigError):
    """Report one setting that cannot be used, with the place where it was set.

    Values of keys that are named like secrets are hidden.
    """

    def __init__(
        self, key: str, value: object, reason: str, hint: str, *, origin: str = ""
    ) -> None:
        safe = redacted(value, key)
        if safe != value:
            text = str(safe)
            reason = reason.replace(repr(value), text).replace(str(value) or text, text)
            value = safe
        super().__init__(key or "''", value, reason, hint)  # an empty argument has no name
        self.origin = origin
        self.args = (str(self),)

    def __str__(self) -> str:
        key, value = (text.replace("\n", "\\n") for text in (self.key, str(self.value)))
        setting = key if self.value is None else f"{key}={value}"
        place = f" ({self.origin})" if self.origin else ""
        return shown(f"{setting}{place}: {self.reason}. {self.hint}")


class CombinedConfigError(ConfigError):
    """Report several settings; `key`, `value`, `reason` and `hint` are those of the first one."""

    def __init__(self, problems: Sequence[SettingError]) -> None:
        first = problems[0]
        super().__init__(first.key, first.value, first.reason, first.hint)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{len(self.problems)} settings cannot be used:"]
        return "\n".join(lines + [f"  - {problem}" for problem in self.problems])


def raise_if_any(problems: Sequence[SettingError]) -> None:
    """Raise a single problem as itself and several as a `CombinedConfigError`.

    Nothing is raised if there are no problems.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise CombinedConfigError(problems)
