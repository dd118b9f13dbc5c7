"""Collect the results of a sweep's jobs: a table, sweep.json, and a page with their curves."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import get_type_hints

from megafp8.cli import is_first_rank
from megafp8.errors import ExitCode, RunError
from megafp8.files import has_keys, is_ours, write_atomically
from megafp8.foreign import parse_json, read_json, read_object
from megafp8.observe.units import format_count, format_duration, in_columns
from megafp8.report.page import runs_page
from megafp8.report.record import RunRecord, read_run
from megafp8.report.verdict import TOLERANCE
from megafp8.report.writer import REPORT_FILE, is_page
from megafp8.secrets import shown

RESULT_NAME = "job.json"
SUMMARY_NAME = "sweep.json"
RECORD_OF_HYDRA = "multirun.yaml"
RECORD_OF_SWEEPERS = "optimization_results.yaml"  # that of Optuna and others

_OUTCOMES = {
    int(ExitCode.FINISHED): "finished",
    int(ExitCode.CRASHED): "crashed",
    int(ExitCode.USER_ERROR): "refused",
    int(ExitCode.NONFINITE): "not finite",
    int(ExitCode.SAVED_ON_SIGNAL): "saved on a signal",
}


_OF_A_JOB = {"job", "overrides"}
_SECTIONS = re.compile(r"(?<![^ ])[\w.]+\.(?=\w+=)")  # `model.optim.` before `lr=`
_STATUS = {int(ExitCode.FINISHED): "finished", int(ExitCode.SAVED_ON_SIGNAL): "stopped"}


@dataclass(frozen=True)
class SweepJob:
    """Name one run of a sweep: its number from 0, its overrides and its directory."""

    num: int
    overrides: tuple[str, ...]
    directory: Path

    @property
    def result_file(self) -> Path:
        """Return the path of the job's `job.json`."""
        return self.directory / RESULT_NAME


