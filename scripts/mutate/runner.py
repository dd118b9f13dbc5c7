"""Run tests in a copy of the tree, in a process that is forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FAST = "not slow and not gpu and not slurm and not hosts"
FAILED, INTERRUPTED = 1, 2  # pytest's exit codes: a test failed; a file could not be imported


@dataclass(frozen=True)
class Outcome:
    """Hold what the tests said: `verdict` is killed, survived, timeout or error."""

    verdict: str
    seconds: float
    by: str = ""  # the first test that failed, or the reason of an error


def copy_tree(root: Path, folder: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree, into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_file():
            shutil.copy2(root / name, target)


def preload() -> None:
    """Import what every run of tests needs and no mutant changes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy
    import pytest
    import torch

    assert all((numpy, pytest, torch))


def run_tests(tree: Path, tests: Sequence[str], limit_seconds: float, log: Path) -> Outcome:
    """Run files of tests in `tree`, one after the other, until a test fails."""
    seconds = 0.0
    for file in tests:
        outcome = _run_file(tree, file, limit_seconds - seconds, log)
        seconds += outcome.seconds
        if outcome.verdict != "survived":
            return Outcome(outcome.verdict, seconds, outcome.by)
    return Outcome("survived", seconds)


def _run_file(tree: Path, file: str, limit_seconds: float, log: Path) -> Outcome:
    """Run a file of tests until one fails, in processes that end with the call."""
    began, ended = time.monotonic(), None
    child = os.fork()
    if child == 0:
        _test(tree, file, log)
    while ended is None and time.monotonic() - began < limit_seconds:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended = status if pid else None
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    seconds = time.monotonic() - began
    if ended is None:
        os.waitpid(child, 0)
        return Outcome("timeout", seconds, file)
    return _outcome(file, os.waitstatus_to_exitcode(ended), seconds, log)


def _outcome(file: str, code: int, seconds: float, log: Path) -> Outcome:
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    by = named[0].split(" - ")[0].partition(" ")[2] if named else file
    if code == 0:
        return Outcome("survived", seconds)
    if code in (FAILED, INTERRUPTED) or code < 0:  # a crash is noticed too
        return Outcome("killed", seconds, by)
    return Outcome("error", seconds, f"{file}: exit code {code}")


def _test(tree: Path, file: str, log: Path) -> None:
    """Become a process that runs a file of tests in `tree` and exits."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(tree.parent / "cache")  # compiled kernels
    os.environ.pop("CI", None)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    sys.argv = ["pytest"]
    code = 3
    try:
        import pytest

        options = ["-x", "-q", "-m", FAST, "-p", "no:cacheprovider", "-p", "scripts.mutate.plugin"]
        code = int(pytest.main([*options, "--tb=line", file]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
