"""Define the errors that a user can cause, each with a hint, and the exit codes of a run.

Every other exception is a bug in megafp8 and keeps its traceback.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Say how a `pretrain_gpt.py` process ended; launchers and scripts may rely on the numbers."""

    FINISHED = 0
    CRASHED = 1
    USER_ERROR = 2
    NONFINITE = 3
    HUNG = 4
    SAVED_ON_SIGNAL = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run


class UserError(Exception):
    """Report an error that a user can cause and correct; it is printed without a traceback."""

    exit_code = ExitCode.USER_ERROR
    is_shared = False  # whether every rank raises it: the main rank then reports it for all

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle the error without `__init__`: `preprocess` has worker processes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[UserError], args: tuple[Any, ...], state: dict[str, Any]) -> UserError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(UserError):
    """Report a configuration that cannot be used, with the key, value, reason and a hint."""

    def __init__(self, key: str, value: object, reason: str, hint: str) -> None:
        super().__init__(f"{key}={value}: {reason}. {hint}")
        self.key, self.value, self.reason, self.hint = key, value, reason, hint


class DataError(UserError):
    """Report a data file that is missing, damaged or of another format; name the file and field."""

    def __init__(self, file: object, field: str, reason: str, hint: str) -> None:
        super().__init__(f"{file}: {field}: {reason}. {hint}")
        self.file, self.field, self.reason, self.hint = file, field, reason, hint


class CheckpointError(UserError):
    """Report a checkpoint that is damaged or does not fit, with the file and the reason."""

    def __init__(self, file: object, reason: str, hint: str) -> None:
        super().__init__(f"{file}: {reason}. {hint}")
        self.file, self.reason, self.hint = file, reason, hint


class UnreadableError(CheckpointError):
    """Report a checkpoint that this process cannot judge, and that may be good.

    It lacks the permission or the resources to read a file, or the checkpoint has another format.
    """


class RunError(UserError):
    """Report a run directory that is locked, or that was made with other settings."""


class NonFiniteError(UserError):
    """Report a NaN or an infinity at which `trainer.nonfinite_policy` stops the training."""

    exit_code = ExitCode.NONFINITE
