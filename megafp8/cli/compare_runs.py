"""Train the runs of a comparison in processes of their own, one after another or at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megafp8.cli.job import training_program
from megafp8.config.overrides import quoted
from megafp8.errors import ExitCode
from megafp8.report.record import read_run
from megafp8.runs.find import ENDED, FINISHED


@dataclass(frozen=True)
class ComparedJob:
    """Name one run: the configuration, the seed, its settings and its directory."""

    label: str
    seed: int
    overrides: tuple[str, ...]
    directory: Path


def run_all(
    jobs: Sequence[ComparedJob], at_once: int, check: Callable[[], None] = lambda: None
) -> dict[ComparedJob, int]:
    """Run the jobs that have not finished; return exit codes. No job starts after a signal.

    `check` is called before each job, which does not start if it raises.

    After Ctrl-C every job that has not finished has the code of an interruption, also one that had
    not begun to train and therefore could not save.
    """
    codes: dict[ComparedJob, int] = {}
    stopped: list[bool] = []

    def run(job: ComparedJob) -> None:
        if stopped:
            codes[job] = int(ExitCode.SAVED_ON_SIGNAL)
            return
        check()
        codes[job] = _run(job, quiet=at_once > 1)
        if codes[job] == ExitCode.SAVED_ON_SIGNAL:
            stopped.append(True)

    # Ctrl-C reaches the runs themselves, which save; this process waits for them.
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(True))
    try:
        with ThreadPoolExecutor(max(1, at_once)) as pool:
            list(pool.map(run, jobs))
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        codes = {job: code and int(ExitCode.SAVED_ON_SIGNAL) for job, code in codes.items()}
    return codes


def _run(job: ComparedJob, *, quiet: bool) -> int:
    name = f"{job.label}, seed {job.seed}"
    status = read_run(job.directory).status if job.directory.is_dir() else ""
    if status in ENDED:
        print(f"{name}: {status} before, in {job.directory}", flush=True)
        return int(ExitCode.FINISHED if status == FINISHED else ExitCode.NONFINITE)
    print(f"{name}: {job.directory}", flush=True)
    given = {text.partition("=")[0] for text in job.overrides}
    usual = {"exp_manager.checkpoint_callback_params.keep": "1"}
    command = [
        sys.executable,
        *training_program(),
        *job.overrides,
        *(f"{key}={value}" for key, value in usual.items() if key not in given),
        f"model.seed={job.seed}",
        f"exp_manager.explicit_log_dir={quoted(str(job.directory))}",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    output = subprocess.DEVNULL if quiet else subprocess.PIPE
    with subprocess.Popen(command, stdout=output, env=environment) as process:
        _show(process.stdout or ())
    return code if (code := process.returncode) >= 0 else 128 - code


def _show(lines: Iterable[bytes]) -> None:
    """Print what a run prints, indented, without the rows that say how to continue it alone.

    A run of the comparison that is prolonged by hand would no longer be comparable.
    """
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip()
        if not text.lstrip().startswith(("continue with ", "beware ")):
            print(f"  {text}".rstrip(), flush=True)
