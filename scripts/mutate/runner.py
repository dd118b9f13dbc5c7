"""Run tests in a copy of the tree, in a process that is forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.packages import is_ours, packages

FAST = "not slow and not gpu and not slurm and not hosts"
PRELOADED = (
    *("numpy", "pytest", "coverage", "hypothesis", "yaml", "hydra", "omegaconf", "sympy"),
    *("torch", "torch.distributed", "torch._dynamo", "torch.testing", "triton", "triton.language"),
)
ASKED = "MUTATE_ASKED"  # the variable of the environment that names a file of `Asked`
FAILED, INTERRUPTED = 1, 2  # pytest's exit codes: a test failed; a file could not be imported


@dataclass(frozen=True)
class Outcome:
    """Hold what the tests said: `verdict` is killed, survived, timeout or error."""

    verdict: str
    seconds: float
    by: str = ""  # the first test that failed, or the reason of an error


@dataclass(frozen=True)
class Asked:
    """Say what pytest is asked for."""

    report: str  # the file that gets the outcomes
    chosen: list[str] | None = None  # tests in their order; None: all of them
    cover: str = ""  # a folder of which executed lines are recorded


@dataclass(frozen=True)
class Report:
    """Hold what pytest said; the lines are of a run that records them."""

    outcomes: dict[str, str] = field(default_factory=dict)  # passed, failed or skipped, by test
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by file and line
    starting: list[str] = field(default_factory=list)  # tests that start processes


def copy_tree(root: Path, folder: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree, into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_file() or (root / name).is_symlink():  # a link may be to a folder
            shutil.copy2(root / name, target, follow_symlinks=False)
    compiler = _programs(folder) / "cc"
    compiler.parent.mkdir(exist_ok=True)
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" -O1\n')
    compiler.chmod(0o755)
    # Compiled once; a file that is mutated has another hash, and is compiled in each process.
    mode = ["--invalidation-mode", "checked-hash"]
    words = [sys.executable, "-m", "compileall", "-q", *mode, *packages(folder), "tests"]
    subprocess.run(words, cwd=folder, check=True)


def _programs(tree: Path) -> Path:
    """Return the folder of a `cc` that means the same as the system's, in an eighth of its time.

    A mutated source is compiled once; the last -O counts, and none changes what the code means.
    """
    return tree.parent / "programs"


def preload() -> None:
    """Import what every run of tests needs and no mutant changes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("MEGAFP8_TE_SOURCES", str(home / "megafp8/te"))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    mutated = [name for name in sys.modules if is_ours(name) or name.startswith("tests")]
    assert not mutated, mutated


def measure(tree: Path, file: str, limit_seconds: float, log: Path) -> Report:
    """Run a file of tests in `tree`, and record which lines each test executes."""
    _, report = _run(tree, [file], Asked(str(log) + ".json", cover=str(tree)), limit_seconds, log)
    return report


def run_tests(tree: Path, tests: Sequence[str], limit_seconds: float, log: Path) -> Outcome:
    """Run tests in `tree` in their order until one fails; one that is skipped is an error."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    asked = Asked(str(log) + ".json", chosen=list(tests))
    outcome, report = _run(tree, files, asked, limit_seconds, log, "-x")
    left = [test for test in tests if report.outcomes.get(test) != "passed"]
    if outcome.verdict == "survived" and left:
        what = report.outcomes.get(left[0], "not found")
        return Outcome("error", outcome.seconds, f"{left[0]} is {what}")
    return outcome


def _run(
    tree: Path, files: Sequence[str], asked: Asked, limit_seconds: float, log: Path, *options: str
) -> tuple[Outcome, Report]:
    """Run files of tests in processes that end with the call."""
    began, ended = time.monotonic(), None
    Path(asked.report).unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _test(tree, [*options, *files], asked, log)
    while ended is None and time.monotonic() - began < limit_seconds:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended = status if pid else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    seconds = time.monotonic() - began
    if ended is None:
        os.waitpid(child, 0)
        return Outcome("timeout", seconds, files[0]), Report()
    path = Path(asked.report)
    report = Report(**json.loads(path.read_text())) if path.exists() else Report()
    return _outcome(files[0], os.waitstatus_to_exitcode(ended), seconds, log), report


def _outcome(file: str, code: int, seconds: float, log: Path) -> Outcome:
    lines = log.read_text(errors="replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    by = named[0].split(" - ")[0].partition(" ")[2] if named else file
    if code == 0:
        return Outcome("survived", seconds)
    if code in (FAILED, INTERRUPTED) or code < 0:  # a crash is noticed too
        return Outcome("killed", seconds, by)
    return Outcome("error", seconds, f"{file}: exit code {code}")


def _test(tree: Path, words: Sequence[str], asked: Asked, log: Path) -> None:
    """Become a process that runs pytest in `tree` and exits."""
    gc.freeze()  # a collection need not walk through what the parent has imported
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["XDG_CACHE_HOME"] = str(tree.parent / "cache")  # compiled kernels
    os.environ["PATH"] = f"{_programs(tree)}{os.pathsep}{os.environ['PATH']}"
    os.environ.pop("CI", None)
    os.environ[ASKED] = str(log) + ".asked"
    Path(os.environ[ASKED]).write_text(json.dumps(asdict(asked)))
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    sys.argv = ["pytest"]
    code = 3
    try:
        import pytest

        options = ["-q", "-m", FAST, "-p", "no:cacheprovider", "-p", "scripts.mutate.plugin"]
        # Assertions that pytest rewrites are compiled in each process, also those of Hypothesis.
        code = int(pytest.main([*options, "--assert=plain", "--tb=line", *words]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
