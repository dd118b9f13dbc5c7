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


def begin_peak(accelerator: str = "cpu") -> None:
    """Let the peak begin again, for a run in a process that has trained another one before.

    Memory that the earlier run has freed goes back to the system first. On Linux the peak of
    resident memory is set to what is resident now; elsewhere it stays the process's.
    """
    gc.collect()
    if accelerator == "gpu":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc; other C libraries have none
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        _CLEAR.write_text("5")  # proc(5): resets VmHWM


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
