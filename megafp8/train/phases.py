"""Change the precision of a run at the steps that `model.precision_schedule` names.

A phase begins between two steps, on all ranks. Whoever computes with the state afterwards sees the
new recipe alone: quantizers and copies of weights are made again. A tensor whose scale was delayed
and still is keeps its history. Where a scale becomes a delayed one, it begins as in a new run, at 1
with an empty history, as Transformer Engine's does under a new recipe. A checkpoint that is written
where a phase begins belongs to the phase before, and the run that continues from it begins the
phase as the undisturbed one did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from megafp8.config.errors import SettingError
from megafp8.config.precision_changes import SCHEDULE, parse_schedule, written
from megafp8.config.precision_phases import changes_of
from megafp8.config.precision_spec import phases_of
from megafp8.config.resume import flat, with_defaults
from megafp8.errors import RunError
from megafp8.parallel.agreement import agree_on_rows, gather, raise_on_all
from megafp8.specs.precision import PrecisionChange, PrecisionPhase
from megafp8.train.state import TrainState

PRECISION_STEPS = "precision_steps"
"""The key of a checkpoint's meta with the step after which each entry of the schedule begins, by
the entry's number. A run without a schedule has no such key."""


def phase_of(state: TrainState, step: int, *, has_run: bool = False) -> int:
    """Return the number of the phase in which the step after `step` runs.

    With `has_run` it is that of the step itself, which `step` steps have ended with.
    """
    begun = [
        number
        for number, phase in enumerate(state.phases)
        if phase.after < step or (phase.after == step and not has_run)
    ]
    return max(begun, default=0)


class Begun(NamedTuple):
    """Hold a phase that has begun, and all tensors whose delayed scales begin with it."""

    phase: PrecisionPhase
    fresh: frozenset[str]


def begin_phase(state: TrainState) -> Begun | None:
    """Begin the phase of the next step, if it is another one; return it, or None.

    All ranks call it together.

    Raises:
        RunError: The ranks do not agree on the phase.
    """
    if not state.phases:
        return None
    phase = state.phases[phase_of(state, state.step)]
    if not _is_other(state, phase):
        return None
    of_ranks = gather(state.mesh, [state.step, phase.after, phase.text])
    if any(of_rank != of_ranks[0] for of_rank in of_ranks):
        raise_on_all(RunError(f"the ranks do not agree on the precision of a step: {of_ranks}"))
    known = _with_history(state)
    _change(state, phase)
    fresh = gather(state.mesh, sorted({name for name, *_ in _with_history(state) - known}))
    return Begun(phase, frozenset(name for names in fresh for name in names))


def _with_history(state: TrainState) -> set[tuple[object, ...]]:
    return {kind for table in state.scaling.tables.values() for kind in table.kinds()}


def _change(state: TrainState, phase: PrecisionPhase) -> None:
    state.backend.change_recipe(state.model, phase.recipe)
    agree_on_rows(state.mesh, state.scaling)
    if not state.backend.spec.optim.storage.is_plain:  # FP8-LM: weights may be their own masters
        state.backend.read_stored(state.model, state.masters.own_weights)


def _is_other(state: TrainState, phase: PrecisionPhase) -> bool:
    present = state.backend.spec.precision.fp8
    return present != phase.recipe


def return_to(
    state: TrainState, step: int, meta: Mapping[str, Any], notify: Callable[[str], None]
) -> None:
    """Give the state the phases of a run that continues, and the precision in which `step` ran.

    `meta` is that of the checkpoint of `step`. Entries that the checkpoint's run had keep their
    steps, so that a fraction does not move with the length of the run.

    Raises:
        SettingError: The schedule has other changes before `step` than the checkpoint's run had.
    """
    had = _changes_of_checkpoint(meta)
    if not state.phases and not had:
        return
    values = with_defaults(state.backend.spec.resolved)
    if not values["model.fp8"]:
        return
    scheduled = changes_of(values)
    changes = tuple(_with_kept_steps(scheduled, had, notify))
    try:
        _check_past(changes, had, step, values[SCHEDULE])
        if changes != scheduled:
            state.phases = tuple(phases_of(values, changes))
    except SettingError as error:  # every rank finds the same
        raise_on_all(error)
    if state.phases:
        phase = state.phases[phase_of(state, step, has_run=True)]
        if _is_other(state, phase):
            _change(state, phase)


def steps_for_meta(state: TrainState) -> dict[str, dict[str, int]]:
    """Return what a checkpoint's meta has of the phases; nothing without a schedule."""
    changes = [change for phase in state.phases for change in phase.changes]
    steps = {str(number): change.after for number, change in enumerate(changes, 1)}
    return {PRECISION_STEPS: steps} if changes else {}


def _changes_of_checkpoint(meta: Mapping[str, Any]) -> tuple[PrecisionChange, ...]:
    """Return the entries of the checkpoint's run, with the steps after which they begin."""
    if not (steps := meta.get(PRECISION_STEPS)):
        return ()
    changes = parse_schedule(flat(meta.get("config") or {}).get(SCHEDULE, []))
    pairs = ((change, steps.get(str(number))) for number, change in enumerate(changes, 1))
    return tuple(replace(change, after=step) for change, step in pairs if step is not None)


def _with_kept_steps(
    scheduled: Sequence[PrecisionChange],
    had: Sequence[PrecisionChange],
    notify: Callable[[str], None],
) -> list[PrecisionChange]:
    """Return the changes of a schedule, those of `had` with the steps that they began after."""
    unmatched, with_steps = list(had), []
    for number, change in enumerate(scheduled, 1):
        same = next((old for old in unmatched if written(old) == written(change)), None)
        if same is not None:
            unmatched.remove(same)
            if same.after != change.after:
                notify(
                    f"{SCHEDULE}: entry {number} ({change.text}) begins after step {same.after}, "
                    f"as when the run began; from: {change.start} would now be {change.after}"
                )
        with_steps.append(change if same is None else same)
    return with_steps


def _check_past(
    changes: Sequence[PrecisionChange], had: Sequence[PrecisionChange], step: int, value: object
) -> None:
    """Raise unless the changes are in order, and those before `step` are the run's own."""
    for first, second in pairwise(changes):
        if second.after < first.after:
            raise SettingError(
                SCHEDULE,
                value,
                f"{second.text} begins after step {second.after}, and the entry before it after "
                f"step {first.after}, which the run has kept since it began",
                "Write the entries in the order of their steps",
            )
    past, past_of_run = ([_meaning(c) for c in cs if c.after < step] for cs in (changes, had))
    if past != past_of_run:
        own_text = "; ".join(f"{c.text} after step {c.after}" for c in had if c.after < step)
        raise SettingError(
            SCHEDULE,
            value,
            f"the run has trained {step} steps, with these changes of precision: "
            f"{own_text or 'none'}",
            f"Keep them, and let other entries begin from step {step} on; or start a new run",
        )


def _meaning(change: PrecisionChange) -> PrecisionChange:
    return replace(change, start=change.after)
