"""The training loop's sizes and intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RampupSpec:
    """Global batches that grow by equal increments from `start` over the first `samples` samples
    (Megatron's `--rampup-batch-size`)."""

    start: int
    increment: int
    samples: int

    def batch_size_at(self, consumed_samples: int, global_batch_size: int) -> int:
        """In Megatron's own floating point, so that every step has the size it has there."""
        if consumed_samples > self.samples:
            return global_batch_size
        num_increments = (global_batch_size - self.start) // self.increment
        done = int(consumed_samples / (self.samples / num_increments))
        return min(global_batch_size, self.start + done * self.increment)


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Counts are optimizer steps unless named otherwise."""

    max_steps: int
    max_time_seconds: float | None = None  # of one process, from its start
    micro_batch_size: int  # samples per forward pass and data-parallel rank
    global_batch_size: int  # samples per optimizer step over all ranks
    log_every_n_steps: int  # the first and the last step are logged besides
    val_check_interval: int
    limit_val_batches: int  # global batches a validation, but for the last, whole one; 0: none
    seed: int
    nonfinite_policy: Literal["stop", "skip", "rollback"]
    overfit_batches: int = 0  # global batches that repeat for ever; 0 trains on all data
    num_sanity_val_steps: int = 0  # global batches validated before the first step
    fast_dev_run: bool = False  # a trial: no validation is whole
    deterministic: bool = False
    max_restarts: int = 0  # of ranks that died, by our own launcher
    gc_interval: int = 0  # steps between two collections of garbage; 0 leaves it to Python

    rampup: RampupSpec | None = None
    compile: Literal["off", "block"] = "off"  # by torch; block: a transformer layer at a time

    def logs_at(self, step: int) -> bool:
        """Whether the step with this number (from 1) has a line of metrics: the first, the last,
        and each `log_every_n_steps`-th."""
        return step % self.log_every_n_steps == 0 or step in (1, self.max_steps)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Samples over all ranks of the step that begins after `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size
        return self.rampup.batch_size_at(consumed_samples, self.global_batch_size)

    def num_microbatches(self, dp: int, consumed_samples: int | None = None) -> int:
        """Microbatches that each data-parallel rank runs per step: after a ramp-up where no
        `consumed_samples` are given."""
        samples = self.global_batch_size
        if consumed_samples is not None:
            samples = self.batch_size_at(consumed_samples)
        return samples // (self.micro_batch_size * dp)
