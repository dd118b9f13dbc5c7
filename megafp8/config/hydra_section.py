"""Say which of Hydra's own settings a YAML file and a command line may give to a sweep.

A value below `hydra` can name a class to make, a command to run, a file to open or a variable of
the environment. Whoever copies a YAML from someone else does not expect any of this. Therefore a
file may give only the settings of the list here, each with values of its kind, and everything else
is refused, also what a later version of Hydra may add. The command line is the user's own: it may
set what has an effect in a sweep.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megafp8.config.errors import SettingError
from megafp8.config.settings import is_text
from megafp8.secrets import redacted

HYDRA = "hydra"
"""The section of a YAML that holds Hydra's own settings."""

TARGETS = frozenset(
    {
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra_plugins.megafp8_slurm.WatchedSlurmLauncher",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
        "optuna.samplers.CmaEsSampler",
        "optuna.samplers.GridSampler",
        "optuna.samplers.MOTPESampler",
        "optuna.samplers.NSGAIISampler",
        "optuna.samplers.RandomSampler",
        "optuna.samplers.TPESampler",
    }
)
"""The full names of the classes that a YAML may name; an installed plugin brings its own."""

_WORD = re.compile(r"[\w.,:=+@&|()\[\] *-]*", re.ASCII)

_NUMBERS = (
    ("launcher", "n_jobs", "verbose", "timeout", "timeout_min", "cpus_per_task", "gpus_per_node"),
    ("launcher", "tasks_per_node", "mem_gb", "nodes", "stderr_to_stdout", "cpus_per_gpu"),
    ("launcher", "gpus_per_task", "signal_delay_s", "max_num_timeout", "array_parallelism"),
    ("sweeper", "max_batch_size", "n_trials", "n_jobs", "max_failure_rate"),
)
_WORDS = (
    ("launcher", "batch_size", "name", "partition", "qos", "comment", "constraint", "exclude"),
    ("launcher", "gres", "mem_per_gpu", "mem_per_cpu", "account"),
    ("sweeper", "direction", "study_name"),
    ("job", "name"),
    ("job.config.override_dirname", "kv_sep", "item_sep", "exclude_keys"),
)

ON_THE_COMMAND_LINE = (
    "hydra.sweep.",
    "hydra.launcher.",
    "hydra.sweeper.",
    "hydra.job.name",
    "hydra.job.env_set.",
    "hydra.job.config.override_dirname.",
)
"""The beginnings of the settings that the command line of a sweep may give."""

GROUPS = ("hydra/launcher", "hydra/sweeper", "hydra/sweeper/sampler")
"""The groups of Hydra from which a sweep's command line and a file's `defaults:` may choose."""

_QUIET = ("hydra/job_logging", "hydra/hydra_logging")
"""The groups of Hydra's logging, which a sweep switches off; a file may do the same."""


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _is_word(value: Any) -> bool:
    """Whether a value is a number or a text that is no path, no command and no interpolation."""
    if isinstance(value, list):
        return all(_is_word(item) for item in value)
    return _is_number(value) or (isinstance(value, str) and _WORD.fullmatch(value) is not None)


def _is_folder(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_override(value: Any) -> bool:
    """Whether a value is what a sweep may give to a key of the job, as `1,2` or `range(1,4)`."""
    if isinstance(value, str):
        return value.isprintable() and "${" not in value
    return _is_number(value)


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values and type(value) in {type(known) for known in values}


def _keys(groups: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    return (f"{HYDRA}.{section}.{name}" for section, *names in groups for name in names)


IN_A_FILE: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_keys(_NUMBERS), _is_number),
    **dict.fromkeys(_keys(_WORDS), _is_word),
    "hydra.sweep.dir": _is_folder,
    "hydra.sweep.subdir": _is_folder,
    "hydra.launcher._target_": _is_one_of(*TARGETS),
    "hydra.sweeper._target_": _is_one_of(*TARGETS),
    "hydra.sweeper.sampler._target_": _is_one_of(*TARGETS),
    "hydra.launcher.backend": _is_one_of(None, "loky", "multiprocessing", "threading"),
    "hydra.launcher.prefer": _is_one_of(None, "processes", "threads"),
    "hydra.launcher.require": _is_one_of(None, "sharedmem"),
    # Hydra's usual way to keep single runs from writing files; a sweep does not read them.
    "hydra.run.dir": _is_folder,
    "hydra.output_subdir": _is_one_of(None),
    "hydra.job.chdir": _is_one_of(None, False),
}
"""The settings that a YAML may give, with the check of their values."""


def is_hydras(key: str) -> bool:
    """Whether an override's key, perhaps with `+` or `~`, is a setting of Hydra itself."""
    return re.match(r"hydra(?![A-Za-z0-9_])", key.lstrip("+~ ")) is not None


def file_problems(package: str, tree: Any, origin: str) -> list[SettingError]:
    """Return what a YAML gives to Hydra and must not.

    Args:
        package: The section to which the file's settings go, as `hydra.launcher`; empty for all.
        tree: The file's settings as plain Python objects, with interpolations as they are written.
        origin: The file's name, for messages.
    """
    return [
        problem
        for key, value in _leaves(package, tree)
        if is_hydras(key) and (problem := _file_problem(key, value, origin))
    ]


