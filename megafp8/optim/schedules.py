"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

from megafp8.specs import OptimSpec


def learning_rate(spec: OptimSpec, step: int) -> float:
    """NeMo's `CosineAnnealing` for optimizer step `step`, counted from 1.

    lr * step / (warmup_steps + 1) while warming up; then half a cosine from lr to min_lr, reached
    `constant_steps` before the end; then min_lr.
    """
    schedule = spec.schedule
    if step <= schedule.warmup_steps:
        return spec.lr * step / (schedule.warmup_steps + 1)
    num_decay_steps = schedule.max_steps - schedule.constant_steps - schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_decay_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (spec.lr - schedule.min_lr) * cosine
