"""One process's life of a run: its parts, and what moves while it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megafp8.data.prepare import PreparedData
from megafp8.observe.console import Console, StepReport
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker
from megafp8.specs import RunSpec
from megafp8.train.pace import Pace
from megafp8.train.process import StopRequest, TimeLimit
from megafp8.train.report.health import HealthLog
from megafp8.train.report.profile import StepProfiler
from megafp8.train.saver import BackgroundSaver, Saver
from megafp8.train.state import TrainState


@dataclass
class Run:
    """One process's life of a run."""

    spec: RunSpec
    state: TrainState
    data: PreparedData
    saver: Saver
    console: Console
    metrics: MetricsFile | None  # the main rank's
    trackers: CompositeTracker
    stop: StopRequest
    limit: TimeLimit
    health: HealthLog
    profiler: StepProfiler
    bytes_per_token: float  # of the validation text
    background: BackgroundSaver | None = None  # writes the periodic checkpoints, with `async_save`
    pace: Pace = field(default_factory=Pace)  # of this process
    last_report: StepReport | None = None
    last_loss: float | None = None
    stopped_by_time: bool = False
    last_save: float = field(default_factory=time.monotonic)
    nonfinite_in_a_row: int = 0
    rolled_back_from: set[int] = field(default_factory=set)  # skipped if they fail again

    def close(self) -> None:
        """The files that this process writes beside the checkpoints."""
        if self.metrics is not None:
            self.metrics.close()
        self.health.close()
        self.trackers.close()
