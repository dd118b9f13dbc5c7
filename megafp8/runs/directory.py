"""Choose the run directory `<exp_dir>/<name>/` of a process, and lock it.

`enter` also checks that the settings continue the run in the directory; `choose_run` does not read
settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megafp8.checkpoint.step_directories import steps
from megafp8.checkpoint.verify import check_structure
from megafp8.config.resume import (
    LAST_IN_EFFECT,
    Difference,
    changed_settings,
    check_continues,
    full_identity,
)
from megafp8.errors import CheckpointError, RunError, UnreadableError
from megafp8.files import (
    expanded,
    read_json_object,
    remove_tree,
    run_errors_reported,
    write_atomically,
    write_json_atomically,
)
from megafp8.foreign import read_yaml
from megafp8.runs.find import CHECKPOINTS_DIR, CONFIG_NAME, ENDED, RECORD_NAME, RUNNING, age
from megafp8.runs.lock import LOCK_NAME, LockedError, RunLock, is_locked
from megafp8.runs.lost import lost_checkpoint
from megafp8.runs.ownership import LOGS, MADE_AT_THE_START, refuse_foreign, refuse_links
from megafp8.runs.place import checked_name, named_directory
from megafp8.specs import RunSpec

_CHANGES_SHOWN = 8


@dataclass(frozen=True)
class RunChoice:
    """Hold the chosen run directory, and its lock, which is locked until the run ends."""

    path: Path
    continues: bool  # an earlier process used it, so that it may have checkpoints
    reason: str  # one line for the console
    lock: RunLock | None  # None on ranks that only learned of the choice
    before: frozenset[str] = frozenset()  # the names in a new run's directory before it was chosen

    def shared(self) -> RunChoice:
        """Return what other ranks learn: all but the lock, which its process holds."""
        return replace(self, lock=None)

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
        return _enter_named(exp_dir / checked_name(name), identity, resume_if_exists, is_sweep)
    skipped: list[str] = []
    if resume_if_exists:
        runs = (path.parent for path in exp_dir.glob(f"*/{RECORD_NAME}"))
        for path in sorted(runs, key=age, reverse=True):
            if found := _continue_unnamed(path, identity, is_sweep, skipped):
                return found
    path, lock = _make_unnamed(exp_dir)
    notes = f" ({'; '.join(skipped)})" if skipped else ""
    choice = RunChoice(path, False, f"new run {path.name}{notes}", lock)
    _begin(choice, identity, is_sweep)
    return choice


def mark(run_dir: Path, status: str) -> None:
    """Record the status of a run, `FINISHED` or `DIVERGED`; any other counts as unfinished."""
    record = read_json_object(run_dir / RECORD_NAME)
    if record.get("status") != status:
        write_json_atomically(run_dir / RECORD_NAME, {**record, "status": status})


def _enter_named(path: Path, identity: str, resume_if_exists: bool, is_sweep: bool) -> RunChoice:
    with run_errors_reported(path, "making the run's directory"):
        path.mkdir(parents=True, exist_ok=True)
    before = frozenset(os.listdir(path))
    refuse_foreign(path, before)
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
        read_json_object(path / RECORD_NAME)  # a damaged record is refused
        return RunChoice(path, True, f"continues run {path.name}", lock)
    except BaseException:
        lock.release()
        raise


def _continue_unnamed(
    path: Path, identity: str, is_sweep: bool, skipped: list[str]
) -> RunChoice | None:
    """Lock a run and return it, if it can be continued; None if another one must be found.

    A reason that the user should know of is added to `skipped`.
    """
    try:
        if not _is_candidate(path, identity, is_sweep):
            return None
    except RunError as error:
        if _is_of_system(error):
            raise  # the run may be the one to continue: beginning another one would hide that
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
    try:
        lost_checkpoint(path)
    except RunError:
        skipped.append(f"{path.name} has lost its checkpoints")
        lock.release()
        return None
    reason = f"continues run {path.name}: the newest unfinished run with the same settings"
    if not steps(path / CHECKPOINTS_DIR):
        reason += ", which had saved no checkpoint: it begins again"
    return RunChoice(path, True, reason, lock)


def _is_of_system(error: RunError) -> bool:
    """Whether a record could not be read for a reason that says nothing about its content."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(
        cause, (FileNotFoundError, PermissionError)
    )


