"""Limits of memory are read as the kernel writes them, from small trees of files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megafp8.ops.memory import Limit, machine_limits, process_limits

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:  8192 kB\nMemFree: 10 kB\nMemAvailable: 4096 kB\nSwapTotal: 1024 kB\n"
MEMINFO += "SwapFree: 512 kB\nHugePages_Total: 0\n"


def shown(limits: list[Limit]) -> list[tuple[int, int, str]]:
    return [(limit.num_bytes // 1024, limit.free // 1024, limit.name) for limit in limits]


def test_the_machine(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"meminfo": MEMINFO})
    assert shown(machine_limits(proc, tmp_path)) == [(9216, 4608, "the memory of this machine")]
    assert machine_limits(tmp_path / "none", tmp_path / "none") == []
    for text in ("", "MemTotal: much kB\n", "MemTotal: 1 GB\n", "MemTotal\n"):
        assert machine_limits(tree(tmp_path / "odd", {"meminfo": text}), tmp_path) == []


def test_groups_of_the_second_version_with_those_around_them(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/job/step\n", "meminfo": MEMINFO})
    groups = tree(
        tmp_path / "groups",
        {
            "job/memory.max": f"{4 * MIB}\n",
            "job/memory.current": f"{3 * MIB}\n",
            "job/memory.swap.max": "0\n",
            "job/memory.stat": f"anon 5\ninactive_file {MIB}\n",
            "job/step/memory.max": "max\n",
            "memory.max": f"{16 * MIB}\n",
        },
    )
    _, job, root = shown(machine_limits(proc, groups))
    assert job == (4096, 2048, f"the limit of the control group {groups / 'job'}")
    assert root == (16384 + 1024, 16384 + 1024, f"the limit of the control group {groups}")


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:cpu:/x\n9:memory,other:/job\nodd\n"})
    groups = tree(
        tmp_path / "groups",
        {
            "memory/job/memory.limit_in_bytes": f"{2 * MIB}\n",
            "memory/job/memory.usage_in_bytes": f"{MIB}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    name = f"the limit of the control group {groups / 'memory/job'}"
    assert shown(machine_limits(proc, groups)) == [(2048, 1024, name)]


def test_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 8 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 0))
    proc = tree(tmp_path, {"self/status": "VmSize:\t 2048 kB\nVmData: 1024 kB\n"})
    (limit,) = process_limits(proc)
    assert limit == Limit(8 * MIB, 6 * MIB, "the limit of the address space, ulimit -v")
    limits[resource.RLIMIT_AS] = MIB
    assert process_limits(proc)[0].free == 0


def test_this_machine_has_memory() -> None:
    limits = machine_limits()
    assert limits and all(0 <= limit.free <= limit.num_bytes for limit in limits)
