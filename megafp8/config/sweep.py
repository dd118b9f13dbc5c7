"""A sweep (`-m`): its jobs, each checked and run like a single run, and what came of them.

The jobs are enumerated here and handed to Hydra's launcher by their numbers alone: so one that is
refused costs only itself, and Hydra records no job's settings.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megafp8.config.app import AppInfo, Task, report
from megafp8.config.compose import ROOT_CONFIG, Source, compose, find_source, register
from megafp8.config.load import HYDRA, load, load_all
from megafp8.config.options import Options
from megafp8.config.overrides import ParsedOverride, parse_overrides, quoted
from megafp8.config.problems import COMMAND_LINE, SettingError, raise_if_any
from megafp8.config.secrets import hide
from megafp8.config.table import record, resolved_table
from megafp8.errors import ExitCode, UserError

CHECKED_JOBS = 32
"""Jobs that are checked before the first one starts; later ones are checked when they start."""

RESULT_NAME = "job.json"
SUMMARY_NAME = "sweep.json"

_LOG_DIR = "exp_manager.explicit_log_dir"
_NUMBER = "sweep_job"
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_LAUNCHERS = ("hydra._internal.core_plugins.", "hydra_plugins.")
_OUTCOMES = {
    int(ExitCode.FINISHED): "finished",
    int(ExitCode.CRASHED): "crashed",
    int(ExitCode.USER_ERROR): "refused",
    int(ExitCode.NONFINITE): "not finite",
    int(ExitCode.SAVED_ON_SIGNAL): "saved on a signal",
}


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    num: int
    overrides: tuple[str, ...]
    directory: Path

    @property
    def result_file(self) -> Path:
        return self.directory / RESULT_NAME


@dataclass(frozen=True)
class Result:
    """What came of a job, as its `job.json` has it. `val_loss` is None unless it finished."""

    job: int
    overrides: list[str]
    directory: str
    code: int
    outcome: str
    val_loss: float | None
    problem: str | None


def run_sweep(options: Options, task: Task) -> int:
    """All jobs of a sweep, then their table; returns the first exit code that is not 0."""
    source = find_source(options.config_dir, options.config_name)
    overrides, problems = parse_overrides(options.overrides, source.directories, multirun=True)
    raise_if_any(problems + _directory_problems(overrides) + _sweeper_problems(overrides))
    for_hydra = [override.text for override in overrides if override.is_hydra]
    settings = _hydra_settings(source, for_hydra)
    ours = [override for override in overrides if not override.is_hydra]
    jobs = [
        Job(num, tuple(texts), Path(settings.sweep.dir) / _subdir(settings, num, texts))
        for num, texts in enumerate(_jobs(ours))
    ]
    for job in jobs:
        job.result_file.unlink(missing_ok=True)  # of the same sweep before
    results = {job.num: _refusal(job, options) for job in jobs[:CHECKED_JOBS]}
    runs = [job for job in jobs if results.get(job.num) is None]
    if runs:
        in_turn = settings.launcher._target_ == _BASIC_LAUNCHER
        run_job = _job_runner(runs, options, task, in_turn=in_turn)
        _launch(source, for_hydra, settings, runs, run_job)
    for job in runs:
        results[job.num] = _read_result(job)
    return _tell([result for _, result in sorted(results.items()) if result is not None], settings)


# --- Hydra's part ------------------------------------------------------------------------------


def _hydra_settings(source: Source, overrides: Sequence[str]) -> Any:
    """Hydra's settings for the sweep; refused where they would start code of a user's file."""
    composed: Any = compose(source, overrides, with_hydra=True)
    settings = composed.hydra
    targets = {name: str(settings[name].get("_target_")) for name in ("launcher", "sweeper")}
    if targets["sweeper"] != _BASIC_SWEEPER:
        raise SettingError(
            "hydra/sweeper",
            targets["sweeper"],
            "jobs are every combination of the values on the command line",
            "Leave it out, and give the values, as KEY=1,2,3 or KEY=range(1,4)",
        )
    if not targets["launcher"].startswith(_LAUNCHERS) or settings.get("callbacks"):
        key = "hydra.callbacks" if settings.get("callbacks") else "hydra.launcher._target_"
        raise SettingError(
            key,
            None,
            "settings never name code to run",
            "Leave it out; hydra/launcher=NAME chooses among the installed launchers",
        )
    try:
        settings.sweep.dir = str(settings.sweep.dir)  # its `${now:…}` is now, for all jobs
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise SettingError("hydra.sweep.dir", None, reason, "Give a directory") from error
    return settings


def _subdir(settings: Any, num: int, overrides: Sequence[str]) -> str:
    """A job's directory in the sweep's: `hydra.sweep.subdir` with what it may refer to."""
    text = str(OmegaConf.to_container(settings.sweep, resolve=False)["subdir"])  # type: ignore[index,call-overload]
    known = {"num": str(num), "override_dirname": ",".join(sorted(overrides)).replace("/", "_")}
    for name, value in known.items():
        text = text.replace(f"${{hydra.job.{name}}}", value)
    if "${" in text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise SettingError(
            "hydra.sweep.subdir",
            text,
            "is no directory inside the sweep's",
            "It may hold ${hydra.job.num} and ${hydra.job.override_dirname}",
        )
    if "${hydra.job." not in str(settings.sweep._get_node("subdir")._value()):
        text = f"{text}/{num}"
    return text


def _launch(
    source: Source,
    overrides: Sequence[str],
    settings: Any,
    jobs: Sequence[Job],
    run_job: Callable[[DictConfig], int],
) -> None:
    """Call Hydra as if from the shell: it reads its arguments from `sys.argv` only."""
    register(source)
    main = hydra.main(
        version_base=None, config_path=str(source.directories[0]), config_name=ROOT_CONFIG
    )
    numbers = ",".join(str(job.num) for job in jobs)
    # Last, and so above what a YAML or the command line say.
    ours = [f"+{_NUMBER}={numbers}", f"hydra.sweep.dir={quoted(settings.sweep.dir)}"]
    argv = ["--multirun", *overrides, *ours, "hydra.sweep.subdir=."]
    try:
        with patch.object(sys, "argv", [sys.argv[0], *argv]), _tracebacks_of_hydra():
            main(run_job)()
    except SystemExit:
        pass  # a job that was saved on a signal ends the sweep
    except Exception as error:  # a launcher's: a worker that was killed, a scheduler that is away
        line = str(error).strip().splitlines()[-1:] or [""]
        print(f"[sweep] the launcher failed: {type(error).__name__}: {hide(line[0])}", flush=True)


def _tracebacks_of_hydra() -> Any:
    """Hydra would print its own errors and end the process; ours are told in the table."""
    return patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"})


# --- one job -----------------------------------------------------------------------------------


def _job_runner(
    jobs: Sequence[Job], options: Options, task: Task, *, in_turn: bool
) -> Callable[[DictConfig], int]:
    """What a launcher calls, perhaps in a process of its own. Nothing is raised to Hydra, but where
    jobs come one after the other and a signal wants the machine back: no further job starts then.
    """
    by_number = {job.num: job for job in jobs}

    def run_job(cfg: DictConfig) -> int:
        job = by_number[int(cfg[_NUMBER])]
        result = _run_job(job, options, task)
        _write_result(job, result)
        if in_turn and result.code == ExitCode.SAVED_ON_SIGNAL:
            raise SystemExit(result.code)
        return result.code

    return run_job


def _run_job(job: Job, options: Options, task: Task) -> Result:
    words = hide(" ".join(job.overrides))
    print(f"[sweep] job {job.num}: {words} -> {job.directory}", flush=True)
    try:
        loaded = load_all(job.overrides, options.config_dir, options.config_name)
        cfg = loaded.cfg
        cfg.exp_manager.explicit_log_dir = str(job.directory)
        loaded = replace(
            loaded,
            origins={**loaded.origins, _LOG_DIR: "the sweep"},
            inert=tuple(setting for setting in loaded.inert if setting.key != HYDRA),
        )
        info = AppInfo(
            overrides=job.overrides,
            config_dir=options.config_dir,
            config_name=options.config_name,
            is_sweep=True,
            job_num=job.num,
            directory=job.directory,
            table=tuple(resolved_table(loaded)),
            inert=tuple(loaded.inert_lines()),
            record=record(loaded),
        )
        return _result(job, task(cfg, info))
    except UserError as error:
        return _result(job, report(error), str(error))
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return _result(job, int(ExitCode.CRASHED), line)


def _refusal(job: Job, options: Options) -> Result | None:
    """Why a job cannot be run, told before the first one starts; None if it can."""
    try:
        load(job.overrides, options.config_dir, options.config_name)
    except UserError as error:
        print(f"[sweep] job {job.num}: {hide(' '.join(job.overrides))}: refused", file=sys.stderr)
        return _result(job, report(error), str(error))
    return None


def _result(job: Job, code: int, problem: str | None = None) -> Result:
    val_loss = None
    if code == ExitCode.FINISHED:
        try:
            val_loss = json.loads((job.directory / "summary.json").read_text()).get("val_loss")
        except (OSError, ValueError):
            pass  # a task that leaves no summary
    return Result(
        job=job.num,
        overrides=[hide(text) for text in job.overrides],
        directory=str(job.directory),
        code=code,
        outcome=_OUTCOMES.get(code, f"exit code {code}"),
        val_loss=val_loss if isinstance(val_loss, float) else None,
        problem=None if problem is None else hide(problem),
    )


def _write_result(job: Job, result: Result) -> None:
    job.directory.mkdir(parents=True, exist_ok=True)
    job.result_file.write_text(json.dumps(asdict(result), indent=2) + "\n")


def _read_result(job: Job) -> Result:
    try:
        return Result(**json.loads(job.result_file.read_text()))
    except FileNotFoundError:
        result = _result(job, int(ExitCode.CRASHED), "it left no result")
        started = job.directory.is_dir()
        return result if started else Result(**(asdict(result) | {"outcome": "not started"}))


# --- the end -----------------------------------------------------------------------------------


def _tell(results: Sequence[Result], settings: Any) -> int:
    """The table of all jobs, on stdout and as `sweep.json`; returns the sweep's exit code.

    What all jobs have in common is said once.
    """
    code = next((result.code for result in results if result.code), int(ExitCode.FINISHED))
    stopped = int(ExitCode.SAVED_ON_SIGNAL)
    code = stopped if any(result.code == stopped for result in results) else code
    directory = Path(settings.sweep.dir)
    if directory.is_dir():  # not where every job was refused
        text = json.dumps([asdict(result) for result in results], indent=2)
        (directory / SUMMARY_NAME).write_text(text + "\n")
    shared = _shared([result.overrides for result in results])
    rows = [
        (
            str(result.job),
            " ".join(text for text in result.overrides if text not in shared) or "the default job",
            result.outcome,
            "-" if result.val_loss is None else f"{result.val_loss:.4f}",
        )
        for result in results
    ]
    rows.insert(0, ("job", "overrides", "outcome", "val loss"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print(f"\n[sweep] {len(results)} jobs in {directory}")
    if shared:
        print(f"all with {' '.join(shared)}")
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for result in results:
        if result.problem is not None:
            lines = result.problem.splitlines()
            print(f"job {result.job}: {' '.join(line.strip() for line in lines)}")
    sys.stdout.flush()
    return code


def _shared(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The overrides that every one of several jobs has."""
    if len(jobs) < 2:
        return []
    return [text for text in jobs[0] if all(text in job for job in jobs)]


