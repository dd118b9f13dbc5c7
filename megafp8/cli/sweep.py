"""Run a sweep (`-m`): Hydra's sweeper chooses the jobs, and Hydra's launcher runs them.

Every job is checked and run like a single run. A job that is refused or fails has an infinite
objective, and the other jobs run on. A table of all jobs is printed at the end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from megafp8.cli.epochs import with_epochs
from megafp8.cli.job import Options, Task, app_info, gives_steps, report_error
from megafp8.config.base_model import LOG_DIR
from megafp8.config.errors import COMMAND_LINE, Origin, SettingError, raise_if_any
from megafp8.config.hydra_section import is_hydras
from megafp8.config.keys import Values
from megafp8.config.layers import find_source
from megafp8.config.load import Loaded
from megafp8.config.overrides import ParsedOverride, last_given, parse_overrides
from megafp8.config.own_recipes import names_given
from megafp8.config.resolve import resolve
from megafp8.errors import ExitCode, UserError
from megafp8.files import run_errors_reported
from megafp8.jobs.hydra import checked_loader, composed, keep_texts, sweeper_problems
from megafp8.jobs.job import (
    Job,
    Result,
    directory_problems,
    read_result,
    result_of,
    with_earlier_slices,
)
from megafp8.jobs.results import print_results, refuse_foreign_sweep, why_foreign, with_baseline
from megafp8.runs.find import CONFIG_NAME, RECORD_NAME
from megafp8.secrets import hide, shown

CHECKED_JOBS = 32
"""The number of jobs that are checked before the first one starts.

