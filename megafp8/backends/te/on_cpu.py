"""Load Transformer Engine's Python over the kernels of `te_cpu`, whose errors become ours."""

from __future__ import annotations

import te_cpu
from megafp8.errors import ConfigError, UserError
from te_cpu.cuda import placing, to_cpu
from te_cpu.draws import DRAWS
from te_cpu.errors import MissingKernelError, SizeError, VersionError

__all__ = ["DRAWS", "describe", "load", "placing", "to_cpu"]

OTHERWISE = "or use model.fp8_backend=native"
OUR_NAMES = {
    "quantized_model_init": "model.fp8_params",
    "disable_rht=True": "trainer.precision=bf16, model.fp4_disable_rht=True",
}
"""Our settings by Transformer Engine's names in messages of `te_cpu`, which knows no others."""


class _InARunError(UserError):
    """Add our settings to a message of `te_cpu`."""

    def __str__(self) -> str:
        text = super().__str__()
        ours = ", ".join(name for theirs, name in OUR_NAMES.items() if theirs in text)
        return f"{text}{f' (here {ours})' if ours else ''}, {OTHERWISE}"


class TeKernelError(_InARunError, MissingKernelError):
    """Report a setting that needs a kernel of Transformer Engine which the CPU does not have."""


class TeSizeError(_InARunError, SizeError):
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
        hint = f"{error.hint}, {OTHERWISE}"
        raise ConfigError(error.key, error.value, error.reason, hint) from error


def describe() -> str | None:
    """Return which Transformer Engine runs over which kernels; None if it was not loaded."""
    return None if te_cpu.loaded() is None else te_cpu.describe()
