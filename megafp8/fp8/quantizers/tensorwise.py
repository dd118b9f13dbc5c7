"""Quantize with the scale of a tensor's own amax (Transformer Engine's `Float8CurrentScaling`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.cast import amax_of
from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.quantizers.base import Need, Operands, SavedForm, TensorQuantizer
from megafp8.fp8.quantizers.scales import scale_of_amax
from megafp8.fp8.quantizers.whole import cast_whole, saved_form
from megafp8.fp8.scaling import ReduceMax, ScalingState


@dataclass(frozen=True)
class TensorwiseQuantizer(TensorQuantizer):
    """Quantize with one scale for the whole tensor, also where ranks hold parts of it.

    `reduce_max` takes the maximum over those ranks in place; None says that this rank has all of
    it.
    """

    state: ScalingState
    fmt: Fp8Format
    power_2: bool
    reduce_max: ReduceMax | None

    def quantize(
        self, x_MN: torch.Tensor, need: Need, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        """Compute the amax and the scale, then cast."""
        engine = self.state.engine
        x_MN = x_MN.contiguous() if engine.uses_triton else x_MN
        scale, dequant_scale = self._scales(self._amax_of(x_MN))
        return cast_whole(
            x_MN, scale, self.fmt, need, engine, dequant_scale=dequant_scale, with_sum=with_sum
        )

    def saved_form(self) -> SavedForm:
        """Return FP8 with one scale."""
        return saved_form(self.fmt, self.state.engine)

    def scale_of(self, x_MN: torch.Tensor) -> torch.Tensor:
        """Return the 0-d FP32 scale for `x_MN`, this rank's part of the tensor."""
        return self.store_scale(self._amax_of(x_MN))[0]

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """Return the scale and format for a tensor whose amax on this rank is `amax`."""
        return self._scales(amax)[0], self.fmt

    def _amax_of(self, x_MN: torch.Tensor) -> torch.Tensor:
        """Return the amax of this rank's part, by one kernel where Triton runs."""
        if not self.state.engine.uses_triton:
            return amax_of(x_MN)
        from megafp8.fp8.kernels.triton_current import amax_of_matrix

        return amax_of_matrix(x_MN.contiguous())

    def _scales(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (quant_scale, dequant_scale); the second one only where a kernel made it."""
        if self.reduce_max is not None:
            self.reduce_max(amax)
        if not self.state.engine.uses_triton:
            return scale_of_amax(amax, self.fmt, power_2=self.power_2), None
        from megafp8.fp8.kernels.triton_current import scales_of

        return scales_of(amax, self.fmt, power_2=self.power_2)
