"""Translate settings of Megatron-LM, Megatron Bridge, NeMo or Accelerate into ours.

megafp8 migrate FILE [ARGUMENT ...] [--env NAME=VALUE] [-o OUTPUT]
megafp8 migrate --line 'pretrain_gpt.py --num-layers 24 ...' -o OUTPUT
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.cli import job
from megafp8.config.api import CombinedConfigError, SettingError, load
from megafp8.errors import ExitCode
from megafp8.foreign import MAX_YAML_BYTES, ForeignFileError, member, parse_yaml, read_bytes
from megafp8.secrets import hide_values, named_secrets, say, secrets_in
from megafp8_migrate import accelerate, bridge, megatron, nemo
from megafp8_migrate.next_steps import next_steps
from megafp8_migrate.report import (
    Migration,
    check_written,
    leave_out_secrets,
    rewrite,
    write_beside,
)

_GIVE_ONE = "Give a script of Megatron, or a YAML of Megatron Bridge, NeMo or Accelerate"


@job.reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the new file and print the report.

    Returns 0 if the new file loads, and 2 if something must be decided or an error was printed.
    """
    parser = job.command_parser("migrate", __doc__)
    parser.add_argument(
        "file", type=Path, nargs="?",
        help="a script of Megatron, or a YAML of Megatron Bridge, NeMo or Accelerate; it is not "
        "changed, and nothing of it is run",
    )  # fmt: skip
    parser.add_argument("argument", nargs="*", help="the script's own arguments: $1, $2, ...")
    parser.add_argument("--line", help="a command of Megatron's, instead of a file")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE",
        help="a variable that the script reads from its environment",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, help="the new file (default: NAME.megafp8.yaml beside FILE)"
    )
    options = parser.parse_args(argv)
    file, text, folder = file_or_line(options, _GIVE_ONE)
    environment = environment_of(options.env)
    migration = migrate(text, file.name, options.argument, environment, folder)
    known = {*secrets_in(text), *named_secrets(environment)}
    leave_out_secrets(migration, known)
    target = write_beside(file, hide_values(migration.text(file.name), known), options.output)
    if not migration.undecided and (problems := _problems_of(target)):
        for problem in problems:
            migration.decide(problem.key, problem.value, problem.reason, problem.hint)
        rewrite(target, hide_values(migration.text(file.name), known))
    say(hide_values(migration.report().rstrip("\n"), known))
    say(f"written: {target}")
    if migration.undecided:
        say("A run refuses the file until what is listed first is decided")
        return ExitCode.USER_ERROR
    for line in next_steps(target, migration):
        say(hide_values(line, known))
    return ExitCode.FINISHED


def file_or_line(options: argparse.Namespace, hint: str) -> tuple[Path, str, Path | None]:
    """Return the path and the text of `options.file`, and its folder; or those of `options.line`.

    Raises:
        SettingError: Both are given or none, or the file cannot be read; the error has the hint.
    """
    if (options.file is None) is (options.line is None):
        raise SettingError("file", None, "give a file or --line, one of the two", hint)
    if options.file is None:
        return Path("megatron.sh"), options.line + "\n", None
    return options.file, read_text(options.file, hint), options.file.parent