Later jobs are checked when they start.
"""

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_REPORTING_LAUNCHER = "hydra_plugins.megafp8_sweep.ReportingLauncher"


class SavedOnSignalError(Exception):
    """Report that a job was saved on a signal, so that no further job may start."""


@dataclass
class Sweep:
    """Run the jobs of a sweep and collect their results; Hydra calls the object for each job."""

    options: Options
    task: Task
    in_turn: bool  # one job after the other, in this process
    recipes_given: frozenset[str]  # the names of code on the command line itself
    results: dict[int, Result] = field(default_factory=dict)

    def job(self, num: int, overrides: Sequence[str], config: Any) -> Job:
        """Return a job with the directory that Hydra's settings give it."""
        with open_dict(config):
            config.hydra.job.num = num
        return Job(num, tuple(overrides), _directory(config.hydra))

    def launch(self, launcher: Launcher, jobs: Sequence[Job]) -> list[JobReturn]:
        """Check jobs and run those that are not refused; return each one's objective."""
        for job in jobs:
            if (problem := why_foreign(job)) is not None:
                foreign = result_of(job, int(ExitCode.USER_ERROR), problem)
                self.results[job.num] = replace(foreign, began=False)
            elif (result := self._finished_before(job)) is not None:
                self.results[job.num] = result
            else:
                job.result_file.unlink(missing_ok=True)  # left by an earlier run of the same sweep
        unchecked = [job for job in jobs if job.num not in self.results]
        for job in unchecked[: max(0, CHECKED_JOBS - len(self.results))]:
            refusal = self._refusal(job)
            if refusal is not None:
                self.results[job.num] = refusal
        runs = [job for job in jobs if job.num not in self.results]
        stopped = False
        if self.in_turn:
            for job in runs:
                if not stopped:
                    self._run_all(launcher, [job])
                self.results[job.num] = read_result(job)
                stopped |= self.results[job.num].code == ExitCode.SAVED_ON_SIGNAL
        elif runs:
            self._run_all(launcher, jobs)  # refused jobs too, so that all jobs keep their numbers
        for job in runs:
            self.results[job.num] = read_result(job)
        if stopped:
            raise SavedOnSignalError
        return [_returned(job, self.results[job.num].objective) for job in jobs]

    def __call__(self, cfg: DictConfig) -> float:
        """Run one job, perhaps in another process; return its objective and raise no exception."""
        settings: Any = HydraConfig.get()
        overrides = tuple(str(text) for text in settings.overrides.task)
        job = Job(int(settings.job.num), overrides, _directory(settings))
        if job.num in self.results:  # refused before the first job started, or finished before
            if self.results[job.num].code == ExitCode.USER_ERROR:
                with suppress(OSError):  # it has files of another program
                    job.directory.rmdir()
            return self.results[job.num].objective
        result = with_earlier_slices(self._run(job), job)
        job.directory.mkdir(parents=True, exist_ok=True)
        job.result_file.write_text(json.dumps(asdict(result), indent=2) + "\n")
        return result.objective

    def _run_all(self, launcher: Launcher, jobs: Sequence[Job]) -> None:
        try:
            launcher.launch([list(job.overrides) for job in jobs], jobs[0].num)
        except SystemExit:
            pass  # the launcher of Slurm jobs has said which one failed
        except Exception as error:  # as with a killed worker or a missing scheduler
            line = str(error).strip().splitlines()[-1:] or [""]
            print(f"[sweep] the launcher failed: {type(error).__name__}: {shown(line[0])}")
            sys.stdout.flush()

    def _run(self, job: Job) -> Result:
        """Run a job in this process, and return its result whatever ends it."""
        words = shown(" ".join(job.overrides))
        print(f"[sweep] job {job.num}: {words} -> {job.directory}", flush=True)
        before = _settings_written(job)
        try:
            loaded = self._load(job)
            given = {LOG_DIR: str(job.directory), **_names_in_wandb(loaded.values, job)}
            loaded = replace(
                loaded.changed_to(given, Origin("the sweep")),
                inert=tuple(setting for setting in loaded.inert if not is_hydras(setting.key)),
            )
            options = replace(self.options, overrides=job.overrides)
            more = {"is_sweep": True, "job_num": job.num, "directory": job.directory}
            result = result_of(job, self.task(loaded, app_info(loaded, options, **more)))
            if result.code != ExitCode.USER_ERROR:
                return result
        except UserError as error:
            result = result_of(job, report_error(error), str(error))
        except Exception as error:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            return result_of(job, int(ExitCode.CRASHED), line)
        # A run writes its settings when it begins; a refused one leaves those of an earlier run.
        return replace(result, began=_settings_written(job) != before)

    def _refusal(self, job: Job) -> Result | None:
        """Return the result of a job that cannot be run, after reporting it; None if it can."""
        try:
            self._load(job)
        except UserError as error:
            words = shown(" ".join(job.overrides))
            print(f"[sweep] job {job.num}: {words}: refused", file=sys.stderr)
            return replace(result_of(job, report_error(error), str(error)), began=False)
        return None

    def _finished_before(self, job: Job) -> Result | None:
        """Return the recorded result of a job whose run has no step left; None if it must run."""
        if not (job.directory / RECORD_NAME).exists():
            return None
        from megafp8.runs.finished import finished_run  # the module imports torch

        try:
            loaded = self._load(job)
            settled, _ = with_epochs(loaded, gives_steps(loaded))
            settled = settled.changed_to({LOG_DIR: str(job.directory)})
            spec = resolve(settled.values, self.options.gpu_available or (lambda: False))
            finished = finished_run(spec, is_sweep=True)
        except UserError:
            return None  # the job is refused, or reports the error itself
        if finished is None:
            return None
        print(f"[sweep] job {job.num}: finished before, in {job.directory}: {finished.note}")
        sys.stdout.flush()
        return result_of(job, int(finished.code))

    def _load(self, job: Job) -> Loaded:
        return self.options.load(
            job.overrides, self.options.gpu_available, recipes_given=self.recipes_given
        )


def run_sweep(options: Options, task: Task) -> int:
    """Run all jobs of a sweep and print their table; return the first exit code that is not 0.

    Raises:
        SettingError: The sweep's own settings cannot be used; no job has started then.
        RunError: The folder of the sweep cannot be made or written; nor has any job then.
    """
    source = find_source(options.config_dir, options.config_name)
    overrides, problems = parse_overrides(options.overrides, source.directories, multirun=True)
    problems += directory_problems(
        [override.text for override in overrides],
        "cannot be set in a sweep, where each job has its own directory",
        "Set the sweep's directory with hydra.sweep.dir=DIR",
    )
    problems += _secret_problems(overrides)
    raise_if_any(problems)
    overrides, repeated = last_given(overrides)
    print("".join(f"[sweep] {line}\n" for line in repeated), end="", flush=True)
    loader = checked_loader(source)
    cfg = composed(source, loader, [override.text for override in overrides])
    raise_if_any(sweeper_problems(overrides, cfg.hydra))
    keep_texts(cfg.hydra.sweeper)
    if _needs_number(cfg.hydra):
        own = f"hydra.sweep.subdir={_subdir(cfg.hydra)}"
        cfg = composed(source, loader, [*(override.text for override in overrides), own])
    in_turn = cfg.hydra.launcher._target_ == _BASIC_LAUNCHER
    sweep = Sweep(options, task, in_turn, names_given(overrides))
    with open_dict(cfg):
        chosen = cfg.hydra.launcher
        cfg.hydra.launcher = {"_target_": _REPORTING_LAUNCHER, "_recursive_": False}
        cfg.hydra.launcher.chosen = chosen
    directory, failure = Path(cfg.hydra.sweep.dir), None
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    refuse_foreign_sweep(directory)
    _make(directory)
    try:
        JobRuntime.instance().set("name", "megafp8")
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=sweep, config=cfg
        )
        sweeper.sweep(arguments=list(OmegaConf.to_container(cfg.hydra.overrides.task)))  # type: ignore[arg-type]
    except SavedOnSignalError:
        pass
    except Exception as error:
        failure = f"[sweep] the sweeper failed: {type(error).__name__}: {shown(str(error))}"
    results = [result for _, result in sorted(sweep.results.items())]
    results = with_baseline(results, directory, options.baseline)
    if not any(Path(result.directory).is_dir() for result in results):
        _remove(made)
    code = print_results(results, directory)
    if failure is None and not results:
        failure = "error: the sweep has no job: a key has an empty list of values. Give a value"
        code = int(ExitCode.USER_ERROR)
    if failure is not None:
        print(failure, file=sys.stderr, flush=True)
    return code or (int(ExitCode.CRASHED) if failure else int(ExitCode.FINISHED))