@dataclass(frozen=True)
class Result:
    """Hold the result of a job, as in its `job.json`; `val_loss` is None unless it finished.

    `began` is False if the job was refused before it began, so that a run in its directory is that
    of another job.
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

    @property
    def objective(self) -> float:
        """Return the number that a sweeper minimizes: infinite if a job has no validation loss."""
        return math.inf if self.val_loss is None else self.val_loss


def result_of(job: SweepJob, code: int, problem: str | None = None) -> Result:
    """Return the result of a job with an exit code, and the figures of its summary."""
    summary: dict[str, object] = {}
    if code in (ExitCode.FINISHED, ExitCode.SAVED_ON_SIGNAL):
        try:
            summary = read_object(job.directory / "summary.json")
        except (OSError, ValueError):
            pass  # the task wrote no summary

    def figure(name: str) -> float | None:
        value = summary.get(name)
        return value if isinstance(value, float) else None

    has_ended = code == ExitCode.FINISHED
    return Result(
        job=job.num,
        overrides=[shown(text) for text in job.overrides],
        directory=str(job.directory),
        code=code,
        outcome=_OUTCOMES.get(code, f"exit code {code}"),
        val_loss=figure("val_loss") if has_ended else None,
        train_loss=figure("train_loss") if has_ended else None,
        tokens_per_second=figure("tokens_per_second") if has_ended else None,
        wall_seconds=figure("wall_seconds"),
        problem=None if problem is None else shown(problem),
    )


def with_earlier_slices(result: Result, job: SweepJob) -> Result:
    """Return the result with the time of the slices before this one, which Slurm has ended."""
    if result.wall_seconds is None or not job.result_file.exists():
        return result
    earlier = read_result(job).wall_seconds or 0.0
    return replace(result, wall_seconds=result.wall_seconds + earlier)


def refuse_foreign_sweep(directory: Path) -> None:
    """Raise `RunError` if a sweep in `directory` would overwrite a file that no sweep wrote.

    The `sweep.json` of another sweep is kept under another name.
    """
    known = {
        REPORT_FILE: is_page,
        RECORD_OF_HYDRA: lambda content: b"megafp8" in content,
        SUMMARY_NAME: _are_results,
        RECORD_OF_SWEEPERS: lambda _: read_sweep(directory) is not None,
    }
    wrong = [name for name, knows in known.items() if not is_ours(directory / name, knows)]
    if wrong:
        raise RunError(
            f"hydra.sweep.dir={directory}: a sweep would overwrite {' and '.join(wrong)}, which no "
            "sweep of megafp8 has written. Choose another hydra.sweep.dir"
        )


def _are_results(content: bytes) -> bool:
    """Whether the content of a `sweep.json` is that of a sweep, perhaps of another version."""
    try:
        tree = parse_json(content.decode())
    except ValueError:
        return False
    rows = tree if isinstance(tree, list) else [None]
    return all(isinstance(row, dict) and _OF_A_JOB <= row.keys() for row in rows)


def why_foreign(job: SweepJob) -> str | None:
    """Return why a sweep must not write a job's `job.json`: another program's file has its name."""
    if is_ours(job.result_file, has_keys(*_OF_A_JOB)):
        return None
    return (
        f"{job.result_file}: no sweep of megafp8 has written this file. Choose another "
        "hydra.sweep.dir"
    )


def read_result(job: SweepJob) -> Result:
    try:
        return _restored(read_object(job.result_file))
    except (ValueError, TypeError):
        return result_of(job, int(ExitCode.CRASHED), "the job's result cannot be read")
    except FileNotFoundError:
        if not job.directory.is_dir():
            return replace(result_of(job, int(ExitCode.CRASHED)), outcome="not started")
        return result_of(job, int(ExitCode.CRASHED), "the job left no result")


def print_results(results: Sequence[Result], directory: Path) -> int:
    """Print the table of all jobs, write sweep.json and the page; return the sweep's exit code.

    Overrides that all jobs have in common are printed once.
    """
    code = next((result.code for result in results if result.code), int(ExitCode.FINISHED))
    stopped = int(ExitCode.SAVED_ON_SIGNAL)
    code = stopped if any(result.code == stopped for result in results) else code
    is_other = _has_another_sweep(directory, results)
    is_left = is_other and all(result.code == ExitCode.USER_ERROR for result in results)
    writes = is_first_rank()  # with torchrun every rank comes here
    is_repeated = False
    if writes and directory.is_dir() and not is_left:  # it was not made if all were refused
        if is_other:
            print(f"\n[sweep] results of an earlier sweep are kept in {_set_aside(directory)}")
        is_repeated = not _write_if_changed(directory / SUMMARY_NAME, results)
    own, shared = _own_overrides(results)
    ranked = _ranked(results)
    best = ranked[0][1] if ranked else None
    rows: list[tuple[str, ...]] = [
        ("job", "overrides", "outcome", "val loss", "train loss", "tokens/s", "time")
    ]
    for result in results:
        rows.append(
            (
                f"{result.job}{' *' if result.job == best else ''}",
                own[result.job],
                result.outcome,
                _text(result.val_loss, "{:.4f}".format),
                _text(result.train_loss, "{:.4f}".format),
                _text(result.tokens_per_second, format_count),
                _text(result.wall_seconds, format_duration),
            )
        )
    full = [column for column in range(len(rows[0])) if any(row[column] != "-" for row in rows[1:])]
    rows = [tuple(row[column] for column in full) for row in rows]  # without columns of dashes
    print(f"\n[sweep] {len(results)} jobs in {directory}")
    if shared:
        print(f"all jobs have {' '.join(shared)}")
    print(*in_columns(rows), sep="\n")
    if best is not None:
        print(f"* best: job {best} ({own[best]})")
        close = [job for loss, job in ranked[1:] if loss <= ranked[0][0] * (1 + TOLERANCE)]
        if close:
            print(
                f"  within {TOLERANCE:.1%} of it: job {', '.join(map(str, sorted(close)))}; "
                "megafp8 compare, with several seeds, tells such a gap from chance"
            )
    for result in results:
        if result.problem is not None:
            lines = result.problem.splitlines()
            print(f"job {result.job}: {' '.join(line.strip() for line in lines)}")
    if is_left:
        print(
            f"{directory} has the results of another sweep, which are left as they are: "
            "choose another hydra.sweep.dir"
        )
    elif writes and is_repeated and not code and (directory / REPORT_FILE).is_file():
        print(f"report: {directory / REPORT_FILE}")  # all jobs had finished before
    elif writes:
        _write_page(results, directory)
    sys.stdout.flush()
    return code


def _write_if_changed(path: Path, results: Sequence[Result]) -> bool:
    """Write the results to `sweep.json` unless it has them already; return whether it was written.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps([asdict(result) for result in results], indent=2) + "\n"
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    write_atomically(path, text)
    return True


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _own_overrides(results: Sequence[Result]) -> tuple[dict[int, str], list[str]]:
    """Return what each job alone has, and what all jobs have; of equal keys the last one counts."""
    last = {
        result.job: list({text.partition("=")[0]: text for text in result.overrides}.values())
        for result in results
    }
    shared = _shared(list(last.values()))
    own = {
        job: " ".join(text for text in texts if text not in shared) or "the default job"
        for job, texts in last.items()
    }
    return own, shared


