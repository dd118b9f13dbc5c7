"""Describe the job that a command line starts: its options, settings, origins and errors."""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from omegaconf import OmegaConf

from megafp8.config.errors import COMMAND_LINE, DEFAULT, SettingError
from megafp8.config.layers import DEFAULT_CONFIG
from megafp8.config.load import Loaded, Source
from megafp8.config.merged import default_values
from megafp8.config.own_recipes import TRUST
from megafp8.config.settings import similar_keys
from megafp8.errors import ExitCode, RunError, UserError
from megafp8.files import paths_reported
from megafp8.parallel.environment import is_first_rank
from megafp8.secrets import HIDDEN, hide_values, one_line, shown, variable_in

FINETUNE_JOB = "finetune_gpt"
STARTED_AS = "MEGAFP8_STARTED_AS"
"""The variable with the words by which a user started training, such as `megafp8 pretrain`. A
process has it if these words are not Python and a script; its ranks inherit it."""
ADDED = "MEGAFP8_ADDED"
"""The variable with the arguments that a batch script has added to those of its user."""
OTHER_RANKS_WAIT_SECONDS = 2.0
"""How long other ranks wait before they report an error.

Rank 0 reports an error that all ranks have, and the launcher ends the others while they wait.
"""


@dataclass(frozen=True, kw_only=True)
class AppInfo:
    """Hold how a task was started, besides its settings.

    Attributes:
        overrides: The overrides of the run, or of this job of a sweep.
        config_dir: The directory of the user's own YAML files.
        config_name: The YAML's name.
        is_sweep: Whether the task is a job of a sweep.
        job_num: The job's number in its sweep, from 0.
        inert: Lines for the start of the run: the given settings that have no effect.
        record: The same, and the settings that are not the default job's, for summary.json.
        directory: The directory of a job of a sweep, which is also its
            `exp_manager.explicit_log_dir`.
        trusts_recipes: Whether recipes that YAML files name as code may be imported.
        gives_steps: Whether a user set `trainer.max_steps`.
    """

    overrides: tuple[str, ...]
    config_dir: Path | None
    config_name: str
    is_sweep: bool = False
    job_num: int | None = None
    inert: tuple[str, ...] = field(default=(), compare=False)
    record: Mapping[str, object] = field(default_factory=dict, compare=False)
    directory: Path | None = None
    trusts_recipes: bool = False
    gives_steps: bool = False


Task = Callable[[Loaded, AppInfo], int]


def app_info(loaded: Loaded, options: Options, **more: Any) -> AppInfo:
    """Return how a job was started, given its settings and its command line.

    `more` are the attributes of `AppInfo` about a sweep.
    """
    return AppInfo(
        overrides=options.overrides,
        config_dir=options.config_dir,
        config_name=options.config_name,
        inert=tuple(loaded.inert_lines()),
        record=record(loaded),
        trusts_recipes=options.trusts_recipes,
        gives_steps=gives_steps(loaded),
        **more,
    )


def gives_steps(loaded: Loaded) -> bool:
    """Whether `trainer.max_steps` is a setting of the user, and not of one of our jobs."""
    origin = str(loaded.origins.get("trainer.max_steps", DEFAULT))
    return origin not in (str(DEFAULT), f"{FINETUNE_JOB}.yaml")


def report_error(error: UserError) -> int:
    """Print an error that a user can correct, without secrets, and return its exit code."""
    who = ""
    if not is_first_rank():
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
        who = f"rank {os.environ['RANK']}: "
    print(f"error: {who}{shown(str(error))}", file=sys.stderr, flush=True)
    return int(error.exit_code)


def command_parser(name: str, about: str | None, **more: Any) -> argparse.ArgumentParser:
    """Return the parser of `megafp8 NAME`; `about` is the docstring of the command's module.

    The parser raises a SettingError for options that it cannot read.
    """
    return _Parser(
        prog=f"megafp8 {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )


def new_file(text: str) -> Path:
    """Return the path of a file that a command is to write, as the type of an argument.

    Raises:
        argparse.ArgumentTypeError: The text does not end with a name, as "" and ".." do not.
    """
    path = Path(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} does not end with the name of a file")
    return path


def number_in(
    kind: Callable[[str], Any], accepts: Callable[[Any], bool], allowed: str
) -> Callable[[str], Any]:
    """Return the type of an argument that is a number, of which `allowed` names the accepted."""

    def number(text: str) -> Any:
        value = kind(text)
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text} is not allowed: give {allowed}")
        return value

    return number