def _is_candidate(path: Path, identity: str, is_sweep: bool) -> bool:
    record = read_json_object(path / RECORD_NAME)
    matches = record.get("identity") == identity and record.get("sweep") == is_sweep
    return matches and record.get("status") not in ENDED


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


def enter(spec: RunSpec, *, is_sweep: bool) -> RunChoice:
    """Find or make the run's directory, lock it, and check that the settings continue its run.

    Raises:
        RunError: Another process uses the directory, or it cannot be made, read or written: the
            disk is full, its quota is used up, it is read-only, …
        ConfigError: The directory has a run of another model, other data or another optimizer.
    """
    named, root = named_directory(spec.observe), expanded(spec.observe.exp_dir)
    how = (full_identity(spec.resolved), spec.observe.resume_if_exists, is_sweep)
    with run_errors_reported(named or root, "entering the run's directory"):
        choice = choose_run(root, None, *how) if named is None else _enter_named(named, *how)
    config = choice.path / CONFIG_NAME
    try:
        if choice.continues:
            refuse_links(choice.path)
            with run_errors_reported(choice.path, "reading the run's settings"):
                old = recorded_settings(choice.path)
            if old is not None:
                check_continues(
                    old.config, spec.resolved, old.earlier, run=str(choice.path), is_sweep=is_sweep
                )
                if changed := changed_settings(old.config, spec.resolved):
                    reason = f"{choice.reason}; changed since: {in_words(changed)}"
                    choice = replace(choice, reason=reason)
            if (lost := lost_checkpoint(choice.path)) is not None:
                choice = replace(choice, reason=f"{choice.reason}; {lost}")
        with run_errors_reported(config, "writing the settings"):
            write_atomically(config, yaml.safe_dump(spec.resolved, sort_keys=False))
    except BaseException:
        _give_up(choice)
        raise
    return choice


def in_words(changes: Sequence[Difference]) -> str:
    """Return changed settings as one line of text, "" if there are none."""
    words = [f"{d.key} {d.old} to {d.new}" for d in changes[:_CHANGES_SHOWN]]
    more = f", and {len(changes) - _CHANGES_SHOWN} more" if len(changes) > _CHANGES_SHOWN else ""
    return ", ".join(words) + more


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
                    remove_tree(file)
        if checkpoints.is_dir():
            checkpoints.rmdir()
        path.rmdir()
    except OSError:
        pass  # the directory has a file that is not the run's
    choice.release()
    return True


def check_directory(spec: RunSpec) -> None:
    """Raise the errors that `enter` would raise for a named run, without making a directory."""
    observe = spec.observe
    path = named_directory(observe)
    if path is None or not path.is_dir():
        return
    if is_locked(path):
        raise RunError(f"{path} is in use by another process")
    with run_errors_reported(path, "looking into the run's directory"):
        refuse_foreign(path, os.listdir(path))
    old = recorded_settings(path)
    if old is not None and not observe.resume_if_exists:
        raise RunError(
            f"{path} has a run already. Set exp_manager.resume_if_exists=true to continue it, or "
            "choose another name"
        )
    if old is not None:
        check_continues(old.config, spec.resolved, old.earlier, run=str(path))


class RecordedSettings(NamedTuple):
    """Hold the settings that a run was trained with last.

    `earlier` has the last values of those without effect in `config` that had one before.
    """

    config: dict[str, Any]
    earlier: dict[str, Any]


def recorded_settings(run_dir: Path) -> RecordedSettings | None:
    """Return the settings of the newest readable checkpoint, else of config.yaml, or None."""
    root = run_dir / CHECKPOINTS_DIR
    for step_dir in sorted(root.glob("step_*"), reverse=True):
        try:
            meta = check_structure(step_dir).meta
        except UnreadableError:
            raise  # the newest settings may be in there: older ones must not take their place
        except CheckpointError:
            continue  # loading the checkpoint reports the damage
        if isinstance(meta.get("config"), dict):
            return RecordedSettings(meta["config"], meta.get(LAST_IN_EFFECT) or {})
    try:
        config = read_yaml(run_dir / CONFIG_NAME)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{run_dir / CONFIG_NAME}: cannot be read ({error})") from error
    return RecordedSettings(config, {}) if isinstance(config, dict) else None
