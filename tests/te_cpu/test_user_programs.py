"""The pytest plugin runs `user_programs.py`, written for a GPU, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_cpu
from tests.te_sources import need_sources

ROOT = Path(te_cpu.__file__).parents[1]


@pytest.mark.parametrize("version", [te_cpu.DEFAULT_VERSION, "2.20.2"])
def test_programs_for_a_gpu_run(version: str, tmp_path: Path) -> None:
    """None is skipped or expected to fail."""
    need_sources(version)
    plugin = ["-p", "te_cpu", "--te-version", version, "--te-skip-missing"]
    alone = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    file = Path(__file__).with_name("user_programs.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *alone, f"--rootdir={tmp_path}", str(file)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout
