"""Where a run works, and whether it may continue what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megafp8.checkpoint.rundir import (
    CHECKPOINTS_DIR,
    CONFIG_NAME,
    RECORD_NAME,
    RunChoice,
    checked_name,
    choose_run,
    is_locked,
)
from megafp8.checkpoint.runlock import LOCK_NAME
from megafp8.checkpoint.verification import check_structure
from megafp8.config.resume import check_continues, full_identity
from megafp8.data.tokenize import TOKENIZER_FILES
from megafp8.errors import CheckpointError, RunError
from megafp8.observe.files import write_atomically
from megafp8.observe.health import HEALTH_FILE
from megafp8.specs import RunSpec
from megafp8.train.restarts import RECORD as RESTARTS_NAME
from megafp8.train.tokenizer_files import TOKENIZER_CONFIG

LOGS = ("metrics.jsonl", HEALTH_FILE)
MADE_AT_THE_START = (
    CONFIG_NAME,
    RECORD_NAME,
    RESTARTS_NAME,
    *TOKENIZER_FILES,
    TOKENIZER_CONFIG,
    "events.out.tfevents.*",
    LOCK_NAME,
)


def enter(spec: RunSpec, *, is_sweep: bool) -> RunChoice:
    """Find or make the run's directory and lock it; refuses settings that do not continue it.

    Raises:
        RunError: Somebody is working there, or it cannot be made.
        ConfigError: It holds a run of another model, other data or another optimizer.
    """
    observe = spec.observe
    if observe.explicit_log_dir is not None:
        directory = Path(observe.explicit_log_dir).absolute()
        root, name = directory.parent, str(directory.name)
    else:
        root, name = Path(observe.exp_dir), observe.name or ""
    choice = choose_run(
        root, name or None, full_identity(spec.resolved), observe.resume_if_exists, is_sweep
    )
    try:
        if choice.continues and (old := recorded_config(choice.path)) is not None:
            check_continues(old, spec.resolved, run=str(choice.path))
        write_atomically(choice.path / CONFIG_NAME, yaml.safe_dump(spec.resolved, sort_keys=False))
    except BaseException:
        choice.release()
        raise
    return choice


def withdraw(choice: RunChoice) -> None:
    """Take a new run's directory away that was refused before its first step left anything.

    Only what every run writes goes; with anything else in it the directory stays.
    """
    if choice.continues or choice.lock is None:  # not ours to take away
        return
    path = choice.path
    checkpoints = path / CHECKPOINTS_DIR
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return
    if any((path / name).exists() and (path / name).stat().st_size for name in LOGS):
        return
    try:
        for pattern in (*LOGS, *MADE_AT_THE_START):
            for file in path.glob(pattern):
                file.unlink()
        if checkpoints.is_dir():
            checkpoints.rmdir()
        path.rmdir()
    except OSError:
        pass  # somebody else's file is there
    choice.release()


def check(spec: RunSpec) -> None:
    """What `enter` would refuse of a run that is named, without a directory being made."""
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
    old = recorded_config(path)
    if old is not None and not observe.resume_if_exists:
        raise RunError(
            f"{path} holds a run already. Set exp_manager.resume_if_exists=true to continue it, or "
            "choose another name"
        )
    if old is not None:
        check_continues(old, spec.resolved, run=str(path))


def recorded_config(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that made the run: of its newest readable checkpoint, else its file."""
    root = run_dir / CHECKPOINTS_DIR
    for step_dir in sorted(root.glob("step_*"), reverse=True):
        try:
            config = check_structure(step_dir).meta["config"]
        except (CheckpointError, KeyError):
            continue  # told when it is loaded
        if isinstance(config, dict):
            return config
    try:
        config = yaml.safe_load((run_dir / CONFIG_NAME).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{run_dir / CONFIG_NAME}: cannot be read ({error})") from error
    return config if isinstance(config, dict) else None
