"""Choose the run directory `<exp_dir>/<name>/` of a process, and lock it.

`enter` also checks that the settings continue the run in the directory; `choose_run` does not read
settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megafp8.checkpoint.reader import check_structure
from megafp8.config.resume import (
    LAST_IN_EFFECT,
    changed_settings,
    check_continues,
    full_identity,
)
from megafp8.data.tokenize import TOKENIZER_FILES
from megafp8.errors import CheckpointError, RunError
from megafp8.files import (
    read_json,
    run_errors_reported,
    write_atomically,
    write_json_atomically,
)
from megafp8.observe.health import HEALTH_FILE
from megafp8.observe.journal import CONSOLE_FILE, EVENTS_FILE
from megafp8.runs.find import CHECKPOINTS_DIR, CONFIG_NAME, FINISHED, RECORD_NAME, RUNNING
from megafp8.runs.lock import LOCK_NAME, LockedError, RunLock, is_locked
from megafp8.runs.restarts import RECORD as RESTARTS_NAME
from megafp8.runs.tokenizer import TOKENIZER_CONFIG
from megafp8.specs import RunSpec

_MAX_NAME_BYTES = 200  # file systems allow 255, and file names are derived from it


@dataclass(frozen=True)
class RunChoice:
    """Hold the chosen run directory, and its lock, which is locked until the run ends."""

    path: Path
    continues: bool  # an earlier process used it, so that it may have checkpoints
    reason: str  # one line for the console
    lock: RunLock | None  # None on ranks that only learned of the choice
    before: frozenset[str] = frozenset()  # the names in a new run's directory before it was chosen

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle everything but the lock, which stays with the process that holds it."""
        return type(self), (self.path, self.continues, self.reason, None)

    def release(self) -> None:
        """Unlock the directory, after the run's last file; the end of the process does so too."""
        if self.lock is not None:
            self.lock.release()


def choose_run(
    exp_dir: Path, name: str | None, identity: str, resume_if_exists: bool, is_sweep: bool
) -> RunChoice:
    """Find or make the run directory, and lock it. One process of a job calls this function.

    With a name, it is the directory of that name. Without, it is that of the newest unfinished run
    with the same `identity` that no process uses, or a new one. A sweep's job never continues
    another kind of run, and the reverse.

    Raises:
        RunError: The name is not usable, the directory cannot be made or written, another process
            uses it, or it has a run and `resume_if_exists` is off.
    """
    if name is not None:
        path = exp_dir / checked_name(name)
        with run_errors_reported(path, "making the run's directory"):
            path.mkdir(parents=True, exist_ok=True)
        return _enter_named(path, identity, resume_if_exists, is_sweep)
    skipped: list[str] = []
    if resume_if_exists:
        for path in _newest_first(exp_dir):
            if found := _continue_unnamed(path, identity, is_sweep, skipped):
                return found
    path, lock = _make_unnamed(exp_dir)
    notes = f" ({'; '.join(skipped)})" if skipped else ""
    choice = RunChoice(path, False, f"new run {path.name}{notes}", lock)
    _begin(choice, identity, is_sweep)
    return choice


def mark(run_dir: Path, status: str) -> None:
    """Record the status of a run, such as `FINISHED`; any other status counts as unfinished."""
    record = read_json(run_dir / RECORD_NAME)
    write_json_atomically(run_dir / RECORD_NAME, {**record, "status": status})


def checked_name(name: str) -> str:
    """Return `name`, or raise `RunError` if it cannot be a directory under `exp_dir`."""
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
    before = frozenset(os.listdir(path))
    lock = RunLock.acquire(path)
    try:
        if not _has_history(path):
            new = RunChoice(path, False, f"new run {path.name}", lock, before=before)
            _begin(new, identity, is_sweep)
            return new
        if not resume_if_exists:
            raise RunError(
                f"{path} has a run already. Set exp_manager.resume_if_exists=true to continue "
                "it, or choose another name"
            )
        if not (path / RECORD_NAME).exists():  # the process was killed before it made the record
            _record(path, identity, is_sweep)
        read_json(path / RECORD_NAME)  # a damaged record is refused
        return RunChoice(path, True, f"continues run {path.name}", lock)
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
    except LockedError:
        skipped.append(f"{path.name} is in use")
        return None
    except RunError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise  # a disk that is full now would also refuse a new run, or begin one unasked
        skipped.append(f"{path.name} is another user's")
        return None
    try:  # another process may have finished it before this one had the lock
        still = _is_candidate(path, identity, is_sweep)
    except RunError:
        still = False
    if not still:
        lock.release()
        return None
    reason = f"continues run {path.name}: the newest unfinished run with the same settings"
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
    """Make a directory and lock it; no other process continues it, since it has no record yet."""
    with run_errors_reported(exp_dir, "making the folder of runs"):
        exp_dir.mkdir(parents=True, exist_ok=True)
    for name in _timestamped_names():
        path = exp_dir / name
        with run_errors_reported(path, "making the run's directory"):
            try:
                path.mkdir()
            except FileExistsError:
                continue
        try:
            return path, RunLock.acquire(path)
        except RunError:
            with suppress(OSError):
                (path / LOCK_NAME).unlink(missing_ok=True)
                path.rmdir()
            raise
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


def _begin(choice: RunChoice, identity: str, is_sweep: bool) -> None:
    """Record a new run; if that fails, no directory of it stays."""
    try:
        _record(choice.path, identity, is_sweep)
    except BaseException:
        _give_up(choice)
        raise


