"""Measure the FP8 health of a training run at log steps, write it, and warn of bad tensors."""

from __future__ import annotations

from pathlib import Path

from megafp8.backends.te.state import TeScaling
from megafp8.files import Warn
from megafp8.observe.health import HEALTH_FILE, HealthRecord, complaints, merged, scalars
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker
from megafp8.parallel.agreement import gather
from megafp8.precision.health import HealthProbe, TableProbe, num_nonfinite
from megafp8.precision.scaling import ScalingState
from megafp8.specs import HealthSpec
from megafp8.train.state import TrainState

MOST_WARNINGS = 3  # tensors that are named in one step; the file has all of them


class HealthLog:
    """Log the FP8 health of one run. Call `begin` before a step that is logged, `end` after it."""

    def __init__(
        self, state: TrainState, spec: HealthSpec, run_dir: Path | None, step: int, warn: Warn
    ) -> None:
        """Open health.jsonl in `run_dir`, which is None on ranks that do not write.

        `step` is the step that training continues from.
        """
        self._state, self._spec, self._warn = state, spec, warn
        self._probe: HealthProbe | TableProbe | None = None
        if isinstance(state.scaling, TeScaling) and spec.mode != "off":
            self._probe = TableProbe(state.scaling)
        elif isinstance(state.scaling, ScalingState) and spec.mode != "off":
            self._probe = HealthProbe(state.scaling, spec.mode)
        self._file: MetricsFile | None = None
        if self._probe is not None and run_dir is not None:
            self._file = MetricsFile(run_dir / HEALTH_FILE, resume_step=step, warn=warn)
        self._warned: set[str] = set()
        self._is_attached = False

    def begin(self) -> None:
        """Measure the casts from now on, until `end` or `abandon`."""
        if self._probe is not None:
            self._probe.attach()
            self._is_attached = True

    def end(self, step: int, trackers: CompositeTracker) -> None:
        """Write what was measured since `begin` as the health of `step`, and warn of bad tensors.

        All ranks call it together. It does nothing if there was no `begin`.
        """
        if self._probe is None or not self._is_attached:
            return
        self._is_attached = False
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        seen = gather(self._state.mesh, (self._probe.detach(), num_nonfinite(scaling)))
        if self._file is None:
            return
        nonfinite: dict[str, int] = {}
        for _, counts in seen:
            nonfinite |= {name: max(n, nonfinite.get(name, 0)) for name, n in counts.items()}
        record = HealthRecord(step, merged(part for part, _ in seen), nonfinite)
        self._file.log(record.to_dict())
        trackers.log(step, scalars(record))
        self._complain(record)

    def abandon(self) -> None:
        """Forget what was measured since `begin`, because the step will be done again."""
        if self._probe is not None and self._is_attached:
            self._probe.detach()
            self._is_attached = False

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, when training goes back to a checkpoint."""
        if self._file is not None:
            self._file.rewind(step)

    def close(self) -> None:
        """Close health.jsonl."""
        if self._file is not None:
            self._file.close()

    def _complain(self, record: HealthRecord) -> None:
        """Warn of each bad tensor once, and again only after it has been good in between."""
        found = complaints(record, self._spec)
        new = [name for name in found if name not in self._warned]
        for name in new[:MOST_WARNINGS]:
            self._warn(f"step {record.step}: {name} in FP8: {found[name]}")
        if len(new) > MOST_WARNINGS:
            rest = len(new) - MOST_WARNINGS
            self._warn(f"step {record.step}: and {rest} more tensors; all are in {HEALTH_FILE}")
        self._warned = set(found)
