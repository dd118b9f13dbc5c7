"""Hydra's launcher for sweeps on Slurm: submitit's, and every job's end is noticed and told.

Submitit asks `sacct`; without accounting a job that was killed leaves no result and would be waited
for without end. Here `squeue` is asked where `sacct` cannot answer. Hydra finds launchers in
`hydra_plugins` only.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hydra.core.utils import JobReturn

try:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
except ImportError:  # the extra `sweep` is not installed: Hydra says so when it is asked for
    SlurmLauncher = None

# conf/hydra/launcher/submitit_slurm.yaml takes the place of submitit's own settings on purpose.
warnings.filterwarnings("ignore", message=r"\n'hydra/launcher/submitit_slurm' is validated against")

CRASHED = 1
CHECK_SECONDS = 20


def parse_queue(text: str) -> dict[str, dict[str, str]]:
    """Job id to its state and nodes, of `squeue --format=%i|%T|%N` with arrays spelt out."""
    found = {}
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, nodes = rest.partition("|")
        if number and state:
            found[number] = {"JobID": number, "State": state, "NodeList": nodes}
    return found


def make_watcher(delay_seconds: int = CHECK_SECONDS) -> Any:
    """What submitit asks for the states of jobs."""
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
            # All of this user's jobs: a single one that Slurm has forgotten would be an error.
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


def _answer(command: list[str]) -> str | None:
    """What a command prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def exit_code(result: Any) -> int:
    """Of a job's result, which is the exit code of its run."""
    value = result.return_value if isinstance(result, JobReturn) else result
    return value if isinstance(value, int) else 0


if SlurmLauncher is not None:

    class WatchedSlurmLauncher(SlurmLauncher):
        """Waits for all jobs of a sweep and tells of each that failed; leaves with its code."""

        def launch(
            self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
        ) -> Sequence[JobReturn]:
            import submitit
            from submitit.core.utils import FailedJobError, UncompletedJobError

            submitted: list[Any] = []
            map_array = submitit.AutoExecutor.map_array

            def remember(executor: Any, *arguments: Any) -> list[Any]:
                submitted.extend(map_array(executor, *arguments))
                say(f"{len(submitted)} job(s) on Slurm: {submitted[0].job_id} …")
                return submitted

            submitit.SlurmJob.watcher = make_watcher()
            results: Sequence[JobReturn] = []
            with patch.object(submitit.AutoExecutor, "map_array", remember):
                try:
                    results = super().launch(job_overrides, initial_job_idx)
                except (FailedJobError, UncompletedJobError):
                    pass  # one of those below
            codes = [
                self._code(job, initial_job_idx + index, list(overrides))
                for index, (job, overrides) in enumerate(zip(submitted, job_overrides, strict=True))
            ]
            if failed := [code for code in codes if code]:
                raise SystemExit(failed[0])
            return results

        @staticmethod
        def _code(job: Any, number: int, overrides: list[str]) -> int:
            from submitit.core.utils import FailedJobError, UncompletedJobError

            what = f"job {number} ({' '.join(overrides)}; Slurm {job.job_id})"
            try:
                code = exit_code(job.results()[0])
            except UncompletedJobError:
                say(f"{what} has died (state {job.state}): {job.paths.stderr}")
                return CRASHED
            except FailedJobError as error:
                say(f"{what} has failed: {str(error).strip().splitlines()[-1]}: {job.paths.stderr}")
                return CRASHED
            if code:
                say(f"{what} left with code {code}: {job.paths.stderr}")
            return code


def say(text: str) -> None:
    print(f"[sweep] {text}", file=sys.stderr, flush=True)
