"""Compile the C kernels on first use, cache the library, and load it.

The cache key covers the source, the compiler and this CPU's instruction set, so a home directory
shared between machines is safe. Without a compiler (or with one that fails, or one whose code does
not reproduce torch's cast) the reason is kept and the torch path runs, which is slower. Casts and
amaxes have the same bits there; the gradient of a bias is added up in another order.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8_numerics.caches import cache_folder, check_own_file, own_folder, put
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.meta import device_kind

SOURCE = Path(__file__).with_name("fp8_cpu.c")
INCLUDED = sorted(Path(__file__).parent.glob("*.h"))
# No flag here may let the compiler reassociate: (y + M) - M would fold to y. -fno-trapping-math
# only says that no code catches floating-point exceptions; gcc vectorizes no comparison without it.
# -fno-math-errno only says that no code reads errno; gcc vectorizes no square root without it.
COMPILE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fPIC",
    "-c",
)
# Each flag is used where the compiler accepts it and the code loads: clang's OpenMP needs a runtime
# that torch has not loaded.
OPTIONAL_FLAGS = ("-march=native", "-mprefer-vector-width=512", "-fopenmp")
PROBE = """
void probe(float *x, int n) {
#pragma omp parallel for
    for (int i = 0; i < n; i++) x[i] += 1;
}
"""
KINDS = (torch.float32, torch.bfloat16, torch.float16)  # in the order of their numbers in C
IN_C = (E4M3, E5M2)  # in the order of their numbers in C


@dataclass(frozen=True)
class Library:
    """Hold the loaded kernels in `lib`, or None, with which torch operations run the casts.

    `note` describes the kernels or says why there are none.
    """

    lib: ctypes.CDLL | None
    note: str


@functools.cache
def library() -> Library:
    """Compile the kernels if needed (a few seconds, once) and load them; never raises."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return Library(None, "no C compiler found (cc, gcc or $CC)")
    try:
        path = own_folder(cache_folder() / "kernels") / f"fp8_cpu-{_key(compiler)}.so"
        _share_torch_threads()
        if not _is_ours(path):
            _compile(compiler, path)
        check_own_file(path)
        lib = ctypes.CDLL(str(path))
    except PermissionError as error:
        reason = f"{error.filename}: {error.strerror}"
        return Library(None, f"{reason}; it is not loaded")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Library(None, f"{compiler} failed ({error})")
    if missing := [name for name in _functions() if not hasattr(lib, name)]:
        return Library(None, f"{path} lacks {missing[0]}; delete it")
    _declare(lib)
    with torch.device("cpu"):  # a dry run makes tensors without memory, unless a device is named
        reproduces_torch = _reproduces_torch(lib)
    if not reproduces_torch:
        return Library(None, f"{compiler}'s code rounds differently")
    threads = "" if lib.megafp8_has_threads() else ", on one thread: no OpenMP with torch's runtime"
    return Library(lib, f"compiled C ({path.name}{threads})")


