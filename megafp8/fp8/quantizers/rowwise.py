"""Quantize with a scale per row, or column, that a product sums over (torchao's `rowwise`).

The two products read two quantizations, both made of the high-precision tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.cast import amax_along, amax_of, quantize_scaled
from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.quantizers.base import (
    Need,
    Operands,
    SavedForm,
    TensorQuantizer,
    column_sum,
    operands_of,
)
from megafp8.fp8.quantizers.scales import scale_of_amax_torchao
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.tensor import Fp8Tensor
from megafp8.specs.traits import ROW


@dataclass(frozen=True)
class RowwiseQuantizer(TensorQuantizer):
    """Quantize with one scale for each row and, separately, one for each column.

    `tensorwise_first` uses one scale for the whole tensor where the sum runs along the first dim.
    The weight of `rowwise_with_gw_hp` needs it in the product for the input gradient.
    """

    state: ScalingState
    fmt: Fp8Format
    power_2: bool
    tensorwise_first: bool = False

    def quantize(
        self, x_MN: torch.Tensor, need: Need, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        """Quantize each row (or column) with the scale of its own amax."""
        if self.state.engine.uses_triton:
            last, first = self._by_triton(x_MN.contiguous(), need)
        else:
            last = self._along(x_MN, dim=1) if need.last else None
            first = self._along(x_MN, dim=0) if need.first else None
        return operands_of(x_MN, last, first), column_sum(x_MN) if with_sum else None

    def saved_form(self) -> SavedForm:
        """Return FP8 with one scale for each column."""
        return SavedForm(ROW, self.fmt.dtype, is_transposed=self.state.engine.uses_triton)

    def _along(self, x_MN: torch.Tensor, dim: int) -> Fp8Tensor:
        """Quantize with one scale for all elements along `dim`."""
        is_whole = dim == 0 and self.tensorwise_first
        amax = amax_of(x_MN).view(1, 1) if is_whole else amax_along(x_MN, dim)
        quant_scale = scale_of_amax_torchao(amax, self.fmt, power_2=self.power_2)
        payload = quantize_scaled(x_MN.float() * quant_scale, self.fmt)
        return self._scaled(payload, quant_scale.reciprocal(), dim)

    def _scaled(self, payload: torch.Tensor, dequant_scale: torch.Tensor, dim: int) -> Fp8Tensor:
        rows, cols = payload.shape
        block = (1, cols) if dim == 1 else (rows, 1)
        if is_whole := dim == 0 and self.tensorwise_first:
            block = (rows, cols)
        return Fp8Tensor(
            payload,
            dequant_scale,
            self.fmt,
            block=block,
            is_power_2=self.power_2,
            layout="tensor" if is_whole else "row",
        )

    def _by_triton(
        self, x_MN: torch.Tensor, need: Need
    ) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
        """Return the same bits, with the second quantization laid out as its product reads it."""
        from megafp8.fp8.kernels.triton_cast import cast
        from megafp8.fp8.kernels.triton_current import (
            amax_of_matrix,
            cast_rowwise,
            scales_of,
        )

        by_columns = need.first and not self.tensorwise_first
        rows, columns = cast_rowwise(
            x_MN, self.fmt, power_2=self.power_2, with_rows=need.last, with_columns=by_columns
        )
        first = None
        if columns is not None:
            first = self._scaled(columns.payload.t(), columns.dequant_scale.t(), dim=0)
        elif need.first:
            quant_scale, dequant_scale = scales_of(
                amax_of_matrix(x_MN), self.fmt, power_2=self.power_2, torchao=True
            )
            payload_t = cast(
                x_MN, quant_scale, self.fmt, with_rows=False, with_columns=True
            ).payload_t
            assert payload_t is not None
            first = self._scaled(payload_t.t(), dequant_scale.view(1, 1), dim=0)
        return None if rows is None else self._scaled(*rows, dim=1), first
