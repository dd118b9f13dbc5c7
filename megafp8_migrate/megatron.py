"""Translate a launch script of Megatron-LM, or one command line, into a configuration.

What the script leaves out has the default of Megatron's own argument parser, which the report
lists. Nothing of the script is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megafp8.config.api import SettingError, megatron_flags, plain
from megafp8_migrate import megatron_rules
from megafp8_migrate.megatron_settings import GivenSetting, MegatronSettings
from megafp8_migrate.report import Migration
from megafp8_migrate.shell import read_script
from megafp8_migrate.shell_values import Holes, Script, ShellCommand
from megafp8_migrate.slurm import (
    report_slurm,
    size_in_slurm,
    slurm_environment,
    slurm_options,
)

_OTHER_MODELS = re.compile(
    "bert|t5|ict|retro|mamba|hybrid|vision|vlm|mimo|dino|biencoder|clip|llava"
)
FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_KEYS = {
    "data_path": "model.data.data_prefix",
    "vocab_file": "model.tokenizer.vocab_file",
    "merge_file": "model.tokenizer.merge_file",
    "tokenizer_model": "model.tokenizer.model or model.tokenizer.type",
    "train_iters": "trainer.max_steps",
    "train_samples": "trainer.max_steps",
    "ffn_hidden_size": "model.ffn_hidden_size",
}
"""Where the user gives what a flag has that several settings are read with."""
_LAUNCHERS = {
    "trainer.devices": ("nproc_per_node", "nproc-per-node", "ntasks-per-node", "gpus-per-node"),
    "trainer.num_nodes": ("nnodes", "nodes"),
}


def is_script(source: str, text: str) -> bool:
    """Whether the file `source` with this text is a shell script or a command, and not YAML."""
    if source.endswith((".sh", ".bash", ".sbatch", ".slurm")):
        return True
    lines = text.split("\n")
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("#!") or any(_names_program(line) for line in lines):
        return True
    said = "\n".join(line.partition("#")[0] for line in lines)  # without comments
    return re.search(r"(?:\\\n|\()\s*--[a-z]", said) is not None


def _names_program(line: str) -> bool:
    """Whether a line has the name of a Python file, and a flag after it."""
    program = re.search(r"\S\.py\b", line.partition("#")[0])
    return program is not None and re.search(r"\s--[a-z]", line[program.end() :]) is not None


def translate_script(
    text: str,
    m: Migration,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    beside: Callable[[str], str | None],
) -> None:
    """Translate a script into the migration `m`.

    Args:
        text: The script.
        m: The migration.
        arguments: The script's own arguments, `$1` and so on.
        environment: Variables that the script reads and does not set.
        beside: Returns the text of a script that this one reads, or None.

    Raises:
        SettingError: The script starts no training of Megatron's.
    """
    slurm = slurm_options(text)
    script = read_script(text, arguments, slurm_environment(slurm) | {**environment}, beside)
    commands = training_commands(script)
    command = commands[0]
    others = [f"line {other.line}" for other in commands[1:] if other.words != command.words]
    m.out["defaults"] = ["pretrain_gpt", "_self_"]
    _program(command.words[place_of_program(command.words) or 0], m)
    settings = _settings_of(command, script.holes, slurm, m)
    settings.beside = beside
    megatron_rules.translate(settings, m)
    _undecided_of_script(script, command, others, m)
    report_slurm(slurm, m)


def training_commands(script: Script) -> list[ShellCommand]:
    """Return the commands of a script that start a program of Megatron's.

    Raises:
        SettingError: There is none.
    """
    commands = [c for c in script.commands if place_of_program(c.words) is not None]
    if not commands:
        raise SettingError(
            "script", None, "starts no program of Megatron's, such as pretrain_gpt.py",
            "Give the script that has the command, or the command alone with --line",
        )  # fmt: skip
    return commands


def place_of_program(words: Sequence[str]) -> int | None:
    """Return the place of Megatron's program among words; None if no flag follows one."""
    last_flag = max((n for n, word in enumerate(words) if word.startswith("--")), default=0)
    return next((n for n, word in enumerate(words[:last_flag]) if _is_program(word)), None)


def _is_program(word: str) -> bool:
    """Whether a word is the path of a file such as pretrain_gpt.py."""
    name = word.rpartition("/")[2]
    return name.endswith(".py") and "train" in name and re.fullmatch(r"[\w.-]+", name) is not None


def _program(path: str, m: Migration) -> None:
    """Let the user decide about a program that is not Megatron's pretrain_gpt.py."""
    name = path.rpartition("/")[2]
    if _OTHER_MODELS.search(name):
        m.decide("program", name, "other models than GPT are not trained here",
                 "Use Megatron itself, or a script of pretrain_gpt.py")  # fmt: skip
    elif "gpt" not in name:
        m.decide("program", name, "is not pretrain_gpt.py, and its flags were read as those of it",
                 "Look whether it gives them other meanings, and remove this line")  # fmt: skip


