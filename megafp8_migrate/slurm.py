"""Read what a script asks of Slurm, and record what becomes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from megafp8_migrate.report import Migration

_LONG_NAMES = {
    "A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "n": "ntasks",
    "L": "licenses", "c": "cpus-per-task", "d": "dependency", "e": "error", "G": "gpus",
    "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_PLACES = frozenset({
    "account", "comment", "constraint", "exclude", "job-name", "licenses", "mail-type",
    "mail-user", "nodelist", "partition", "qos", "reservation", "time",
})  # fmt: skip
"""Options that say where, when and for whom a job runs, whatever it does there."""
_SIZES = ("nodes", "ntasks-per-node", "gpus-per-node", "gres", "ntasks", "gpus")
JOB_SCRIPT = "examples/slurm/pretrain.sbatch"


def slurm_options(text: str) -> dict[str, str]:
    """Return the options of a script's `#SBATCH` lines by their long names.

    Slurm reads those above the first command. Where there are none, those of a text count that the
    script itself gives to `sbatch`.
    """
    lines = text.split("\n")
    is_command = (re.match(r"\s*[^#\s]", line) is not None for line in lines)
    first = next((n for n, yes in enumerate(is_command) if yes), len(lines))
    options = _options(lines[:first])
    return options or _options(lines)


def _options(lines: list[str]) -> dict[str, str]:
    words: list[str] = []
    for line in lines:
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:  # a quote that does not end
                words += line.split()[1:]
    options, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif re.match(r"-[A-Za-z]", word):
            name, value = _LONG_NAMES.get(word[1], word[1]), word[2:].removeprefix("=")
        else:
            value = word
        options[name] = value
    options.pop("", None)
    return options


def slurm_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets in a job with these options, of those about its size."""
    nodes, devices = _number(options.get("nodes")), _devices(options)
    variables = {name: nodes for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")} | {
        "SLURM_NTASKS_PER_NODE": _number(options.get("ntasks-per-node")),
        "SLURM_GPUS_ON_NODE": devices if _gpus(options) else None,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def size_in_slurm(options: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return our keys of a job's size that the options say, each with what says it."""
    found = {
        "trainer.num_nodes": _number(options.get("nodes")),
        "trainer.devices": _devices(options),
    }
    label = " ".join(f"--{name}={options[name]}" for name in _SIZES if name in options)
    return {key: (f"#SBATCH {label}", value) for key, value in found.items() if value is not None}


def _devices(options: Mapping[str, str]) -> int | None:
    """Return the ranks on each node: its GPUs, or its tasks; None if both are said and differ.

    A single task beside several GPUs is one that starts the ranks itself, as torchrun does.
    """
    gpus, tasks = _gpus(options), _number(options.get("ntasks-per-node"))
    if gpus is not None and tasks not in (None, 1, gpus):
        return None
    return gpus if gpus is not None else tasks


def _gpus(options: Mapping[str, str]) -> int | None:
    found = re.fullmatch(r"gpu(?::[\w.-]+)??(?::(\d+))?", options.get("gres", ""))
    each = options.get("gpus-per-node", "").rpartition(":")[2]
    return _number(each) if each else _number((found[1] or "1") if found else None)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,6}", text, re.ASCII) else None


def report_slurm(options: Mapping[str, str], m: Migration) -> None:
    """Record which options the command that follows has, and why it has no others."""
    for name, value in options.items():
        if name in _PLACES:
            m.kept.append(f"#SBATCH --{name}={value} (in the command of sbatch)")
            m.slurm_options.append(f"--{name}={value}")
        elif name in _SIZES:
            m.drop(f"#SBATCH --{name}", value, "trainer.num_nodes and trainer.devices say it")
        else:
            m.drop(f"#SBATCH --{name}", value or True, f"{JOB_SCRIPT} has its own options")
