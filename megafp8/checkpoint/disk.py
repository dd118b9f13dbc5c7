"""What a checkpoint asks of the file system: durable names, free space, errors with a way out."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megafp8.errors import CheckpointError

_WAYS_OUT = {
    errno.ENOSPC: "Free space there or move the run; older checkpoints are untouched",
    errno.EDQUOT: "Free some of the quota or move the run; older checkpoints are untouched",
    errno.EFBIG: "Raise the file size limit (ulimit -f); older checkpoints are untouched",
    errno.EROFS: "The file system is read-only: remount it or move the run",
    errno.EACCES: "Give this user write permission there or move the run",
    errno.EPERM: "Give this user write permission there or move the run",
    errno.EIO: "The disk or network file system is failing: move the run; older checkpoints stay",
    errno.ENOENT: "Something removed it while it was in use; see the errors of the other ranks",
}
_OTHERWISE = "Mend the file system or move the run; older checkpoints are untouched"


@contextmanager
def os_errors_reported(path: Path, doing: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `CheckpointError` with its way out."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        named = errno.errorcode.get(number, "OSError")
        reason = f"{doing} failed with {named} ({error.strerror or error})"
        raise CheckpointError(path, reason, _WAYS_OUT.get(number, _OTHERWISE)) from error


def write_durably(path: Path, content: bytes) -> None:
    """Creates `path` and returns once its bytes are on the disk; the directory entry is not yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Makes the names in `directory` (creations, renames) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Deletes a directory (of a link: the link only); what cannot be deleted stays, silently."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
