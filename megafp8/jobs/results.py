"""Report a sweep: a table of its jobs, sweep.json, and a page with their curves."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path

from megafp8.errors import ExitCode, RunError
from megafp8.files import has_keys, is_ours, write_atomically
from megafp8.foreign import parse_json, read_json
from megafp8.jobs.job import Job, Result, run_left_in
from megafp8.observe.units import format_count, format_duration, in_columns
from megafp8.parallel.environment import is_first_rank
from megafp8.report.page import BASELINE, differing_settings, ranked, runs_page
from megafp8.report.record import RunRecord
from megafp8.report.verdict import TOLERANCE
from megafp8.report.writer import REPORT_FILE, is_page

SUMMARY_NAME = "sweep.json"
RECORD_OF_HYDRA = "multirun.yaml"
RECORD_OF_SWEEPERS = "optimization_results.yaml"  # that of Optuna and others

NO_BASELINE = (
    "no job is the baseline: add one without FP8 (model.fp8=False,True or precision=bf16,…) or "
    "with the default values, or name a job by its number with --baseline JOB"
)
_OF_A_JOB = {"job", "overrides"}
_SECTIONS = re.compile(r"(?<![^ ])[\w.]+\.(?=\w+=)")  # `model.optim.` before `lr=`
_STATUS = {int(ExitCode.FINISHED): "finished", int(ExitCode.SAVED_ON_SIGNAL): "stopped"}


# ---- files of others


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


def why_foreign(job: Job) -> str | None:
    """Return why a sweep must not write a job's `job.json`: another program's file has its name."""
    if is_ours(job.result_file, has_keys(*_OF_A_JOB)):
        return None
    return (
        f"{job.result_file}: no sweep of megafp8 has written this file. Choose another "
        "hydra.sweep.dir"
    )


# ---- the baseline


def with_baseline(
    results: Sequence[Result], directory: Path, named: int | None = None
) -> list[Result]:
    """Return the results with the baseline marked: the job of a number, or else the likely one.

    That is the only one without FP8, or else the only one that has the default job's value of each
    setting in which the jobs differ.
    """
    if named is None:
        runs = {
            result.job: run
            for result in results
            if result.began and (run := _run_of(result, directory, True)) is not None
        }
        differ = differing_settings(list(runs.values())).keys()
        plain = [job for job, run in runs.items() if run.config.get("model.fp8") is False]
        usual = [
            job for job, run in runs.items() if not differ & {row.get("key") for row in run.changed}
        ]
        of_fp8 = plain if "model.fp8" in differ else usual
        named = of_fp8[0] if len(of_fp8) == 1 and len(runs) > 1 else None
    return [replace(result, is_baseline=result.job == named) for result in results]


def _gaps(results: Sequence[Result]) -> dict[int, tuple[float, str]]:
    """Return the losses of jobs over the baseline's, minus 1, as numbers and in words."""
    losses = {job: loss for loss, job in _losses(results)}
    base = next((result.job for result in results if result.is_baseline), None)
    if base is None or base not in losses:
        return {}
    gaps = {job: loss / losses[base] - 1 for job, loss in losses.items()}
    return {j: (gap, BASELINE if j == base else f"{100 * gap:+.2f} %") for j, gap in gaps.items()}


# ---- the table


def print_results(results: Sequence[Result], directory: Path) -> int:
    """Print the table of all jobs, write sweep.json and the page; return the sweep's exit code.

    Overrides that all jobs have in common are printed once.
    """
    writes = is_first_rank()  # with torchrun every rank comes here
    codes = [result.code for result in results if result.code]
    stopped = int(ExitCode.SAVED_ON_SIGNAL)
    code = stopped if stopped in codes else next(iter(codes), int(ExitCode.FINISHED))
    is_other = _has_another_sweep(directory, results)
    is_left = is_other and all(result.code == ExitCode.USER_ERROR for result in results)
    is_repeated = False
    if writes and directory.is_dir() and not is_left:  # it was not made if all were refused
        if is_other:
            print(f"\n[sweep] results of an earlier sweep are kept in {_set_aside(directory)}")
        is_repeated = not _write_if_changed(directory / SUMMARY_NAME, results)
    print(f"\n[sweep] {len(results)} jobs in {directory}", *_table(results), sep="\n")
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


def _table(results: Sequence[Result]) -> list[str]:
    """Return the table of the jobs, without columns of dashes, and below it the best job."""
    own, shared = _own_overrides(results)
    losses = _losses(results)
    best = losses[0][1] if losses else None
    gaps = _gaps(results)

    def column(title: str, name: str, form: Callable[[float], str]) -> list[str]:
        values = (getattr(result, name) for result in results)
        return [title, *("-" if value is None else form(value) for value in values)]

    columns = [
        ["job", *(f"{r.job}{' *' if r.job == best else ''}" for r in results)],
        ["overrides", *(own[r.job] for r in results)],
        ["outcome", *(r.outcome for r in results)],
        column("val loss", "val_loss", "{:.4f}".format),
        column("train loss", "train_loss", "{:.4f}".format),
        ["to baseline", *(gaps[r.job][1] if r.job in gaps else "-" for r in results)],
        column("tokens/s", "tokens_per_second", format_count),
        column("time", "wall_seconds", format_duration),
    ]
    columns = [cells for cells in columns if set(cells[1:]) != {"-"}]
    lines = [f"all jobs have {' '.join(shared)}"] if shared else []
    lines += in_columns(list(zip(*columns, strict=True)))
    if best is not None:
        lines.append(f"* {_best(losses, own)}")
        lines += [] if gaps else [NO_BASELINE]
    return lines


