"""Read how much memory this process and this machine may use, and keep what has been freed.

The limits are those of the process (`ulimit -v`), of its control groups (containers, Slurm,
systemd) and of the machine. A limit that cannot be read is left out.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # the first version of control groups writes a number near 2**63 for "none"
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = 1, -1, -2, -4  # malloc.h of glibc
_IN_HUGE_PAGES = 1 << 30
"""The bytes of the heap, from its end when a run begins, that may have huge pages. They take
address space at once, and memory where they are written."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")  # 2: the kernel counts address space as memory


@dataclass(frozen=True)
class Limit:
    """Hold a limit of memory in bytes: in all, what is free of it now, and its name in words."""

    num_bytes: int
    free: int
    name: str


def process_limits(proc: Path = _PROC) -> list[Limit]:
    """Return the limits of this process alone.

    Memory that the process has freed and keeps for itself does not count as free.
    """
    used = _fields(proc / "self/status")
    kinds = (
        (resource.RLIMIT_AS, "VmSize", "the limit of the address space, ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "the limit of the data segment, ulimit -d"),
    )
    limits = []
    for kind, field, name in kinds:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            limits.append(Limit(limit, max(0, limit - used.get(field, 0)), name))
    return limits


def machine_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[Limit]:
    """Return the limits that all processes of this job on this machine share, with swap space."""
    have = _fields(proc / "meminfo")
    swap = have.get("SwapTotal", 0)
    limits = []
    if "MemTotal" in have:
        free = have.get("MemAvailable", have["MemTotal"]) + have.get("SwapFree", 0)
        limits.append(Limit(have["MemTotal"] + swap, free, "the memory of this machine"))
    return [*limits, *_group_limits(proc, cgroups, swap)]


def _group_limits(proc: Path, cgroups: Path, swap: int) -> Iterator[Limit]:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            names = ("memory.max", "memory.current", "memory.swap.max")
            yield from _along(cgroups, path, names, swap)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "")
            yield from _along(cgroups / "memory", path, names, swap)


def _along(root: Path, path: str, names: tuple[str, str, str], swap: int) -> Iterator[Limit]:
    """Yield the limits of a control group and of those that it is in."""
    inside = PurePosixPath(path.lstrip("/"))
    for part in (inside, *inside.parents):
        group = root / part
        limit = _number(group / names[0])
        if ".." in part.parts or limit is None or limit >= _UNLIMITED:
            continue
        of_swap = _number(group / names[2]) if names[2] else None
        extra = swap if of_swap is None else min(swap, of_swap)
        used = _number(group / names[1]) or 0
        files = _statistic(group / "memory.stat", "inactive_file")  # freed when memory is needed
        free = max(0, min(limit, limit - used + files)) + extra
        yield Limit(limit + extra, free, f"the limit of the control group {group}")


def _fields(path: Path) -> dict[str, int]:
    """Return the lines `name: number kB` of a file of the kernel, in bytes."""
    num_bytes = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            num_bytes[name] = int(words[0]) * 1024
    return num_bytes


def _number(path: Path) -> int | None:
    """Return the number in a file; None for the word `max` and where there is no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    pairs = (line.split() for line in _lines(path))
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, and have huge pages: faster steps on a CPU.

    Otherwise glibc returns large freed blocks to the kernel, and each large tensor is mapped again
    and page-faulted, which takes up to half of the time of a training step. The settings hold for
    what is allocated from now on, until the process ends, so the process never becomes smaller.
    Return whether they took effect, which needs Linux with glibc. No result changes.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 256 << 20),
        # Small freed blocks are merged with free neighbours at once, but for the few that a thread
        # keeps for itself. glibc would look for neighbours of all of them each time that 64 KiB
        # are freed in one piece.
        (_M_MXFAST, 0),
    )
    is_kept = all(libc.mallopt(option, value) == 1 for option, value in settings)
    if is_kept:
        _ask_for_huge_pages(libc)
    return is_kept


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask the kernel to put what the process allocates next into huge pages, where it has them.

    A step reads and writes more pages of 4 KiB than the processor remembers the addresses of. The
    heap grows by a block that is freed again before anything is written there; since freed memory
    is kept, tensors will lie in it.
    """
    is_counted = _OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2"
    if is_counted or process_limits():  # the block would take address space from the run
        return
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(_IN_HUGE_PAGES))
    if block is None:
        return
    begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    size = block + _IN_HUGE_PAGES - begin
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(block))
