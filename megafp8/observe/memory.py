"""How much memory a run has used at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(accelerator: str = "cpu") -> int:
    """Peak of this process: CUDA's allocated memory for `gpu`, else resident memory."""
    if accelerator == "gpu":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _peak_resident_bytes()


def reset_peak_memory(accelerator: str = "cpu") -> None:
    """Forget CUDA's peak; the operating system's peak of resident memory cannot be reset."""
    if accelerator == "gpu":
        import torch

        torch.cuda.reset_peak_memory_stats()


def _peak_resident_bytes() -> int:
    # /proc first: getrusage's maximum is inherited from the parent through fork and exec, so that a
    # small process started by a large one would report the large one's peak.
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
