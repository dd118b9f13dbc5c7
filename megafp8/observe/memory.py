"""Measure how much memory a run has used at most."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_memory_bytes(accelerator: str = "cpu") -> int:
    """Return the peak memory of this process in bytes.

    It is the memory that torch allocated on the CUDA device for `gpu`, and resident memory for any
    other accelerator.
    """
    if accelerator == "gpu":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _peak_resident_bytes()


class PeakMemory:
    """Measure the peak memory of a run, in a process that may have trained other runs before.

    Args:
        accelerator: As for `peak_memory_bytes`.
    """

    def __init__(self, accelerator: str = "cpu") -> None:
        self._accelerator = accelerator
        self._began_again = _begin_peak(accelerator)
        self._before = peak_memory_bytes(accelerator)

    def bytes(self) -> int | None:
        """Return the peak since this object was made, in bytes.

        It is None if it is not known: the process's peak could not begin again, and has not risen
        since, so that it may be that of an earlier run.
        """
        peak = peak_memory_bytes(self._accelerator)
        return peak if self._began_again or peak > self._before else None


def _begin_peak(accelerator: str) -> bool:
    """Let the process's peak begin again; return whether it did.

    Memory that an earlier run has freed goes back to the system first. On Linux the peak of
    resident memory is set to what is resident now; elsewhere it stays as it is.
    """
    gc.collect()
    if accelerator == "gpu":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return True
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc; other C libraries have none
    try:
        _CLEAR.write_text("5")  # proc(5): resets VmHWM
    except OSError:  # not on Linux, or a sandbox forbids it
        return False
    return True


def _peak_resident_bytes() -> int:
    # /proc is preferred: a process inherits getrusage's maximum from its parent through fork and
    # exec, so that a small process that a large one started would report the large one's peak.
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
