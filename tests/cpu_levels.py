"""Levels of x86 CPUs, and what imitates one below the machine's own.

The levels are those of the x86-64 psABI, as compilers name them. Other CPUs have their own alone.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

# What Linux calls the instructions that a level adds (psABI, table 3.1).
ADDED = {
    "x86-64": ("sse2",),
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
LEVELS = (*ADDED, "native")


def missing(level: str) -> str:
    """Why this machine cannot run code of the level; empty where it can."""
    if level == "native":
        return ""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{level}: this is a {platform.machine()}"
    names = list(ADDED)
    needed = [flag for name in names[: names.index(level) + 1] for flag in ADDED[name]]
    text = Path("/proc/cpuinfo").read_text()
    here = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    absent = [flag for flag in needed if flag not in here]
    return f"{level}: this CPU has no {', '.join(absent)}" if absent else ""


def compiler_for(level: str, folder: Path, compiler: str = "cc") -> Path:
    """A compiler for $CC that makes code of that level, whatever level it is asked for.

    Its version names the level, as libraries are cached by it.
    """
    found = shutil.which(compiler)
    assert found is not None, compiler
    path = folder / f"{compiler}-{level}"
    path.write_text(
        f'#!/bin/sh\n[ "$1" != --version ] || echo {level}\nexec {found} "$@" -march={level}\n'
    )
    path.chmod(0o755)
    return path
