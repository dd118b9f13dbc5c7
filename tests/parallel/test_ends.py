"""A rank says how it ended, and torchrun's exit code is that of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megafp8.errors import ExitCode
from megafp8.parallel.ends import end_line, lost_connection
from tests.train.runs import Driver

ROOT = Path(__file__).parents[2]
GLOO = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3821"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        dist.DistNetworkError("Broken pipe"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_a_broken_connection_is_known(error: Exception) -> None:
    found = lost_connection(error)
    assert found is not None and found.startswith(type(error).__name__) and "\n" not in found
    try:
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("the save failed") from inner
    except RuntimeError as outer:
        assert lost_connection(outer) == found


def test_other_errors_are_crashes() -> None:
    for error in (RuntimeError("CUDA error: an illegal memory access"), ValueError("")):
        assert lost_connection(error) is None


def test_the_line_names_rank_and_reason() -> None:
    given = {"RANK": "3", "MEGAFP8_MAX_RESTARTS": "2"}
    assert "rank 3 on " in end_line(4, given)
    assert end_line(4, given).endswith("ends with code 4 (hang; trainer.max_restarts=2)")
    assert end_line(2, given).endswith("ends with code 2 (refused)"), "no start would mend it"
    assert end_line(1, {"RANK": "0"}).endswith("ends with code 1 (crash)")
    assert end_line(1, {}, is_lost=True).endswith("ends with code 1 (another rank was lost)")


RANK = """if True:
    import os, signal, sys, time
    from megafp8.parallel.launch import run_process
    def main():
        if os.environ["RANK"] == "1":
            {first}
        time.sleep(600)
    run_process(main)
"""


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        ("return 75", int(ExitCode.SAVED_ON_SIGNAL), "code 75 (saved)"),
        ("return 2", int(ExitCode.USER_ERROR), "code 2 (refused)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 has ended by signal SIGKILL"),
        ("raise RuntimeError('Connection closed by peer')", 1, "code 1 (another rank was lost)"),
    ],
)
def test_torchrun_ends_with_the_code_of_its_ranks(
    driver: Driver, first: str, code: int, says: str, tmp_path: Path
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(first=first))
    words = ["-m", "megafp8.parallel.torchrun", "--standalone", "--nproc-per-node=2", str(program)]
    env = {"MEGAFP8_REQUEUES": "1", "PYTHONPATH": str(ROOT)}
    done = driver.run_python(*words, cwd=ROOT, folder=tmp_path, env=env)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and len(done.stderr.splitlines()) < 6, done.stderr
