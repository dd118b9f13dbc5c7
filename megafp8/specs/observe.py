"""Describe what a run records, and the measures of FP8 health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HealthMode = Literal["off", "scales", "full"]


@dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """Say what is measured of FP8 tensors at logged steps, and from which limits on a run warns.

    `scales` measures amaxes and scales, `full` also what each tensor loses in FP8. A warning names
    the tensor that is beyond a limit.
    """

    mode: HealthMode = "scales"
    max_underflow: float = 0.5  # fraction of non-zero values that became zero
    max_overflow: float = 0.01  # fraction of values that saturated
    min_snr_db: float = 5.0  # signal to noise of the worst row, in decibel


@dataclass(frozen=True, kw_only=True)
class TensorHealth:
    """Hold the measures of one tensor in one step, over its microbatches; None was not measured."""

    amax: float
    quant_scale: float  # the smallest, where there are several
    underflow: float | None = None  # fraction of the non-zero values whose FP8 value is zero
    overflow: float | None = None  # fraction of the values beyond the largest FP8 number
    snr_db: float | None = None  # signal to noise of the worst row, in decibel


@dataclass(frozen=True, kw_only=True)
class ObserveSpec:
    """Say where a run writes its records."""

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
