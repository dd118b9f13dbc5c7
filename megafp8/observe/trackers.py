"""Record curves: in TensorBoard's files and, on request, in Weights & Biases.

Both packages are imported when a tracker is made, not before, so that a run without them neither
needs them nor waits for their import.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megafp8.errors import ConfigError
from megafp8.files import Warn, strict, warn_on_stderr, write_atomically
from megafp8.foreign import read_bytes
from megafp8.specs import ObserveSpec

WANDB_FOLDER = "wandb"  # wandb itself makes this folder in the run's directory
WANDB_ID_FILE = "wandb_run_id.txt"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

TAGS: Mapping[str, tuple[str, str]] = {
    "loss": ("reduced_train_loss", "lm loss"),
    "val_loss": ("val_loss", "lm loss validation"),
    "lr": ("lr", "learning-rate"),
    "grad_norm": ("grad_norm", "grad-norm"),
    "step_seconds": ("train_step_timing in s", "iteration-time"),
    "loss_scale": ("loss_scale", "loss-scale"),
    "global_batch_size": ("global_batch_size", "batch-size"),
}
"""The names of figures in the dashboards of NeMo's and of Megatron's users."""


def tagged(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values under NeMo's and Megatron's names; under our own where they have none."""
    by_tag = {tag: value for key, value in values.items() for tag in TAGS.get(key, (key,))}
    if "val_loss" in values:
        try:
            by_tag["lm loss validation ppl"] = math.exp(values["val_loss"])
        except OverflowError:
            by_tag["lm loss validation ppl"] = math.inf
    return by_tag


@runtime_checkable
class Tracker(Protocol):
    """Record numbers with the step that they belong to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the named `values` of `step`."""
        ...

    def close(self) -> None:
        """Write what is still in memory and release the files or the connection."""
        ...


class TensorBoardTracker:
    """Write TensorBoard's event files to `directory`.

    Args:
        directory: The directory, which is made if it does not exist.
        resume_step: The step that training continues from: TensorBoard then hides the values of
            later steps in earlier files. `None` or 0 in a new run.
    """

    def __init__(self, directory: str | Path, *, resume_step: int | None = None) -> None:
        # PyTorch's writer needs the package tensorboard only, and supports purge_step.
        from torch.utils.tensorboard import SummaryWriter

        self.directory = Path(directory)
        purge_step = resume_step + 1 if resume_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar for each of `values`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def require_wandb() -> None:
    """Raise `ConfigError` if the package wandb is not installed.

    Set-up takes minutes; this check comes before it.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "exp_manager.create_wandb_logger",
            True,
            "the package wandb is not installed",
            "Install it (pip install wandb), or set exp_manager.create_wandb_logger=False",
        )


class WandbTracker:
    """Record one Weights & Biases run; training that continues in `directory` continues its id.

    The mode `offline` records without a network, and `wandb sync` uploads later.
    Curves are drawn over `trainer/global_step`, which may decrease after a rollback; wandb's own
    step counter may not.
    """

    STEP_KEY = "trainer/global_step"

    def __init__(
        self,
        directory: str | Path,
        spec: ObserveSpec,
        config: Mapping[str, object] | None = None,
        *,
        warn: Warn = warn_on_stderr,
    ) -> None:
        require_wandb()
        import wandb

        directory = Path(directory)
        id_file = directory / WANDB_ID_FILE
        run_id = _id_in(id_file, warn)
        try:
            self._run: Any = wandb.init(
                project=spec.wandb_project,
                name=spec.wandb_name,
                entity=spec.wandb_entity,
                group=spec.wandb_group,
                tags=spec.wandb_tags or None,
                mode=spec.wandb_mode,
                dir=str(directory),
                id=run_id,
                resume="allow",
                config={key: strict(item) for key, item in (config or {}).items()},
            )
        except Exception as error:  # a missing login, a name that is refused, a lost connection
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                "exp_manager.create_wandb_logger",
                True,
                f"Weights & Biases cannot begin its run ({reason})",
                "Run `wandb login`, set WANDB_API_KEY, or set exp_manager.wandb_logger_kwargs.mode"
                "=offline",
            ) from error
        try:
            write_atomically(id_file, f"{self._run.id}\n")
        except OSError as error:
            warn(f"{id_file}: cannot be written ({error}); a run that continues begins a new one")
        self._run.define_metric(self.STEP_KEY)
        self._run.define_metric("*", step_metric=self.STEP_KEY)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send `values` together with their step."""
        self._run.log({**values, self.STEP_KEY: step})

    def close(self) -> None:
        """End wandb's run, which uploads what is left.

        Versions before 0.31 have a parameter `quiet`, which newer ones refuse. It only kept wandb's
        last lines from the screen, so no version is asked for it.
        """
        self._run.finish()


def _id_in(file: Path, warn: Warn) -> str | None:
    """Return the id of the Weights & Biases run that a file has; None if it has none.

    A damaged file costs the old curve, and not the run.
    """
    if not os.path.lexists(file):
        return None
    try:
        text = read_bytes(file, 1024).decode().strip()
    except (OSError, ValueError) as error:
        text, reason = "", str(error)
    else:
        reason = "it has no id of Weights & Biases"
    if _ID.fullmatch(text):
        return text
    warn(f"{file}: cannot be used ({reason}); Weights & Biases begins a new run")
    return None


class CompositeTracker:
    """Treat several trackers as one. A tracker that fails is reported once and not used again.

    A full disk or a lost connection must not end a training run, whatever a library raises then.
    Therefore this class catches every `Exception`; no other place in this package does.
    """

    def __init__(self, trackers: Iterable[Tracker], *, warn: Warn = warn_on_stderr) -> None:
        self._trackers = list(trackers)
        self._warn = warn

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` in each tracker that has not failed, under the names of `TAGS`."""
        named = tagged(values)
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, named)
            except Exception as error:
                self._trackers.remove(tracker)
                self._report(tracker, error, "training continues without it")

    def close(self) -> None:
        """Close all trackers, even if some of them fail to close."""
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:
                self._report(tracker, error, "its last values may be missing")

    def _report(self, tracker: Tracker, error: Exception, consequence: str) -> None:
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
    """Return the trackers that `spec` asks for. Only the rank that records calls it.

    Args:
        spec: Says which trackers are wanted.
        log_dir: The run's directory, to which TensorBoard writes its event files:
            `tensorboard --logdir` shows each directory as one run.
        resume_step: The step that training continues from; `None` or 0 in a new run.
        config: The resolved configuration, which wandb shows.
        warn: Called with a message if TensorBoard cannot write or a tracker fails later.

    Raises:
        ConfigError: wandb is requested and not installed.
    """
    trackers: list[Tracker] = []
    if spec.create_wandb_logger:
        require_wandb()
    if spec.create_tensorboard_logger:
        try:
            trackers.append(TensorBoardTracker(log_dir, resume_step=resume_step))
        except (OSError, ImportError) as error:
            where = os.fspath(log_dir)
            warn(f"TensorBoard cannot write to {where}: {error}; training continues without it")
    if spec.create_wandb_logger:
        trackers.append(WandbTracker(log_dir, spec, config, warn=warn))
    return CompositeTracker(trackers, warn=warn)
