"""Files that survive a kill: durable and atomic writes, locks, caches, strict JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

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
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PROGRESS = "MEGAFP8_PROGRESS"
"""The environment variable by which our launcher tells its ranks the file for `note_progress`."""
STALE_SECONDS = 24 * 3600.0  # an older folder that is being built belongs to a killed process

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


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` (creations, renames) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Return the `knows` of a JSON file of this project, an object that has these keys."""

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


def move_away(folder: Path) -> None:
    """Rename a folder in one step, so that no process finds half of it, and delete it.

    Raises:
        OSError: The folder cannot be renamed.
    """
    away = folder.with_name(f"{folder.name}.tmp-left-{os.getpid()}-{time.time_ns()}")
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o644), "a", encoding="utf-8") as file:
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


def own_folder(path: Path, mode: int = 0o755) -> Path:
    """Return a folder from which this process may load code, made if it is missing.

    A folder of this user loses the permission of others to write in it. `mode` holds for a new
    folder, whatever the umask; folders above it that are missing get 0o700.

    Raises:
        PermissionError: The folder belongs to another user, or anybody may put another one in its
            place.
    """
    for missing in reversed([folder for folder in path.parents if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(mode)
    info = path.stat()
    if info.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    if info.st_mode & _BY_OTHERS:
        path.chmod(stat.S_IMODE(info.st_mode) & ~_BY_OTHERS)
    for folder in path.resolve().parents:
        above = folder.stat().st_mode
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, "anybody may replace what is in it", str(folder))
    return path


def check_own_file(path: Path) -> None:
    """Check that a file with code belongs to this user, and that no other user may write it.

    Raises:
        PermissionError: It is not, or is no ordinary file.
    """
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise PermissionError(errno.EPERM, "is no ordinary file", str(path))
    if info.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    if info.st_mode & _BY_OTHERS:
        raise PermissionError(errno.EPERM, "can be written by other users", str(path))


def private_cache(variable: str, name: str) -> Path:
    """Make a library keep its compiled code in a folder of this user, and return the folder.

    Args:
        variable: The environment variable that names the library's folder. A folder that it names
            already is checked; otherwise it is set.
        name: The folder's name in megafp8's cache.

    Raises:
        OSError: The folder belongs to another user, or cannot be made.
    """
    given = os.environ.get(variable)
    path = own_folder(Path(given)) if given else own_folder(cache_folder() / name, 0o700)
    os.environ[variable] = str(path)
    return path


def why_unsafe(caches: Mapping[str, str]) -> str | None:
    """Return why a library must not load compiled code here; None if its folders are this user's.

    Args:
        caches: The arguments of `private_cache`: variables, and the names of their folders.
    """
    try:
        for variable, name in caches.items():
            private_cache(variable, name)
    except OSError as error:
        return f"code would be loaded from {error.filename}, which is not safe: {error.strerror}"
    except RuntimeError as error:  # the home folder is not known
        return f"there is no safe folder for compiled code: {error}"
    return None


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
