"""Keep code and data in folders of this user: caches that appear whole, locks, who may write."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
STALE_SECONDS = 24 * 3600.0  # an older folder that is being built belongs to a killed process


def sync(path: Path) -> None:
    """Return once the bytes of the file `path` are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` (creations, renames) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(draft: Path, path: Path) -> Path:
    """Make the file `draft` the file `path` in one step, with its bytes on the disk before it.

    Return `path`. Both must lie on one file system. A crash at any instant leaves the old file or
    the new one.
    """
    sync(draft)
    draft.replace(path)
    fsync_directory(path.parent)  # the rename itself must survive a power cut
    return path


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
