"""Which checkpoints are the best of a run, by what was measured when each was saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megafp8.checkpoint.verification import check_structure
from megafp8.errors import CheckpointError

METRICS = "metrics"
"""In a manifest's meta: what was measured last before the save, by name."""


@dataclass(frozen=True)
class Best:
    """The `count` best by `monitor` are kept besides the newest; -1 keeps all, 0 none."""

    count: int = 0
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    def of(self, step_dirs: Sequence[Path]) -> set[Path]:
        """The best of these checkpoints; of equal ones the earlier. Unmeasured do not count."""
        if self.count < 0:
            return set(step_dirs)
        if self.count == 0:
            return set()
        sign = 1.0 if self.mode == "min" else -1.0
        scores = {path: score_of(path, self.monitor) for path in step_dirs}
        ranked = sorted(
            (path for path, score in scores.items() if score is not None),
            key=lambda path: path.name,
        )
        # Stable: of those between two validations the one that was measured itself comes first.
        ranked.sort(key=lambda path: sign * (scores[path] or 0.0))
        return set(ranked[: self.count])


NONE = Best()
"""Only the newest checkpoints are kept."""


def score_of(step_dir: Path, monitor: str) -> float | None:
    """What the checkpoint's manifest says was measured; None without a finite number."""
    try:
        value = check_structure(step_dir).meta.get(METRICS, {}).get(monitor)
    except CheckpointError:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
