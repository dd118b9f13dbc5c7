"""Plan a run that changes its precision: each of its phases is a run by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from megafp8.plan.hardware import Hardware
from megafp8.plan.memory import rank_memory
from megafp8.plan.time import Achieved, step_time
from megafp8.specs import RunSpec
from megafp8.specs.recipes import label_of


@dataclass(frozen=True)
class PhaseTime:
    """Hold how long a step of one phase takes, in seconds, and how many steps the phase has."""

    text: str
    num_steps: int
    step_seconds: float


def specs_of_phases(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield a run without a schedule for each phase of a run; the run itself if it has none."""
    precision = spec.precision
    if not precision.schedule:
        yield spec
    for phase in precision.schedule:
        yield replace(spec, precision=replace(precision, fp8=phase.recipe, schedule=()))


def largest_phase(spec: RunSpec) -> RunSpec:
    """Return the phase of a run that needs the most memory on some rank, as a run by itself."""
    phases = list(specs_of_phases(spec))
    if len(phases) == 1:
        return phases[0]
    return max(phases, key=bytes_of_largest_rank)


def bytes_of_largest_rank(spec: RunSpec, usable: float = math.inf) -> int:
    """Return the bytes of the rank that needs most; its first and its last stage are compared.

    The first rank of a pipeline keeps the most microbatches, the last one has the head. If the
    first one needs more than `usable` bytes, the last one is left out.
    """
    first = rank_memory(spec, 0).total
    if spec.parallel.pp == 1 or first > usable:
        return first
    return max(first, rank_memory(spec, spec.parallel.pp - 1).total)


def mean_step_seconds(spec: RunSpec, hardware: Hardware, achieved: Achieved | None = None) -> float:
    """Return the time of a step, the mean of all steps of a run."""
    if not spec.precision.schedule:
        return step_time(spec, hardware, achieved).total
    times = phase_times(spec, hardware, achieved)
    return sum(each.num_steps * each.step_seconds for each in times) / spec.train.max_steps


def phase_times(
    spec: RunSpec, hardware: Hardware, achieved: Achieved | None = None
) -> tuple[PhaseTime, ...]:
    """Return the times of the phases of a run; none for a run without a schedule."""
    schedule, last = spec.precision.schedule, spec.train.max_steps
    if not schedule:
        return ()
    ends = [min(phase.after, last) for phase in schedule]
    lengths = [end - begin for begin, end in pairwise([*ends, last])]
    return tuple(
        PhaseTime(
            phase.text or label_of(phase.recipe.name),
            length,
            step_time(each, hardware, achieved).total,
        )
        for phase, each, length in zip(schedule, specs_of_phases(spec), lengths, strict=True)
    )
