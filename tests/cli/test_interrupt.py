"""Test that Ctrl-C during the imports of a command ends it with one line and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT

INTERRUPTED = """\
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def interrupted(
    folder: Path, package: str, *command: str, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command that gets Ctrl-C while it imports `package`; return exit code and stderr."""
    (folder / f"{package}.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("omegaconf", ["pretrain_gpt.py"]),
        ("omegaconf", ["finetune_gpt.py"]),
        ("torch", ["-m", "megafp8", "generate", "latest", "--prompt", "def"]),
        ("torch", ["-m", "megafp8", "export", "latest", "out"]),
    ],
)
def test_ctrl_c_during_imports(package: str, command: list[str], tmp_path: Path) -> None:
    assert interrupted(tmp_path, package, *command) == (130, "megafp8: interrupted\n")


def test_one_of_several_ranks_says_it(tmp_path: Path) -> None:
    code, errors = interrupted(tmp_path, "omegaconf", "pretrain_gpt.py", environment={"RANK": "1"})
    assert (code, errors) == (130, "")


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    code, errors = interrupted(
        tmp_path, "unused", "-c", "import megafp8.cli; raise ValueError('a bug')"
    )
    assert code == 1 and "Traceback" in errors and errors.endswith("ValueError: a bug\n")
