"""The command line: options, the composed tree, and a task that gets it.

The ordinary path composes by itself, so that errors come fast and in our words. A sweep is Hydra's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from megafp8.config.document import help_page
from megafp8.config.load import load_all
from megafp8.config.options import Options, parse_options
from megafp8.config.problems import SettingError
from megafp8.config.secrets import hide
from megafp8.config.table import record, resolved_table
from megafp8.errors import ExitCode, UserError


@dataclass(frozen=True, kw_only=True)
class AppInfo:
    """How a task was started, beside its settings."""

    overrides: tuple[str, ...]  # those of this run; in a sweep, of this job
    config_dir: Path | None
    config_name: str
    is_sweep: bool = False
    job_num: int | None = None  # of a sweep, from 0
    # Lines for the start of the run: what is not the default job's, and what changes nothing.
    table: tuple[str, ...] = field(default=(), compare=False)
    inert: tuple[str, ...] = field(default=(), compare=False)
    record: Mapping[str, object] = field(default_factory=dict, compare=False)  # for summary.json
    directory: Path | None = None  # of a sweep's job; `exp_manager.explicit_log_dir` is it too


Task = Callable[[DictConfig, AppInfo], int]


def run_app(argv: Sequence[str], task: Task, *, prog: str = "python pretrain_gpt.py") -> int:
    """Run `task` as the arguments (without the program's name) ask; returns the exit code.

    What a user can mend is printed on stderr in full. Any other exception is a bug and goes on.
    """
    try:
        return _run(parse_options(argv), task, prog)
    except UserError as error:
        return report(error)


OTHER_RANKS_WAIT_SECONDS = 2.0
"""Rank 0 tells an error that all ranks have; the launcher ends the others before they speak too."""


def report(error: UserError) -> int:
    """Print an error that a user can mend; returns its exit code."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
    who = "" if rank == "0" else f"rank {rank}: "
    print(f"error: {who}{hide(str(error))}", file=sys.stderr, flush=True)
    return int(error.exit_code)


def _run(options: Options, task: Task, prog: str) -> int:
    if options.show_help:
        print(help_page(prog), end="")
        return ExitCode.FINISHED
    if options.multirun and options.show_config:
        raise SettingError("--cfg", "job", "shows one run, not a sweep", "Leave out -m")
    if options.multirun:
        from megafp8.config.sweep import run_sweep

        return run_sweep(options, task)
    loaded = load_all(options.overrides, options.config_dir, options.config_name)
    if options.show_config:
        comments = [*resolved_table(loaded), *loaded.inert_lines()] or ["the default job"]
        print("\n".join(f"# {line}" for line in comments))
        print(OmegaConf.to_yaml(loaded.cfg, resolve=options.resolve), end="")
        return ExitCode.FINISHED
    info = AppInfo(
        overrides=options.overrides,
        config_dir=options.config_dir,
        config_name=options.config_name,
        table=tuple(resolved_table(loaded)),
        inert=tuple(loaded.inert_lines()),
        record=record(loaded),
    )
    return task(loaded.cfg, info)
