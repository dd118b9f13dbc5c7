"""Load Transformer Engine's Python over the kernels of `te_cpu`, whose errors become ours."""

from __future__ import annotations

import te_cpu
from megafp8.errors import ConfigError, UserError
from te_cpu.cuda import placing, to_cpu
from te_cpu.draws import DRAWS
from te_cpu.errors import MissingKernelError, SizeError, VersionError

__all__ = ["DRAWS", "describe", "load", "placing", "to_cpu"]


class TeKernelError(UserError, MissingKernelError):
    """Report a setting that needs a kernel of Transformer Engine which the CPU does not have."""


class TeSizeError(UserError, SizeError):
    """Report sizes of the model or of its batches that Transformer Engine's kernels do not take."""


def load(version: str | None) -> None:
    """Load a version, or the default one.

    Raises:
        ConfigError: The version cannot be had or loaded here.
    """
    MissingKernelError.raised_as, SizeError.raised_as = TeKernelError, TeSizeError
    try:
        te_cpu.load(version or te_cpu.DEFAULT_VERSION)
    except VersionError as error:
        raise ConfigError(error.key, error.value, error.reason, error.hint) from error


def describe() -> str | None:
    """Return which Transformer Engine runs over which kernels; None if it was not loaded."""
    return None if te_cpu.loaded() is None else te_cpu.describe()
