"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """One of NeMo's schedules by its name there; `optim.schedules` has their formulas."""

    name: str
    warmup_steps: int
    constant_steps: int  # CosineAnnealing: the last steps, at `min_lr`
    min_lr: float
    max_steps: int  # of the whole run: warm-up, decay and constant part together
    hold_steps: int | None = None  # at the highest rate after the warm-up
    power: float = 1.0  # of the polynomial
    decay_rate: float = 0.5  # NoamHoldAnnealing: exponent of the decay
    d_model: int | None = None  # NoamAnnealing: the rate is divided by its root


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """Adam with one of two weight decays, and gradient clipping.

    `adam` adds weight_decay * weight to the gradient (L2); `adamw` and `fused_adam` shrink the
    weight itself (decoupled). `fused_adam` takes Apex's or Transformer Engine's kernel if it can;
    `distributed_fused_adam` does too, and shares the states out over replicas (ZeRO-1).
    """

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad_norm: float | None  # None or 0: no clipping
    schedule: ScheduleSpec
    clip_algorithm: Literal["norm", "value"] = "norm"

    @property
    def shards_states(self) -> bool:
        """Whether each replica keeps a part of masters and moments alone."""
        return self.name == "distributed_fused_adam"
