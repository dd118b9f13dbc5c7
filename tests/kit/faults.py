"""Plant an error in the product by a dotted name, on every rank or on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """Calls `wrong(right, *arguments)` in place of the function or method `target`.

    `target` is a dotted name such as `megafp8.optim.masters.Masters.agree`, and `right` what is
    there. A fault that is sent to ranks needs a `wrong` that has a name in a module, or a `partial`
    of such a function. Modules that have imported a function by its name have it under another one.
    """

    target: str
    wrong: Callable[..., Any]
    rank: int | None = None  # the only one that has the fault

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        right, wrong = resolve_name(self.target), self.wrong
        patch.setattr(self.target, lambda *args, **more: wrong(right, *args, **more))


@contextmanager
def planted(*faults: Fault, rank: int = 0) -> Iterator[None]:
    """Plant the faults of a rank inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            if fault.rank in (None, rank):
                fault.plant(patch)
        yield


def times(factor: float, right: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return the right result times a factor; for `partial(times, 1.03)`."""
    return right(*args, **more) * factor


def unchanged(right: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return the last argument as it is, such as a tensor that other ranks should change."""
    return args[-1]


def twice(right: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Do it twice, and return the second result."""
    right(*args, **more)
    return right(*args, **more)


def nothing(right: Callable[..., Any], *args: Any, **more: Any) -> None:
    """Do nothing."""
