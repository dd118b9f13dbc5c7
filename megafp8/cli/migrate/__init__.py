"""Translate a YAML of NeMo or Accelerate into a configuration of megafp8.

megafp8 migrate FILE [-o OUTPUT]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megafp8.cli import job
from megafp8.cli.migrate import accelerate, nemo
from megafp8.cli.migrate.report import (
    Migration,
    check_written,
    leave_out_secrets,
    rewrite,
    write_beside,
)
from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.load import load
from megafp8.errors import ExitCode
from megafp8.foreign import MAX_YAML_BYTES, ForeignFileError, parse_yaml, read_bytes
from megafp8.secrets import say


@job.reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the new file and print the report.

    Returns 0 if the new file loads, and 2 if something must be decided or an error was printed.
    """
    parser = job.command_parser("migrate", __doc__)
    parser.add_argument("file", type=Path, help="NeMo's or Accelerate's YAML, which is not changed")
    parser.add_argument(
        "-o", "--output", type=Path, help="the new file (default: NAME.megafp8.yaml beside FILE)"
    )
    options = parser.parse_args(argv)
    migration = migrate(_read(options.file), options.file.name)
    leave_out_secrets(migration)
    target = write_beside(options.file, migration.text(options.file.name), options.output)
    if not migration.undecided and (problems := _problems_of(target)):
        for problem in problems:
            migration.decide(problem.key, problem.value, problem.reason, problem.hint)
        rewrite(target, migration.text(options.file.name))
    say(migration.report().rstrip("\n"))
    say(f"written: {target}")
    if migration.undecided:
        say("A run refuses the file until what is listed first is decided")
        return ExitCode.USER_ERROR
    name, folder = target.name.removesuffix(".yaml"), target.absolute().parent
    say(f"run it with: megafp8 pretrain --config-dir {folder} --config-name {name}")
    return ExitCode.FINISHED


def migrate(text: str, source: str) -> Migration:
    """Return the translation of a NeMo or Accelerate YAML; `source` names it in messages.

    Raises:
        SettingError: The text is not a YAML of settings.
    """
    try:
        tree = parse_yaml(text)
    except ForeignFileError as error:
        raise SettingError(source, None, str(error), "Correct the file") from error
    if not isinstance(tree, dict) or not tree:
        raise SettingError(source, None, "has no settings", "Give a NeMo or Accelerate YAML")
    migration = Migration()
    if any(mark in tree for mark in accelerate.MARKS):
        accelerate.translate_accelerate(tree, migration)
        check_written(migration)
    else:
        nemo.translate_nemo(tree, migration)
    return migration


def _problems_of(file: Path) -> list[SettingError]:
    """Return what is wrong with a configuration file, as a run would report it."""
    try:
        load(config_dir=file.absolute().parent, config_name=file.name)
    except CombinedConfigError as error:
        return list(error.problems)
    except SettingError as error:
        return [error]
    return []


def _read(file: Path) -> str:
    try:
        return read_bytes(file, MAX_YAML_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(
            str(file), None, f"cannot be read ({error})", "Give a YAML file"
        ) from error
