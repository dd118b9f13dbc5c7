"""A run's peak of memory is its own, also where the process has used more before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT, Place

EARLIER = 1 << 30  # bytes: more than the tiny job uses, so that an earlier run's peak is higher
PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from megafp8.observe import memory
if sys.argv.pop(1) == "forbidden":
    memory._CLEAR = Path("/proc/none")
earlier = bytearray({EARLIER})
earlier[::4096] = b"x" * len(earlier[::4096])
del earlier
import pretrain_gpt
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the peak begin again")
@pytest.mark.parametrize("reset", ["allowed", "forbidden"])
def test_a_run_shows_its_own_peak_or_none(place: Place, reset: str, tmp_path: Path) -> None:
    argv = place.argv("trainer.max_steps=2", "trainer.limit_val_batches=0")
    words = ("-c", PROGRAM, reset, *argv)
    done = place.driver.run_python(*words, cwd=place.cwd, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((place.dir() / "summary.json").read_text())
    shown = [summary["peak_memory_bytes"]] + [
        line.get("peak_memory_bytes") for line in place.metrics() if "loss" in line
    ]
    assert len(shown) == 3
    if reset == "forbidden":
        assert shown == [None] * 3 and "peak memory" not in done.stdout
        assert "peak_memory_bytes" not in place.metrics()[0]
    else:
        assert all(50 << 20 < peak < EARLIER for peak in shown), shown
        assert "peak memory" in done.stdout and "mem " in done.stdout
