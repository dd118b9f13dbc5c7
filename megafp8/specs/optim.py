"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """NeMo's `CosineAnnealing`: linear warm-up, cosine to `min_lr`, then `constant_steps` at it."""

    name: str
    warmup_steps: int
    constant_steps: int
    min_lr: float
    max_steps: int  # of the whole run: warm-up, cosine and constant part together


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """AdamW (decoupled weight decay) and gradient clipping by global norm."""

    name: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad_norm: float | None  # None or 0: no clipping
    schedule: ScheduleSpec
