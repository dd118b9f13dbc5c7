"""Files that survive a kill: durable and atomic writes, folders that appear whole, strict JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fp8_numerics.caches import put
from megafp8.errors import CheckpointError, RunError, UnreadableError
from megafp8.foreign import ForeignFileError, parse_json, read_bytes, read_object
from megafp8.secrets import hide_values, shown

_HINTS = {
    errno.ENOSPC: "Free space there or move the run; older checkpoints are untouched",
    errno.EDQUOT: "Free some of the quota or move the run; older checkpoints are untouched",
    errno.EFBIG: "Raise the file size limit (ulimit -f); older checkpoints are untouched",
    errno.EROFS: "The file system is read-only: remount it or move the run",
    errno.EACCES: "Give this user write permission there or move the run",
    errno.EPERM: "Give this user write permission there or move the run",
    errno.EIO: "The disk or network file system is failing: move the run; older checkpoints stay",
    errno.ENOENT: "Something removed it while it was in use; see the errors of the other ranks",
    errno.ELOOP: "It is a link, which is not followed: remove the link",
    errno.EEXIST: "A file has the name of a folder: choose another folder",
    errno.ENOTDIR: "A file has the name of a folder: choose another folder",
}
_OTHERWISE = "Repair the file system or move the run; older checkpoints are untouched"
PROGRESS = "MEGAFP8_PROGRESS"
"""The environment variable by which our launcher tells its ranks the file for `note_progress`."""

_HINTS_FOR_READING = {
    errno.EACCES: "Give this user permission to read it (chmod, chown)",
    errno.EPERM: "Give this user permission to read it (chmod, chown)",
    errno.EMFILE: "Too many files are open in this process: raise the limit (ulimit -n)",
    errno.ENFILE: "Too many files are open on this machine: close some, or raise fs.file-max",
    errno.ENOMEM: "Free some memory, or raise the limit (ulimit -v)",
}
_HINTS_FOR_PATHS = {
    errno.EACCES: "Give this user permission to look there (chmod, chown), or name another path",
    errno.EPERM: "Give this user permission to look there (chmod, chown), or name another path",
    errno.ENAMETOOLONG: "Give a shorter path",
    errno.ELOOP: "Its links lead in a circle: name another path",
}
_OTHERWISE_FOR_READING = "The disk or network file system is failing: repair it, or copy the run"
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_NUMBER_OF_ERROR = re.compile(r"\(os error (\d{1,3})\)|unable to \w+ .*\((\d{1,3})\)", re.DOTALL)
Warn = Callable[[str], None]


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


@contextmanager
def paths_reported() -> Iterator[None]:
    """Turn the error that a path of the user's causes inside the block into a `RunError`.

    `pathlib` raises such errors where a program only asks whether a file is there.
    """
    try:
        yield
    except OSError as error:
        hint = _HINTS_FOR_PATHS.get(error.errno or 0)
        if hint is None or error.filename is None:
            raise
        reason = f"{os.fsdecode(error.filename)}: {os.strerror(error.errno or 0)}"
        raise RunError(f"{reason}. {hint}") from error


def expanded(path: str | Path) -> Path:
    """Return a path of the user's, where `~` stands for the user's home folder.

    Raises:
        RunError: There is no such user, or the user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RunError(f"{path}: {str(error).rstrip('.')}. Write the path without '~'") from error


def why_unreadable(path: Path, error: Exception) -> UnreadableError | None:
    """Return the error for a file that could not be read although it may be good, else None.

    None: the file is missing, a folder has its name, or the error is not of the operating system.
    safetensors and torch report such errors as other kinds, with the number in their text.
    """
    found = _NUMBER_OF_ERROR.search(str(error))
    number = int(found[1] or found[2]) if found else None
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number is None or number in _NO_FILE:
        return None
    hint = _HINTS_FOR_READING.get(number, _OTHERWISE_FOR_READING)
    what = f"{errno.errorcode.get(number, 'OSError')} ({os.strerror(number)})"
    reason = f"cannot be read now: {what}. The checkpoint may be good and was left as it is"
    return UnreadableError(path, reason, f"{hint}, and give the same command again")


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


