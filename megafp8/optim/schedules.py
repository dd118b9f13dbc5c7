"""Compute NeMo's learning-rate schedules, and Megatron's WSD, as pure functions of the step.

NeMo counts steps from 0 and so do the formulas below: s is the optimizer step less one, W the
number of warm-up steps, M the run's number of steps. Unless a schedule says otherwise, it begins
with the warm-up lr * (s + 1) / (W + 1) while s <= W (none if W is 0), and is `min_lr` where s > M.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megafp8.specs import OptimSpec
from megafp8.specs.optim import WsdDecay

Formula = Callable[[OptimSpec, int], float]
WSD_DECAYS: dict[WsdDecay, Callable[[float], float]] = {
    "exponential": lambda progress: 2.0 * math.pow(0.5, progress) - 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""What is left of the rate above `min_lr`, by the progress of the decay from 0 to 1."""


def learning_rate(spec: OptimSpec, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1."""
    return FORMULAS[spec.schedule.name](spec, step - 1)


def _with_warmup(after: Formula) -> Formula:
    """Return NeMo's `WarmupPolicy`: the warm-up, then `after`, then `min_lr`."""

    def rate(spec: OptimSpec, s: int) -> float:
        if _warms_up(spec, s):
            return _warmup(spec, s)
        return spec.schedule.min_lr if s > spec.schedule.max_steps else after(spec, s)

    return rate


def _with_warmup_and_hold(after: Formula) -> Formula:
    """Return NeMo's `WarmupHoldPolicy`: the highest rate for `hold_steps` after the warm-up."""

    def rate(spec: OptimSpec, s: int) -> float:
        if not _warms_up(spec, s) and s < _end_of_hold(spec):
            return spec.lr
        return _with_warmup(after)(spec, s)

    return rate


def _warms_up(spec: OptimSpec, s: int) -> bool:
    return 0 < spec.schedule.warmup_steps >= s


def _warmup(spec: OptimSpec, s: int) -> float:
    return spec.lr * ((s + 1) / (spec.schedule.warmup_steps + 1))


def _warmup_from_zero(spec: OptimSpec, s: int) -> float:
    """Return the rate of Megatron's warm-up, whose first rate is 0."""
    return spec.lr * (s / spec.schedule.warmup_steps)


def _end_of_hold(spec: OptimSpec) -> int:
    """Return the step at which the hold ends; 0 without a hold, as in NeMo."""
    hold = spec.schedule.hold_steps
    return 0 if hold is None else spec.schedule.warmup_steps + hold


def _constant(spec: OptimSpec, s: int) -> float:
    return spec.lr


def _cosine(spec: OptimSpec, s: int) -> float:
    """Return half a cosine from lr to min_lr between the warm-up and the constant steps.

    During the constant steps the rate is min_lr. If there are any, the warm-up is Megatron's, lr *
    s / W, whose first rate is 0. Warm-up and constant steps may be more than the run has: it then
    ends in the warm-up, or has min_lr right after it, as in NeMo.
    """
    schedule = spec.schedule
    warmup, constant = schedule.warmup_steps, schedule.constant_steps
    if _warms_up(spec, s):
        return _warmup_from_zero(spec, s) if constant else _warmup(spec, s)
    num_decay_steps = schedule.max_steps - constant - warmup
    if constant and num_decay_steps <= 0:
        return schedule.min_lr  # the constant steps fill what the run has after its warm-up
    progress = min(1.0, (s - warmup) / max(1, num_decay_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (spec.lr - schedule.min_lr) * cosine


def _linear(spec: OptimSpec, s: int) -> float:
    """Return NeMo's `WarmupAnnealing`: a straight line from lr to min_lr."""
    return _line_to_the_power(spec, s - spec.schedule.warmup_steps, _decay_steps(spec), 1.0)


def _polynomial(spec: OptimSpec, s: int) -> float:
    """Return min_lr + (lr - min_lr) * (1 - progress)^power."""
    schedule = spec.schedule
    since = s - schedule.warmup_steps
    return _line_to_the_power(spec, since, _decay_steps(spec), schedule.power)


def _polynomial_after_hold(spec: OptimSpec, s: int) -> float:
    """Return the rate of `_polynomial` counted from the end of the hold.

    NeMo counts from step 0 where there is no hold.
    """
    schedule = spec.schedule
    end = _end_of_hold(spec)
    decay_steps = max(1, schedule.max_steps - max(schedule.warmup_steps, end))
    return _line_to_the_power(spec, s - end, decay_steps, schedule.power)


def _line_to_the_power(spec: OptimSpec, since: int, decay_steps: int, power: float) -> float:
    fraction_left = 1.0 - min(since, decay_steps) / decay_steps
    return spec.schedule.min_lr + (spec.lr - spec.schedule.min_lr) * math.pow(fraction_left, power)


def _decay_steps(spec: OptimSpec) -> int:
    return max(1, spec.schedule.max_steps - spec.schedule.warmup_steps)


def _square(spec: OptimSpec, s: int) -> float:
    """Return lr * (1 - progress)^2, at least min_lr; progress begins at the end of the warm-up."""
    decay_steps = _decay_steps(spec)
    fraction_left = 1.0 - (s - spec.schedule.warmup_steps) / decay_steps
    return max(spec.schedule.min_lr, spec.lr * fraction_left**2)


def _square_root(spec: OptimSpec, s: int) -> float:
    """Return lr * sqrt(1 - s / M), at least min_lr; as in NeMo, s includes the warm-up's steps."""
    return max(spec.schedule.min_lr, spec.lr * math.sqrt(1.0 - s / spec.schedule.max_steps))


def _inverse_square_root(spec: OptimSpec, s: int) -> float:
    """Return lr * sqrt((W + 1) / (s + 1)), which falls below min_lr as NeMo's does."""
    return spec.lr * math.sqrt((spec.schedule.warmup_steps + 1) / (s + 1))


def _noam(spec: OptimSpec, s: int) -> float:
    """Return lr times the rate of Vaswani et al. 2017 (arXiv 1706.03762), section 5.3.

    After the warm-up it is at least min_lr. The formula contains its own warm-up, and steps 0 and 1
    have the same rate.
    """
    schedule, s = spec.schedule, max(1, s)
    assert schedule.d_model is not None, "validated"
    factor = 1 / math.sqrt(s)
    if schedule.warmup_steps > 0:
        factor = min(factor, s * math.pow(schedule.warmup_steps, -1.5))
    rate = spec.lr / math.sqrt(schedule.d_model) * factor
    return max(rate, schedule.min_lr) if s > schedule.warmup_steps else rate


def _noam_after_hold(spec: OptimSpec, s: int) -> float:
    """Return lr * (W / (s - hold))^decay_rate, at least min_lr.

    The formula is Squeezeformer's (arXiv 2206.00888).
    """
    schedule = spec.schedule
    since = max(1.0, math.pow(s - (schedule.hold_steps or 0), schedule.decay_rate))
    top = max(1.0, math.pow(schedule.warmup_steps, schedule.decay_rate))
    return max(schedule.min_lr, spec.lr * top / since)


def _warmup_stable_decay(spec: OptimSpec, s: int) -> float:
    """Return the rate of warm-up, stable, decay (MiniCPM, arXiv 2404.06395, section 4).

    Formulas and warm-up are those of `lr_decay_style=WSD` in Megatron-core's
    `OptimizerParamScheduler`.
    """
    schedule = spec.schedule
    if _warms_up(spec, s):
        return _warmup_from_zero(spec, s)
    if s > schedule.max_steps:
        return schedule.min_lr
    since = s - (schedule.max_steps - schedule.wsd_decay_steps)
    if since <= 0:
        return spec.lr
    fraction_left = WSD_DECAYS[schedule.wsd_decay_style](since / schedule.wsd_decay_steps)
    return schedule.min_lr + fraction_left * (spec.lr - schedule.min_lr)


FORMULAS: dict[str, Formula] = {
    "CosineAnnealing": _cosine,
    "WarmupPolicy": _with_warmup(_constant),
    "WarmupHoldPolicy": _with_warmup(_constant),  # the rate stays after the hold: no difference
    "WarmupAnnealing": _with_warmup(_linear),
    "PolynomialDecayAnnealing": _with_warmup(_polynomial),
    "PolynomialHoldDecayAnnealing": _with_warmup_and_hold(_polynomial_after_hold),
    "SquareAnnealing": _with_warmup(_square),
    "SquareRootAnnealing": _with_warmup(_square_root),
    "InverseSquareRootAnnealing": _with_warmup(_inverse_square_root),
    "NoamAnnealing": _noam,
    "NoamHoldAnnealing": _with_warmup_and_hold(_noam_after_hold),
    "WSD": _warmup_stable_decay,
}
"""The formula of each schedule, under NeMo's name for it, or Megatron's (WSD)."""
