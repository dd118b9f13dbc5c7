"""Warn of linears where FP8 costs accuracy, and name the schedule that would take them out of it.

`megafp8/observe/accuracy.py` has the criterion and its thresholds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megafp8.config.checks.precision_schedule import is_valid
from megafp8.config.precision_changes import BF16, SCHEDULE, names_bf16, with_change
from megafp8.config.resume import with_defaults
from megafp8.files import Warn
from megafp8.fp8.noise import NoiseProbe
from megafp8.fp8.scaling import ScalingState
from megafp8.observe.accuracy import Streaks, beyond_noise, beyond_range, noise_of_gradient
from megafp8.observe.units import plural
from megafp8.parallel.parts import linears_of
from megafp8.specs import TensorHealth
from megafp8.specs.recipes import HIGH_PRECISION, traits_of
from megafp8.train.state import TrainState

Squares = Mapping[str, tuple[float, float]]
"""The squares of each linear's gradient and of its noise, of what one rank has of them."""


class AccuracyCheck:
    """Judge the linears of a run at its logged steps. It reads, and changes nothing.

    Call `begin` before a logged step, `squares` on all ranks after it, and `warn_of` on the rank
    that writes.
    """

    def __init__(self, state: TrainState, *, measures: bool) -> None:
        """Prepare the check; `measures` says that FP8 health is `full`."""
        self._state, self._measures = state, measures
        self._streaks = Streaks()
        self._probe: NoiseProbe | None = None

    def begin(self) -> Callable[[], torch.Tensor] | None:
        """Measure the casts from now on, until `squares` or `abandon`.

        The result returns the squared norm of each gradient that this rank updates, which `squares`
        needs, and is None if casts are not measured.
        """
        if not self._measures or not isinstance(self._state.scaling, ScalingState):
            return None
        self._probe = NoiseProbe(self._state.scaling)
        self._probe.attach()
        return self._state.masters.squared_norms

    def abandon(self) -> None:
        """Forget what was measured since `begin`."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None

    def rewind(self) -> None:
        """Count logged steps from 0 again, because training goes back to a checkpoint."""
        self._streaks = Streaks()

    def squares(self, numbers: Sequence[float]) -> Squares:
        """Return what this rank measured; `numbers` are those for which `begin` asked."""
        if self._probe is None:
            return {}
        noise, self._probe = self._probe.detach(), None
        masters, mesh = self._state.masters, self._state.mesh
        gradients: dict[object, float] = defaultdict(float)
        for segment, square in zip(masters.segments, numbers, strict=True):
            group = segment.piece.group
            replicas, shards = mesh.replicas_of(group).data, masters.shards_of[group]
            # several ranks may have the same gradient
            gradients[segment.param] += square / (replicas.size // shards.size)
        found = {}
        for linear in linears_of(self._state.model):
            x, g = (noise.get(f"{linear.name}.{role}") for role in ("input", "grad_output"))
            is_cast = linear.quantizer is not None and "grad_weight" in linear.quantizer.fp8_gemms
            if is_cast:  # a rank that had no rows may still keep a part of their gradient
                noise_here = 0.0 if x is None or g is None else noise_of_gradient(x, g)
                found[linear.name] = gradients[linear.weight], noise_here
        return found

    def warn_of(
        self,
        step: int,
        tensors: Mapping[str, TensorHealth],
        parts: Iterable[Squares],
        all_fp8: Sequence[str],
        warn: Warn,
    ) -> None:
        """Warn of the linears that were beyond a limit for several logged steps.

        Args:
            step: The step that was logged.
            tensors: The FP8 health of all tensors.
            parts: What `squares` returned, of all ranks.
            all_fp8: The linears that are in FP8 now, of all ranks.
            warn: Shows a warning.
        """
        found = dict(self._beyond(tensors, parts))
        named = self._streaks.after(found)
        if not named:
            return
        first = f"{named[0]}: {found[named[0]]}"
        more = "" if len(named) == 1 else f"; and {plural(len(named) - 1, 'more linear')}"
        values = with_defaults(self._state.backend.spec.resolved)
        is_last = step >= values["trainer.max_steps"]
        warn(
            f"step {step}: FP8 costs accuracy: {first}{more}. The run can be continued from a "
            f"checkpoint of this step or before it with "
            f"{'a larger trainer.max_steps and ' if is_last else ''}"
            f'"{_schedule(values, step, named, all_fp8)}"'
        )

    def _beyond(
        self, tensors: Mapping[str, TensorHealth], parts: Iterable[Squares]
    ) -> Iterator[tuple[str, str]]:
        """Yield the linears that are beyond a limit, each with what is wrong."""
        sums: dict[str, list[float]] = {}
        for part in parts:
            for name, pair in part.items():
                old = sums.get(name, [0.0, 0.0])
                sums[name] = [a + b for a, b in zip(old, pair, strict=True)]
        scaling = self._state.scaling
        assert isinstance(scaling, ScalingState)
        for tensor, health in tensors.items():
            name, _, role = tensor.rpartition(".")
            traits = traits_of(scaling.recipe.precision_of(name))
            if traits is not None and traits.has_history:
                fmt = (scaling.backward if role == "grad_output" else scaling.forward).fmt
                info = torch.finfo(fmt.dtype)
                smallest = info.smallest_normal * info.eps
                if (why := beyond_range(role, health, fmt.max, smallest)) is not None:
                    yield name, why
        for name, (gradient, noise) in sums.items():
            if (why := beyond_noise(gradient, noise)) is not None:
                yield name, why


def _schedule(
    values: dict[str, Any], step: int, named: Sequence[str], all_fp8: Sequence[str]
) -> str:
    """Return the schedule with the modules `named` in higher precision from `step` on."""
    is_bf16 = values["trainer.precision"] == BF16 or names_bf16(values[SCHEDULE])
    entry = {
        "from": step,
        "modules": patterns_of(named, all_fp8),
        "recipe": BF16 if is_bf16 else HIGH_PRECISION,
    }
    valid = partial(is_valid, values=values)
    return with_change(values[SCHEDULE], int(values["trainer.max_steps"]), entry, valid)


def patterns_of(named: Sequence[str], all_fp8: Sequence[str]) -> list[str] | None:
    """Return patterns that name some of the linears in FP8 and no others; None: they are all."""
    left = set(all_fp8) - set(named)
    if not left:
        return None
    kinds = {name: "*." + name.split(".", 2)[-1] for name in (*named, *left)}
    mixed = {kinds[name] for name in left}
    return list(dict.fromkeys(name if kinds[name] in mixed else kinds[name] for name in named))
