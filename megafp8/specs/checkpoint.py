"""Describe when checkpoints are written and how many are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Say when checkpoints are written and how many are kept.

    Both intervals may be set. The last step of a run is saved if `save_last` is set.
    """

    every_n_train_steps: int | None
    train_time_interval_seconds: float | None
    save_last: bool
    keep: int  # newest checkpoints kept; older ones go after a newer one is verified
    save_top_k: int = 0  # the best checkpoints are kept too: how many; -1 keeps all
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    async_save: bool = False  # whether periodic checkpoints are written while training continues
