"""Write the report of a run while it trains, at a bounded cost."""

from __future__ import annotations

import time
from pathlib import Path

from megafp8.files import Warn, require_ours, write_atomically
from megafp8.report.page import PAGE_START, run_page
from megafp8.report.record import read_run
from megafp8.runs.find import REPORT_NAME

REPORT_FILE = REPORT_NAME
LARGEST_SHARE = 0.01  # of the time since the last report that writing one may take


def is_page(content: bytes) -> bool:
    """Whether the content of a file is that of a page of this project."""
    return content.startswith(PAGE_START.encode())


def require_page(path: Path, hint: str) -> None:
    """Raise `RunError` if `path` is a file of another program, which a page would overwrite."""
    require_ours(path, "a report", is_page, hint)


class Reporter:
    """Write report.html into a run's directory, as often as it costs little.

    A report that cannot be written costs the report, with one warning, and never the run. So every
    `Exception` is caught here.
    """

    def __init__(self, directory: Path, warn: Warn) -> None:
        self._directory, self._warn = directory, warn
        self._last = time.monotonic()
        self._cost = 0.0  # seconds that the last report took
        self._warned = False

    def write(self, status: str | None = None) -> None:
        """Write the report, unless that would take more than 1 % of the time since the last one.

        With a `status`, with which the run ends, it is written in any case.
        """
        began = time.monotonic()
        if status is None and self._cost > LARGEST_SHARE * (began - self._last):
            return
        try:
            write_atomically(
                self._directory / REPORT_FILE, run_page(read_run(self._directory, status))
            )
        except Exception as error:
            if not self._warned:
                self._warned = True
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._warn(f"{self._directory / REPORT_FILE}: cannot be written ({reason})")
        self._last = time.monotonic()
        self._cost = self._last - began
