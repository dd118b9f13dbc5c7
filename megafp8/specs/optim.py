"""Describe the optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Describe one of NeMo's schedules by its name there; `optim.schedules` has the formulas."""

    name: str
    warmup_steps: int
    constant_steps: int  # CosineAnnealing: the last steps, at `min_lr`
    min_lr: float
    max_steps: int  # steps of the whole run: warm-up, decay and constant part together
    hold_steps: int | None = None  # steps at the highest rate after the warm-up
    power: float = 1.0  # the polynomial's exponent
    decay_rate: float = 0.5  # NoamHoldAnnealing: exponent of the decay
    d_model: int | None = None  # NoamAnnealing: the rate is divided by its root


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """Describe Adam, its weight decay and gradient clipping.

    `adam` adds weight_decay * weight to the gradient (L2); `adamw` and `fused_adam` shrink the
    weight itself (decoupled). `fused_adam` runs Apex's or Transformer Engine's kernel where it can;
    `distributed_fused_adam` does too, and shards the optimizer's state over replicas (ZeRO-1).
    """

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad_norm: float | None  # None and 0 switch clipping off
    schedule: ScheduleSpec
    clip_algorithm: Literal["norm", "value"] = "norm"

    @property
    def shards_states(self) -> bool:
        """Whether each replica keeps only its shard of the master weights and moments."""
        return self.name == "distributed_fused_adam"
