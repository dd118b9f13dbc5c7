"""Say where the runs of a comparison start, if not at step 0: at checkpoints of trained runs.

Such a run has the settings of the run that wrote the checkpoint, and continues its whole state:
weights, optimizer, FP8 scales and histories, position in the data and learning rate. Its precision
changes there by an entry of `model.precision_schedule`, as that of a run that is stopped and
continues in another precision.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.checkpoint.step_directories import MANIFEST_NAME, step_name, step_of
from megafp8.checkpoint.step_directories import steps as steps_in
from megafp8.config.base_model import why_no_checkpoint
from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.overrides import quoted
from megafp8.config.precision_changes import as_override, parse_schedule
from megafp8.config.resume import with_defaults
from megafp8.errors import CheckpointError, RunError
from megafp8.files import expanded, run_errors_reported, whole_folder
from megafp8.runs.find import CHECKPOINTS_DIR, CONFIG_NAME, find_run
from megafp8.runs.tokenizer import KEPT

FROM = "--from"
STEPS, OF_SCHEDULE = "trainer.max_steps", "model.optim.sched.max_steps"
SET_BY_START = (
    STEPS, OF_SCHEDULE, "trainer.max_epochs", "restore_from_path", "model.resume_from_checkpoint",
    "exp_manager.resume_from_checkpoint",
)  # fmt: skip
"""The settings that say where a run begins and ends, which a start sets."""
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """Name a checkpoint that runs start from, and for how many steps.

    Attributes:
        checkpoint: The checkpoint, in the directory `checkpoints` of its run.
        step: How many steps the checkpoint's run had finished.
        last: The last step that is trained from there.
        values: The settings of the checkpoint's run, by their dotted paths.
    """

    checkpoint: Path
    step: int
    last: int
    values: Mapping[str, Any]

    @property
    def run(self) -> Path:
        """Return the directory of the run, with its settings and tokenizer."""
        return self.checkpoint.parents[1]

    @property
    def name(self) -> str:
        """Return what reports and directories call the start: the run and the step."""
        own = f"@{self.step}"
        return self.run.name if self.run.name.endswith(own) else self.run.name + own

    def overrides(self) -> tuple[str, ...]:
        """Return the settings of a run that differ from those of the checkpoint's run.

        The learning rate stays that of the checkpoint's run, also if few steps are trained.
        """
        planned = self.values[OF_SCHEDULE] or self.values[STEPS]
        words = [f"{STEPS}={self.last}", f"{OF_SCHEDULE}={planned}"]
        starts = ("trainer.max_epochs", "restore_from_path")
        return (*words, *(f"{key}=null" for key in starts if self.values[key] is not None))

    def schedule(self, own: Sequence[Entry], entries: Sequence[Entry]) -> str:
        """Return the setting that changes the precision at the start, besides a run's own entries.

        Args:
            own: The entries of the run.
            entries: The new ones, without their step. If the first is about all products of all
                linears, they take the place of the run's own ones from here on.
        """
        both = list(zip(own, parse_schedule(own, self.values[STEPS]), strict=True))
        new = [{"from": self.step, **entry} for entry in entries]
        if entries and not entries[0].keys() & {"modules", "products"}:
            return as_override([*(e for e, c in both if c.after < self.step), *new])
        later = (e for e, c in both if self.step < c.after < self.last)
        return as_override([*(e for e, c in both if c.after <= self.step), *new, *later])


def named_checkpoint(text: str) -> Path:
    """Return the checkpoint that `RUN` or `RUN@STEP` names: the newest one, or that of a step.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    named, _, number = text.rpartition("@")
    has_step = bool(named) and number.isdecimal() and not expanded(text).exists()
    path = find_run(expanded(named if has_step else text), with_checkpoint=True)
    if step_of(path.name) is None:
        there = steps_in(path / CHECKPOINTS_DIR)
        if not there:
            raise CheckpointError(path, *why_no_checkpoint(path))
        wanted = int(number) if has_step else there[-1]
        if wanted not in there:
            hint = f"It has those of {', '.join(map(str, there))}"
            raise CheckpointError(path, f"has no checkpoint of step {wanted}", hint)
        path = path / CHECKPOINTS_DIR / step_name(wanted)
    return path.absolute()


def find_start(text: str, steps: int | None) -> Start:
    """Return the start that `RUN` or `RUN@STEP` names: the newest checkpoint, or that of a step.

    `steps` says how many steps are trained from there; None is those that the run has left.

    Raises:
        CheckpointError: There is no such checkpoint, or it has no state of training.
        SettingError: The run has no step left.
    """
    from megafp8.checkpoint.manifest import check_state
    from megafp8.checkpoint.verify import check_structure

    path = named_checkpoint(text)
    manifest = check_structure(path)
    check_state(manifest.meta, path)
    values = with_defaults(manifest.meta["config"])
    left = values[STEPS] - manifest.step if steps is None else steps
    start = Start(path, manifest.step, manifest.step + left, values)
    if left < 1:
        reason = f"has trained the {values[STEPS]} steps of its job, so that none is left"
        hint = "Give --steps N, or name an earlier checkpoint as RUN@STEP"
        raise SettingError(FROM, text, reason, hint, origin=COMMAND_LINE)
    if not (start.run / CONFIG_NAME).is_file():
        raise RunError(f"{start.run}: has no {CONFIG_NAME}. Name a checkpoint within its run")
    return start


def keep(start: Start, folder: Path) -> Path:
    """Return a directory with a start's checkpoint, settings and tokenizer, below `folder`.

    The run may delete its checkpoint meanwhile, and each run of a comparison reads it. Files
    are links to the run's where the file system can do that. Nothing is written to the run.

    Raises:
        RunError: A file cannot be kept, or another checkpoint of that name is kept there.
    """
    home, inside = folder / start.name, start.checkpoint.relative_to(start.run)
    if home.is_dir():
        kept, now = (place / inside / MANIFEST_NAME for place in (home, start.run))
        if not kept.is_file() or kept.read_bytes() != now.read_bytes():
            raise RunError(f"{home} is of another run of that name. Give another --out")
        return home
    with (
        run_errors_reported(home, "keeping the checkpoint"),
        whole_folder(home, CONFIG_NAME) as build,
    ):
        for path in (start.run / CONFIG_NAME, *start.run.glob(f"{KEPT}*")):
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, build / path.name)
        shutil.copytree(start.checkpoint, build / inside, copy_function=_link)
    return home


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def state_of(home: Path, start: Start) -> tuple[str, ...]:
    """Return the settings by which a run continues the state in a directory that `keep` made."""
    path = quoted(str((home / CHECKPOINTS_DIR / start.checkpoint.name).absolute()))
    return tuple(f"{section}.resume_from_checkpoint={path}" for section in ("model", "exp_manager"))
