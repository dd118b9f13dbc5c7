"""Define the errors of this package, each with a hint; a program may turn them into its own."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class TeCpuError(Exception):
    """Report what this stand-in for Transformer Engine's kernels cannot do.

    A program whose own errors have a class in common sets `raised_as` of a class below to a
    subclass of it and of its own class, of which all errors then are, wherever they are raised: in
    a forward pass, or by autograd in a backward pass.
    """

    raised_as: ClassVar[type[TeCpuError] | None] = None

    def __new__(cls, *args: Any) -> Self:
        """Return an error of the class that the program has set."""
        kind: Any = cls.raised_as or cls
        return super().__new__(kind, *args)  # type: ignore[no-any-return]


class MissingKernelError(TeCpuError, NotImplementedError):
    """Report a function of the compiled extension that does not exist on the CPU."""


class SizeError(TeCpuError, ValueError):
    """Report a tensor whose sizes Transformer Engine's kernels do not take."""


class ProductError(TeCpuError, RuntimeError):
    """Report a product that cuBLAS refuses, in its words."""


class VersionError(TeCpuError):
    """Report a version of Transformer Engine whose Python cannot be had or loaded."""

    def __init__(self, key: str, value: object, reason: str, hint: str) -> None:
        super().__init__(f"{key}={value}: {reason}. {hint}")
        self.key, self.value, self.reason, self.hint = key, value, reason, hint
