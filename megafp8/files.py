"""Files that survive a kill: durable and atomic writes, locks, caches, strict JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    errno.EEXIST: "A file has the name of a folder: choose another folder",
    errno.ENOTDIR: "A file has the name of a folder: choose another folder",
}
_OTHERWISE = "Repair the file system or move the run; older checkpoints are untouched"
PROGRESS = "MEGAFP8_PROGRESS"
"""The environment variable by which our launcher tells its ranks the file for `note_progress`."""
STALE_SECONDS = 24 * 3600.0  # an older folder that is being built belongs to a killed process


@contextmanager
def os_errors_reported(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `CheckpointError` with its hint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, *_reason_and_hint(error, doing)) from error


@contextmanager
def run_errors_reported(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `RunError` that names `path`, reason and hint."""
    try:
        yield
    except OSError as error:
        reason, hint = _reason_and_hint(error, doing)
        raise RunError(f"{path}: {reason}. {hint}") from error


def _reason_and_hint(error: OSError, doing: str) -> tuple[str, str]:
    number = error.errno or 0
    named = errno.errorcode.get(number, "OSError")
    reason = f"{doing} failed with {named} ({error.strerror or error})"
    if number == errno.ENOENT and doing.startswith("making") and _parent_exists(error):
        return reason, "This file system makes no folders there: choose another folder"
    return reason, _HINTS.get(number, _OTHERWISE)


def _parent_exists(error: OSError) -> bool:
    """Whether the folder exists in which `error` says that a file is missing."""
    return isinstance(error.filename, str) and Path(error.filename).parent.is_dir()


def note_progress() -> None:
    """Show our launcher that this rank does not hang, by the time of a file that both know.

    After a signal the launcher waits for ranks that make progress. Other launchers name no file.
    """
    if file := os.environ.get(PROGRESS):
        with suppress(OSError):  # the launcher has ended, or its folder is full
            os.utime(file)


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


def sync(path: Path) -> None:
    """Return once the bytes of the file `path` are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def put(draft: Path, path: Path) -> Path:
    """Make the file `draft` the file `path` in one step, with its bytes on the disk before it.

    Return `path`. Both must lie on one file system. A crash at any instant leaves the old file or
    the new one.
    """
    sync(draft)
    draft.replace(path)
    fsync_directory(path.parent)  # the rename itself must survive a power cut
    return path


def draft_of(path: Path) -> Path:
    """Return a new name beside `path` for the file that `put` will move there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_atomically(path: str | Path, text: str) -> None:
    """Write `path` so that a reader, or a crash at any instant, finds the old file or the new one.

    Raises:
        OSError: The disk is full, the directory missing, …; the old file is then untouched.
    """
    path = Path(path)
    draft = draft_of(path)
    try:
        draft.write_text(text, encoding="utf-8")
        put(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def built_beside(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, and rename it to `folder` after the block.

    So `folder` is complete or absent, however many processes build it and whenever they are killed.
    If another process was faster, its folder stays and this one is deleted, as it is if the block
    raises. What killed processes left beside `folder` a day ago is deleted, too.

    Raises:
        OSError: The folder cannot be made or renamed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):
        with suppress(OSError):  # gone meanwhile
            newest = max(path.stat().st_mtime for path in (left, *left.rglob("*")))
            if time.time() - newest > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    build = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        yield build
        build.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
        try:
            build.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(build, ignore_errors=True)


def move_away(folder: Path) -> None:
    """Rename a damaged folder in one step, so that no process finds half of it, and delete it.

    Raises:
        OSError: The folder cannot be renamed.
    """
    away = folder.with_name(f"{folder.name}.tmp-damaged-{os.getpid()}-{time.time_ns()}")
    with suppress(FileNotFoundError):  # another process did
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def locked(path: Path, on_busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is made if it is missing.

    If another process on this host holds the lock, `on_busy` is called, which may raise; then this
    process waits. On a file system without locks the block runs without one.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def cache_folder() -> Path:
    """Return megafp8's folder in the user's cache (XDG Base Directory Specification).

    Raises:
        RuntimeError: The user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache", "megafp8")


def write_json_atomically(path: Path, obj: object) -> None:
    """Write `obj` as JSON by `write_atomically`. Raises `RunError`."""
    with run_errors_reported(path, "writing the file"):
        write_atomically(path, json.dumps(obj, indent=1, sort_keys=True) + "\n")


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


def give_ordinary_mode(path: Path) -> None:
    """Give a file the permissions that an ordinary `open` would have given it."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


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