def _best(losses: Sequence[tuple[float, int]], own: Mapping[int, str]) -> str:
    """Return in a sentence which job is best, and which ones are as good, of sorted losses."""
    (least, best), *others = losses
    text = f"best: job {best} ({own[best]})"
    close = [job for loss, job in others if loss <= least * (1 + TOLERANCE)]
    if not close:
        return text
    jobs = f"job{'s' * (len(close) > 1)} {', '.join(map(str, sorted(close)))}"
    return (
        f"{text}, nearly equal (within {TOLERANCE:.1%}): {jobs}; megafp8 compare, with several "
        "seeds, tells such a gap from chance"
    )


def _losses(results: Sequence[Result]) -> list[tuple[float, int]]:
    """Return the losses of the jobs with the jobs' numbers, the least first."""
    figures = [partial(getattr, result) for result in results]
    return [(loss, results[place].job) for loss, place in ranked(figures)]


def _own_overrides(results: Sequence[Result]) -> tuple[dict[int, str], list[str]]:
    """Return what each job alone has, and what all jobs have; of equal keys the last one counts."""
    last = {
        result.job: list({text.partition("=")[0]: text for text in result.overrides}.values())
        for result in results
    }
    first, *others = last.values() or [[]]
    shared = [text for text in first if others and all(text in texts for texts in others)]
    own = {
        job: " ".join(text for text in texts if text not in shared) or "the default job"
        for job, texts in last.items()
    }
    return own, shared


# ---- sweep.json


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
        return [Result.restored(each) for each in read_json(directory / SUMMARY_NAME)]
    except (OSError, ValueError, TypeError):
        return None


# ---- the page


def sweep_page(
    results: Sequence[Result],
    directory: Path,
    problems: Sequence[str] = (),
    *,
    were_continued: bool = True,
) -> str | None:
    """Return the page of a sweep, refused jobs with their reasons; None without a run.

    Args:
        results: The results of the jobs.
        directory: The folder of the sweep.
        problems: Messages about runs that cannot be read.
        were_continued: Whether runs may have been continued since the sweep, so that their own
            files say how they ended.
    """
    own, _ = _own_overrides(results)
    runs: list[RunRecord] = []
    labels, notes, outcomes = [], [], {}
    for result in results:
        label = f"{result.job}: {_SECTIONS.sub('', own[result.job])}"
        outcomes[label] = result.outcome
        run = _run_of(result, directory, were_continued) if result.began else None
        if run is not None:
            runs.append(run)
            labels.append(label)
        if result.problem is not None and (run is None or run.status in ("failed", "stopped")):
            tail = ["", *run.tail] if run is not None and run.tail else []
            notes.append((label, "\n".join([result.problem, *tail])))
    if not runs:
        return None
    losses = _losses(results)
    gaps = {f"{job}: {_SECTIONS.sub('', own[job])}": gap for job, gap in _gaps(results).items()}
    lead = [f"{len(results)} jobs in {directory}", *([_best(losses, own)] if losses else [])]
    lead += [NO_BASELINE] if losses and not gaps else []
    title = f"sweep {directory.name}"
    return runs_page(
        title, runs, problems=problems, labels=labels, lead=lead, notes=notes, outcomes=outcomes,
        gaps=gaps,
    )  # fmt: skip


def _run_of(result: Result, directory: Path, was_continued: bool) -> RunRecord | None:
    """Return what a job left behind; None if it left no run.

    Paths in `sweep.json` are relative to where the sweep was started, which may be elsewhere.
    """
    path = Path(result.directory)
    if not path.is_dir():
        path = directory / path.name
    return run_left_in(path, None if was_continued else _STATUS.get(result.code, "failed"))


def _write_page(results: Sequence[Result], directory: Path) -> None:
    """Write the page of all jobs; a page that cannot be written costs a line, not the sweep."""
    try:
        page = sweep_page(results, directory, were_continued=False) if directory.is_dir() else None
        if page is None:
            return
        write_atomically(directory / REPORT_FILE, page)
        print(f"report: {directory / REPORT_FILE}")
    except Exception as error:  # whatever is wrong with a job's files, the sweep has its results
        print(f"report: cannot be written ({type(error).__name__}: {error})")
    began = (Path(result.directory) for result in results if result.began)
    if any(any(path.glob("events.out.tfevents.*")) for path in began):
        print(f"curves: tensorboard --logdir {directory}")
