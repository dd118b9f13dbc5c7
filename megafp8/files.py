"""Files that survive a kill: durable and atomic writes, strict JSON, errors with a hint."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megafp8.errors import CheckpointError, RunError

_HINTS = {
    errno.ENOSPC: "Free space there or move the run; older checkpoints are untouched",
    errno.EDQUOT: "Free some of the quota or move the run; older checkpoints are untouched",
    errno.EFBIG: "Raise the file size limit (ulimit -f); older checkpoints are untouched",
    errno.EROFS: "The file system is read-only: remount it or move the run",
    errno.EACCES: "Give this user write permission there or move the run",
    errno.EPERM: "Give this user write permission there or move the run",
    errno.EIO: "The disk or network file system is failing: move the run; older checkpoints stay",
    errno.ENOENT: "Something removed it while it was in use; see the errors of the other ranks",
}
_OTHERWISE = "Repair the file system or move the run; older checkpoints are untouched"


@contextmanager
def os_errors_reported(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `CheckpointError` with its hint."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        named = errno.errorcode.get(number, "OSError")
        reason = f"{doing} failed with {named} ({error.strerror or error})"
        raise CheckpointError(path, reason, _HINTS.get(number, _OTHERWISE)) from error


def write_durably(path: Path, content: bytes) -> None:
    """Create `path` and return once its bytes are on the disk; the directory entry is not yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` (creations, renames) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete a directory (of a link: the link only); what cannot be deleted stays, silently."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Write `path` so that a reader, or a crash at any instant, finds the old file or the new one.

    Raises:
        OSError: The disk is full, the directory missing, …; the old file is then untouched.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_durably(draft, text.encode())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    fsync_directory(path.parent)  # the rename itself must survive a power cut


def write_json_atomically(path: Path, obj: object) -> None:
    """Write `obj` as JSON by `write_atomically`. Raises `RunError`."""
    try:
        write_atomically(path, json.dumps(obj, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{path}: cannot be written ({reason}). Free space or move it") from error


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`; raise `RunError` if it is missing, damaged or no object."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}). Was the run moved?") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON ({error}). Restore it or start a new run") from error
    if not isinstance(tree, dict):
        raise RunError(f"{path}: not a JSON object. Restore it or start a new run")
    return tree


Warn = Callable[[str], None]


def warn_on_stderr(message: str) -> None:
    """Print a warning to stderr: the default `Warn`, for callers without a console."""
    import sys

    print(f"warning: {message}", file=sys.stderr, flush=True)


def strict(value: object) -> object:
    """Return `value` made of what strict JSON knows: NaN and infinities become strings.

    Python's own `json` writes them as bare words that no other parser takes. Finite floats stay
    floats, and `json` writes those so that they read back bit for bit. Anything with `item()` (a
    NumPy or torch scalar) becomes its Python number, paths and others become text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    item = getattr(value, "item", None)
    return strict(item()) if callable(item) else str(value)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON. Without `indent` it is one ASCII line, whatever newlines the text may hold."""
    return json.dumps(strict(value), indent=indent, allow_nan=False, ensure_ascii=indent is None)
