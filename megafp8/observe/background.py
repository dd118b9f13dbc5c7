"""Run a tracker in a thread of its own, so that one that fails or blocks never stops training."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from megafp8.files import Warn, warn_on_stderr

SILENT_SECONDS = 5.0  # that a run waits for a tracker without a word
START_SECONDS, END_SECONDS = 60.0, 90.0
"""How long a run waits for a tracker to begin and to end; training never waits for one."""
MOST_LINES = 10_000  # that wait for a tracker; it has failed with more


@runtime_checkable
class Tracker(Protocol):
    """Record numbers with the step that they belong to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the named `values` of `step`."""

    def rewind(self, step: int) -> None:
        """Take note that training goes back, and that the steps after `step` come again."""

    def close(self) -> None:
        """Write what is still in memory and release the files or the connection."""


class Background:
    """Run a tracker in a thread of its own, so that training never waits for it.

    Args:
        name: What messages call the tracker.
        begin: Makes the tracker, in the thread. It is given a function that returns, for a function
            that shows a message, one that may be called in the thread: the message is shown by the
            next call of this object.
        start_seconds: How long this waits until the tracker has begun; None waits without a limit.
        end_seconds: The same for `close`.

    Raises:
        Exception: What `begin` raised, if it did in time.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[Callable[[Warn], Warn]], Tracker],
        *,
        start_seconds: float | None = START_SECONDS,
        end_seconds: float | None = END_SECONDS,
        warn: Warn = warn_on_stderr,
    ) -> None:
        self.name, self.where, self._end_seconds = name, "", end_seconds
        self._begin = begin
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_LINES)
        self._said: deque[tuple[Warn, str]] = deque()
        self._error: Exception | None = None
        self._has_begun, self._has_ended = threading.Event(), threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()
        at_first = SILENT_SECONDS if start_seconds is None else min(start_seconds, SILENT_SECONDS)
        if not self._has_begun.wait(at_first) and start_seconds != at_first:
            warn(f"{name} has not begun yet; the run waits for it")
            self._has_begun.wait(None if start_seconds is None else start_seconds - at_first)
        if not self._has_begun.is_set():
            warn(f"{name} has not begun yet; training continues, and its curves wait for it")
        self._tell()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call("log", step, values)

    def rewind(self, step: int) -> None:
        self._call("rewind", step)

    def close(self) -> None:
        """End the tracker, and wait a limited time for it.

        Raises:
            TimeoutError: It has not ended yet. Its thread stays as long as the process does.
        """
        self._call("close")
        if not self._has_begun.is_set():
            raise TimeoutError("it has never begun")
        if not self._has_ended.wait(self._end_seconds):
            raise TimeoutError("it does not end")
        self._tell()

    def _call(self, method: str, *arguments: Any) -> None:
        self._tell()
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            raise TimeoutError(f"it has not taken {MOST_LINES} lines") from None

    def _tell(self) -> None:
        """Show what the thread has to say, and raise its error."""
        while self._said:
            show, text = self._said.popleft()
            show(text)
        if self._error is not None:
            raise self._error

    def _deferred(self, show: Warn) -> Warn:
        return lambda text: self._said.append((show, text))

    def _work(self) -> None:
        method = ""
        try:
            tracker = self._begin(self._deferred)
            self.where = getattr(tracker, "where", "")
            self._has_begun.set()
            while method != "close":
                method, arguments = self._calls.get()
                getattr(tracker, method)(*arguments)
        except BaseException as error:  # whatever a library raises, `sys.exit()` too
            self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        finally:
            self._has_begun.set()
            self._has_ended.set()
