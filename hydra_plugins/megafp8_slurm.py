"""Launch sweeps on Slurm through Hydra and submitit, and report how every job ends.

Submitit asks `sacct` for the states of jobs. On a cluster without accounting, it would wait forever
for a job that was killed, since such a job leaves no result. This launcher asks `squeue` where
`sacct` cannot answer. Hydra finds launchers in `hydra_plugins` only.
"""

from __future__ import annotations

import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

try:
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
except ImportError:  # without the extra `sweep`, Hydra reports a missing launcher
    SlurmLauncher = None

CRASHED = 1
CHECK_SECONDS = 20
SETTLE_SECONDS = 2.0  # between two looks at a job that has left a result and has not ended yet
AGAIN = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"})
UNDER_WAY = frozenset({"RUNNING", "COMPLETING", "PREEMPTED", "SIGNALING", "STAGE_OUT", "STOPPED"})


def parse_queue(text: str) -> dict[str, dict[str, str]]:
    """Return state and nodes by job id, given the output of `squeue --array --format=%i|%T|%N`."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, nodes = rest.partition("|")
        if number and state:
            found[number] = {"JobID": number, "State": state, "NodeList": nodes}
    return found


def make_watcher(delay_seconds: int = CHECK_SECONDS) -> Any:
    """Return the object that submitit asks for the states of jobs."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    class Watcher(SlurmInfoWatcher):  # type: ignore[misc]
        has_accounting: bool | None = None

        def update(self) -> None:
            command = self._make_command()
            if command is None:
                return
            if self.has_accounting is None:
                self.has_accounting = _answer(["sacct", "--noheader", "-X", "-n"]) is not None
            if self.has_accounting:
                super().update()
                return
            # The command lists all jobs of this user: asking for a job that Slurm has forgotten
            # would be an error.
            text = _answer(
                ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T|%N"]
            )
            if text is not None:
                states = parse_queue(text)
                # Slurm forgets a job some minutes after its end (MinJobAge).
                gone = {"State": "ENDED", "NodeList": ""}
                for number in self._registered:
                    self._info_dict[number] = states.get(number, {"JobID": number, **gone})
            self._num_calls += 1
            self._last_status_check = time.time()
            for number in self._registered - self._finished:
                if self.is_done(number, mode="cache"):
                    self._finished.add(number)

    return Watcher(delay_s=delay_seconds)