def reports_errors(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Make a command print the error that a user can correct, and return its exit code.

    A reader that goes away, as in `… | head`, ends the command quietly.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> int:
        open_streams()
        try:
            with paths_reported():
                refuse_secrets_in_command(argv)
                code = main(argv)
            return code or show("")
        except UserError as error:
            return report_error(error)
        except BrokenPipeError:
            _drop_output()
            return 128 + signal.SIGPIPE

    return run


def open_streams() -> None:
    """Open the null device for each standard stream that is closed, as some daemons leave it.

    Otherwise the next file that is opened would get the stream's number, and printed text.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))


def show(text: str) -> int:
    """Print the text that a command was asked for; return the exit code.

    A reader that goes away is no error.

    Raises:
        RunError: The output cannot be written, since a disk is full.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_output()
        hint = "Write it to a place that has space"
        raise RunError(f"standard output: cannot be written ({error.strerror}). {hint}") from error
    return int(ExitCode.FINISHED)


def _drop_output() -> None:
    """Send standard output to the null device, so that Python's own last flush succeeds."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


# --- settings that differ from the default job's --------------------------------------------------


class Changed(NamedTuple):
    """Hold a setting that differs from the default job's, with the layer that set it."""

    key: str
    value: Any
    origin: str  # a preset, a file, the command line, or the key whose value it takes
    usual: Any  # the default job's value


def resolved_table(loaded: Loaded) -> list[str]:
    """Return a line `key = value (origin; …)` for each setting that is not the default job's."""
    return [
        f"{c.key} = {one_line(c.value)} ({c.origin}; default job: {one_line(c.usual)})"
        for c in changed(loaded)
    ]


def record(loaded: Loaded) -> dict[str, object]:
    """Return the changed settings for summary.json, and those that were given without effect."""
    return {
        "non_default": [
            {"key": c.key, "value": c.value, "origin": c.origin, "default": c.usual}
            for c in changed(loaded)
        ],
        "inert_keys": [
            {"key": s.key, "value": s.value, "origin": s.origin}
            for s in (*loaded.inert, *(s for s, _ in loaded.unused))
        ],
    }


def changed(loaded: Loaded) -> list[Changed]:
    """Return the settings that are not the default job's, in the schema's order."""
    of_the_job = default_values()
    return [
        Changed(path, value, loaded.origins.get(path) or _origin_of_default(loaded, path), usual)
        for path, value in loaded.values.items()
        if value != (usual := of_the_job[path])
    ]


def _origin_of_default(loaded: Loaded, path: str) -> str:
    section, _, leaf = path.rpartition(".")
    tree = loaded.merged.tree
    node = (OmegaConf.select(tree, section) if section else tree)._get_node(leaf)
    text = node._value() if node is not None else None
    return f"{DEFAULT}, from {text}" if isinstance(text, str) and "${" in text else DEFAULT


@dataclass(frozen=True, kw_only=True)
class Options(Source):
    """Hold the overrides and the options of a command line.

    `gpu_available` returns whether this machine has a GPU, where that matters. `baseline` is the
    number of a sweep's job to which the others are compared.
    """

    overrides: tuple[str, ...]
    multirun: bool
    show_help: bool
    show_config: bool
    resolve: bool
    gpu_available: Callable[[], bool] | None = None
    show_version: bool = False
    baseline: int | None = None


def parse_options(argv: Sequence[str], config_name: str = DEFAULT_CONFIG) -> Options:
    """Return the parsed command line; options may be anywhere among the overrides, as with Hydra.

    `config_name` is the YAML if `--config-name` is not given.

    Raises:
        SettingError: An option is unknown or lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--multirun", "-m", action="store_true")
    is_job = number_in(int, lambda n: n >= 0, "the number of a job, from 0")
    parser.add_argument("--baseline", type=is_job)
    parser.add_argument("--help", "-h", action="store_true", dest="show_help")
    parser.add_argument("--cfg", "-c", choices=["job"], dest="show_config")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--version", action="store_true", dest="show_version")
    parser.add_argument(TRUST, action="store_true", dest="trusts_recipes")
    parsed = parser.parse_intermixed_args(list(argv))
    parsed.overrides, parsed.show_config = tuple(parsed.overrides), parsed.show_config is not None
    return Options(**vars(parsed))


def refuse_secrets_in_command(words: Sequence[str]) -> None:
    """Raise if the words of a command line, or the current folder, hold a secret.

    Paths and words of the command are recorded in files and shown in lists of processes; a path
    with `***` in it would be another one.

    Raises:
        SettingError: A word or a path holds the value of a secret variable, or a password.
    """
    for word in words:
        if hide_values(word) != word:
            key = word.partition("=")[0] if "=" in word else "options"
            reason = "holds a secret, and the command line is recorded and seen by other users"
            hint = "Leave it out; libraries that need a secret read it from the environment"
            if name := variable_in(word):
                reason = f"holds the value of the environment variable {name}, and is recorded"
            raise SettingError(key, HIDDEN, reason, hint, origin=COMMAND_LINE)
    here = os.getcwd()
    if hide_values(here) != here:
        hint = "Work in a folder whose name holds no secret"
        raise SettingError("the current folder", here, "holds a secret in its name", hint)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists the options"
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        keys = similar_keys(unknown.lstrip("-"))
        takes_settings = re.match(r"argument (--[\w-]+): invalid .* value: '[\w.+~]+=", message)
        near = get_close_matches(unknown, self._option_string_actions, 1, cutoff=0.8)
        if takes_settings:
            hint = f"Settings stand before {takes_settings[1]}, not after it"
        elif near:
            hint = f"Did you mean {near[0]}?"
        elif "=" in unknown:
            hint = f"If it is a setting, write it without dashes: {unknown.lstrip('-')}"
        elif keys:
            hint = f"Settings are written without dashes. Did you mean {' or '.join(keys)}?"
        raise SettingError("options", None, message, hint, origin=COMMAND_LINE)
