"""Show and record a run: the console, metrics.jsonl, trackers, and the summary at its end.

Nothing in this package may stop a training run: a full disk or a closed terminal costs the record,
not the run, and is reported once.
"""

from megafp8.observe.console import Console, SilentConsole, StepReport
from megafp8.observe.live import open_console
from megafp8.observe.memory import PeakMemory, peak_memory_bytes
from megafp8.observe.metrics import MetricsFile, read_metrics
from megafp8.observe.summary import RunSummary, bits_per_byte, write_summary
from megafp8.observe.trackers import (
    CompositeTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    open_trackers,
    require_wandb,
)

__all__ = [
    "CompositeTracker",
    "Console",
    "MetricsFile",
    "PeakMemory",
    "RunSummary",
    "SilentConsole",
    "StepReport",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "bits_per_byte",
    "open_console",
    "open_trackers",
    "peak_memory_bytes",
    "read_metrics",
    "require_wandb",
    "write_summary",
]