def choices(defaults: Iterable[Any] | None) -> list[tuple[str, Any]]:
    """Return the groups of Hydra from which a YAML's `defaults:` choose, with what they choose.

    A file of Hydra's that is named as a whole, or whose settings go to another section, counts too.

    Args:
        defaults: The items of the list, as Hydra has read them.
    """
    chosen = []
    for item in defaults or ():
        group = getattr(item, "group", None)
        name = str(group if group is not None else getattr(item, "path", None)).lstrip("/")
        if name == HYDRA or name.startswith(f"{HYDRA}/"):
            package = getattr(item, "package", None)
            key = name if package is None else f"{name}@{package}"
            chosen.append((key, item.value if group is not None else None))
    return chosen


def choice_problems(defaults: Iterable[Any] | None, origin: str) -> list[SettingError]:
    """Return which choices of a YAML's `defaults:` a sweep would drop.

    Args:
        defaults: The items of the list, as Hydra has read them.
        origin: The file's name, for messages.
    """
    return [
        SettingError(
            key,
            value,
            "has no effect in a sweep",
            f"Leave it out of `defaults:`, which may choose from {', '.join(GROUPS)}",
            origin=origin,
        )
        for key, value in choices(defaults)
        if key not in GROUPS and not (key in _QUIET and value in (None, "none", "disabled"))
    ]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and not _is_map(path):
        for name, item in value.items():
            # A name with a dot is one name, and is none of Hydra's.
            part = f"[{name}]" if "." in str(name) else str(name)
            yield from _leaves(f"{path}.{part}" if path else part, item)
    else:
        yield path, value


def _is_map(path: str) -> bool:
    return path in ("hydra.sweeper.params", "hydra.sweeper.search_space")


def _file_problem(key: str, value: Any, origin: str) -> SettingError | None:
    if redacted(value, key) != value:
        reason = "holds a secret, which Hydra would write into the sweep's multirun.yaml"
        hint = "Leave it out, and set the variable in the environment, which jobs inherit"
        return SettingError(key, None, reason, hint, origin=origin)
    if _is_map(key) and (number := _number_for_text(value)) is not None:
        reason = f"gives {number} a number, or True or False, and it is a text"
        hint = "Write each value in quotes, as \"'3.10','3.1'\""
        return SettingError(key, None, reason, hint, origin=origin)
    if key in IN_A_FILE:
        fits = IN_A_FILE[key](value)
    elif _is_map(key):
        fits = value is None or _is_of_jobs(value)
    else:
        fits = key.startswith("hydra.sweeper.sampler.") and "._" not in key and _is_number(value)
    if fits:
        return None
    reason, hint = _why_not(key)
    return SettingError(key, None, reason, hint, origin=origin)


def _is_of_jobs(value: Any) -> bool:
    """Whether a value maps keys of jobs to values, or to descriptions of a range."""
    return isinstance(value, dict) and all(
        _is_key_of_jobs(str(key))
        and (_is_range(item) if isinstance(item, dict) else _is_override(item))
        for key, item in value.items()
    )


def _number_for_text(value: Any) -> str | None:
    """Return a key of the jobs that is a text and is given what YAML reads as none."""
    for key, item in value.items() if isinstance(value, dict) else ():
        items = item.get("choices", ()) if isinstance(item, dict) else (item,)
        numbers = any(isinstance(one, (bool, int, float)) for one in items or ())
        if numbers and is_text(str(key).lstrip("+")):
            return str(key)
    return None


def _is_key_of_jobs(key: str) -> bool:
    return re.fullmatch(r"\+{0,2}[A-Za-z][\w./@-]*", key) is not None and not is_hydras(key)


def _is_range(value: Mapping[str, Any]) -> bool:
    known = {"type", "choices", "low", "high", "log", "step"}
    return value.keys() <= known and all(_is_word(item) for item in value.values())


def _why_not(key: str) -> tuple[str, str]:
    name = key.rpartition(".")[2]
    if name.startswith("_") or "callbacks" in key or name in ("setup", "custom_search_space"):
        return (
            "settings must not name code to run",
            "Leave it out; hydra/launcher=NAME and hydra/sweeper=NAME choose among those that are "
            "installed, and the command line may give hydra.launcher.setup",
        )
    if key.startswith(("hydra.job.env_set", "hydra.job.env_copy")):
        return (
            "a YAML file must not set the environment of jobs",
            "Set the variable in the shell; jobs inherit the environment",
        )
    if "logging" in key:
        return (
            "settings must not name code to run or files to open",
            "Leave it out; each job writes its own console.log",
        )
    if key in IN_A_FILE or _is_map(key):
        return (
            "a YAML file may give only plain numbers and words here",
            "Give it on the command line, which is your own",
        )
    return (
        "is none of Hydra's settings that a YAML file may give to a sweep",
        "Leave it out, or give it on the command line if it has an effect there",
    )
