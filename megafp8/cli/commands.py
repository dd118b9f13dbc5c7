"""Find a subcommand of `megafp8` by its name, and run it.

Nothing is imported for the list of commands; a subcommand's module is imported when it is run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from megafp8 import __version__
from megafp8.cli import USER_ERROR  # the import handles Ctrl-C during those that follow


class Command(NamedTuple):
    """Name the module that has a subcommand's `main`, and say what the subcommand does."""

    module: str
    about: str


COMMANDS = {
    "pretrain": Command("pretrain", "train a GPT, or run a sweep of jobs (-m)"),
    "finetune": Command("finetune", "train a GPT further, on questions and answers"),
    "generate": Command("generate", "continue a text with a run's model"),
    "preprocess": Command("preprocess", "make a dataset and its tokenizer from text"),
    "import": Command("import_hf", "import a model of Hugging Face's transformers"),
    "export": Command("export", "write a run's model for Hugging Face's transformers"),
    "migrate": Command("migrate", "translate a script of Megatron, or a YAML of NeMo and others"),
    "audit": Command("audit", "say which FP8 flags of a Megatron or Accelerate job do nothing"),
    "plan": Command("plan", "predict memory, messages and time of a job, or search a layout"),
    "dryrun": Command("dryrun", "count the memory of a job's ranks, without starting them"),
    "compare": Command("compare", "train with FP8 and without, and say whether the loss differs"),
    "runs": Command("runs", "list runs with their status, loss and speed"),
    "report": Command("report", "write one HTML page about one run or several"),
    "inspect": Command("inspect", "show which tensors of a run lose most in FP8"),
    "recipe": Command("recipe", "compare the recipes, or check one of your own"),
    "doctor": Command("doctor", "show what this machine has for training"),
    "completion": Command("completion", "print what makes a shell complete commands and keys"),
}
"""The subcommands, in the order in which a user meets them."""
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
    command = COMMANDS.get(name)
    if command is None:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        return USER_ERROR
    if name in TRAINING:
        return _train(name, rest)
    return int(import_module(f"megafp8.cli.{command.module}").main(rest))


def _train(name: str, argv: Sequence[str]) -> NoReturn:
    from megafp8.cli.job import STARTED_AS
    from megafp8.parallel.launch import run_process

    os.environ.setdefault(STARTED_AS, f"megafp8 {name}")
    sys.argv[1:] = argv  # the settings alone, as those of pretrain_gpt.py
    module = import_module(f"megafp8.cli.{COMMANDS[name].module}")
    run_process(lambda: int(module.main(argv)))


def overview() -> str:
    """Return the list of subcommands, which fits a screen."""
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items())
    return "\n".join(
        [
            "usage: megafp8 COMMAND [ARGUMENTS]",
            "",
            *rows,
            "",
            "megafp8 COMMAND --help explains a command; megafp8 pretrain --help WORD explains",
            "the settings with this word. megafp8 --version prints the version.",
        ]
    )


def run_old_name(module: str) -> NoReturn:
    """Run a subcommand that was started as `python -m megafp8.cli.NAME`, and name the new command.

    This way of starting will end with version 0.3.
    """
    name = next(name for name, command in COMMANDS.items() if command.module == module)
    print(
        f"note: `python -m megafp8.cli.{module}` is `megafp8 {name}` now; version 0.3 will not "
        "have the old name",
        file=sys.stderr,
    )
    sys.exit(main([name, *sys.argv[1:]]))


def _unknown(name: str) -> str:
    """Return what is wrong with a name that is no subcommand, and what was probably meant."""
    from difflib import get_close_matches

    if "=" in name or name in ("-m", "--multirun", "--cfg"):
        return f"{name} is not a command. Settings follow a command: megafp8 pretrain {name} …"
    near = get_close_matches(name, COMMANDS, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Commands are {', '.join(COMMANDS)}"
    return f"megafp8 has no command {name}. {hint}"
