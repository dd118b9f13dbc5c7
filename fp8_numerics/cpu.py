"""Read what this machine's CPU can multiply, and what oneDNN may use of it; needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

X86_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
BF16_FLAGS = X86_BF16_FLAGS | {"bf16", "svebf16"}
"""Linux' names of BF16 dot products: AVX512-BF16 and AMX on x86, plain and SVE on Arm."""

ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
WITHOUT_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""oneDNN's names of the instruction sets that have no BF16 dot products."""
WITHOUT_AMX = WITHOUT_BF16 | {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}
"""Those that have no AMX."""

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


def onednn_limit(
    environment: Mapping[str, str], names: frozenset[str] = WITHOUT_BF16
) -> str | None:
    """Return the variable and value that keep oneDNN from BF16 instructions, or None.

    `names` are the values that do so; with `WITHOUT_AMX` those that keep it from AMX.

    torch gives BF16 products to oneDNN on x86. As oneDNN does, this function takes the first of the
    two variables that is not empty, and ignores case and values that oneDNN does not know. (The
    page of oneDNN is "CPU Dispatcher Control"; `ATEN_CPU_CAPABILITY` and MKL's variables do not
    change products of BF16 matrices.) On an imitated CPU its flags decide alone.
    """
    if IMITATED in environment:
        return None
    given = ((name, environment.get(name, "")) for name in ONEDNN_LIMITS)
    name, value = next((pair for pair in given if pair[1]), ("", ""))
    return f"{name}={value}" if value.upper() in names else None


FLAGS = read_flags()
LIMIT = onednn_limit(os.environ)


def is_fast_at_bf16(flags: frozenset[str] | None, limit: str | None) -> bool:
    """Return whether a CPU with these flags multiplies BF16 by instructions of its own.

    `limit` is what `onednn_limit` returns; oneDNN's names are those of x86.
    """
    found = (flags or frozenset()) & BF16_FLAGS
    return bool(found - X86_BF16_FLAGS if limit else found)


FAST_AT_BF16 = is_fast_at_bf16(FLAGS, LIMIT)
"""Whether BF16 products use BF16 dot products of this CPU.

Without them torch multiplies BF16 matrices 5 to 170 times slower than with them. Tests replace this
value, so everything that depends on it reads it from this module."""


def has_amx(flags: frozenset[str] | None, environment: Mapping[str, str]) -> bool:
    """Return whether oneDNN multiplies BF16 matrices by AMX."""
    return "amx_bf16" in (flags or ()) and onednn_limit(environment, WITHOUT_AMX) is None


HAS_AMX = has_amx(FLAGS, os.environ)


def why_slow_at_bf16() -> str:
    """Return why `FAST_AT_BF16` is false, for a run's header."""
    if FLAGS is None:
        return f"which instructions this CPU has cannot be read on {platform.system()}"
    if LIMIT is not None and FLAGS & X86_BF16_FLAGS:
        return f"{LIMIT} keeps oneDNN from this CPU's BF16 instructions"
    return "this CPU has no BF16 instructions"
