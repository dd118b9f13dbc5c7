"""Say which directory the settings name for a run, and refuse that of another program.

No module that this one imports loads torch: a wrong folder is an error of the first second.
"""

from __future__ import annotations

import os
from pathlib import Path

from megafp8.config.values import why_no_name
from megafp8.errors import RunError
from megafp8.files import expanded, paths_reported, run_errors_reported
from megafp8.runs.ownership import refuse_foreign
from megafp8.specs import ObserveSpec


def check_place(observe: ObserveSpec) -> None:
    """Raise the errors of a run's directory that are found before torch is imported.

    Raises:
        RunError: The settings name the root of the file system, or a folder that is neither empty
            nor that of a run.
    """
    path = named_directory(observe)
    with paths_reported():
        if path is None or not path.is_dir():
            return
    with run_errors_reported(path, "looking into the run's directory"):
        refuse_foreign(path, os.listdir(path))


def named_directory(observe: ObserveSpec) -> Path | None:
    """Return the directory that the settings name, which may not exist; None if they name none.

    Raises:
        RunError: The name cannot be that of a directory.
    """
    if observe.explicit_log_dir is not None:
        path = expanded(observe.explicit_log_dir).absolute()
        path = path.resolve() if ".." in path.parts else path
        if path == path.parent:
            raise RunError(
                f"exp_manager.explicit_log_dir={observe.explicit_log_dir} is the root of the file "
                "system. Give a folder for this run alone"
            )
        return path
    if not observe.name:
        return None
    return expanded(observe.exp_dir) / checked_name(observe.name)


def checked_name(name: str) -> str:
    """Return `name`, or raise `RunError` if it cannot be a directory under `exp_dir`."""
    if wrong := why_no_name(name):
        raise RunError(f"exp_manager.name={name[:80]!r} {wrong}. Use a plain directory name")
    return name
