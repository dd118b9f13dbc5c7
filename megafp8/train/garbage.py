"""Python's garbage collection at chosen steps: ranks that pause one by one make all others wait."""

from __future__ import annotations

import gc
from types import TracebackType


class Garbage:
    """While it is entered, Python collects every `interval` steps and at no other time; with 0 as
    it always does."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> Garbage:
        self._was_enabled = gc.isenabled()
        if self._interval:
            gc.collect()
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        if self._interval and step % self._interval == 0:
            gc.collect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._was_enabled:
            gc.enable()
