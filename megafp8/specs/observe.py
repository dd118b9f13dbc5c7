"""What a run records, and what its records of FP8's health are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HealthMode = Literal["off", "scales", "full"]


@dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """At log steps: nothing, amaxes and scales, or also what each tensor loses in FP8.

    A tensor beyond a limit is warned of by name.
    """

    mode: HealthMode = "scales"
    max_underflow: float = 0.5  # share of non-zero values that became zero
    max_overflow: float = 0.01  # share of values that saturated
    min_snr_db: float = 5.0  # signal to noise of the worst row, in decibel


@dataclass(frozen=True, kw_only=True)
class TensorHealth:
    """One tensor in one step, over its microbatches; None was not measured."""

    amax: float
    quant_scale: float  # the smallest, where there are several
    underflow: float | None = None  # share of the non-zero values whose FP8 value is zero
    overflow: float | None = None  # share of the values beyond the largest FP8 number
    snr_db: float | None = None  # of the worst row


@dataclass(frozen=True, kw_only=True)
class ObserveSpec:
    """Where a run's records go."""

    exp_dir: str
    name: str | None
    explicit_log_dir: str | None
    resume_if_exists: bool
    create_tensorboard_logger: bool
    create_wandb_logger: bool
    wandb_project: str | None
    wandb_name: str | None
    progress_bar: bool = True
    health: HealthSpec = HealthSpec()
