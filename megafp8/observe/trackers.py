"""Record curves: in TensorBoard's files and, on request, in Weights & Biases.

Both packages are imported when a tracker is made, not before, so that a run without them neither
needs them nor waits for their import. Each tracker works in a thread of its own: one that fails or
blocks costs its curves, a warning and a line of the summary, never the run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError, ConfigError
from megafp8.files import Warn, strict, warn_on_stderr, write_atomically
from megafp8.foreign import read_bytes
from megafp8.observe.background import START_SECONDS, Background, Tracker
from megafp8.observe.health import HEALTH_FILE, read_health, scalars
from megafp8.observe.metrics import read_metrics
from megafp8.specs import ObserveSpec

WANDB_FOLDER = "wandb"  # wandb itself makes this folder in the run's directory
WANDB_ID_FILE = "wandb_run_id.txt"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PROJECT = "megafp8"
"""The project in Weights & Biases of runs for which no setting and no WANDB_PROJECT names one."""

_WANDBS_OWN = {"WANDB_INIT_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT": "60"}
"""Limits in seconds that make Weights & Biases itself give up before, where a user sets none."""

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


class TensorBoardTracker:
    """Write TensorBoard's event files to `directory`: one point for each step and name.

    Args:
        directory: The directory, which is made if it does not exist.
        resume_step: The step that training continues from: TensorBoard then hides the values of
            later steps in earlier files. `None` or 0 in a new run.
    """

    def __init__(self, directory: str | Path, *, resume_step: int | None = None) -> None:
        self.directory = Path(directory)
        self._open(resume_step or None)

    def _open(self, last_step: int | None) -> None:
        # PyTorch's writer needs the package tensorboard only, and supports purge_step.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if last_step is None else last_step + 1
        self._writer: Any = SummaryWriter(str(self.directory), purge_step=purge_step, flush_secs=10)
        self._last: dict[str, int] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar for each of `values` that has none at this step."""
        for key, value in values.items():
            if self._last.get(key) != step:
                self._last[key] = step
                self._writer.add_scalar(key, value, step)

    def rewind(self, step: int) -> None:
        """Begin a new file, which hides the values of steps after `step`."""
        self._writer.close()
        self._open(step)

    def close(self) -> None:
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

    Its step is that of training, so that the lines of a step are one row. Weights & Biases takes no
    row twice: after a rollback it keeps the steps that it has, and where training continues it gets
    from `metrics` what an earlier process could not send. Offline it cannot say what it has, and
    gets all, so that the newest folder alone has the whole curve.

    Args:
        directory: The run's directory.
        spec: The settings. A run that they do not name has the directory's name.
        config: The resolved configuration.
        metrics: The run's metrics.jsonl, if training continues, and its health.jsonl beside it.
        resume_step: The step that training continues from.
        say: Called with the run's address, and where it begins.
        warn: Called if the run can be recorded offline only.

    Raises:
        ConfigError: The run cannot begin, and the reason lies in the settings or the machine.
        Exception: It cannot begin for another reason, not even offline.
    """

    STEP_KEY = "trainer/global_step"

    def __init__(
        self,
        directory: str | Path,
        spec: ObserveSpec,
        config: Mapping[str, object] | None = None,
        *,
        metrics: Path | None = None,
        resume_step: int = 0,
        say: Warn = lambda text: None,
        warn: Warn = warn_on_stderr,
    ) -> None:
        require_wandb()
        for name, seconds in _WANDBS_OWN.items():
            os.environ.setdefault(name, seconds)
        import wandb

        directory = Path(directory)
        id_file = directory / WANDB_ID_FILE
        unnamed = "WANDB_NAME" not in os.environ
        given: dict[str, Any] = {
            "project": spec.wandb_project or os.environ.get("WANDB_PROJECT") or PROJECT,
            "name": spec.wandb_name or (directory.absolute().name if unnamed else None),
            "entity": spec.wandb_entity,
            "group": spec.wandb_group,
            "job_type": spec.wandb_job_type,
            "notes": spec.wandb_notes,
            "tags": spec.wandb_tags or None,
            "dir": str(directory),
            "id": _id_in(id_file, warn),
            "resume": "allow",
            "config": {key: strict(item) for key, item in (config or {}).items()},
        }
        if getattr(wandb, "run", None) is not None:  # that of an earlier job, which did not end
            given["reinit"] = "create_new"
        try:
            self._run: Any = wandb.init(mode=spec.wandb_mode, **given)
        except Exception as error:  # a missing login, a name that is refused, a lost connection
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            problem = ConfigError(
                "exp_manager.create_wandb_logger",
                True,
                f"Weights & Biases cannot begin its run ({reason})",
                "Run `wandb login`, set WANDB_API_KEY, or set exp_manager.wandb_logger_kwargs.mode"
                "=offline",
            )
            is_new = metrics is None
            if spec.wandb_must_start or (is_new and _is_wrong_by_itself(error, str(error))):
                raise problem from error
            self._run = wandb.init(mode="offline", **given)
            warn(f"Weights & Biases cannot begin its run ({reason}); it is recorded offline")
        try:
            write_atomically(id_file, f"{self._run.id}\n")
        except OSError as error:
            warn(f"{id_file}: cannot be written ({error}); a run that continues begins a new one")
        self._run.define_metric(self.STEP_KEY)
        self._run.define_metric("*", step_metric=self.STEP_KEY)
        self.where = self._where()
        if self.where:
            say(f"Weights & Biases: {self.where}")
        self._next = int(getattr(self._run, "starting_step", 0) or 0)  # the first that is taken
        rows = {} if metrics is None else _logged(metrics, resume_step)
        if metrics is not None and self._next > resume_step + 1:
            say(f"Weights & Biases has steps up to {self._next - 1}, and takes none of them again")
        for step in sorted(rows):
            self.log(step, rows[step])

    def _where(self) -> str:
        """Return the run's address, or the command that uploads it; "" if there is neither."""
        if getattr(self._run, "disabled", False):
            return ""
        if getattr(self._run, "offline", False):
            return f"offline; upload with: wandb sync {Path(self._run.dir).parent}"
        return getattr(self._run, "url", None) or ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send `values` with their step, unless a later one was sent."""
        if step >= self._next:
            self._next = step
            self._run.log({**values, self.STEP_KEY: step}, step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: Weights & Biases cannot go back."""

    def close(self) -> None:
        """End wandb's run, which uploads what is left.

        Versions before 0.31 have a parameter `quiet`, which newer ones refuse. It only kept wandb's
        last lines from the screen, so no version is asked for it.
        """
        self._run.finish()


