"""Run directories `<exp_dir>/<name>/`: which one a process works in, and that it is alone there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megafp8.checkpoint.jsonfiles import read_json, write_json_atomically
from megafp8.checkpoint.runlock import RunLock, is_locked
from megafp8.errors import RunError

__all__ = [
    "CHECKPOINTS_DIR",
    "CONFIG_NAME",
    "FINISHED",
    "RECORD_NAME",
    "RUNNING",
    "RunChoice",
    "RunLock",
    "choose_run",
    "is_locked",
    "mark",
    "read_json",
    "write_json_atomically",
]

RECORD_NAME = "run.json"
CONFIG_NAME = "config.yaml"
CHECKPOINTS_DIR = "checkpoints"
RUNNING = "running"
FINISHED = "finished"

_MAX_NAME_BYTES = 200  # file systems allow 255; checkpoints and logs add to it


@dataclass(frozen=True)
class RunChoice:
    """Where to work. `lock` is held already: keep it for as long as the run lives."""

    path: Path
    continues: bool  # an earlier process was here: look for checkpoints
    reason: str  # one line for people
    lock: RunLock | None  # None on ranks that only learned of the choice
    identity_changed: bool = False  # a named run whose settings are not those it began with

    def release(self) -> None:
        """Give the directory up; an ended process does so by itself."""
        if self.lock is not None:
            self.lock.release()


def choose_run(
    exp_dir: Path, name: str | None, identity: str, resume_if_exists: bool, is_sweep: bool
) -> RunChoice:
    """Finds or makes the run directory and locks it in the same act; one process per job calls it.

    With a name: that directory, whatever its state; `RunError` if another process is alive in it,
    or if it holds a run and `resume_if_exists` is off. Without: the newest unfinished run with the
    same `identity` that nobody is working on, else a new one. Sweep jobs and other runs never meet.
    """
    if name is not None:
        path = exp_dir / checked_name(name)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be made ({error.strerror})") from error
        return _enter_named(path, identity, resume_if_exists, is_sweep)
    skipped: list[str] = []
    if resume_if_exists:
        for path in _newest_first(exp_dir):
            if found := _continue_unnamed(path, identity, is_sweep, skipped):
                return found
    path, lock = _make_unnamed(exp_dir)
    _record(path, identity, is_sweep)
    notes = f" ({'; '.join(skipped)})" if skipped else ""
    return RunChoice(path, False, f"new run {path.name}{notes}", lock)


def mark(run_dir: Path, status: str) -> None:
    """Records how the run stands, e.g. `FINISHED`; anything else counts as unfinished."""
    record = read_json(run_dir / RECORD_NAME)
    write_json_atomically(run_dir / RECORD_NAME, {**record, "status": status})


def checked_name(name: str) -> str:
    """`name` if it can be one directory under `exp_dir`, else `RunError`."""
    wrong = None
    if not name.strip():
        wrong = "is empty"
    elif "/" in name or "\0" in name or name.startswith("."):
        wrong = "contains '/' or NUL or starts with '.'"
    elif not name.isprintable():
        wrong = "contains control characters"
    elif len(os.fsencode(name)) > _MAX_NAME_BYTES:
        wrong = f"is longer than {_MAX_NAME_BYTES} bytes"
    if wrong:
        raise RunError(f"exp_manager.name={name[:80]!r} {wrong}. Use a plain directory name")
    return name


def _enter_named(path: Path, identity: str, resume_if_exists: bool, is_sweep: bool) -> RunChoice:
    lock = RunLock.acquire(path)
    try:
        if not _has_history(path):
            _record(path, identity, is_sweep)
            return RunChoice(path, False, f"new run {path.name}", lock)
        if not resume_if_exists:
            raise RunError(
                f"{path} holds a run already. Set exp_manager.resume_if_exists=true to continue "
                "it, or choose another name"
            )
        if not (path / RECORD_NAME).exists():  # killed or copied before the record was made
            _record(path, identity, is_sweep)
        record = read_json(path / RECORD_NAME)
        changed = record.get("identity") != identity
        reason = f"continues {path.name}: it has this name"
        reason += ", though its settings differ" if changed else ""
        return RunChoice(path, True, reason, lock, changed)
    except BaseException:
        lock.release()
        raise


def _continue_unnamed(
    path: Path, identity: str, is_sweep: bool, skipped: list[str]
) -> RunChoice | None:
    try:
        if not _is_candidate(path, identity, is_sweep):
            return None
    except RunError:
        skipped.append(f"{path.name} has a damaged {RECORD_NAME}")
        return None
    try:
        lock = RunLock.acquire(path)
    except RunError:
        skipped.append(f"{path.name} is in use")
        return None
    try:  # another process may have finished it between the look and the lock
        still = _is_candidate(path, identity, is_sweep)
    except RunError:
        still = False
    if not still:
        lock.release()
        return None
    reason = f"continues {path.name}: the newest unfinished run with the same settings"
    return RunChoice(path, True, reason, lock)


def _is_candidate(path: Path, identity: str, is_sweep: bool) -> bool:
    record = read_json(path / RECORD_NAME)
    matches = record.get("identity") == identity and record.get("sweep") == is_sweep
    return matches and record.get("status") != FINISHED


def _newest_first(exp_dir: Path) -> list[Path]:
    def age(path: Path) -> tuple[str, str]:
        try:
            return str(read_json(path / RECORD_NAME).get("created")), path.name
        except RunError:
            return "", path.name

    runs = [path.parent for path in exp_dir.glob(f"*/{RECORD_NAME}")]
    return sorted(runs, key=age, reverse=True)


def _make_unnamed(exp_dir: Path) -> tuple[Path, RunLock]:
    """Nobody else joins it before its lock is held: it has no record yet."""
    try:
        exp_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{exp_dir}: cannot be made ({error.strerror})") from error
    for name in _timestamped_names():
        path = exp_dir / name
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{path}: cannot be made ({error.strerror})") from error
        return path, RunLock.acquire(path)
    raise AssertionError("unreachable")


def _timestamped_names() -> Iterator[str]:
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    yield now
    number = 2
    while True:
        yield f"{now}-{number}"
        number += 1


def _has_history(path: Path) -> bool:
    checkpoints = path / CHECKPOINTS_DIR
    has_checkpoints = checkpoints.is_dir() and any(checkpoints.iterdir())
    return has_checkpoints or (path / RECORD_NAME).exists() or (path / CONFIG_NAME).exists()


def _record(path: Path, identity: str, is_sweep: bool) -> None:
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    fields = {"identity": identity, "status": RUNNING, "created": created, "sweep": is_sweep}
    write_json_atomically(path / RECORD_NAME, fields)
