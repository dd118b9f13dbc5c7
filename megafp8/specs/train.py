"""Describe the sizes and intervals of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RampupSpec:
    """Describe global batches that grow over the first `samples` samples of a run.

    They grow from `start` by equal increments (Megatron's `--rampup-batch-size`).
    """

    start: int
    increment: int
    samples: int

    def batch_size_at(self, consumed_samples: int, global_batch_size: int) -> int:
        """Return the global batch size, in samples, of the step after `consumed_samples`.

        The arithmetic is Megatron's own floating point, so that every step has the size it has
        there.
        """
        if consumed_samples > self.samples:
            return global_batch_size
        num_increments = (global_batch_size - self.start) // self.increment
        done = int(consumed_samples / (self.samples / num_increments))
        return min(global_batch_size, self.start + done * self.increment)


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Hold the sizes and intervals of training.

    Counts are optimizer steps unless their comment names another unit.
    """

    max_steps: int
    max_time_seconds: float | None = None  # time limit of one process, from its start
    micro_batch_size: int  # samples per forward pass and data-parallel rank
    global_batch_size: int  # samples per optimizer step over all ranks
    log_every_n_steps: int  # the first and the last step are logged besides
    val_check_interval: int
    limit_val_batches: int  # global batches per validation; the last one is whole; 0: none
    seed: int
    nonfinite_policy: Literal["stop", "skip", "rollback"]
    overfit_batches: int = 0  # train on this many global batches again and again; 0: on all data
    num_sanity_val_steps: int = 0  # global batches validated before the first step
    fast_dev_run: bool = False  # whether the run is a trial, without whole validations
    deterministic: bool = False
    max_restarts: int = 0  # how often our own launcher restarts a run after a rank died
    gc_interval: int = 0  # steps between two garbage collections; 0 leaves them to Python

    rampup: RampupSpec | None = None
    compile: Literal["off", "block"] = (
        "off"  # by torch.compile; `block` compiles a transformer layer
    )

    def logs_at(self, step: int) -> bool:
        """Whether step `step`, counted from 1, has a line of metrics.

        The first step, the last, and each `log_every_n_steps`-th have one.
        """
        return step % self.log_every_n_steps == 0 or step in (1, self.max_steps)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples, over all ranks, of the step that begins after `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size
        return self.rampup.batch_size_at(consumed_samples, self.global_batch_size)

    def num_microbatches(self, dp: int, consumed_samples: int | None = None) -> int:
        """Return how many microbatches each data-parallel rank runs in a step.

        Without `consumed_samples` it is the number after a ramp-up.
        """
        samples = self.global_batch_size
        if consumed_samples is not None:
            samples = self.batch_size_at(consumed_samples)
        return samples // (self.micro_batch_size * dp)
