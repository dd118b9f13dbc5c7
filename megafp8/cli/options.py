"""Parse the options of a command line: `--help`, `--cfg`, `-m`, `--config-dir` and others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.layers import DEFAULT_CONFIG


@dataclass(frozen=True)
class Options:
    """Hold the overrides and the options of a command line."""

    overrides: tuple[str, ...]
    config_dir: Path | None
    config_name: str
    multirun: bool
    show_help: bool
    show_config: bool
    resolve: bool


def parse_options(argv: Sequence[str]) -> Options:
    """Return the parsed command line; options may be anywhere among the overrides, as with Hydra.

    Raises:
        SettingError: An option is unknown or lacks its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp", type=Path)
    parser.add_argument("--config-name", "-cn", default=DEFAULT_CONFIG)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    found = parser.parse_intermixed_args(list(argv))
    return Options(
        overrides=tuple(found.overrides),
        config_dir=found.config_dir,
        config_name=found.config_name,
        multirun=found.multirun,
        show_help=found.help,
        show_config=found.cfg is not None,
        resolve=found.resolve,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists the options and all keys"
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if "=" in unknown:
            hint = f"If it is a setting, write it without dashes: {unknown.lstrip('-')}"
        raise SettingError("options", None, message, hint, origin=COMMAND_LINE)
