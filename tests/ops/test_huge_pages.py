"""Memory that a process frees stays with it, and lies in huge pages where the kernel has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = """
import re, resource
from pathlib import Path
import torch
from megafp8.train.process import prepare_process

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def prepare():
    before = kib("VmSize"), kib("RssAnon")
    prepare_process(torch.device("cpu"), fp32=False)
    return kib("VmSize") - before[0], kib("RssAnon") - before[1]
"""
FLAGS = """
prepare()
x = torch.ones(1 << 20)
for part in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
    begin, end = (int(number, 16) for number in part.split()[0].split("-"))
    if begin <= x.data_ptr() + x.nbytes // 2 < end:
        print("hg" in part.partition("VmFlags:")[2].split())
"""
TWICE = "print(*prepare(), *prepare())"
LIMITED = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print(*prepare())"
FAULTS = """
from megafp8 import fp8

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(1 << 23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = faults()
assert fp8.keep_freed_memory()
faults()  # gets the memory that is kept
print(returned, faults())
"""
on_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)


def said(program: str) -> list[str]:
    command = [sys.executable, "-c", COMMON + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@on_linux
def test_the_memory_of_a_tensor_may_have_huge_pages() -> None:
    assert said(FLAGS) == ["True"]


@on_linux
def test_address_space_is_taken_once_and_no_memory() -> None:
    size, resident, more_size, more_resident = map(int, said(TWICE))
    assert size >= 1 << 20 and resident < 4096, "KiB"
    assert more_size < 1024 and more_resident < 4096, "the second call takes the same addresses"


@on_linux
def test_a_limit_of_the_address_space_is_left_to_the_run() -> None:
    size, _ = map(int, said(LIMITED))
    assert size < 1 << 20, "KiB"


@on_linux
def test_a_kernel_that_counts_address_space_is_asked_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "overcommit_memory").write_text("2\n")
    program = f"""
from megafp8.ops import memory
memory._OVERCOMMIT = Path({str(tmp_path / "overcommit_memory")!r})
print(*prepare())
"""
    size, _ = map(int, said(program))
    assert size < 1 << 20, "KiB"


@on_linux
def test_a_program_of_ones_own_keeps_what_it_frees() -> None:
    """Each of eight tensors of 32 MiB has 8,192 pages of 4 KiB, or 16 huge ones.

    The few faults that stay are not theirs.
    """
    returned, kept = map(int, said(FAULTS))
    assert returned >= 8 * 16 and kept < returned / 4
