"""Compile the C kernels on first use, cache the library, and load it.

The cache key covers the source, the compiler and this CPU's instruction set, so a home directory
shared between machines is safe. Without a compiler (or with one that fails, or one whose code does
not reproduce torch's cast) the reason is kept and the torch path is used: same bits, slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("fp8_cpu.c")
# No flag here may let the compiler reassociate: (y + M) - M would fold to y.
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-c")
OPTIONAL_FLAGS = ("-mprefer-vector-width=512", "-fopenmp")


@dataclass(frozen=True)
class Library:
    """The loaded kernels, or None and the reason."""

    lib: ctypes.CDLL | None
    note: str


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megafp8" / "kernels"


@functools.cache
def library() -> Library:
    """Compile if needed (about a second, once) and load. Never raises."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return Library(None, "no C compiler found (cc, gcc or $CC): casts run as torch operations")
    try:
        path = cache_folder() / f"fp8_cpu-{_key(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        _share_torch_threads()
        return Library(ctypes.CDLL(str(path)), f"compiled C ({path.name})")
    except (OSError, subprocess.SubprocessError) as error:
        return Library(None, f"{compiler} failed ({error}): casts run as torch operations")


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        cpu = platform.processor() + platform.machine()
    parts = (SOURCE.read_bytes(), version, cpu.encode(), repr(COMPILE_FLAGS).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Build beside `path` and rename, so that processes that start together cannot collide."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        obj, lib = f"{folder}/kernels.o", f"{folder}/kernels.so"
        base = [compiler, *COMPILE_FLAGS, "-o", obj, str(SOURCE)]
        for count in range(len(OPTIONAL_FLAGS), -1, -1):
            build = subprocess.run(
                base + list(OPTIONAL_FLAGS[-count:] if count else ()), capture_output=True
            )
            if build.returncode == 0:
                break
        build.check_returncode()
        # Linked without the OpenMP runtime: its symbols come from the one torch has loaded
        # (_share_torch_threads), so that both use one pool of threads.
        subprocess.run([compiler, "-shared", "-o", lib, obj], capture_output=True, check=True)
        os.replace(lib, path)


def _share_torch_threads() -> None:
    """Make the OpenMP runtime that torch has loaded visible to our library."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return
    for path in sorted({word for word in maps if "/libgomp" in word or "/libomp" in word}):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