def is_ours(path: Path, knows: Callable[[bytes], bool]) -> bool:
    """Whether a file may be written to `path`, because nothing or one of this project is there.

    A link, a folder and a special file are others', wherever they lead.

    Args:
        path: Where a command is about to write.
        knows: Whether the content of a file is this project's. An empty file may be replaced.
    """
    if path.is_symlink() or not path.is_file():
        return not os.path.lexists(path)
    try:
        content = read_bytes(path)
    except (OSError, ForeignFileError):
        return False
    return not content or knows(content)


def require_ours(path: Path, what: str, knows: Callable[[bytes], bool], hint: str) -> None:
    """Raise `RunError` if `path` may not be written: `is_ours` says no, and `what` is written."""
    if not is_ours(path, knows):
        raise RunError(f"{path} is not {what} of megafp8, and would be overwritten. {hint}")


def has_keys(*keys: str) -> Callable[[bytes], bool]:
    """Return whether a file's content is a JSON object with these keys, as a function of it.

    It is an argument `knows` of `is_ours` and `require_ours`.
    """

    def knows(content: bytes) -> bool:
        try:
            tree = parse_json(content.decode())
        except ValueError:
            return False
        return isinstance(tree, dict) and all(key in tree for key in keys)

    return knows


def remove_tree(path: Path) -> None:
    """Delete a directory (of a link: the link only); what cannot be deleted stays, silently."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def draft_of(path: Path) -> Path:
    """Return a new name beside `path` for the file that `put` will move there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_atomically(path: str | Path, text: str) -> None:
    """Write `path` so that a reader, or a crash at any instant, finds the old file or the new one.

    Secrets of the environment are hidden, as in the text of an error that a page repeats.

    Raises:
        OSError: The disk is full, the directory missing, …; the old file is then untouched.
    """
    path = Path(path)
    draft = draft_of(path)
    try:
        draft.write_text(hide_values(text), encoding="utf-8")
        put(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, last: str) -> Iterator[Path]:
    """Yield a folder in which to build `folder`, which gets the files after the block.

    `folder` is then complete. If the block raises, nothing is left that would block a repetition:
    a folder that did not exist does not, and an empty one is empty again. A killed process leaves
    a hidden folder only, beside a new folder or in an existing one. Only if it is killed while an
    existing folder gets its files, some of them are there without `last`, without which nothing
    reads such a folder.

    Raises:
        RunError: `folder` is not empty, or it cannot be made or written.
    """
    is_new, left = not os.path.lexists(folder), f".{folder.absolute().name}.part-"
    if not is_new:
        with run_errors_reported(folder, "looking into the folder"):
            names = os.listdir(folder) if folder.is_dir() else ["a file"]
        if any(not name.startswith(left) for name in names):
            raise RunError(
                f"{folder}: exists already and is not empty. Give a new or an empty folder"
            )
    with run_errors_reported(folder, "making the folder"):
        where = folder.absolute().parent if is_new else folder
        where.mkdir(parents=True, exist_ok=True)
        build = Path(tempfile.mkdtemp(prefix=left, dir=where))
    try:
        yield build
        with run_errors_reported(folder, "completing the folder"):
            if is_new:
                give_ordinary_mode(build, 0o777)
                build.rename(folder)
            else:
                for path in sorted(build.iterdir(), key=lambda path: path.name == last):
                    path.rename(folder / path.name)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def write_json_atomically(path: Path, obj: object) -> None:
    """Write `obj` as JSON by `write_atomically`. Raises `RunError`."""
    with run_errors_reported(path, "writing the file"):
        write_atomically(path, json.dumps(obj, indent=1, sort_keys=True) + "\n")


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`; raise `RunError` if it is missing, damaged or no object."""
    try:
        return read_object(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}). Was the run moved?") from error
    except ForeignFileError as error:
        raise RunError(f"{path}: {error}. Restore it or start a new run") from error


def give_ordinary_mode(path: Path, mode: int = 0o666) -> None:
    """Give a file the permissions that `open` would have given it, or `mkdir` with mode 0o777."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def warn_on_stderr(message: str) -> None:
    """Print a warning to stderr: the default `Warn`, for callers without a console."""
    import sys

    print(f"warning: {shown(message)}", file=sys.stderr, flush=True)


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
