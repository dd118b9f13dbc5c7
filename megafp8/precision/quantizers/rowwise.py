"""One scale for each row, or column, that a product sums over (torchao's `rowwise`).

The two products read two quantizations, both made of the high-precision tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.cast import amax_along, quantize_scaled
from megafp8.precision.formats import Fp8Format
from megafp8.precision.quantizers.base import Fp8Operands, Need, column_sum
from megafp8.precision.quantizers.scales import scale_of_amax_torchao
from megafp8.precision.tensor import Fp8Tensor


@dataclass(frozen=True)
class RowwiseQuantizer:
    """`tensorwise_first`: one scale for the whole tensor where the sum runs along the first dim.

    That is the weight of `rowwise_with_gw_hp` in the product for the input gradient.
    """

    fmt: Fp8Format
    power_2: bool
    tensorwise_first: bool = False

    def quantize(self, x_MN: torch.Tensor, need: Need) -> Fp8Operands:
        return Fp8Operands(
            self._along(x_MN, dim=1) if need.last else None,
            self._along(x_MN, dim=0) if need.first else None,
        )

    def quantize_and_sum(self, x_MN: torch.Tensor, need: Need) -> tuple[Fp8Operands, torch.Tensor]:
        return self.quantize(x_MN, need), column_sum(x_MN)

    def _along(self, x_MN: torch.Tensor, dim: int) -> Fp8Tensor:
        """Quantized with one scale for all elements along `dim`."""
        amax = amax_along(x_MN, dim)
        block = (1, x_MN.shape[1]) if dim == 1 else (x_MN.shape[0], 1)
        if dim == 0 and self.tensorwise_first:
            amax, block = amax.amax().view(1, 1), (x_MN.shape[0], x_MN.shape[1])
        quant_scale = scale_of_amax_torchao(amax, self.fmt, power_2=self.power_2)
        payload = quantize_scaled(x_MN, quant_scale, self.fmt)
        return Fp8Tensor(
            payload, quant_scale.reciprocal(), self.fmt, block=block, is_power_2=self.power_2
        )