def migrate(
    text: str,
    source: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Migration:
    """Return the translation of a script or a YAML.

    Args:
        text: The content of the file.
        source: The file's name, for messages and to tell a script from a YAML.
        arguments: A script's own arguments.
        environment: Variables that a script does not set.
        folder: Where the files are that a script names; None if none is read.

    Raises:
        SettingError: The text has no settings, or cannot be read.
    """
    migration = Migration()
    if megatron.is_script(source, text):
        beside = texts_in(folder)
        megatron.translate_script(text, migration, arguments, environment or {}, beside)
        return migration
    refuse_for_yaml(source, arguments, environment or {})
    if source.endswith(".toml"):
        raise _not_translated(source, "torchtitan", None)
    try:
        tree = parse_yaml(text)
    except ForeignFileError as error:
        raise SettingError(source, None, str(error), "Correct the file") from error
    if not isinstance(tree, dict) or not tree:
        raise SettingError(source, None, "has no settings", _GIVE_ONE)
    if (neighbour := _neighbour_of(tree, text)) is not None:
        raise _not_translated(source, neighbour, tree.get("fp8"))
    if bridge.is_bridges(tree):
        bridge.translate_bridge(tree, migration)
    elif any(mark in tree for mark in accelerate.MARKS):
        accelerate.translate_accelerate(tree, migration)
        check_written(migration)
    else:
        nemo.translate_nemo(tree, migration)
    return migration


_NEIGHBOURS: dict[str, tuple[frozenset[str], ...]] = {
    "verl": (frozenset({"actor_rollout_ref"}),),
    "Axolotl": (frozenset({"base_model", "datasets"}), frozenset({"base_model", "adapter"})),
    "LLaMA-Factory": (
        frozenset({"model_name_or_path", "stage"}),
        frozenset({"model_name_or_path", "finetuning_type"}),
    ),
    "ms-swift": (frozenset({"model", "train_type"}), frozenset({"model", "tuner_type"})),
    "torchtitan": (frozenset({"job", "training", "parallelism"}),),
}
"""Other frameworks, and the sections or keys by which their files are known."""


def _neighbour_of(tree: Mapping[Any, Any], text: str) -> str | None:
    """Return the framework whose file this is, if it is one that is not translated."""
    if "nemo_automodel" in text:
        return "NeMo Automodel"
    if {"fp8", "model"} <= tree.keys() and _section(tree, "fp8").keys() & {
        "filter_fqns",
        "enabled",
    }:
        return "NeMo Automodel"
    found = (name for name, marks in _NEIGHBOURS.items() if any(m <= tree.keys() for m in marks))
    return next(found, None)


def _section(tree: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _not_translated(source: str, framework: str, fp8: object) -> SettingError:
    """Return the error of a file that is not translated, with the settings of its FP8 section."""
    hint = "Write a YAML of megafp8 by hand (docs/guide/training.md)"
    if isinstance(fp8, Mapping):
        recipe = f" model.fp8_recipe={fp8['recipe_name']}" if fp8.get("recipe_name") else ""
        hint += f". Its FP8 is model.fp8={bool(fp8.get('enabled', True))}{recipe}"
        hint += "; a model's head is never in FP8 here"
    return SettingError(source, None, f"is a file of {framework}, which is not translated", hint)


def refuse_for_yaml(
    source: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Raise `SettingError` for what a script would read, since the file is a YAML.

    Raises:
        SettingError: There are arguments, or variables of an environment.
    """
    hint = "Leave it out, or name a script"
    if arguments:
        reason = f"has no effect: {source} is a YAML, which takes no arguments"
        raise SettingError("argument", arguments[0], reason, hint)
    for name, value in (environment or {}).items():
        reason = f"has no effect: {source} is a YAML, which reads no environment"
        raise SettingError("--env", f"{name}={value}", reason, hint)


def environment_of(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`.

    Raises:
        SettingError: A text is not of this form.
    """
    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise SettingError("--env", text, "is not NAME=VALUE", "Give for example --env TP=4")
        values[name] = value
    return values


def texts_in(folder: Path | None) -> Callable[[str], str | None]:
    """Return what returns the text of a file in a folder, or None if it cannot be read.

    A file of another folder is not read, whatever a script says, nor one to which a link leads:
    what it holds would stand in the report and in the new file.
    """

    def text_of(name: str) -> str | None:
        if folder is None or Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        try:
            path = member(folder, name)
            return None if path is None else read_text(path, "")
        except (SettingError, ValueError):  # a link to another place, a FIFO, no name of a file
            return None

    return text_of


def _problems_of(file: Path) -> list[SettingError]:
    """Return what is wrong with a configuration file, as a run would report it."""
    try:
        load(config_dir=file.absolute().parent, config_name=file.name)
    except CombinedConfigError as error:
        return list(error.problems)
    except SettingError as error:
        return [error]
    return []


def read_text(file: Path, hint: str) -> str:
    """Return the text of a file that a user names.

    Raises:
        SettingError: It cannot be read; the error has the hint.
    """
    try:
        return read_bytes(file, MAX_YAML_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(str(file), None, f"cannot be read ({error})", hint) from error
