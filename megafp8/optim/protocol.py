"""Give each parameter to one of several optimizers, and update all of them in a step.

Plan and checks read what they must know of an optimizer without torch from its `OptimizerTraits`
(`megafp8/specs/optim.py`), which also make it. Nothing outside of this package asks which one runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.optim.clipping import clip, coefficient_on_device
from megafp8.optim.masters import Masters
from megafp8.optim.partitions import Segment
from megafp8.optim.schedules import learning_rate
from megafp8.parallel.collectives import Axis
from megafp8.specs import OptimSpec
from megafp8.specs.optim import OptimizerTraits

States = Mapping[str, ScaledTensor]
"""The states of a segment by their names, each shaped as its master weight."""


class Step(NamedTuple):
    """Hold what an update needs beside gradients, which are divided and clipped already.

    Where `skips` (0-d FP32, on the device) is not 0, nothing is to be updated. An optimizer that
    `divides` divides the gradients by `divisor` besides, which is 0-d FP32. Both are None unless
    all optimizers `skip_on_device`.
    """

    number: int  # of the step, counted from 1
    lr: float
    num_updates: int  # with this one; skipped steps do not count
    skips: torch.Tensor | None = None
    divisor: torch.Tensor | None = None


@dataclass(eq=False)
class Optimizer(ABC):
    """Update what a rank has of the parameters that one optimizer owns.

    params            these parameters, also those that other ranks update
    rows              the numbers of their segments in the lists of `masters`
    tp                the ranks with the other parts of tensors
    seed              of stochastic rounding
    skips_on_device   whether it reads `Step.skips`, so that the host need not know of a skip
    divides           whether it divides the gradients of a step by `Step.divisor` itself
    """

    traits: OptimizerTraits
    spec: OptimSpec
    masters: Masters
    params: Sequence[nn.Parameter]
    rows: Sequence[int]
    tp: Axis
    seed: int
    skips_on_device = divides = False

    def __post_init__(self) -> None:
        """Make states of zeros, in the formats of the traits."""
        masters, self._states = self.masters, dict[int, States]()
        for row in self.rows:
            kind, shape = masters.kind_of(masters.segments[row].param), masters.masters[row].shape
            self._states[row] = {
                name: ScaledTensor.zeros(shape, STORAGE_FORMATS[fmt], masters.device)
                for name, fmt in self.traits.states(self.spec, kind).items()
            }

    @property
    def states(self) -> Mapping[int, States]:
        """Return the states of each row; who loads them writes into their tensors."""
        return self._states

    @abstractmethod
    def describe(self) -> str:
        """Return what computes the update, for the log."""

    @abstractmethod
    def update(self, step: Step) -> None:
        """Update masters and states by the gradients; all ranks call it, also those without rows.

        Gradients are read from `masters`: FSDP's are other tensors in each step.
        """

    def set_num_updates(self, count: int) -> None:  # noqa: B027  # most get it with each step
        """Take over how many updates were applied, when training continues from a checkpoint."""


class Optimizers:
    """Update all parameters, each by the first optimizer of `spec` that owns it.

    num_updates   how many updates were applied; skipped steps do not count
    """

    def __init__(
        self, masters: Masters, spec: OptimSpec, seed: int = 0, tp: Axis | None = None
    ) -> None:
        """Make the optimizers that own a parameter.

        `seed` is that of stochastic rounding; `tp` has the ranks with the other parts of tensors.
        """
        self.masters, self.spec, self.num_updates = masters, spec, 0
        kinds = {param: masters.kind_of(param) for param in masters.params}
        self._names = sorted({name for kind in kinds.values() for name in spec.states_of(kind)})
        self.optimizers: list[Optimizer] = []
        for traits in spec.named.optimizers:
            params = [param for param, kind in kinds.items() if spec.owner(kind) is traits]
            owned = frozenset(params)
            rows = [row for row, s in enumerate(masters.segments) if s.param in owned]
            if params:
                made = traits.make(spec, masters, params, rows, tp or Axis("tp"), seed)
                self.optimizers.append(made)

    def describe(self) -> str:
        """Return what computes the updates, for the log."""
        text = self.optimizers[0].describe()
        for before, after in pairwise(self.optimizers):
            name = after.traits.name
            if name != before.traits.name:
                text += f"; {name} for the rest by {after.describe()}"
            elif after.rows:
                text += f"; where all is FP32, {after.describe()}"
        return text

    @property
    def skip_on_device(self) -> bool:
        """Whether the optimizers can skip an update that the device found not finite."""
        by_norm = self.spec.clip_algorithm == "norm"
        return by_norm and all(optimizer.skips_on_device for optimizer in self.optimizers)

    @property
    def decides_on_device(self) -> bool:
        """Whether the kernels themselves clip and, after a step that is not finite, update nothing.

        The host then need not know the norm before the update, and where the kernel divides, no
        pass over the gradients is spent on clipping. It is so on GPUs where gradients are clipped
        by norm and all optimizers can skip; on CPUs the bits stay those of `clip`.
        """
        return self.masters.device.type == "cuda" and self.skip_on_device

    def update(self, step: int, norm: float, *, divisor: float) -> None:
        """Divide the gradients in `masters` by `divisor`, clip them, and apply them.

        `norm` is the norm of the gradients after the division; `step` is counted from 1.
        """
        clip(self.masters.own_grads, norm, self.spec, divisor=divisor)
        self.step(step)

    @torch.no_grad()
    def update_if_finite(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor, *, divisor: torch.Tensor
    ) -> None:
        """Do what `update` does, unless the loss or the norm is not finite, without the host.

        The arguments are 0-d FP64 tensors on the device; `divisor` is what the gradients' sums are
        divided by, tokens and loss scale. If the step is skipped, masters and states stay as they
        are; the masters are written into the weights again, since FP8 scales may have moved.
        Gradients may be clipped all the same, and the caller counts one update less
        (`num_updates`). It is called only with `decides_on_device`.
        """
        skips = (loss.isfinite() & norm.isfinite()).logical_not().float()
        factor = coefficient_on_device(norm, self.spec)
        if all(optimizer.divides for optimizer in self.optimizers):
            self.step(step, skips, (divisor / factor).float())
            return
        factor = (factor / divisor).float()  # one for all gradients, as `clip` has it
        for flat_grad in self.masters.own_grads:
            flat_grad.mul_(factor)
        self.step(step, skips)

    @torch.no_grad()
    def step(
        self, step: int, skips: torch.Tensor | None = None, divisor: torch.Tensor | None = None
    ) -> None:
        """Apply the gradients in `masters` as optimizer step `step`, counted from 1.

        The updated master weights are then rounded into the weights that the model computes with.
        `skips` and `divisor` are those of `Step`.
        """
        self.num_updates += 1
        now = Step(step, learning_rate(self.spec, step), self.num_updates, skips, divisor)
        for optimizer in reversed(self.optimizers):
            optimizer.update(now)
        self.masters.write_back()

    def set_num_updates(self, count: int) -> None:
        """Set the number of updates to `count`, when training continues from a checkpoint."""
        self.num_updates = count
        for optimizer in self.optimizers:
            optimizer.set_num_updates(count)

    def states_of_rows(self) -> dict[int, States]:
        """Return the states of each segment, by its number."""
        return dict(sorted((row, s) for o in self.optimizers for row, s in o.states.items()))

    def states(self) -> Iterator[tuple[str, list[tuple[Segment, ScaledTensor]]]]:
        """Yield the name of each kind of state, and what each segment that has one has of it.

        All ranks that share masters yield the same names.
        """
        of_rows, segments = self.states_of_rows(), self.masters.segments
        for name in self._names:
            yield name, [(segments[row], s[name]) for row, s in of_rows.items() if name in s]

    def all_state_tensors(self) -> list[torch.Tensor]:
        """Return the payloads of the states of all names."""
        return [state.payload for _, states in self.states() for _, state in states]
