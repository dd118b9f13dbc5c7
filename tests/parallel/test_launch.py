"""Ranks that die are started again as often as `trainer.max_restarts` says, and no other code is.

The ranks run a few lines of Python and train nothing; tests/train/test_restarts.py has real runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT

RANK = """\
import os, pathlib, signal, sys
starts = pathlib.Path(sys.argv[1], os.environ["RANK"])
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
with starts.open("a") as file:
    file.write(restart + os.environ["WORLD_SIZE"] + " ")
if int(restart) < int(sys.argv[2]) and os.environ["RANK"] == "0":
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[3]))
"""
JOB = "import sys; from megafp8.parallel.launch import launch; sys.exit(launch(sys.argv[1], \
sys.argv[3:], 2, max_restarts=int(sys.argv[2])))"


def starts(folder: Path, max_restarts: int, deaths: int, how: str) -> tuple[int, str, list[str]]:
    """Run a job of two ranks whose rank 0 ends early in the first `deaths` starts.

    Return the exit code, stderr, and the starts that each rank has noted: restart, world size.
    """
    script = folder / "rank.py"
    script.write_text(RANK)
    words = [str(script), str(max_restarts), str(folder), str(deaths), how]
    done = subprocess.run(
        [sys.executable, "-c", JOB, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr, (folder / "0").read_text().split()


def test_a_rank_that_dies_is_started_again(tmp_path: Path) -> None:
    code, errors, noted = starts(tmp_path, 2, 1, "killed")
    assert code == 0 and noted == ["02", "12"]
    assert "rank 0 died (signal SIGKILL)" in errors
    assert "starting all ranks again: restart 1 of 2" in errors


def test_not_more_often_than_asked(tmp_path: Path) -> None:
    code, _, noted = starts(tmp_path, 1, 9, "killed")
    assert code not in (0, 2) and noted == ["02", "12"]


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_to_correct_is_not_tried_again(code: int, tmp_path: Path) -> None:
    found, _, noted = starts(tmp_path, 2, 9, str(code))
    assert found == code and noted == ["02"]
