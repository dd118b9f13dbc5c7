"""Run a command line: load its configuration and pass it to a task, or print help, or sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from platform import python_version

from omegaconf import OmegaConf

from megafp8 import __version__
from megafp8.cli.help import help_page
from megafp8.cli.job import (
    AppInfo,
    Options,
    Task,
    app_info,
    open_streams,
    parse_options,
    refuse_secrets_in_command,
    report_error,
    resolved_table,
    show,
)
from megafp8.config.errors import SettingError
from megafp8.config.layers import DEFAULT_CONFIG
from megafp8.errors import UserError
from megafp8.files import paths_reported
from megafp8.secrets import printable

__all__ = ["AppInfo", "Task", "report_error", "run_app"]


def run_app(
    argv: Sequence[str],
    task: Task,
    *,
    prog: str = "python pretrain_gpt.py",
    gpu_available: Callable[[], bool] | None = None,
    config_name: str = DEFAULT_CONFIG,
) -> int:
    """Run `task` with the configuration that the arguments ask for; return the exit code.

    Errors that a user can correct are printed on stderr. Any other exception is a bug and is not
    caught.

    Args:
        argv: The arguments without the program's name.
        task: Gets the settings and how it was started, and returns an exit code.
        prog: The command's name for the help page.
        gpu_available: Returns whether this machine has a GPU; see `load_all`.
        config_name: The YAML that is used if the arguments name none.
    """
    open_streams()
    try:
        refuse_secrets_in_command(argv)
        options = replace(parse_options(argv, config_name), gpu_available=gpu_available)
        if options.show_help:
            return show(help_page(prog, options.overrides, config_name))
        return _run(options, task)
    except UserError as error:
        return report_error(error)


def _run(options: Options, task: Task) -> int:
    if options.show_version:
        return show(f"megafp8 {__version__}, torch {version('torch')}, Python {python_version()}\n")
    if options.multirun and options.show_config:
        raise SettingError("--cfg", "job", "shows one run and not a sweep", "Leave out -m")
    if options.resolve and not options.show_config:
        reason = "shows resolved values with --cfg job only, and would start a run here"
        raise SettingError("--resolve", None, reason, "Add --cfg job, or leave it out")
    if options.baseline is not None and not options.multirun:
        reason = "is a job of a sweep, and this is a single run"
        raise SettingError("--baseline", options.baseline, reason, "Add -m, or leave it out")
    if options.multirun:
        from megafp8.cli.sweep import run_sweep

        return run_sweep(options, task)
    with paths_reported():
        loaded = options.load(options.overrides, options.gpu_available)
    if options.show_config:
        comments = [*resolved_table(loaded), *loaded.inert_lines()] or ["the default job"]
        text = printable("".join(f"# {line}\n" for line in comments))
        return show(text + OmegaConf.to_yaml(loaded.cfg, resolve=options.resolve))
    return task(loaded, app_info(loaded, options))
