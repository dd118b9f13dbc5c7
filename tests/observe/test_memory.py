"""Peak memory is measured for this process, in bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.observe import memory
from megafp8.observe.memory import peak_memory_bytes


def test_peak_grows_with_what_is_used_and_stays() -> None:
    program = """
from megafp8.observe.memory import peak_memory_bytes
before = peak_memory_bytes()
block = bytearray(b"x") * (64 << 20)
during = peak_memory_bytes()
del block
assert 60 << 20 <= during - before <= 80 << 20, (before, during)
assert peak_memory_bytes() >= during - (4 << 20)  # the kernel counts in batches
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from_proc = peak_memory_bytes()
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    assert peak_memory_bytes() >= 0.9 * from_proc


@pytest.mark.gpu
def test_cuda_counts_what_is_allocated() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_bytes("gpu")
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert peak_memory_bytes("gpu") - before >= block.numel()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak")
def test_a_second_run_of_a_process_has_a_peak_of_its_own() -> None:
    code = """if True:
        from megafp8.observe.memory import PeakMemory, peak_memory_bytes
        first = bytearray(200 << 20)
        first[:: 4096] = b"x" * len(first[:: 4096])
        del first
        assert peak_memory_bytes() > 200 << 20
        assert PeakMemory().bytes() < 200 << 20
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_peak_that_cannot_begin_again_is_known_once_it_has_risen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "none" / "clear_refs")
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    status.write_text("VmHWM:  500 kB\n")
    peak = memory.PeakMemory()
    assert peak.bytes() is None  # may be an earlier run's
    status.write_text("VmHWM:  501 kB\n")
    assert peak.bytes() == 501 * 1024
