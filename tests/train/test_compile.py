"""Compiled layers, in a process of their own: what other tests leave in torch's compiler counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("compile_alone.py")


@pytest.mark.parametrize(
    "marker", ["not slow and not gpu", pytest.param("slow and not gpu", marks=pytest.mark.slow)]
)
def test_in_a_process_of_its_own(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, FILE]
    done = subprocess.run(command, cwd=FILE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
