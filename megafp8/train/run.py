"""Hold the parts of a run in one process, and what changes while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megafp8.observe.console import Console, StepReport
from megafp8.observe.curve import LossCurve
from megafp8.observe.memory import PeakMemory
from megafp8.observe.metrics import MetricsFile
from megafp8.observe.trackers import CompositeTracker
from megafp8.observe.utilization import Peak
from megafp8.ops.waiting import Waiting
from megafp8.report.writer import Reporter
from megafp8.runs.run_data import RunData
from megafp8.specs import RunSpec
from megafp8.train.background_saver import BackgroundSaver
from megafp8.train.pace import Pace
from megafp8.train.process import StopRequest, TimeLimit
from megafp8.train.report.fp8 import HealthLog
from megafp8.train.report.profile import StepProfiler
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState


@dataclass
class Run:
    """Hold the parts of a run in one process, and what changes while it trains."""

    spec: RunSpec
    state: TrainState
    data: RunData
    saver: Saver
    console: Console
    metrics: MetricsFile | None  # None on all ranks but the main one
    experts_log: MetricsFile | None  # the tokens of each expert; None also without experts
    trackers: CompositeTracker
    stop: StopRequest
    limit: TimeLimit
    health: HealthLog
    profiler: StepProfiler
    bytes_per_token: float  # of the validation text
    curve: LossCurve  # of the training loss; complete on the main rank only
    peak: Peak  # of one rank
    memory: PeakMemory  # of this rank
    waiting: Waiting | None = None  # how OpenMP's threads wait; None on a GPU
    background: BackgroundSaver | None = None  # writes periodic checkpoints with `async_save`
    background_logs: Mapping[str, int] = field(default_factory=dict)  # sizes when it began to save
    pace: Pace = field(default_factory=Pace)  # of this process
    last_report: StepReport | None = None
    reporter: Reporter | None = None  # writes report.html; None on all ranks but the main one
    stopped_by_time: bool = False  # the time limit, not a signal, ended training
    last_save: float = field(default_factory=time.monotonic)  # when, on the monotonic clock
    has_trained: bool = False  # this process has changed the weights in a step, logged or not
    rolled_back_from: set[int] = field(default_factory=set)  # steps that rolled back once

    def close(self) -> None:
        """Close the files that this process writes, other than checkpoints."""
        for file in (self.metrics, self.experts_log):
            if file is not None:
                file.close()
        self.health.close()
        if self.waiting is not None:
            self.waiting.close()
        self.trackers.close()
