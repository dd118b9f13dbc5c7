"""Measure how much memory a run has used at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(accelerator: str = "cpu") -> int:
    """Return the peak memory of this process in bytes.

    It is the memory that torch allocated on the CUDA device for `gpu`, and resident memory for any
    other accelerator.
    """
    if accelerator == "gpu":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _peak_resident_bytes()


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
