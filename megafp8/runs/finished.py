"""Recognize a run that has reached its last step, so that a repeated command changes no file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megafp8.checkpoint.step_directories import step_name, steps
from megafp8.checkpoint.verify import why_damaged
from megafp8.config.resume import changed_settings, check_continues
from megafp8.errors import ExitCode, RunError
from megafp8.files import read_json_object
from megafp8.observe.summary import RunSummary
from megafp8.runs.directory import in_words, recorded_settings
from megafp8.runs.find import CHECKPOINTS_DIR, DIVERGED, ENDED, RECORD_NAME, SUMMARY_NAME
from megafp8.runs.lock import is_locked
from megafp8.runs.lost import newest_saved
from megafp8.runs.place import named_directory
from megafp8.specs import RunSpec

OF_TRAINING = (
    "train_loss", "train_loss_steps", "loss_curve", "health", "wall_seconds", "tokens_per_second",
    "tflops_causal", "tflops_full", "mfu_causal", "mfu_full", "hfu_causal", "hfu_full",
    "peak_memory_bytes",
)  # fmt: skip
"""The fields of a summary that only a process can measure that trains."""


@dataclass(frozen=True)
class FinishedRun:
    """Hold what a run recorded at its end; `note` is what the user should know about it."""

    path: Path
    summary: RunSummary
    note: str

    @property
    def code(self) -> ExitCode:
        """Return the exit code with which the run ended."""
        is_diverged = self.summary.status == DIVERGED
        return ExitCode.NONFINITE if is_diverged else ExitCode.FINISHED


def finished_run(spec: RunSpec, *, is_sweep: bool = False) -> FinishedRun | None:
    """Return the run that `spec` names if it is finished and has no step left, else None.

    No file is written, and no lock is taken. A run whose newest checkpoint is gone or damaged
    continues from the one before, if there is one; but of a job of a sweep only the result is read.

    Raises:
        ConfigError: The directory has a finished run of another model, data or optimizer.
        RunError: Its settings cannot be read.
    """
    path = named_directory(spec.observe)
    if path is None or not spec.observe.resume_if_exists or is_locked(path):
        return None
    summary = recorded_summary(path)
    if summary is None or summary.status not in ENDED or summary.step < spec.train.max_steps:
        return None
    if _status(path) not in ENDED or _newest_step(path) > summary.step:
        return None  # the run went on after this summary
    newest, saved = _newest_step(path), newest_saved(path)
    step_dir = path / CHECKPOINTS_DIR / step_name(newest)
    if newest >= 0 and not is_sweep and (newest < saved or why_damaged(step_dir) is not None):
        return None  # the newest checkpoint that was saved is damaged or lost
    old = recorded_settings(path)
    if old is None:
        return None
    check_continues(old.config, spec.resolved, old.earlier, run=str(path), is_sweep=is_sweep)
    note = f"step {summary.step} of {spec.train.max_steps}: nothing is left to do"
    if changes := in_words(changed_settings(old.config, spec.resolved)):
        note += f", and the settings changed since have no effect: {changes}"
    if newest < 0 <= saved:
        gone = "none of its checkpoints is left; train it again under another name"
        summary = dataclasses.replace(summary, checkpoint=None, continue_command=None)
        return FinishedRun(path, dataclasses.replace(summary, continue_note=gone), note)
    return FinishedRun(path, summary, note)


def recorded_summary(path: Path) -> RunSummary | None:
    """Return the summary in a run's directory; None if it is missing or damaged."""
    try:
        return RunSummary.from_dict(read_json_object(path / SUMMARY_NAME))
    except (RunError, ValueError):
        return None


def with_recorded(new: RunSummary, recorded: RunSummary | None) -> RunSummary:
    """Return the summary of a process that trained no step, with the figures of the one before.

    The recorded summary counts if it was written at the same step.
    """
    if recorded is None or recorded.step != new.step:
        return new
    kept = {name: getattr(recorded, name) for name in OF_TRAINING}
    extra = {name: recorded.extra.get(name, value) for name, value in new.extra.items()}
    return dataclasses.replace(new, **kept, extra=extra)


def _status(path: Path) -> object:
    try:
        return read_json_object(path / RECORD_NAME).get("status")
    except RunError:
        return None


def _newest_step(path: Path) -> int:
    return max(steps(path / CHECKPOINTS_DIR), default=-1)
