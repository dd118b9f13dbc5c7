"""Describe a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from megafp8.specs.checkpoint import CheckpointSpec
from megafp8.specs.data import DataSpec
from megafp8.specs.model import GPTSpec
from megafp8.specs.observe import ObserveSpec
from megafp8.specs.optim import OptimSpec
from megafp8.specs.parallel import ParallelSpec
from megafp8.specs.precision import PrecisionSpec
from megafp8.specs.train import TrainSpec


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Say which steps are profiled, counted from 0, and on which ranks."""

    enabled: bool = False
    start_step: int = 10
    end_step: int = 10  # the last profiled step
    ranks: tuple[int, ...] = (0,)
    gen_shape: bool = False
    memory_snapshot_on_oom: bool = False


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Hold the resolved configuration of a run.

    `model.vocab_size` is 0 until the data is prepared, since the tokenizer decides it;
    `train.build` replaces it. `resolved` is the whole configuration under NeMo's names, as plain
    dicts and lists.
    """

    model: GPTSpec
    precision: PrecisionSpec
    parallel: ParallelSpec
    optim: OptimSpec
    data: DataSpec
    train: TrainSpec
    checkpoint: CheckpointSpec
    observe: ObserveSpec
    vocab_divisible_by: int
    profile: ProfileSpec = ProfileSpec()
    resolved: dict[str, object] = field(repr=False)
    restore_from_path: str | None = None  # the checkpoint whose weights a new run loads
    resume_from_checkpoint: str | None = None  # the checkpoint whose whole state a new run loads
