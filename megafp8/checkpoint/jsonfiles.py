"""Small JSON files that survive a kill, and logs of JSON lines that are cut back to a step."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megafp8.checkpoint.disk import fsync_directory
from megafp8.errors import RunError


def write_json_atomically(path: Path, obj: object) -> None:
    """Readers see the old content or the new one, never part of it. Raises `RunError`."""
    content = json.dumps(obj, indent=1, sort_keys=True) + "\n"
    with _replacing(path) as file:
        file.write(content.encode())


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`; raises `RunError` where it is missing, damaged or no object."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}). Was the run moved?") from error
    except ValueError as error:
        raise RunError(f"{path}: not JSON ({error}). Restore it or start a new run") from error
    if not isinstance(tree, dict):
        raise RunError(f"{path}: not a JSON object. Restore it or start a new run")
    return tree


def truncate_jsonl(path: Path, last_step: int) -> int:
    """Keeps, byte for byte, the whole lines whose integer `step` is at most `last_step`.

    Lines after a kill or from steps that will be run again go, so that a continued log ends as an
    undisturbed one. Atomic; a missing file is left missing. Returns how many lines were dropped
    (a torn last line counts as one). Raises `RunError`.
    """
    if not path.exists():
        return 0
    dropped = 0
    with _replacing(path) as kept, open(path, "rb") as lines:
        for line in lines:
            step = _step_of_line(line)
            if step is not None and step <= last_step:
                kept.write(line)
            else:
                dropped += 1
    return dropped


def _step_of_line(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and vanishes if not."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{path}: cannot be written ({reason}). Free space or move it") from error
    finally:
        draft.unlink(missing_ok=True)