def _is_wrong_by_itself(error: Exception, text: str) -> bool:
    """Whether a first start failed for a missing key, a name or the like, and would fail again."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"UsageError", "AuthenticationError", "ValueError", "TypeError"}:
        return True
    return "CommError" in kinds and _REFUSED.search(text) is not None


_REFUSED = re.compile(r"\b40[0134]\b|permission|unauthorized|not found", re.IGNORECASE)


def _logged(metrics: Path, last_step: int) -> dict[int, dict[str, float]]:
    """Return what a run's files have of each step until the last, by the names of `tagged`."""
    rows: dict[int, dict[str, float]] = {}
    for row in read_metrics(metrics):
        if (step := row.pop("step", None)) is not None:
            rows.setdefault(int(step), {}).update(tagged(row))
    health = metrics.with_name(HEALTH_FILE)
    try:
        records = read_health(health) if health.is_file() else []
    except CheckpointError:  # a damaged file costs these curves
        records = []
    for record in records:
        rows.setdefault(record.step, {}).update(scalars(record))
    return {step: values for step, values in rows.items() if step <= last_step}


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
    Therefore this class catches every `Exception`.

    Attributes:
        failures: What has failed, as lines for the summary.
    """

    def __init__(self, trackers: Iterable[Tracker], *, warn: Warn = warn_on_stderr) -> None:
        self._trackers = list(trackers)
        self._all = tuple(self._trackers)
        self._warn = warn
        self.failures: list[str] = []

    @property
    def where(self) -> str | None:
        """Return where Weights & Biases has the run, None if it has not."""
        return next((where for t in self._all if (where := getattr(t, "where", ""))), None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` in each tracker that has not failed, under the names of `TAGS`."""
        named = tagged(values)
        self._each(lambda tracker: tracker.log(step, named))

    def rewind(self, step: int) -> None:
        self._each(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        """Close all trackers, even if some of them fail to close."""
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:
                self.failed(_name(tracker), error, "its last values may be missing")

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                act(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self.failed(_name(tracker), error, "training continues without it")

    def failed(self, name: str, error: Exception, consequence: str) -> None:
        """Warn of a failure once, and keep it for the summary."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.failures.append(f"{name} failed ({reason})")
        self._warn(f"{self.failures[-1]}; {consequence}")


def _name(tracker: Tracker) -> str:
    return getattr(tracker, "name", type(tracker).__name__)


def open_trackers(
    spec: ObserveSpec,
    log_dir: str | Path,
    *,
    resume_step: int | None = None,
    config: Mapping[str, object] | None = None,
    metrics: Path | None = None,
    say: Warn = lambda text: None,
    warn: Warn = warn_on_stderr,
    start_seconds: float | None = START_SECONDS,
) -> CompositeTracker:
    """Return the trackers that `spec` asks for. Only the rank that records calls it.

    Args:
        spec: Says which trackers are wanted.
        log_dir: The run's directory, to which TensorBoard writes its event files:
            `tensorboard --logdir` shows each directory as one run.
        resume_step: The step that training continues from; `None` or 0 in a new run.
        config: The resolved configuration, which wandb shows.
        metrics: The run's metrics.jsonl, from which Weights & Biases gets what it lacks.
        say: Called with where Weights & Biases has the run.
        warn: Called with a message if a tracker cannot begin or fails later.
        start_seconds: How long this waits for each of them.

    Raises:
        ConfigError: Weights & Biases cannot begin in a new run for a reason that would stay, as a
            missing package or key; or the settings ask for this error whatever the reason.
    """
    required = spec.create_wandb_logger and spec.wandb_must_start
    sent = metrics if resume_step else None
    openers: dict[str, Callable[[Callable[[Warn], Warn]], Tracker]] = {}
    if spec.create_wandb_logger:
        openers["Weights & Biases"] = lambda deferred: WandbTracker(
            log_dir,
            spec,
            config,
            metrics=sent,
            resume_step=resume_step or 0,
            say=deferred(say),
            warn=deferred(warn),
        )
    if spec.create_tensorboard_logger:
        openers["TensorBoard"] = lambda _: TensorBoardTracker(log_dir, resume_step=resume_step)
    opened: list[Tracker] = []
    failed: list[tuple[str, Exception]] = []
    for name, opener in openers.items():
        seconds = None if required else start_seconds
        try:
            opened.append(Background(name, opener, start_seconds=seconds, warn=warn))
        except Exception as error:
            if isinstance(error, ConfigError) and (required or not resume_step):
                raise
            failed.append((name, error))
    trackers = CompositeTracker(opened, warn=warn)
    for name, reason in failed:
        trackers.failed(name, reason, "training continues without it")
    return trackers
