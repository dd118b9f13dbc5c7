"""Lock a run directory for one process; the kernel unlocks it when that process dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from megafp8.errors import RunError
from megafp8.files import run_errors_reported

LOCK_NAME = ".lock"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, no pipe waited for
_ATTEMPTS = 5  # `is_locked` of another process locks for microseconds, which must not count
_PAUSE_SECONDS = 0.005

_held: set[RunLock] = set()  # the locks of this process


class LockedError(RunError):
    """Report that another process holds the lock of a run directory."""


class RunLock:
    """Hold an exclusive `flock` on `<run_dir>/.lock` until `release` or death.

    Deleting the object does not release the lock. The file stays: deleting it would let two
    processes lock two files of the same name.
    """

    def __init__(self, run_dir: Path, descriptor: int) -> None:
        self.run_dir = run_dir
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, run_dir: Path) -> RunLock:
        """Lock `run_dir`.

        Raises:
            LockedError: Another living process holds the lock; its host and number are named.
            RunError: The file system has no locks, or refuses to write the file.
        """
        path = run_dir / LOCK_NAME
        with run_errors_reported(path, "opening the lock"):
            descriptor = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(descriptor, path):
            os.close(descriptor)
            used = f"{run_dir} is in use by {_named(path)}"
            raise LockedError(f"{used}. Wait for it, or use another name")
        content = {"host": socket.gethostname(), "pid": os.getpid()}
        try:
            with run_errors_reported(path, "writing the lock"):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(content).encode() + b"\n", 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(run_dir, descriptor)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        _held.discard(self)
        if (descriptor := self._descriptor) is not None:
            self._descriptor = None
            os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(run_dir: Path) -> bool:
    """Whether a living process holds `run_dir`. The answer may change at any time."""
    try:
        descriptor = os.open(run_dir / LOCK_NAME, _FLAGS | os.O_RDONLY)
    except OSError:  # there is no lock file, or this process may not read it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may ask as well
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks, which `acquire` reports
        return False
    finally:
        os.close(descriptor)
    return False


def _try_lock(descriptor: int, path: Path) -> bool:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            os.close(descriptor)
            raise RunError(
                f"{path}: this file system cannot lock files ({error.strerror}). "
                "Use another one, or mount it with locks (Lustre: -o flock)"
            ) from error
    return False


def holder(run_dir: Path) -> str | None:
    """Return in words which living process holds `run_dir`; None if none does."""
    return _named(run_dir / LOCK_NAME) if is_locked(run_dir) else None


def _named(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes()[:4096])
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _leave_to_parent() -> None:
    """Close the locks' files in a forked process; the parent, which has them open, keeps the locks.

    A child, such as a data loader, would share the locks and might outlive a killed trainer.
    """
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)  # once: a hook cannot be taken back