def _ranked(results: Sequence[Result]) -> list[tuple[float, int]]:
    """Return the validation losses, else training losses, of at least two jobs, the least first."""
    for name in ("val_loss", "train_loss"):
        known = [
            (value, result.job)
            for result in results
            if (value := getattr(result, name)) is not None and math.isfinite(value)
        ]
        if len(known) > 1:
            return sorted(known)
    return []


def _has_another_sweep(directory: Path, results: Sequence[Result]) -> bool:
    """Whether the `sweep.json` of a directory has results of jobs with other overrides."""
    earlier = read_sweep(directory)
    if earlier is None:
        return (directory / SUMMARY_NAME).exists()  # another version's, which cannot be read
    return [each.overrides for each in earlier] != [each.overrides for each in results]


def _set_aside(directory: Path) -> Path:
    """Give the `sweep.json` of a directory the first free name of sweep-1.json and so on."""
    names = (directory / f"sweep-{number}.json" for number in count(1))
    path = next(name for name in names if not os.path.lexists(name))
    return (directory / SUMMARY_NAME).rename(path)


def read_sweep(directory: Path) -> list[Result] | None:
    """Return the results in a sweep's `sweep.json`; None without one that can be read."""
    try:
        return [_restored(each) for each in read_json(directory / SUMMARY_NAME)]
    except (OSError, ValueError, TypeError):
        return None


def _restored(tree: dict[str, object]) -> Result:
    """Return a result that was written as JSON.

    Raises:
        TypeError: It has other fields than a result, or values of other types.
    """
    result = Result(**tree)  # type: ignore[arg-type]  # checked below
    for name, kind in get_type_hints(Result).items():
        if not isinstance(getattr(result, name), list if name == "overrides" else kind):
            raise TypeError(name)
    if not all(isinstance(text, str) for text in result.overrides):
        raise TypeError("overrides")
    return result


def sweep_page(
    results: Sequence[Result], directory: Path, problems: Sequence[str] = ()
) -> str | None:
    """Return the page of an earlier sweep, refused jobs with their reasons; None without a run.

    Its runs may have been continued since, so their own files say how they ended. `problems` are
    messages about runs that cannot be read.
    """
    page_and_runs = _page_and_runs(results, directory, were_continued=True, problems=problems)
    return None if page_and_runs is None else page_and_runs[0]


def _page_and_runs(
    results: Sequence[Result],
    directory: Path,
    *,
    were_continued: bool = False,
    problems: Sequence[str] = (),
) -> tuple[str, list[RunRecord]] | None:
    own, _ = _own_overrides(results)
    runs: list[RunRecord] = []
    labels, notes = [], []
    for result in results:
        label = f"{result.job}: {_SECTIONS.sub('', own[result.job])}"
        run = _run_of(result, directory, were_continued) if result.began else None
        if run is not None:
            runs.append(run)
            labels.append(label)
        if result.problem is not None and (run is None or run.status in ("failed", "stopped")):
            tail = ["", *run.tail] if run is not None and run.tail else []
            notes.append((label, "\n".join([result.problem, *tail])))
    if not runs:
        return None
    lead = [f"{len(results)} jobs in {directory}"]
    title = f"sweep {directory.name}"
    page = runs_page(title, runs, problems=problems, labels=labels, lead=lead, notes=notes)
    return page, runs


def _run_of(result: Result, directory: Path, was_continued: bool) -> RunRecord | None:
    """Return what a job left behind; None if it left no run.

    Paths in `sweep.json` are relative to where the sweep was started, which may be elsewhere.
    """
    path = Path(result.directory)
    if not path.is_dir():
        path = directory / path.name
    status = None if was_continued else _STATUS.get(result.code, "failed")
    try:
        return read_run(path, status)
    except RunError:
        return None


def _write_page(results: Sequence[Result], directory: Path) -> None:
    """Write the page of all jobs; a page that cannot be written costs a line, not the sweep."""
    runs: list[RunRecord] = []
    try:
        page_and_runs = _page_and_runs(results, directory) if directory.is_dir() else None
        if page_and_runs is None:
            return
        page, runs = page_and_runs
        write_atomically(directory / REPORT_FILE, page)
        print(f"report: {directory / REPORT_FILE}")
    except Exception as error:  # whatever is wrong with a job's files, the sweep has its results
        print(f"report: cannot be written ({type(error).__name__}: {error})")
    if any(any(run.path.glob("events.out.tfevents.*")) for run in runs):
        print(f"curves: tensorboard --logdir {directory}")


def _shared(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that all of several jobs have."""
    if len(jobs) < 2:
        return []
    return [text for text in jobs[0] if all(text in job for job in jobs)]
