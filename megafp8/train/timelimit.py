"""`trainer.max_time`: leave early enough to have saved by then."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimit:
    """Due when one more step and one save, each as slow as the slowest so far, would not fit; with
    a save under way beside training, that one has to end first.

    `began` and `clock` are in seconds of the same clock; a step's time includes the validation and
    the periodic save that came with it.
    """

    def __init__(
        self, seconds: float | None, began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self._began, self._clock = seconds, began, clock
        self._last: float | None = None
        self._longest_step = self._longest_save = 0.0

    def start(self) -> None:
        """The first step begins."""
        self._last = self._clock()

    def saved(self, seconds: float) -> None:
        """A save took so long."""
        self._longest_save = max(self._longest_save, seconds)

    def is_due(self, under_way: float | None = None) -> bool:
        """Call once after each step; `under_way`: seconds since a save beside training began."""
        now = self._clock()
        if self._last is not None:
            self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        if self.seconds is None:
            return False
        one_save = max(self._longest_save, under_way or 0.0)
        saves = one_save if under_way is None else 2 * one_save
        return now - self._began + self._longest_step + saves >= self.seconds