def _make(directory: Path) -> None:
    """Make the folder of the sweep, and check that files can be written there."""
    with run_errors_reported(directory, "making the folder hydra.sweep.dir"):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


# --- the directories of jobs --------------------------------------------------------------------


def _subdir(settings: Any) -> str:
    """Return the setting `hydra.sweep.subdir`, with the job's number appended if it lacks it."""
    text = str(settings.sweep._get_node("subdir")._value())
    return text if "${hydra.job." in text else f"{text}/${{hydra.job.num}}"


def _needs_number(settings: Any) -> bool:
    """Whether all jobs would have the same directory.

    Raises:
        SettingError: The directory would be outside the sweep's.
    """
    text = str(settings.sweep._get_node("subdir")._value())
    rest = text.replace("${hydra.job.num}", "0").replace("${hydra.job.override_dirname}", "x")
    if "${" in rest or Path(rest).is_absolute() or ".." in Path(rest).parts:
        raise SettingError(
            "hydra.sweep.subdir",
            text,
            "is not a directory inside the sweep's",
            "Give a relative path; it may contain ${hydra.job.num} and "
            "${hydra.job.override_dirname}",
        )
    return _subdir(settings) != text


def _directory(settings: Any) -> Path:
    return Path(str(settings.sweep.dir)) / str(settings.sweep.subdir)


def _names_in_wandb(values: Values, job: Job) -> dict[str, str]:
    """Return the group and the name of a job in Weights & Biases by key, where none are given."""
    sweep = Path(str(HydraConfig.get().sweep.dir)).absolute().name
    names = {"group": (sweep, "WANDB_RUN_GROUP"), "name": (f"{sweep}-{job.num}", "WANDB_NAME")}
    if not values["exp_manager.create_wandb_logger"]:
        return {}
    return {
        key: name
        for leaf, (name, variable) in names.items()
        if values[key := f"exp_manager.wandb_logger_kwargs.{leaf}"] is None
        and variable not in os.environ
    }


def _settings_written(job: Job) -> tuple[int, int] | None:
    """Return which file has the settings of the run in a job's directory; None without a run."""
    try:
        status = (job.directory / CONFIG_NAME).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _returned(job: Job, objective: float) -> JobReturn:
    """Return a job's result in the form that Hydra's sweepers read."""
    returned = JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED)
    returned.return_value = objective
    return returned


def _remove(folders: Sequence[Path]) -> None:
    """Delete the folders of a sweep that started no job, from the innermost one on."""
    for folder in folders:
        (folder / "multirun.yaml").unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:  # the folder is not empty, or was never made
            return


# --- what a sweep refuses ----------------------------------------------------------------------


def _secret_problems(overrides: Sequence[ParsedOverride]) -> list[SettingError]:
    """Return errors for overrides with a secret, which Hydra and the sweep would record."""
    return [
        SettingError(
            override.text.partition("=")[0],
            None,
            "holds a secret, and the command line is recorded and seen by other users",
            "Leave it out, and set the variable in the environment, which jobs inherit",
            origin=COMMAND_LINE,
        )
        for override in overrides
        if hide(override.text) != override.text
    ]
