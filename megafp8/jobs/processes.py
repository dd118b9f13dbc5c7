"""Run jobs in processes of their own, one after another or several at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType

from megafp8.config.overrides import quoted
from megafp8.errors import ExitCode, RunError
from megafp8.jobs.job import Job
from megafp8.parallel.launch import (
    heard_signals,
    job_environment,
    leave_dead_terminal,
    training_program,
)
from megafp8.report.record import read_run
from megafp8.runs.find import ENDED, FINISHED
from megafp8.runs.lock import holder

_POLL_SECONDS = 0.2


class _Signals:
    """Pass signals on to the processes of the runs, each of which has a session of its own.

    At the first signal the runs save and leave; the second one kills them. Ctrl-C and the end of a
    terminal reach this process alone. Use it as a context; when it ends, no process is left.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.stops = False  # no other run starts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Signals:
        for number in heard_signals():
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, command: Sequence[str], *, quiet: bool) -> subprocess.Popen[bytes]:
        """Start a run, which gets the signal, or the two, that may have come meanwhile."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            env={**job_environment(), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self._processes.append(process)
        if self.received:
            self._pass_on(process)
        return process

    @contextmanager
    def sent_by_errors(self) -> Iterator[None]:
        """Let the runs save and leave at an error, as when the reader of the output goes away.

        Runs that stand beside the error would otherwise train to their end before it is reported.
        """
        try:
            yield
        except BaseException:
            if not self.stops:
                self._receive(signal.SIGTERM, None)
            raise

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        self.received.append(signal.Signals(number))
        self.stops = True
        for process in list(self._processes):
            self._pass_on(process)

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(self.received[0] if len(self.received) == 1 else signal.SIGKILL)


def run_all(
    jobs: Sequence[Job], at_once: int, check: Callable[[], None] = lambda: None
) -> tuple[dict[Job, int], int | None]:
    """Run the jobs that have not finished; return their exit codes, and that of an interruption.

    `check` is called before each job, which does not start if it raises. At a signal or an error
    the jobs that run save and leave, and no other one starts. After a signal the code of the
    interruption is not None: it says that the same command continues, also jobs that had not begun
    to train, or that a second signal ended the runs at once.

    Raises:
        RunError: Another process trains one of the runs.
    """
    for job in jobs:
        refuse_in_use(job)
    codes: dict[Job, int] = {}
    with _Signals() as signals, ThreadPoolExecutor(max(1, at_once)) as pool:

        def run(job: Job) -> None:
            if signals.stops:
                codes[job] = int(ExitCode.SAVED_ON_SIGNAL)
                return
            with signals.sent_by_errors():
                check()
                codes[job] = _run(job, signals, quiet=at_once > 1)
            if codes[job] == ExitCode.SAVED_ON_SIGNAL:  # the signal may have come to the run alone
                signals.stops = True

        runs = [pool.submit(run, job) for job in jobs]
        # This thread handles signals, and only when it wakes. One that the kernel gives to another
        # thread, as it may while an earlier one is not handled yet, does not wake it.
        while wait(runs, timeout=_POLL_SECONDS).not_done:
            pass
        for done in runs:
            done.result()
    if not signals.stops or not any(codes.values()):
        return codes, None
    if len(signals.received) > 1:
        return codes, 128 + signals.received[1]
    return codes, int(ExitCode.SAVED_ON_SIGNAL)


def refuse_in_use(job: Job) -> None:
    """Raise `RunError` if a living process works in the directory of a run."""
    if (process := holder(job.directory)) is not None:
        raise RunError(
            f"{job.directory} is in use by {process}, which trains this run. Wait until it has "
            "ended, or end it; the same command continues"
        )


def _run(job: Job, signals: _Signals, *, quiet: bool) -> int:
    status = read_run(job.directory).status if job.directory.is_dir() else ""
    if status in ENDED:
        print(f"{job.name}: {status} before, in {job.directory}", flush=True)
        return int(ExitCode.FINISHED if status == FINISHED else ExitCode.NONFINITE)
    print(f"{job.name}: {job.directory}", flush=True)
    given = {text.partition("=")[0] for text in job.overrides}
    usual = {"exp_manager.checkpoint_callback_params.keep": "1"}
    if isinstance(job.seed, int):
        usual["model.seed"] = str(job.seed)
    command = [
        sys.executable,
        *training_program(),
        *job.overrides,
        *(f"{key}={value}" for key, value in usual.items() if key not in given),
        f"exp_manager.explicit_log_dir={quoted(str(job.directory))}",
    ]
    with signals.start(command, quiet=quiet) as process, signals.sent_by_errors():
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
