"""Choose the best checkpoints of a run, by the metrics that each one records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megafp8.checkpoint.verify import check_structure
from megafp8.errors import CheckpointError, UnreadableError

METRICS = "metrics"
"""The key in a manifest's `meta` under which the last metrics before the save stand, by name."""


@dataclass(frozen=True)
class Best:
    """Say which checkpoints are kept besides the newest: the best ones by a metric.

    Attributes:
        count: How many are kept; -1 keeps all, 0 none.
        monitor: The metric's name.
        mode: Whether the smallest or the largest value is best.
    """

    count: int = 0
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    def of(self, step_dirs: Sequence[Path]) -> set[Path]:
        """Return the best of these checkpoints.

        Of equally good ones the earlier is better. A checkpoint without the metric is never best.
        One that cannot be read now is among them, since it may be the best.
        """
        if self.count < 0:
            return set(step_dirs)
        if self.count == 0:
            return set()
        sign = 1.0 if self.mode == "min" else -1.0
        scores: dict[Path, float | None] = {}
        unknown = set()
        for path in step_dirs:
            try:
                scores[path] = score_of(path, self.monitor)
            except UnreadableError:
                unknown.add(path)
        ranked = sorted(
            (path for path, score in scores.items() if score is not None),
            key=lambda path: path.name,
        )
        # Checkpoints between two validations record the same value. The sort is stable, so the
        # earliest of them, which is the one that was validated, stays first.
        ranked.sort(key=lambda path: sign * (scores[path] or 0.0))
        return {*ranked[: self.count], *unknown}


NONE = Best()
"""Keeps the newest checkpoints only."""


def score_of(step_dir: Path, monitor: str) -> float | None:
    """Return the metric `monitor` of a checkpoint; None unless its manifest has a finite number.

    Raises:
        UnreadableError: The checkpoint cannot be read now.
    """
    try:
        value = check_structure(step_dir).meta.get(METRICS, {}).get(monitor)
    except UnreadableError:
        raise
    except CheckpointError:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
