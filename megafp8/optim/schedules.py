"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

from megafp8.specs import OptimSpec


def learning_rate(spec: OptimSpec, step: int) -> float:
    """NeMo's `CosineAnnealing` for optimizer step `step`, counted from 1 (NeMo counts from 0).

    lr * step / (warmup_steps + 1) until that is lr; then half a cosine from lr to min_lr, which the
    step after the last one would reach, or the first of `constant_steps` does; then min_lr.
    """
    schedule = spec.schedule
    if step <= schedule.warmup_steps + 1:
        return spec.lr * (step / (schedule.warmup_steps + 1))
    num_decay_steps = schedule.max_steps - schedule.constant_steps - schedule.warmup_steps
    progress = min(1.0, (step - 1 - schedule.warmup_steps) / max(1, num_decay_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (spec.lr - schedule.min_lr) * cosine
