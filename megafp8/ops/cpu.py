"""Read from its flags what this machine's CPU can multiply; needs no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Linux' names of BF16 dot products: AVX512-BF16 and AMX on x86, plain and SVE on Arm."""

IMITATED = "MEGAFP8_CPU_FLAGS"
"""The environment variable with flags that replace the CPU's own, so that tests imitate another."""


def cpu_flags(cpuinfo: str) -> frozenset[str] | None:
    """Return the flags that all cores have, from the text of /proc/cpuinfo, or None if it has none.

    A line of x86 begins with `flags`, one of Arm with `Features`.
    """
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    flags_of_cores = {words for name, _, words in pairs if name.strip() in ("flags", "Features")}
    cores = [frozenset(words.split()) for words in flags_of_cores]
    return frozenset.intersection(*cores) if cores else None


def read_flags() -> frozenset[str] | None:
    """Return this CPU's flags, or those that `IMITATED` names; None where they cannot be read.

    Only Linux has them in a file. Elsewhere (macOS), BF16 products then run in FP32, which is right
    on every CPU, and fast on every CPU that torch supports.
    """
    if (imitated := os.environ.get(IMITATED)) is not None:
        return frozenset(imitated.split())
    try:
        return cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


FLAGS = read_flags()
FAST_AT_BF16 = FLAGS is not None and bool(FLAGS & BF16_FLAGS)
"""Whether this CPU has BF16 dot products.

Without them torch multiplies BF16 matrices 5 to 90 times slower than FP32 ones. Tests replace this
value, so everything that depends on it reads it from this module."""


def why_slow_at_bf16() -> str:
    """Return why `FAST_AT_BF16` is false, for a run's header."""
    if FLAGS is None:
        return f"which instructions this CPU has cannot be read on {platform.system()}"
    return "this CPU has no BF16 instructions"