# --- which jobs --------------------------------------------------------------------------------


def _jobs(overrides: Sequence[ParsedOverride]) -> Iterator[list[str]]:
    """The overrides of each job, the last key's values changing fastest, as Hydra's sweeper has."""
    choices: list[list[str]] = []
    for override in overrides:
        if override.sweep is None:
            choices.append([override.text])
            continue
        key = override.text.partition("=")[0]
        choices.append([f"{key}={value}" for value in override.sweep.sweep_string_iterator()])
    for job in itertools.product(*choices):
        yield list(job)


def _sweeper_problems(overrides: Sequence[ParsedOverride]) -> list[SettingError]:
    return [
        SettingError(
            override.text.partition("=")[0],
            override.text.partition("=")[2],
            "jobs are every combination of values, and an interval has no end of them",
            "Give the values, as 1,2,3 or range(1,4)",
            origin=COMMAND_LINE,
        )
        for override in overrides
        if override.sweep is not None and not override.sweep.is_discrete_sweep()
    ]


def _directory_problems(overrides: Sequence[ParsedOverride]) -> list[SettingError]:
    texts = [override.text for override in overrides]
    return [
        SettingError(
            key,
            text.partition("=")[2],
            "each job of a sweep has a directory of its own",
            "Choose that of the sweep with hydra.sweep.dir=DIR",
            origin=COMMAND_LINE,
        )
        for text in texts
        for key in (_LOG_DIR, "exp_manager.exp_dir")
        if text.startswith(f"{key}=")
    ]
