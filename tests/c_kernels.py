"""Skip a test of the C kernels where there is no compiler, and only there."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable

import pytest

from fp8_numerics.kernels.compile import library


def need_kernels() -> None:
    """A machine may have no compiler; one that has it and no kernels is a failure.

    This is looked for here and not read from what the product says.
    """
    found = library()
    if found.lib is None and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))):
        pytest.skip(found.note)
    assert found.lib is not None, found.note


def threads_started(kernel: Callable[[], object]) -> int:
    """Return how many threads a kernel starts when nothing on this thread has started any.

    OpenMP keeps a team for each thread that asks for one, so that a new thread has none yet.
    """
    found: list[int] = []

    def run() -> None:
        before = set(os.listdir("/proc/self/task"))
        kernel()
        found.append(len(set(os.listdir("/proc/self/task")) - before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