def runs_again(
    number: str,
    ask: Callable[[list[str]], str | None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until Slurm is done with a job that has left a result; return whether it runs it again.

    A job that is preempted or requeued saves and leaves a result, and Slurm then starts it again.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N", "-j", number]
    while True:
        states = parse_queue((ask or _answer)(command) or "")
        state = states.get(number, {}).get("State", "ENDED")
        if state in AGAIN:
            return True
        if state not in UNDER_WAY:
            return False
        pause(SETTLE_SECONDS)


def _answer(command: list[str]) -> str | None:
    """Return what a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def exit_code(result: Any) -> int:
    """Return the exit code of a job.

    A job's result is the exit code of its run, or a float that a sweeper minimizes (code 0).
    """
    value = result.return_value if isinstance(result, JobReturn) else result
    return value if isinstance(value, int) else 0


@contextmanager
def saving_at(notice: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Let a run save at submitit's notice of a time limit or preemption, as it does at SIGTERM.

    Submitit's own handler requeues the job and ends the process at once. It does so here while no
    run handles SIGTERM. The value tells whether a run was asked to save.
    """
    requeue, of_submitit = signal.getsignal(notice), signal.getsignal(signal.SIGTERM)
    asked = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if signal.getsignal(signal.SIGTERM) != of_submitit:
            asked = True
            signal.raise_signal(signal.SIGTERM)
        elif callable(requeue):
            requeue(number, frame)

    signal.signal(notice, receive)
    try:
        yield lambda: asked
    finally:
        signal.signal(notice, requeue)


if SlurmLauncher is not None:

    class WatchedSlurmLauncher(SlurmLauncher):
        """Wait for all jobs of a sweep, and report each that failed.

        The process exits with the code of the first job that failed.
        """

        def launch(
            self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
        ) -> Sequence[JobReturn]:
            """Submit the jobs, wait for them, and return their results."""
            import submitit

            from megafp8.config.overrides import quoted

            submitit.SlurmJob.watcher = make_watcher()
            jobs = self.submit(job_overrides, initial_job_idx)
            say(f"jobs submitted: {len(jobs)}, from {jobs[0].job_id} on")
            numbered = enumerate(zip(jobs, job_overrides, strict=True), start=initial_job_idx)
            try:
                codes = [self._code(job, num, list(words)) for num, (job, words) in numbered]
            except KeyboardInterrupt:
                array = jobs[0].job_id.partition("_")[0]
                sweep: Any = self.config
                folder = quoted(str(Path(str(sweep.hydra.sweep.dir)).absolute()))
                say(f"interrupted: the jobs continue in Slurm. scancel {array} ends them")
                say(
                    "when they have ended, the same command with "
                    f"{shlex.quote(f'hydra.sweep.dir={folder}')} collects their results, and "
                    "continues those that have not finished"
                )
                raise
            if failed := [code for code in codes if code]:
                raise SystemExit(failed[0])
            return [job.results()[0] for job in jobs]

        def __call__(self, *given: Any) -> Any:
            """Run a job inside of Slurm, and let it save before submitit requeues it."""
            from submitit.core.job_environment import JobEnvironment

            notice = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
            with saving_at(notice) as is_requeued:
                result = super().__call__(*given)
            if is_requeued() and not math.isfinite(result.return_value):
                signal.raise_signal(notice)  # submitit requeues the job, and ends this process
            return result

        def submit(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
            """Submit jobs as submitit's launcher does, but do not wait for them."""
            import submitit

            of_executor = {"max_num_timeout"} & self.params.keys()
            executor = submitit.AutoExecutor(
                cluster="slurm",
                folder=self.params["submitit_folder"],
                **{f"slurm_{name}": self.params[name] for name in of_executor},
            )
            common = set(OmegaConf.structured(BaseQueueConf))
            executor.update_parameters(
                **{
                    name if name in common else f"slurm_{name}": value
                    for name, value in self.params.items()
                    if name not in of_executor | {"submitit_folder"}
                }
            )
            sweep: Any = self.config
            Path(str(sweep.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
            numbers = range(first, first + len(job_overrides))
            jobs: list[Any] = executor.map_array(
                self,
                [list(overrides) for overrides in job_overrides],
                ["hydra.sweep.dir"] * len(numbers),
                list(numbers),
                [f"job_id_for_{number}" for number in numbers],
                [Singleton.get_state()] * len(numbers),
            )
            return jobs

        @staticmethod
        def _code(job: Any, number: int, overrides: list[str]) -> int:
            from submitit.core.utils import FailedJobError, UncompletedJobError

            what = f"job {number} ({' '.join(overrides)}; Slurm {job.job_id})"
            try:
                code = exit_code(job.results()[0])
                while runs_again(job.job_id):
                    say(f"{what} was saved, and Slurm runs it again")
                    for task in range(job.num_tasks):  # the next result is not this one
                        job.task(task).paths.result_pickle.unlink(missing_ok=True)
                    code = exit_code(job.results()[0])
            except UncompletedJobError:
                say(f"{what} died (state {job.state}); its output: {job.paths.stderr}")
                return CRASHED
            except FailedJobError as error:
                reason = str(error).strip().splitlines()[-1]
                say(f"{what} failed: {reason}; its output: {job.paths.stderr}")
                return CRASHED
            if code:
                say(f"{what} ended with exit code {code}; its output: {job.paths.stderr}")
            return code


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"[sweep] {text}", file=sys.stderr, flush=True)
