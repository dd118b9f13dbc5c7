"""Find a subcommand of `megafp8` by its name, and run it.

A subcommand is one of the trainer's own, or of another package: an entry point of the group
`megafp8.commands`, a function that takes the arguments and returns an exit code. For the list of
commands nothing is imported but Python's reader of entry points; a subcommand's module is imported
when it is run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from megafp8 import __version__
from megafp8.cli import USER_ERROR  # the import handles Ctrl-C during those that follow
from megafp8.neighbours import FOLDERS, how_to_install, is_there

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "megafp8.commands"
"""The group of entry points of other packages' subcommands."""


class Command(NamedTuple):
    """Name the module that has a subcommand's `main`, and say what the subcommand does."""

    module: str
    about: str


COMMANDS = {
    "pretrain": Command("pretrain", "train a GPT, or run a sweep of jobs (-m)"),
    "finetune": Command("finetune", "train a GPT further, on questions and answers"),
    "generate": Command("generate", "continue a text with a run's model"),
    "preprocess": Command("preprocess", "make a dataset and its tokenizer from text"),
    "import": Command("import_hf", "import a model of transformers, Megatron or NeMo"),
    "export": Command("export", "write a run's model for Hugging Face's transformers"),
    "serve-diff": Command("serve_diff", "say how far a run is from its export, and by which rule"),
    "plan": Command("plan", "predict memory, messages and time of a job, or search a layout"),
    "dryrun": Command("dryrun", "count the memory of a job's ranks, without starting them"),
    "compare": Command("compare", "train with FP8 and without, and say whether the loss differs"),
    "runs": Command("runs", "list runs with their status, loss and speed"),
    "report": Command("report", "write one HTML page about one run or several"),
    "inspect": Command("inspect", "show which tensors of a run lose most in FP8"),
    "recipe": Command("recipe", "name the recipe for a GPU, compare all, or check your own"),
    "doctor": Command("doctor", "show what this machine has for training"),
    "completion": Command("completion", "print what makes a shell complete commands and keys"),
}
"""The trainer's own subcommands."""
APART = {
    "migrate": Command(
        "megafp8_migrate", "translate a script of Megatron, or a YAML of NeMo and others"
    ),
    "audit": Command(
        "megafp8_migrate.audit", "say which FP8 flags of a Megatron or Accelerate job do nothing"
    ),
}
"""The subcommands of this repository's other packages, by whole modules.

They need no entry point where the package can be imported, as in a clone without any install; where
it cannot, they are named with the line that installs it.
"""
USES = {
    "Train": ("pretrain", "finetune", "compare", "generate"),
    "Data and models": ("preprocess", "import", "export"),
    "Look, and help of the shell": (
        "runs",
        "report",
        "inspect",
        "serve-diff",
        "doctor",
        "completion",
    ),
    "Before a large job": ("recipe", "plan", "dryrun", "migrate", "audit"),
}
"""What the subcommands are for, as the list of them shows it."""
TRAINING = ("pretrain", "finetune")
"""The subcommands whose process may be a rank, which ends without running destructors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name, and return its exit code.

    Args:
        argv: The arguments without the program's name; None stands for those of this process.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"megafp8 {__version__}")
        return 0
    if name in TRAINING:
        return _train(name, rest)
    if name in COMMANDS:
        return int(import_module(f"megafp8.cli.{COMMANDS[name].module}").main(rest))
    try:
        run = _of_another_package(name)
        if run is not None:
            return int(run(rest))
        missing = APART[name].module if name in APART else ""
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] not in FOLDERS:
            raise
    folder = missing.partition(".")[0]
    needs = f"megafp8 {name} needs the package {folder}. {how_to_install(folder)}" if folder else ""
    print(f"error: {needs or _unknown(name)}", file=sys.stderr)
    return USER_ERROR


def _of_another_package(name: str) -> Callable[[Sequence[str]], int] | None:
    """Return the function that runs a subcommand of another package; None if none is found."""
    if name in APART:
        module = APART[name].module
        return import_module(module).main if is_there(module) else None
    point = entry_points().get(name)
    return None if point is None else point.load()


def entry_points() -> dict[str, EntryPoint]:
    """Return the subcommands of other packages by name; ours are not replaced."""
    from importlib import metadata

    known = COMMANDS.keys() | APART.keys()
    return {
        point.name: point for point in metadata.entry_points(group=GROUP) if point.name not in known
    }


def all_commands() -> dict[str, str]:
    """Return what every subcommand does, those of other packages last."""
    about = {name: command.about for name, command in (*COMMANDS.items(), *APART.items())}
    return about | {name: f"a command of {point.module}" for name, point in entry_points().items()}


def _train(name: str, argv: Sequence[str]) -> NoReturn:
    from megafp8.cli.job import STARTED_AS
    from megafp8.parallel.launch import run_process

    os.environ.setdefault(STARTED_AS, f"megafp8 {name}")
    sys.argv[1:] = argv  # the settings alone, as those of pretrain_gpt.py
    module = import_module(f"megafp8.cli.{COMMANDS[name].module}")
    run_process(lambda: int(module.main(argv)))


def overview() -> str:
    """Return the list of subcommands, which fits a screen."""
    commands = all_commands()
    width = max(map(len, commands))
    others = {"Other packages": tuple(name for name in commands if name in entry_points())}
    lines = ["usage: megafp8 COMMAND [ARGUMENTS] (--help explains it) | megafp8 --version"]
    for use, names in (USES | others).items():
        lines += [f"{use}:"] if names else []
        lines += [f"  {name:<{width}}  {commands[name]}" for name in names]
    return "\n".join([*lines, "megafp8 pretrain --help WORD explains the settings with a word."])


def run_old_name(module: str) -> NoReturn:
    """Run a subcommand that was started as `python -m megafp8.cli.NAME`, and name the new command.

    This way of starting will end with version 0.4, as the notes of 0.3.0 say.
    """
    named = (name for name, command in COMMANDS.items() if command.module == module)
    name = next(named, module)
    print(
        f"note: `python -m megafp8.cli.{module}` is `megafp8 {name}` now; version 0.4 will not "
        "have the old name",
        file=sys.stderr,
    )
    sys.exit(main([name, *sys.argv[1:]]))


def _unknown(name: str) -> str:
    """Return what is wrong with a name that is no subcommand, and what was probably meant."""
    from difflib import get_close_matches

    if "=" in name or name in ("-m", "--multirun", "--cfg"):
        return f"{name} is not a command. Settings follow a command: megafp8 pretrain {name} …"
    commands = all_commands()
    near = get_close_matches(name, commands, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands are {', '.join(commands)}"
    return f"megafp8 has no command {name}. {hint}"
