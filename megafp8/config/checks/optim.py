"""Check that settings of optimizer, schedule and batch ramp-up fit together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules, counted, nearest_multiples
from megafp8.config.values import (
    MAX_RAMP_SIZES,
    SIZES,
    WORLD,
    model_ranks,
    schedule_steps,
    steps_or_ratio,
    warmup_steps,
    world_size,
)

rule = Rules()

_SCHED = "model.optim.sched"


def _steps_or_ratio(v: Values, part: str) -> Iterator[Finding]:
    steps, ratio = f"{_SCHED}.{part}_steps", f"{_SCHED}.{part}_ratio"
    # The default of constant_steps is 0, not null.
    if v[ratio] is not None and v[steps] not in ((None, 0) if part == "constant" else (None,)):
        yield Finding(ratio, f"{steps}={v[steps]} is given too", "Leave one of the two out")


for _part in ("warmup", "constant", "hold", "wsd_decay"):
    rule(f"{_SCHED}.{_part}_steps", f"{_SCHED}.{_part}_ratio")(partial(_steps_or_ratio, part=_part))


@rule(
    "trainer.max_steps",
    "model.optim.sched.max_steps",
    "model.optim.sched.name",
    "model.optim.sched.warmup_steps",
    "model.optim.sched.warmup_ratio",
)
def _noam_warms_up(v: Values) -> Iterator[Finding]:
    if v[f"{_SCHED}.name"] != "NoamHoldAnnealing":
        return
    max_steps = schedule_steps(v)
    steps, ratio = v[f"{_SCHED}.warmup_steps"], v[f"{_SCHED}.warmup_ratio"]
    if warmup_steps(steps_or_ratio(steps, ratio, max_steps), max_steps) == 0:
        yield Finding(
            f"{_SCHED}.warmup_steps",
            f"{_SCHED}.name=NoamHoldAnnealing needs a warm-up",
            "Give at least 1",
        )


@rule(
    "model.rampup_batch_size",
    "model.global_batch_size",
    "model.micro_batch_size",
    *WORLD,
    *SIZES,
)
def _rampup_fits(v: Values) -> Iterator[Finding]:
    key, ramp = "model.rampup_batch_size", v["model.rampup_batch_size"]
    ranks, size = world_size(v), model_ranks(v)
    if ramp is None or ranks % size:
        return
    (start, increment, _), end = ramp, v["model.global_batch_size"]
    unit = v["model.micro_batch_size"] * (ranks // size)
    if start >= end or (end - start) % increment:
        yield Finding(
            key,
            f"steps of {increment} do not lead from {start} to model.global_batch_size={end}",
            "Give [start, increment, samples] with start below the global batch size and the "
            "difference a multiple of increment",
        )
    elif (end - start) // increment > MAX_RAMP_SIZES:
        yield Finding(
            key,
            f"steps of {increment} from {start} to {end} are {(end - start) // increment} sizes of "
            f"the batch; at most {MAX_RAMP_SIZES} are checked",
            "Give a larger increment",
        )
    elif start % unit or increment % unit:
        wrong = start if start % unit else increment
        yield Finding(
            key,
            f"{wrong} is not a multiple of model.micro_batch_size={v['model.micro_batch_size']} "
            f"times {counted(ranks // size, 'data-parallel rank')}",
            f"Nearest: {nearest_multiples(wrong, unit)}",
        )
