"""Delayed scaling of one tensor: the scale stands in the table before the tensor is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.formats import Fp8Format
from megafp8.precision.producers import CastInto, Produced, Producer
from megafp8.precision.quantizers.base import Fp8Operands, Need, SavedForm
from megafp8.precision.quantizers.whole import (
    cast_operands,
    cast_whole,
    cast_whole_and_sum,
    saved_form,
)
from megafp8.precision.scaling import ScalingState, Slot


@dataclass(frozen=True)
class DelayedQuantizer:
    """Casts with the table's scale; the amax joins the table's, for later microbatches."""

    state: ScalingState
    slot: Slot

    def quantize(self, x_MN: torch.Tensor, need: Need) -> Fp8Operands:
        slot, engine = self.slot, self.state.engine
        return cast_whole(x_MN, slot.quant_scale, slot.fmt, need, engine, amax=self._amax)

    def quantize_and_sum(self, x_MN: torch.Tensor, need: Need) -> tuple[Fp8Operands, torch.Tensor]:
        slot, engine = self.slot, self.state.engine
        return cast_whole_and_sum(x_MN, slot.quant_scale, slot.fmt, need, engine, amax=self._amax)

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """What to cast a weight of this amax with, whose parts lie on several ranks; recorded."""
        if self.state.recording:
            self.slot.amax.copy_(torch.maximum(self.slot.amax, amax))
        return self.slot.quant_scale, self.slot.fmt

    def produce(
        self, producer: Producer, x_MX: torch.Tensor, need: Need, *, with_plain: bool
    ) -> tuple[Fp8Operands, Produced]:
        """The tensor quantized as `producer` makes it of `x_MX`; only where Triton runs."""
        slot, orients = self.slot, self.state.engine.orients("tensor")
        into = CastInto(
            slot.quant_scale,
            slot.fmt,
            self._amax,
            with_rows=need.last or not orients,
            with_columns=need.first and orients,
            with_plain=with_plain,
        )
        made = producer.cast(x_MX, into)
        return cast_operands(made.payload, made.payload_t, slot.quant_scale, slot.fmt, need), made

    def saved_form(self) -> SavedForm:
        return saved_form(self.slot.fmt, self.state.engine)

    @property
    def _amax(self) -> torch.Tensor | None:
        return self.slot.amax if self.state.recording else None
