"""The GPU benchmark of a product runs on a CPU with a tiny shape, but does not measure it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_gemm.py", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_tiny_run_writes_its_result(tmp_path: Path) -> None:
    done = run("--tiny", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*_gemm-64.json")
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 3
    commit = result["commit"]
    assert len(commit) == 40 if (ROOT / ".git").exists() else commit == "unknown"
    for row in result["rows"].values():
        expected = 2 * 64**3 / row["median_seconds"]
        assert row["flops_per_second"] == pytest.approx(expected)
        assert row["min_seconds"] <= row["median_seconds"] <= row["max_seconds"]
