"""Refuse a folder that is neither empty nor that of a run.

A run's folder has our mark: its record, or the checkpoint of a training. Any other folder must be
empty, but for what a process of ours that died at once, a shell or a scheduler leaves there. A run
replaces and adds to files by name, so that a wrong path would cost a user theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megafp8.checkpoint.step_directories import MANIFEST_NAME, is_ours, step_of
from megafp8.data.named_tokenizers import TOKENIZER_CONFIG
from megafp8.data.tokenize import TOKENIZER_FILES
from megafp8.errors import RunError
from megafp8.files import read_json_object
from megafp8.observe.experts import EXPERTS_FILE
from megafp8.observe.health import HEALTH_FILE
from megafp8.observe.journal import CONSOLE_FILE, EVENTS_FILE, SAMPLES_FILE
from megafp8.runs.find import CHECKPOINTS_DIR, CONFIG_NAME, METRICS_NAME, RECORD_NAME
from megafp8.runs.lock import LOCK_NAME
from megafp8.runs.restarts import RECORD as RESTARTS_NAME
from megafp8.runs.tokenizer import KEPT

LOGS = (METRICS_NAME, HEALTH_FILE, EXPERTS_FILE)
"""The files in which a run records its steps."""

MADE_AT_THE_START = (
    CONFIG_NAME,
    RECORD_NAME,
    RESTARTS_NAME,
    *TOKENIZER_FILES,
    TOKENIZER_CONFIG,
    KEPT,
    "events.out.tfevents.*",
    CONSOLE_FILE,
    EVENTS_FILE,
    LOCK_NAME,
)
"""The files and folders that a run may have made before its first step."""

_WRITTEN_IN_PLACE = (*LOGS, CONSOLE_FILE, EVENTS_FILE, SAMPLES_FILE)
"""The files that a run opens to add to them; the others are replaced as a whole."""

_OF_OTHERS = ("*.out", "*.err", "*.log")
"""The files that a shell or a scheduler makes for a command's output; a run only appends to one."""

_OF_A_RECORD = ("identity", "status", "created")
_OF_A_LOCK = ("host", "pid")
_NAMES_SHOWN = 5


def refuse_foreign(path: Path, names: Iterable[str]) -> None:
    """Raise `RunError` if a run in `path` would begin among files that no run of ours has written.

    Args:
        path: The directory in which a run is about to begin.
        names: What the directory holds.

    Raises:
        RunError: The directory is neither empty nor that of a run, or a link or special file has a
            name of a file that a run would add to.
    """
    if _has_run(path):
        refuse_links(path)
        return
    found = sorted(name for name in names if not _is_as_good_as_none(path / name))
    if not found:
        return
    shown = ", ".join(found[:_NAMES_SHOWN]) + (", …" if len(found) > _NAMES_SHOWN else "")
    raise RunError(
        f"{path} has no run, and other files than one: {shown}. Nothing was changed. Give a new or "
        "an empty folder"
    )


def refuse_links(path: Path) -> None:
    """Raise `RunError` if a run that continues would write through a link, a FIFO or a device.

    Somebody else may have made the directory, and a link may lead to any file of this user.
    """
    for file in (path / name for name in _WRITTEN_IN_PLACE):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise RunError(
                f"{file} is a link or no ordinary file, and the run would write to what it stands "
                "for. Nothing was changed. Remove it, or put the file itself there"
            )


def _has_run(path: Path) -> bool:
    """Whether a directory has the record, or a checkpoint of the training, of a run of ours."""
    record = path / RECORD_NAME
    if record.is_file() and not record.is_symlink():
        try:
            return all(isinstance(read_json_object(record).get(name), str) for name in _OF_A_RECORD)
        except RunError:
            return True  # reading the record reports the damage, and the run is refused
    checkpoints = path / CHECKPOINTS_DIR
    return any(_is_of_training(step_dir) for step_dir in checkpoints.glob("step_*"))


def _is_of_training(step_dir: Path) -> bool:
    """Whether a folder is a checkpoint of a training, which records what data it was trained on."""
    if step_of(step_dir.name) is None:
        return False
    try:
        manifest: Any = read_json_object(step_dir / MANIFEST_NAME)
    except RunError:
        return False
    meta = manifest.get("meta")
    return isinstance(meta, dict) and "data_fingerprint" in meta


def _is_as_good_as_none(file: Path) -> bool:
    """Whether a folder that has this file or folder alone counts as empty."""
    if file.is_symlink() or not (file.is_file() or file.is_dir()):
        return False
    if file.is_dir():  # checkpoints that cannot be read are reported where they are loaded
        known = is_ours if file.name == CHECKPOINTS_DIR else lambda name: False
        return all(known(each.name) for each in file.iterdir())
    if file.name == LOCK_NAME:
        return _is_lock(file)
    is_output = any(fnmatchcase(file.name, pattern) for pattern in _OF_OTHERS)
    return is_output or file.stat().st_size == 0


def _is_lock(file: Path) -> bool:
    try:
        content = json.loads(file.read_bytes() or b"{}")
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and (not content or all(k in content for k in _OF_A_LOCK))