def _settings_of(
    command: ShellCommand, holes: Holes, slurm: Mapping[str, str], m: Migration
) -> MegatronSettings:
    start = place_of_program(command.words) or 0
    settings = MegatronSettings(source="a default of " + megatron_flags().version)
    _ranks(command.words[:start], holes, slurm, m)
    flag, values = "", list[str]()
    for word in (*command.words[start + 1 :], "--end"):
        if not FLAG.fullmatch(word):
            values.append(word)
            continue
        _add(settings, flag, values, holes, m)
        flag, _, first = word.partition("=")
        values = [first] if "=" in word else []
    return settings


def _add(
    settings: MegatronSettings, flag: str, values: list[str], holes: Holes, m: Migration
) -> None:
    if not flag:
        if values:
            _unknown_words("words before the first flag", values, holes, m)
        return
    extra = [value for value in values if holes.inside(value) == [holes.shown(value)]]
    name, means = megatron_flags().of_flag(flag[2:])
    passed = megatron_flags().passed.get(name)
    is_switch = passed is not None and passed.is_switch
    if is_switch and values and len(extra) == len(values):
        _unknown_words(f"words after {flag}", values, holes, m)
        values = []
    if any(holes.inside(value) for value in values):
        key = passed.key if passed else _KEYS.get(name, "")
        settings.unknown[name] = " ".join(holes.shown(value) for value in values)
        if not megatron_rules.stands_alone(name):
            _undecided_value(flag, values, key, holes, m)
        return
    if name in settings.given and settings.given[name].value != (
        _read(values) if values else means
    ):
        m.drop(flag, settings.given[name].value, "a later one of the same flag replaces it")
    settings.add(name, GivenSetting(flag, _read(values) if values else means, not values), m)


def _undecided_value(flag: str, values: list[str], key: str, holes: Holes, m: Migration) -> None:
    shown = " ".join(holes.shown(value) for value in values)
    sources = list(dict.fromkeys(one for value in values for one in holes.inside(value)))
    hint = f"Give {key}" if key else "Give it in the command"
    hint += ", or migrate with the script's arguments after its name, or with --env NAME=VALUE"
    m.decide(flag, shown, f"depends on {', '.join(sources)}, which the script does not say", hint)


def _unknown_words(what: str, values: list[str], holes: Holes, m: Migration) -> None:
    shown = " ".join(holes.shown(value) for value in values)
    reason = "the script does not say what stands there"
    m.decide(what, shown, reason, "Give what it stands for with --env NAME=VALUE, or remove it")


def _read(values: list[str]) -> Any:
    """Return the values of a flag: numbers as numbers, and several as a list."""
    read = [_number(value) for value in values]
    return read[0] if len(read) == 1 else read


def _number(text: str) -> Any:
    try:
        return int(text) if re.fullmatch(r"[-+]?\d{1,18}", text, re.ASCII) else _float(text)
    except ValueError:
        return text


def _float(text: str) -> Any:
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", text, re.ASCII)
    return float(text) if is_number else text


def _ranks(words: Sequence[str], holes: Holes, slurm: Mapping[str, str], m: Migration) -> None:
    """Translate the numbers of ranks and nodes that torchrun, srun or sbatch is given."""
    for key, names in _LAUNCHERS.items():
        value = None
        for place, word in enumerate(words):
            name, _, said = word.lstrip("-").partition("=")
            if word.startswith("--") and name in names:
                value = said or (words[place + 1] if place + 1 < len(words) else "")
        if value is None and key in size_in_slurm(slurm):
            shown, number = size_in_slurm(slurm)[key]
            m.change(shown, number, {key: number})
            continue
        if value is None and key == "trainer.num_nodes":
            continue
        if value is not None and value.isdecimal() and len(value) < 8:
            m.change(key.rpartition(".")[2] + " of the launcher", value, {key: int(value)})
        else:
            shown = "???" if value is None else holes.shown(value)
            m.decide(key, shown, "the script does not say it", "Give the number")


def _undecided_of_script(
    script: Script, command: ShellCommand, others: list[str], m: Migration
) -> None:
    for what, value in script.assumed.items():
        m.assumed[what] = f"{script.holes.shown(what)} {script.holes.shown(value)}"
    for where in dict.fromkeys(script.unread):
        m.decide(
            "script", where, "could not be read", "Look whether it changes what is trained, and "
            "remove this line",
        )  # fmt: skip
    if command.condition:
        hint = "Look whether it is the one that you run"
        m.decide("script", f"line {command.line}", f"runs by {command.condition} alone", hint)
    if others:
        reason = f"trains too, with other flags than line {command.line}, which was read"
        m.decide("script", plain(", ".join(others)), reason, "Give each command with --line")
