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

import torch

SOURCE = Path(__file__).with_name("fp8_cpu.c")
# No flag here may let the compiler reassociate: (y + M) - M would fold to y.
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-c")
OPTIONAL_FLAGS = ("-mprefer-vector-width=512", "-fopenmp")
FORMATS = ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0))  # by their number in C


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
        lib = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Library(None, f"{compiler} failed ({error}): casts run as torch operations")
    if not _reproduces_torch(lib):
        return Library(None, f"{compiler}'s code rounds differently: casts run as torch operations")
    return Library(lib, f"compiled C ({path.name})")


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        cpu = platform.processor() + platform.machine()
    flags = repr((COMPILE_FLAGS, OPTIONAL_FLAGS))
    parts = (SOURCE.read_bytes(), version, cpu.encode(), flags.encode())
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


def _reproduces_torch(lib: ctypes.CDLL) -> bool:
    """Whether both casts, their grids and their amax are torch's for a sample of all magnitudes.

    A flag in a compiler's wrapper or specs (-ffast-math) could undo the rounding: milliseconds.
    """
    bits = torch.arange(-(1 << 31), 1 << 31, 104729)  # a prime: low bits vary too
    x = bits.to(torch.int32).view(torch.float32)
    scale = torch.ones(())
    for number, (dtype, largest) in enumerate(FORMATS):
        payload, grid = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.bfloat16)
        decoded, amax = torch.empty_like(grid), torch.zeros(())
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, scale, payload, grid, decoded, amax)]
        x_at, scale_at, payload_at, grid_at, decoded_at, amax_at = pointers
        count = ctypes.c_size_t(x.numel())
        lib.megafp8_quantize(x_at, count, 0, number, scale_at, payload_at, grid_at, amax_at, 1)
        lib.megafp8_decode(payload_at, count, number, decoded_at, 1)
        expected = x.clamp(-largest, largest).to(dtype)
        same = [_same(t, expected.to(torch.bfloat16)) for t in (grid, decoded, payload.bfloat16())]
        if not (all(same) and amax.isinf()):
            return False
    return True


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal numbers and signs, NaN where the other is."""
    real = ~right.isnan()
    same_bits = torch.equal(left[real].view(torch.int16), right[real].view(torch.int16))
    return same_bits and torch.equal(left.isnan(), ~real)


def _share_torch_threads() -> None:
    """Make the OpenMP runtime that torch has loaded visible to our library."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return
    for path in sorted({word for word in maps if "/libgomp" in word or "/libomp" in word}):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
