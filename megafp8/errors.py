"""What a user can cause, as exceptions with a way out; and the exit codes of a run.

Everything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """How a `pretrain_gpt.py` process ended; launchers and scripts may rely on the numbers."""

    FINISHED = 0
    CRASHED = 1
    USER_ERROR = 2
    NONFINITE = 3
    HUNG = 4
    SAVED_ON_SIGNAL = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run


class UserError(Exception):
    """Base of every error that a user can cause and mend; printed without a traceback."""

    exit_code = ExitCode.USER_ERROR
    is_shared = False  # every rank raises it: the main rank tells, for all

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks send errors to each other; `Exception`'s own way would call `__init__` again."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[UserError], args: tuple[Any, ...], state: dict[str, Any]) -> UserError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(UserError):
    """A configuration that cannot be honoured: names the key, its value and the way out."""

    def __init__(self, key: str, value: object, reason: str, way_out: str) -> None:
        super().__init__(f"{key}={value}: {reason}. {way_out}")
        self.key, self.value, self.reason, self.way_out = key, value, reason, way_out


class DataError(UserError):
    """A data file that is missing, damaged or foreign: names the file and the field."""

    def __init__(self, file: object, field: str, reason: str, way_out: str) -> None:
        super().__init__(f"{file}: {field}: {reason}. {way_out}")
        self.file, self.field, self.reason, self.way_out = file, field, reason, way_out


class CheckpointError(UserError):
    """A checkpoint that is damaged or does not fit: names the file and what is wrong with it."""

    def __init__(self, file: object, reason: str, way_out: str) -> None:
        super().__init__(f"{file}: {reason}. {way_out}")
        self.file, self.reason, self.way_out = file, reason, way_out


class RunError(UserError):
    """A run directory that cannot be used as asked: locked, or made by other settings."""


class NonFiniteError(UserError):
    """Training met a NaN or an infinity and `trainer.nonfinite_policy` says to stop."""

    exit_code = ExitCode.NONFINITE
