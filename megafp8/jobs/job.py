"""Describe a job of a sweep or of a comparison, and what came out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from megafp8.config.base_model import EXP_DIR, LOG_DIR, NAME
from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.overrides import parse_overrides
from megafp8.config.values import plain
from megafp8.errors import ExitCode, RunError
from megafp8.foreign import read_object
from megafp8.report.record import RunRecord, read_run
from megafp8.report.verdict import Seed, named
from megafp8.secrets import shown

RESULT_NAME = "job.json"
OUTCOMES = {
    int(ExitCode.FINISHED): "finished",
    int(ExitCode.CRASHED): "crashed",
    int(ExitCode.USER_ERROR): "refused",
    int(ExitCode.NONFINITE): "not finite",
    int(ExitCode.SAVED_ON_SIGNAL): "saved on a signal",
}


@dataclass(frozen=True)
class Job:
    """Name one run of several.

    Attributes:
        num: The number of the job, from 0.
        overrides: The settings of the run, as on a command line.
        directory: The directory of the run.
        label: The configuration of the run, in a comparison.
        seed: The run's `model.seed`, or the name of the checkpoint it starts from, in a comparison.
    """

    num: int
    overrides: tuple[str, ...]
    directory: Path
    label: str = ""
    seed: Seed = 0

    @property
    def name(self) -> str:
        """Return what a comparison calls the run."""
        return f"{self.label}, {named(self.seed)}"

    @property
    def result_file(self) -> Path:
        """Return the path of the job's `job.json`."""
        return self.directory / RESULT_NAME


@dataclass(frozen=True)
class Result:
    """Hold the result of a job, as in its `job.json`; `val_loss` is None unless it finished.

    `began` is False if the job was refused before it began, so that a run in its directory is that
    of another job. `is_baseline` says that the others' losses are shown in relation to this one's.
    """

    job: int
    overrides: list[str]
    directory: str
    code: int
    outcome: str
    val_loss: float | None
    train_loss: float | None
    tokens_per_second: float | None
    wall_seconds: float | None  # of all slices of a job that Slurm started again
    problem: str | None
    began: bool = True
    is_baseline: bool = False

    @property
    def objective(self) -> float:
        """Return the number that a sweeper minimizes: infinite if a job has no validation loss."""
        return math.inf if self.val_loss is None else self.val_loss

    @classmethod
    def restored(cls, tree: dict[str, object]) -> Result:
        """Return a result that was written as JSON.

        Raises:
            TypeError: It has other fields than a result, or values of other types.
        """
        result = cls(**tree)  # type: ignore[arg-type]  # checked below
        for name, kind in get_type_hints(cls).items():
            if not isinstance(getattr(result, name), list if name == "overrides" else kind):
                raise TypeError(name)
        if not all(isinstance(text, str) for text in result.overrides):
            raise TypeError("overrides")
        return result


def result_of(job: Job, code: int, problem: str | None = None) -> Result:
    """Return the result of a job with an exit code, and the figures of its summary."""
    summary: dict[str, object] = {}
    if code in (ExitCode.FINISHED, ExitCode.SAVED_ON_SIGNAL):
        try:
            summary = read_object(job.directory / "summary.json")
        except (OSError, ValueError):
            pass  # the task wrote no summary

    def figure(name: str, *, is_known: bool = code == ExitCode.FINISHED) -> float | None:
        value = summary.get(name)
        return value if isinstance(value, float) and is_known else None

    return Result(
        job=job.num,
        overrides=[shown(text) for text in job.overrides],
        directory=str(job.directory),
        code=code,
        outcome=OUTCOMES.get(code, f"exit code {code}"),
        val_loss=figure("val_loss"),
        train_loss=figure("train_loss"),
        tokens_per_second=figure("tokens_per_second"),
        wall_seconds=figure("wall_seconds", is_known=True),
        problem=None if problem is None else shown(problem),
    )


def run_left_in(directory: Path, status: str | None = None) -> RunRecord | None:
    """Return what a job left in its directory, perhaps with a known status; None without a run."""
    try:
        return read_run(directory, status)
    except RunError:
        return None


def with_earlier_slices(result: Result, job: Job) -> Result:
    """Return the result with the time of the slices before this one, which Slurm has ended."""
    if result.wall_seconds is None or not job.result_file.exists():
        return result
    earlier = read_result(job).wall_seconds or 0.0
    return replace(result, wall_seconds=result.wall_seconds + earlier)


def read_result(job: Job) -> Result:
    """Return the result in a job's `job.json`; without one, that of a job that crashed."""
    try:
        return Result.restored(read_object(job.result_file))
    except (ValueError, TypeError):
        return result_of(job, int(ExitCode.CRASHED), "the job's result cannot be read")
    except FileNotFoundError:
        if not job.directory.is_dir():
            return replace(result_of(job, int(ExitCode.CRASHED)), outcome="not started")
        return result_of(job, int(ExitCode.CRASHED), "the job left no result")


# ---- settings that are not those of one job


def directory_problems(overrides: Sequence[str], reason: str, hint: str) -> list[SettingError]:
    """Return an error for each setting of one run's directory, where each run gets its own."""
    return [
        SettingError(key, value, reason, hint, origin=COMMAND_LINE)
        for text in overrides
        for key, value in given_settings(text)
        if key in (EXP_DIR, LOG_DIR) or (key == NAME and value != "null")
    ]


def given_settings(text: str) -> list[tuple[str, str]]:
    """Return the keys that an override sets; one for a section sets several."""
    for parsed in parse_overrides([text], ())[0]:
        return [(key, plain(value)) for key, value in parsed.given]
    key, _, value = text.lstrip("+").partition("=")
    return [(key, value)]
