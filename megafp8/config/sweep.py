"""A sweep: Hydra makes the jobs (`-m`), each is composed, checked and run like a single run."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megafp8.config.app import AppInfo, Task, report
from megafp8.config.compose import ROOT_CONFIG, Source, find_source, register
from megafp8.config.load import load, load_all
from megafp8.config.options import Options
from megafp8.config.overrides import ParsedOverride, parse_overrides
from megafp8.config.problems import COMMAND_LINE, SettingError, raise_if_any
from megafp8.config.table import resolved_table
from megafp8.errors import ExitCode, UserError

CHECKED_JOBS = 32
"""Jobs that are checked before the first one starts; later ones are checked when they start."""

_LOG_DIR = "exp_manager.explicit_log_dir"


def run_sweep(options: Options, task: Task) -> int:
    """All jobs of a sweep; returns the first exit code that is not 0."""
    source = find_source(options.config_dir, options.config_name)
    overrides, problems = parse_overrides(options.overrides, source.directories, multirun=True)
    raise_if_any(problems + _directory_problems(overrides))
    _check_jobs(overrides, options)
    codes: list[int] = []

    def run_job(_: DictConfig) -> int:
        code = _run_job(options, task)
        codes.append(code)
        if code == ExitCode.SAVED_ON_SIGNAL:  # the machine is wanted back: start no further job
            raise SystemExit(code)
        return code

    try:
        _hand_over(source, [override.text for override in overrides], run_job)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(ExitCode.CRASHED)
    return next((code for code in codes if code), int(ExitCode.FINISHED))


def _hand_over(source: Source, overrides: Sequence[str], job: Callable[[DictConfig], int]) -> None:
    """Call Hydra as if from the shell: it reads its arguments from `sys.argv` only."""
    register(source)
    main = hydra.main(
        version_base=None, config_path=str(source.directories[0]), config_name=ROOT_CONFIG
    )
    with patch.object(sys, "argv", [sys.argv[0], "--multirun", *overrides]):
        main(job)()


def _run_job(options: Options, task: Task) -> int:
    """One job. Hydra would cut tracebacks short and end the sweep: nothing is raised to it."""
    settings: Any = HydraConfig.get()
    directory = Path(settings.sweep.dir) / str(settings.sweep.subdir)
    overrides = tuple(str(text) for text in settings.overrides.task)
    print(f"[sweep] job {settings.job.num}: {' '.join(overrides)} -> {directory}", flush=True)
    try:
        loaded = load_all(overrides, options.config_dir, options.config_name)
        cfg = loaded.cfg
        cfg.exp_manager.explicit_log_dir = str(directory)
        info = AppInfo(
            overrides=overrides,
            config_dir=options.config_dir,
            config_name=options.config_name,
            is_sweep=True,
            job_num=int(settings.job.num),
            directory=directory,
            table=tuple(resolved_table(loaded)),
            inert=tuple(loaded.inert_lines()),
        )
        return task(cfg, info)
    except UserError as error:
        return report(error)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.CRASHED)


def _check_jobs(overrides: Sequence[ParsedOverride], options: Options) -> None:
    """Refuse a sweep before it starts if one of its first jobs cannot be run."""
    for texts in itertools.islice(_jobs(overrides), CHECKED_JOBS):
        try:
            load(texts, options.config_dir, options.config_name)
        except UserError as error:
            raise SettingError(
                "-m", None, f"the job `{' '.join(texts)}` cannot be run", str(error)
            ) from error


def _jobs(overrides: Sequence[ParsedOverride]) -> Iterator[list[str]]:
    """The overrides of each job as Hydra's basic sweeper makes them; none for other sweepers."""
    choices: list[list[str]] = []
    for override in overrides:
        sweep = override.sweep
        if sweep is None:
            choices.append([override.text])
        elif sweep.is_discrete_sweep() and not sweep.is_hydra_override():
            key = override.text.partition("=")[0]
            choices.append([f"{key}={value}" for value in sweep.sweep_string_iterator()])
        else:
            return
    for job in itertools.product(*choices):
        yield list(job)


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
