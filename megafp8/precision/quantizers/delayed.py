"""Delayed scaling of one tensor: the scale stands in the table before the tensor is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.quantizers.base import Fp8Operands, Need, both
from megafp8.precision.scaling import ScalingState, Slot
from megafp8.precision.tensor import Fp8Tensor


@dataclass(frozen=True)
class DelayedQuantizer:
    """Casts with the table's scale; the amax joins the table's, for later microbatches."""

    state: ScalingState
    slot: Slot

    def quantize(self, x_MN: torch.Tensor, need: Need) -> Fp8Operands:
        return both(
            Fp8Tensor.quantize(x_MN, self.slot.quant_scale, self.slot.fmt, amax=self._amax), need
        )

    def quantize_and_sum(self, x_MN: torch.Tensor, need: Need) -> tuple[Fp8Operands, torch.Tensor]:
        x_fp8, total_N = Fp8Tensor.quantize_and_sum(
            x_MN, self.slot.quant_scale, self.slot.fmt, amax=self._amax
        )
        return both(x_fp8, need), total_N

    @property
    def _amax(self) -> torch.Tensor | None:
        return self.slot.amax if self.state.recording else None
