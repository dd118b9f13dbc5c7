"""Name the files of a run's directory, and find runs: by their paths, or the latest one."""

from __future__ import annotations

from pathlib import Path

from megafp8.errors import RunError
from megafp8.files import read_json_object

RECORD_NAME = "run.json"
CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
REPORT_NAME = "report.html"
CHECKPOINTS_DIR = "checkpoints"
RUNNING = "running"
FINISHED = "finished"
DIVERGED = "diverged"  # at its last step, with a model whose outputs are not finite
ENDED = (FINISHED, DIVERGED)  # what the same command does not continue
LATEST = "latest"
USUAL_FOLDER = Path("runs")

_ANY_OF = (RECORD_NAME, METRICS_NAME, SUMMARY_NAME, CHECKPOINTS_DIR)


def is_run(path: Path) -> bool:
    """Whether a directory has a file that only runs write."""
    return path.is_dir() and any((path / name).exists() for name in _ANY_OF)


def runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder, oldest first; the folder itself, if it is a run."""
    if is_run(folder):
        return [folder]
    found = [path for path in folder.glob("*") if is_run(path)] if folder.is_dir() else []
    return sorted(found, key=age)


def find_run(named: Path, *, with_checkpoint: bool = False) -> Path:
    """Return the path that a command was given, where `latest` stands for the newest run.

    With `with_checkpoint`, it is the newest one that has a checkpoint.

    `latest` alone is the newest run in `runs`, and `DIR/latest` the newest one in DIR. `NAME` alone
    is the run of that name in `runs`. A file or a directory of either name is taken as it is.

    Raises:
        RunError: There is no run of which one could be the latest.
    """
    if named.exists():
        return named
    if named.name != LATEST:
        return USUAL_FOLDER / named if is_run(USUAL_FOLDER / named) else named
    folder = USUAL_FOLDER if named == Path(LATEST) else named.parent
    runs = runs_below(folder)
    if with_checkpoint:
        runs = [path for path in runs if any((path / CHECKPOINTS_DIR).glob("step_*"))]
    if not runs:
        what = "run with a checkpoint" if with_checkpoint else "run"
        raise RunError(f"{named}: there is no {what} in {folder}. Name a run's directory")
    return runs[-1]


def age(path: Path) -> tuple[str, str]:
    """Return what sorts runs by the time when they were made, oldest first."""
    try:
        return str(read_json_object(path / RECORD_NAME).get("created") or ""), path.name
    except RunError:  # the record is missing or damaged: such a run counts as an old one
        return "", path.name