def _give_up(choice: RunChoice) -> None:
    with suppress(OSError):  # the caller raises the error that came first
        withdraw(choice)
    choice.release()


def _record(path: Path, identity: str, is_sweep: bool) -> None:
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    fields = {"identity": identity, "status": RUNNING, "created": created, "sweep": is_sweep}
    write_json_atomically(path / RECORD_NAME, fields)


LOGS = ("metrics.jsonl", HEALTH_FILE)
MADE_AT_THE_START = (
    CONFIG_NAME,
    RECORD_NAME,
    RESTARTS_NAME,
    *TOKENIZER_FILES,
    TOKENIZER_CONFIG,
    "events.out.tfevents.*",
    CONSOLE_FILE,
    EVENTS_FILE,
    LOCK_NAME,
)


def enter(spec: RunSpec, *, is_sweep: bool) -> RunChoice:
    """Find or make the run's directory, lock it, and check that the settings continue its run.

    Raises:
        RunError: Another process uses the directory, or it cannot be made, read or written: the
            disk is full, its quota is used up, it is read-only, …
        ConfigError: The directory has a run of another model, other data or another optimizer.
    """
    observe = spec.observe
    if observe.explicit_log_dir is not None:
        directory = Path(observe.explicit_log_dir).absolute()
        root, name = directory.parent, str(directory.name)
    else:
        root, name = Path(observe.exp_dir), observe.name or ""
    identity = full_identity(spec.resolved)
    with run_errors_reported(root / name, "entering the run's directory"):
        choice = choose_run(root, name or None, identity, observe.resume_if_exists, is_sweep)
    config = choice.path / CONFIG_NAME
    try:
        if choice.continues:
            with run_errors_reported(choice.path, "reading the run's settings"):
                old = recorded_settings(choice.path)
            if old is not None:
                check_continues(
                    old.config, spec.resolved, old.earlier, run=str(choice.path), is_sweep=is_sweep
                )
                choice = replace(choice, reason=choice.reason + _changes(old.config, spec))
        with run_errors_reported(config, "writing the settings"):
            write_atomically(config, yaml.safe_dump(spec.resolved, sort_keys=False))
    except BaseException:
        _give_up(choice)
        raise
    return choice


def _changes(old: dict[str, Any], spec: RunSpec) -> str:
    """Return in words which settings differ from those with which the run was trained last."""
    found = changed_settings(old, spec.resolved)
    words = [f"{d.key} {d.old} to {d.new}" for d in found[:_CHANGES_SHOWN]]
    more = f", and {len(found) - _CHANGES_SHOWN} more" if len(found) > _CHANGES_SHOWN else ""
    return f"; changed since: {', '.join(words)}{more}" if found else ""


_CHANGES_SHOWN = 8


def withdraw(choice: RunChoice) -> bool:
    """Delete the directory of a new run that was refused before its first step.

    The caller knows that no step has changed the weights; the files cannot tell, since not every
    step is logged. Only files that every run writes are deleted, and none that was there before.
    The directory stays if it has other files. Return whether the run was withdrawn.
    """
    if choice.continues or choice.lock is None:
        return False  # an earlier run, or another process, made the directory
    path = choice.path
    checkpoints = path / CHECKPOINTS_DIR
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return False
    if any((path / name).exists() and (path / name).stat().st_size for name in LOGS):
        return False
    try:
        for pattern in (*LOGS, *MADE_AT_THE_START):
            for file in path.glob(pattern):
                if file.name not in choice.before:
                    file.unlink()
        if checkpoints.is_dir():
            checkpoints.rmdir()
        path.rmdir()
    except OSError:
        pass  # the directory has a file that is not the run's
    choice.release()
    return True


def check(spec: RunSpec) -> None:
    """Raise the errors that `enter` would raise for a named run, without making a directory."""
    observe = spec.observe
    if observe.explicit_log_dir is not None:
        path = Path(observe.explicit_log_dir).absolute()
    elif observe.name:
        path = Path(observe.exp_dir) / checked_name(observe.name)
    else:
        return
    if not path.is_dir():
        return
    if is_locked(path):
        raise RunError(f"{path} is in use by another process")
    old = recorded_settings(path)
    if old is not None and not observe.resume_if_exists:
        raise RunError(
            f"{path} has a run already. Set exp_manager.resume_if_exists=true to continue it, or "
            "choose another name"
        )
    if old is not None:
        check_continues(old.config, spec.resolved, old.earlier, run=str(path))


class Recorded(NamedTuple):
    """Hold the settings that a run was trained with last.

    `earlier` has the last values of those without effect in `config` that had one before.
    """

    config: dict[str, Any]
    earlier: dict[str, Any]


def recorded_settings(run_dir: Path) -> Recorded | None:
    """Return the settings of the newest readable checkpoint, else of config.yaml, or None."""
    root = run_dir / CHECKPOINTS_DIR
    for step_dir in sorted(root.glob("step_*"), reverse=True):
        try:
            meta = check_structure(step_dir).meta
        except CheckpointError:
            continue  # loading the checkpoint reports the damage
        if isinstance(meta.get("config"), dict):
            return Recorded(meta["config"], meta.get(LAST_IN_EFFECT) or {})
    try:
        config = yaml.safe_load((run_dir / CONFIG_NAME).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{run_dir / CONFIG_NAME}: cannot be read ({error})") from error
    return Recorded(config, {}) if isinstance(config, dict) else None
