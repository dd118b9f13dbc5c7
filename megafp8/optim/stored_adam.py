"""Run Adam on master weights, moments and gradients of which some are stored below FP32 (FP8-LM).

`optim/scaled_adam.py` computes the update of one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from megafp8.fp8.scaled import Dither
from megafp8.models.init import key_of
from megafp8.optim.adamw import STATES
from megafp8.optim.partitions import Segment
from megafp8.optim.protocol import Optimizer, Step
from megafp8.optim.scaled_adam import (
    Constants,
    Dithers,
    Tensors,
    fresh_amaxes,
    kernel_name,
    update_all,
    update_part,
    updates_by_triton,
)

Asked = tuple[Segment, Tensors, Constants]


class StoredAdam(Optimizer):
    """Update stored tensors by the rule of `AdamW`; the moments have the formats of `spec.storage`.

    To multiply the scales of gradients clips them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_l2 = self.spec.name == "adam"
        self._stochastic = self.spec.storage.stochastic_rounding

    def describe(self) -> str:
        masters = self.masters
        return kernel_name(
            masters.device,
            self._tensors().values(),
            is_l2=self._is_l2,
            stochastic=self._stochastic,
            in_parts=masters.row_of is not None,
        )

    @cached_property
    def skips_on_device(self) -> bool:  # type: ignore[override]
        """Whether Triton's kernels update all of it."""
        if self.rows and self.masters.row_of is not None:
            return False
        return all(
            updates_by_triton(tensors, is_l2=self._is_l2, stochastic=self._stochastic)
            for tensors in self._tensors().values()
        )

    def _tensors(self) -> dict[int, Tensors]:
        masters = self.masters
        return {
            row: Tensors(masters.stored[row], grad=masters.stored_grads[row], **states)
            for row, states in self.states.items()
        }

    def update(self, step: Step) -> None:
        masters, segments = self.masters, self.masters.segments
        asked = [
            (segments[row], tensors, self._constants(segments[row].param, step))
            for row, tensors in self._tensors().items()
        ]
        if masters.row_of is not None:
            self._update_parts(asked, step.number, masters.row_of)
        elif asked:
            whole = [(tensors, c, self._dithers(of, step.number)) for of, tensors, c in asked]
            update_all(whole, step.skips)

    def _update_parts(
        self, asked: Sequence[Asked], step: int, row_of: Mapping[nn.Parameter, int]
    ) -> None:
        """Update parts of tensors, with the scales of the whole ones, which ranks agree on."""
        masters = self.masters
        amaxes = torch.zeros(len(row_of), self.traits.num_amaxes, device=masters.device)
        for segment, tensors, constants in asked:
            fresh_amaxes(tensors, constants, amaxes[row_of[segment.param]])
        masters.agree(amaxes)
        for segment, tensors, constants in asked:
            dithers = self._dithers(segment, step)
            update_part(tensors, constants, amaxes[row_of[segment.param]], dithers)

    def _constants(self, param: nn.Parameter, step: Step) -> Constants:
        spec = self.spec
        decay = spec.weight_decay if spec.decays(param.dim()) else 0.0
        return Constants(step.lr, spec.betas, spec.eps, decay, self._is_l2, step.num_updates)

    def _dithers(self, segment: Segment, step: int) -> Dithers:
        """Return the random numbers that round a segment: of its weight and its moments."""
        if not self._stochastic:
            return None, None, None
        piece = segment.piece
        name: tuple[object, ...] = (piece.name,)
        if any(piece.offset):
            name += (piece.offset,)
        if segment.begin:  # a part has random numbers of its own
            name += ("from", segment.begin)
        keys = (key_of("round", self.seed, step, *name, what) for what in ("model", *STATES))
        param_key, first, second = (Dither(key) for key in keys)
        return param_key, first, second
