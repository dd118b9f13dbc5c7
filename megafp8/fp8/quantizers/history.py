"""Quantize with a scale that is in a table before the tensor is computed (`has_history`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.fused import CastInto, Make, Produced
from megafp8.fp8.quantizers.base import Need, Operands, SavedForm, TensorQuantizer
from megafp8.fp8.quantizers.whole import cast_whole, saved_form, tensors_of_cast
from megafp8.fp8.scaling import ScalingState, Slot


@dataclass(frozen=True)
class HistoryQuantizer(TensorQuantizer):
    """Cast with the table's scale, and add the amax to the table for later microbatches."""

    state: ScalingState
    slot: Slot

    def quantize(
        self, x_MN: torch.Tensor, need: Need, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        """Cast with the table's scale and stage the amax."""
        slot, engine = self.slot, self.state.engine
        return cast_whole(
            x_MN,
            slot.quant_scale,
            slot.fmt,
            need,
            engine,
            amax=self._amax,
            dequant_scale=slot.dequant_scale if engine.uses_triton else None,
            with_sum=with_sum,
        )

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """Return the table's scale and format, and record `amax` for later steps."""
        if self.state.recording:
            self.slot.amax.copy_(torch.maximum(self.slot.amax, amax))
        return self.slot.quant_scale, self.slot.fmt

    @property
    def can_fuse(self) -> bool:
        """Whether Triton kernels run.

        The scale is known beforehand, so a kernel can cast its own result.
        """
        return self.state.engine.uses_triton

    def produce(
        self, make: Make, need: Need, *, with_plain: bool, with_sum: bool = False
    ) -> tuple[Operands, Produced]:
        """Let `make` compute the tensor, cast it with the table's scale and stage its amax."""
        slot, orients = self.slot, self.state.engine.orients("tensor")
        into = CastInto(
            slot.quant_scale,
            slot.fmt,
            self._amax,
            with_rows=need.last or not orients,
            with_columns=need.first and orients,
            with_plain=with_plain,
            with_sums=with_sum,
        )
        made = make(into)
        last, first = tensors_of_cast(
            made.payload, made.payload_t, slot.quant_scale, slot.fmt, need, slot.dequant_scale
        )
        assert last is not None, "the product along the last dim reads the tensor in FP8"
        return Operands(last, last if first is None else first), made

    def saved_form(self) -> SavedForm:
        """Return FP8 with one scale."""
        return saved_form(self.slot.fmt, self.state.engine)

    @property
    def _amax(self) -> torch.Tensor | None:
        return self.slot.amax if self.state.recording else None