class _NoEffect:
    """Stand for the kernels in a dry run: each of them takes its arguments and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def library_for(x: torch.Tensor) -> Any:
    """Return the kernels for a tensor on a CPU; None elsewhere, or if there are none.

    A tensor without memory that stands for one on a CPU gets kernels without effect, so that the
    tensors are made that would be made there.
    """
    if x.is_cpu:
        return library().lib
    stands_for_cpu = x.is_meta and device_kind(x.device) == "cpu"
    return _NoEffect() if stands_for_cpu and library().lib is not None else None


def _declare(lib: ctypes.CDLL) -> None:
    """Declare the arguments of the casts, so that callers pass plain numbers as addresses.

    They are called for each tensor of each linear, and objects of ctypes for each argument would
    take longer than a cast of a small tensor.
    """
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    results = (number, number, pointer, pointer, pointer, number, pointer)  # kind to amax
    lib.megafp8_quantize.argtypes = (pointer, size, *results, number)
    lib.megafp8_quantize_and_sum.argtypes = (pointer, size, size, *results, pointer, number)
    lib.megafp8_amax.argtypes = (pointer, size, number, pointer, number)
    lib.megafp8_column_sums.argtypes = (pointer, size, size, number, pointer, number)
    lib.megafp8_gelu.argtypes = (pointer, pointer, size, number, pointer, number)
    lib.megafp8_decode.argtypes = (pointer, size, number, pointer, number, number)
    matrix, block = (pointer, size, size, number), (size, size)
    cast = (pointer, pointer, pointer, number)  # payload, scales, values and their kind
    lib.megafp8_mxfp8.argtypes = (*matrix, number, *cast, number)
    lib.megafp8_current.argtypes = (*matrix, *block, number, number, number, *cast, number)
    lib.megafp8_nvfp4.argtypes = (*matrix, *block, pointer, pointer, *cast, pointer, number)
    lib.megafp8_rotate.argtypes = (*matrix, pointer, pointer, pointer, number)
    lib.megafp8_block_values.argtypes = (
        *(pointer, size, size, pointer, *block, pointer, number, number),
    )
    lib.megafp8_draw.argtypes = (
        *(pointer, pointer, size, pointer, size, size, pointer, pointer, number),
    )


def _is_ours(path: Path) -> bool:
    """Whether the cached library is there and only this user could have written it.

    One that others could write, as under a loose umask, is built again. One of another user
    cannot be replaced in a folder that is this user's, but by this user.
    """
    try:
        check_own_file(path)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _functions() -> list[str]:
    """Return the names of the functions that the sources define."""
    text = "".join(path.read_text(encoding="utf-8") for path in (SOURCE, *INCLUDED))
    return re.findall(r"^(?:void|int) (megafp8_\w+)\(", text, re.MULTILINE)


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line for line in lines if line.lower().startswith(("flags", "features")))
    except (OSError, StopIteration):
        cpu = platform.processor() + platform.machine()
    flags = repr((COMPILE_FLAGS, OPTIONAL_FLAGS, PROBE))
    sources = [path.read_bytes() for path in (SOURCE, *INCLUDED)]
    parts = (*sources, version, cpu.encode(), flags.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Build beside `path` and rename, so that processes that start together cannot collide."""
    if sys.stderr.isatty():
        print("megafp8: compiling the casts for this CPU (once) …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flags = [flag for flag in OPTIONAL_FLAGS if _serves(compiler, flag, Path(folder))]
        built = _build(compiler, [*COMPILE_FLAGS, *flags], SOURCE, Path(folder, "kernels.so"))
        built.chmod(0o755)  # whatever the umask is
        put(built, path)


def _build(compiler: str, flags: Sequence[str], source: Path, lib: Path) -> Path:
    """Build a library without linking the OpenMP runtime, and return its path.

    Its symbols come from the runtime that torch has loaded (`_share_torch_threads`), so that both
    use one pool of threads.
    """
    obj = str(lib.with_suffix(".o"))
    subprocess.run([compiler, *flags, "-o", obj, str(source)], capture_output=True, check=True)
    subprocess.run([compiler, "-shared", "-o", lib, obj], capture_output=True, check=True)
    return lib


def _serves(compiler: str, flag: str, folder: Path) -> bool:
    """Whether the compiler accepts the flag, and the code that it builds with it loads here."""
    source = folder / "probe.c"
    source.write_text(PROBE)
    try:
        ctypes.CDLL(str(_build(compiler, ["-fPIC", "-c", flag], source, folder / f"{flag}.so")))
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _reproduces_torch(lib: ctypes.CDLL) -> bool:
    """Whether both casts of each dtype, their grids and amaxes equal torch's.

    A sample of all magnitudes is cast, which takes milliseconds. A flag in a compiler's wrapper or
    specs (-ffast-math) could undo the rounding.
    """
    bits = torch.arange(-(1 << 31), 1 << 31, 104729)  # a prime: low bits vary too
    wide = bits.to(torch.int32).view(torch.float32)
    cases = itertools.product(enumerate(KINDS), enumerate(IN_C), enumerate(KINDS[:2]))
    return all(
        _casts_as_torch(lib, wide.to(dtype), kind, number, grid_dtype, grid_kind)
        for (kind, dtype), (number, _), (grid_kind, grid_dtype) in cases
        if grid_dtype in (torch.float32, dtype)
    )


def _casts_as_torch(
    lib: ctypes.CDLL,
    x: torch.Tensor,
    kind: int,
    number: int,
    grid_dtype: torch.dtype,
    grid_kind: int,
) -> bool:
    """Whether `x`, which has a NaN or an infinity, is cast and decoded in C with torch's bits.

    `kind`, `number` and `grid_kind` are the C kernels' numbers of the dtype of `x`, of the FP8
    format and of `grid_dtype`, to which casts are rounded back.
    """
    fmt = IN_C[number]
    payload, grid = torch.empty_like(x, dtype=fmt.dtype), torch.empty_like(x, dtype=grid_dtype)
    decoded, amax, scale = (
        torch.empty_like(grid),
        torch.zeros((), dtype=torch.float32),
        torch.ones((), dtype=torch.float32),
    )
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, scale, payload, grid, decoded, amax)]
    x_at, scale_at, payload_at, grid_at, decoded_at, amax_at = pointers
    count = ctypes.c_size_t(x.numel())
    lib.megafp8_quantize(
        x_at, count, kind, number, scale_at, payload_at, grid_at, grid_kind, amax_at, 1
    )
    lib.megafp8_decode(payload_at, count, number, decoded_at, grid_kind, 1)
    expected = x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype).to(grid_dtype)
    same = [_same(t, expected) for t in (grid, decoded, payload.to(grid_dtype))]
    return all(same) and bool(amax.isinf())  # as the amax of a tensor with a NaN or an infinity


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal numbers and signs, and NaN in the same places."""
    real = ~right.isnan()
    bits = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    same_bits = torch.equal(left[real].view(bits), right[real].view(bits))
    return same_bits and torch.equal(left.isnan(), ~real)


def _share_torch_threads() -> None:
    """Make the OpenMP runtime that torch has loaded visible to our library."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return
    for path in sorted({word for word in maps if "/libgomp" in word or "/libomp" in word}):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
