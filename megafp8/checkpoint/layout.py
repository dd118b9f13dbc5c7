"""Names of what lies in a checkpoint root.

`step_00000012` is committed; `step_00000012.damaged-1` was found damaged and set aside for people
to look at; `.staging-*` is being written and `.trash-*` deleted, or was when its writer died.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from megafp8.files import fsync_directory, os_errors_reported, remove_tree

_STEP = re.compile(r"step_(\d{8,})")
_DAMAGED = re.compile(r"step_\d{8,}\.damaged-\d+")
_LEFTOVERS = (".staging-", ".trash-")


def step_name(step: int) -> str:
    """`step_00000012` for 12."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a directory name claims, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def staging_path(root: Path, step: int) -> Path:
    """A name that nobody else has."""
    return root / f".staging-{step_name(step)}-{secrets.token_hex(8)}"


def steps(root: Path) -> list[int]:
    """Committed steps, ascending, damaged or not; none where `root` does not exist."""
    found = (step_of(name) for name in _names(root) if (root / name).is_dir())
    return sorted(step for step in found if step is not None)


def set_aside(step_dir: Path) -> Path:
    """Renames a damaged checkpoint to `….damaged-<n>`; deletes nothing. May raise `OSError`."""
    number = 1
    while os.path.lexists(aside := step_dir.with_name(f"{step_dir.name}.damaged-{number}")):
        number += 1
    step_dir.rename(aside)
    return aside


def were_set_aside(root: Path) -> list[Path]:
    """Checkpoints that were found damaged earlier."""
    return [root / name for name in sorted(_names(root)) if _DAMAGED.fullmatch(name)]


def remove_whole(path: Path) -> None:
    """Deletes so that a kill half-way leaves nothing under a valid name. May raise `OSError`."""
    if not os.path.lexists(path):
        return
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(8)}")
    path.rename(trash)
    fsync_directory(path.parent)
    remove_tree(trash)


def remove_leftovers(root: Path, in_progress: Collection[Path] = ()) -> list[Path]:
    """Deletes what dead writers left: all staging and trash except `in_progress`.

    Only the one writer of `root` (who holds the run's lock) may call it.
    """
    mine = {path.name for path in in_progress}
    left = [root / n for n in _names(root) if n.startswith(_LEFTOVERS) and n not in mine]
    for path in left:
        with os_errors_reported(path, "deleting a leftover"):
            remove_tree(path)
    return left


def _names(root: Path) -> list[str]:
    if not os.path.lexists(root):
        return []
    with os_errors_reported(root, "listing checkpoints"):
        return os.listdir(root)
