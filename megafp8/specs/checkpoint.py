"""When checkpoints are written and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Both intervals may be set; the last step of a run is saved when `save_last` is."""

    every_n_train_steps: int | None
    train_time_interval_seconds: float | None
    save_last: bool
    keep: int  # newest checkpoints kept; older ones go after a newer one is verified
    save_top_k: int = 0  # of the best kept besides; -1 keeps all
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    async_save: bool = False  # periodic ones are written while training goes on
