"""Test that a wrong variable of a rank is one line that names it, before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megafp8.errors import RunError
from megafp8.parallel.environment import check_environment, join_seconds
from tests.train.runs import ROOT

RIGHT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "MEGAFP8_JOIN_SECONDS": "1.5",
}


def test_right_variables_pass() -> None:
    check_environment(RIGHT)
    check_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert join_seconds(RIGHT) == 1.5 and join_seconds({}) == 600


def test_a_process_that_is_no_rank_is_not_checked() -> None:
    wrong = {"LOCAL_RANK": "x", "MASTER_PORT": "x"}
    check_environment(wrong)
    with pytest.raises(RunError, match="LOCAL_RANK=x|MASTER_PORT=x"):
        check_environment(RIGHT | wrong)


WRONG = [
    ("MASTER_PORT", "abc", "is not a whole number"),
    ("MASTER_PORT", "70000", "a port is a number from 1 to 65535"),
    ("MASTER_PORT", "0", "a port is a number from 1 to 65535"),
    ("RANK", "a", "is not a whole number"),
    ("RANK", "-1", "is not a whole number"),
    ("RANK", "5", "with WORLD_SIZE=2 the ranks are 0 to 1"),
    ("WORLD_SIZE", "two", "is not a whole number"),
    ("WORLD_SIZE", "0", "there is at least one rank"),
    ("LOCAL_RANK", "1.0", "is not a whole number"),
    ("LOCAL_RANK", "2", "with LOCAL_WORLD_SIZE=2 the ranks are 0 to 1"),
    ("LOCAL_WORLD_SIZE", "x", "is not a whole number"),
    ("TORCHELASTIC_MAX_RESTARTS", "abc", "is not a whole number"),
    ("TORCHELASTIC_RESTART_COUNT", "²", "is not a whole number"),
    ("MEGAFP8_JOIN_SECONDS", "1m", "is not a number of seconds above 0"),
    ("MEGAFP8_JOIN_SECONDS", "nan", "is not a number of seconds above 0"),
    ("MEGAFP8_JOIN_SECONDS", "0", "is not a number of seconds above 0"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_a_wrong_variable_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(RunError, match=f"^{name}={value}: {said}.*[.] [A-Z]"):
        check_environment(RIGHT | {name: value})


COMMAND = """\
import sys
import pretrain_gpt
code = pretrain_gpt.main()
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_a_command_reports_it_in_one_line_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "trainer.devices=2", "trainer.accelerator=cpu"],
        cwd=ROOT,
        env={**os.environ, **RIGHT, "RANK": "5"},
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: rank 5: RANK=5: with WORLD_SIZE=2")


def test_a_wrong_variable_of_slurm_is_no_traceback() -> None:
    step = {
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=ROOT,
        env={**os.environ, **step},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: SLURM_STEP_TASKS_PER_NODE=1(x2: cannot be read")
