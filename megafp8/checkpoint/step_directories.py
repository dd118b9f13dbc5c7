"""Name, list, set aside and delete the directories in a checkpoint root.

A checkpoint root is the directory that holds a run's checkpoints. In it, `step_00000012` is a
committed checkpoint, and `step_00000012.damaged-1` one that was found damaged and is kept for
people to look at. `.staging-*` is being written and `.trash-*` is being deleted, unless the process
that did so has died.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from fp8_numerics.caches import fsync_directory
from megafp8.files import os_errors_reported, remove_tree

MANIFEST_NAME = "manifest.json"

_STEP = re.compile(r"step_(\d{8,})")
_DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
_LEFTOVER = re.compile(
    r"\.(staging|trash)-(staging-)?step_\d{8,}(\.damaged-\d+)?(-[0-9a-f]{16}){1,2}"
)


def step_name(step: int) -> str:
    """Return the name of a step's directory: `step_00000012` for 12."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def staging_path(root: Path, step: int) -> Path:
    """Return a new path for writing the checkpoint of `step`; a random part makes it unique."""
    return root / f".staging-{step_name(step)}-{secrets.token_hex(8)}"


def is_ours(name: str) -> bool:
    """Whether a name in a checkpoint root is one that this module gives."""
    return any(pattern.fullmatch(name) for pattern in (_STEP, _DAMAGED, _LEFTOVER))


def steps(root: Path) -> list[int]:
    """Return the steps that are committed in `root`, ascending, damaged or not.

    The list is empty where `root` does not exist.
    """
    named = {name: step for name in _names(root) if (step := step_of(name)) is not None}
    with os_errors_reported(root, "looking into the checkpoints"):
        return sorted(step for name, step in named.items() if (root / name).is_dir())


def set_aside(step_dir: Path) -> Path:
    """Rename a damaged checkpoint to `….damaged-<n>` and return its new path.

    Raises:
        OSError: The directory cannot be renamed.
    """
    number = 1
    while os.path.lexists(aside := step_dir.with_name(f"{step_dir.name}.damaged-{number}")):
        number += 1
    step_dir.rename(aside)
    return aside


def were_set_aside(root: Path) -> list[Path]:
    """Return the checkpoints in `root` that `set_aside` renamed, sorted by name."""
    return [root / name for name in sorted(_names(root)) if _DAMAGED.fullmatch(name)]


def remove_whole(path: Path) -> None:
    """Delete a directory; a kill in between never leaves a part of it under a checkpoint's name.

    The directory is first renamed to `.trash-*`. Nothing happens if `path` does not exist.

    Raises:
        OSError: The directory cannot be renamed.
    """
    if not os.path.lexists(path):
        return
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(8)}")
    path.rename(trash)
    fsync_directory(path.parent)
    remove_tree(trash)


def remove_leftovers(root: Path) -> list[Path]:
    """Delete the staging and trash directories in `root`, and return their paths.

    Processes that died while they wrote or deleted leave such directories. Only the
    process that holds the run's lock may call this function, and not while it saves.

    Raises:
        CheckpointError: A directory cannot be deleted.
    """
    leftovers = [root / name for name in _names(root) if _LEFTOVER.fullmatch(name)]
    for path in leftovers:
        with os_errors_reported(path, "deleting a leftover"):
            remove_tree(path)
    return leftovers


def _names(root: Path) -> list[str]:
    if not os.path.lexists(root):
        return []
    with os_errors_reported(root, "listing checkpoints"):
        return os.listdir(root)
