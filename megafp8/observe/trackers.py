"""Where curves go: TensorBoard and, when asked for, Weights & Biases.

Both packages are imported when a tracker is made, not before, so that a run without them neither
needs nor waits for them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megafp8.errors import ConfigError
from megafp8.files import Warn, strict, warn_on_stderr
from megafp8.specs import ObserveSpec


@runtime_checkable
class Tracker(Protocol):
    """Takes numbers with the step they belong to."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in `directory`.

    Args:
        directory: Made if it is not there.
        resume_step: The step that training continues from: TensorBoard then hides what earlier
            files hold about later steps. `None` or 0 on a fresh run.
    """

    def __init__(self, directory: str | Path, *, resume_step: int | None = None) -> None:
        # PyTorch's writer: it needs the tensorboard package only, and knows purge_step.
        from torch.utils.tensorboard import SummaryWriter

        self.directory = Path(directory)
        purge_step = resume_step + 1 if resume_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


def require_wandb() -> None:
    """Raise `ConfigError` now, not after minutes of set-up, when wandb is asked for and missing."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "exp_manager.create_wandb_logger",
            True,
            "the package wandb is not installed",
            "Install it (pip install wandb), or set exp_manager.create_wandb_logger=False",
        )


class WandbTracker:
    """One Weights & Biases run, continued by its id when training continues in `directory`.

    Works offline with wandb's own `WANDB_MODE=offline` (then `wandb sync` uploads it later).
    Curves are drawn over `trainer/global_step`, which may go back after a rollback; wandb's own
    step counter may not.
    """

    STEP_KEY = "trainer/global_step"

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str | None,
        name: str | None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        require_wandb()
        import wandb

        directory = Path(directory)
        id_file = directory / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run: Any = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            id=run_id,
            resume="allow",
            config=strict(dict(config or {})),
        )
        id_file.write_text(f"{self._run.id}\n")
        self._run.define_metric(self.STEP_KEY)
        self._run.define_metric("*", step_metric=self.STEP_KEY)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, self.STEP_KEY: step})

    def close(self) -> None:
        self._run.finish(quiet=True)


class CompositeTracker:
    """Several trackers as one. A tracker that fails is told about once and left alone from then on.

    A full disk or a lost connection must not end a training run, whatever a library raises for it:
    hence the broad `except`, here and nowhere else.
    """

    def __init__(self, trackers: Iterable[Tracker], *, warn: Warn = warn_on_stderr) -> None:
        self._trackers = list(trackers)
        self._warn = warn

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, values)
            except Exception as error:
                self._trackers.remove(tracker)
                self._tell(tracker, error, "training goes on without it")

    def close(self) -> None:
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:
                self._tell(tracker, error, "its last values may be missing")

    def _tell(self, tracker: Tracker, error: Exception, consequence: str) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._warn(f"{type(tracker).__name__} failed ({reason}); {consequence}")


def open_trackers(
    spec: ObserveSpec,
    log_dir: str | Path,
    *,
    resume_step: int | None = None,
    config: Mapping[str, object] | None = None,
    warn: Warn = warn_on_stderr,
) -> CompositeTracker:
    """The trackers that `spec` asks for, for the rank that records.

    Args:
        log_dir: The run's directory: TensorBoard writes its event files there, where
            `tensorboard --logdir` finds one run a directory.
        resume_step: The step that training continues from; `None` or 0 on a fresh run.
        config: The resolved configuration, shown by wandb.

    Raises:
        ConfigError: wandb is asked for and not installed.
    """
    trackers: list[Tracker] = []
    if spec.create_wandb_logger:
        require_wandb()
    if spec.create_tensorboard_logger:
        try:
            trackers.append(TensorBoardTracker(log_dir, resume_step=resume_step))
        except (OSError, ImportError) as error:
            warn(f"TensorBoard cannot write to {os.fspath(log_dir)}: {error}; going on without it")
    if spec.create_wandb_logger:
        trackers.append(
            WandbTracker(log_dir, project=spec.wandb_project, name=spec.wandb_name, config=config)
        )
    return CompositeTracker(trackers, warn=warn)
