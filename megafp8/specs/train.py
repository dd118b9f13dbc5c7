"""The training loop's sizes and intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Counts are optimizer steps unless named otherwise."""

    max_steps: int
    max_time_seconds: float | None = None  # of one process, from its start
    micro_batch_size: int  # samples per forward pass and data-parallel rank
    global_batch_size: int  # samples per optimizer step over all ranks
    log_every_n_steps: int
    val_check_interval: int
    limit_val_batches: int  # global batches per validation during training; the last one is whole
    seed: int
    nonfinite_policy: Literal["stop", "skip", "rollback"]

    def num_microbatches(self, dp: int) -> int:
        """Microbatches that each data-parallel rank runs per step."""
        return self.global_batch_size // (self.micro_batch_size * dp)
