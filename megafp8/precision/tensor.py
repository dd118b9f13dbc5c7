"""An FP8 tensor: bytes, format, and its own copy of the scale that undoes the quantization."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.cast import decode, quantize, quantize_and_sum
from megafp8.precision.formats import Fp8Format


@dataclass
class Fp8Tensor:
    """value = payload * dequant_scale.

    `dequant_scale` (0-d, FP32) is this tensor's own: the scale table moves on between a
    microbatch's forward and its backward. `grid`, where kept, is the payload in BF16 for GEMMs
    that FP8 hardware does not do; it is dropped before the tensor is saved for backward.
    """

    payload: torch.Tensor
    dequant_scale: torch.Tensor
    fmt: Fp8Format
    grid: torch.Tensor | None = None

    @classmethod
    def quantize(
        cls,
        x: torch.Tensor,
        quant_scale: torch.Tensor,
        fmt: Fp8Format,
        *,
        amax: torch.Tensor | None = None,
        with_grid: bool = True,
    ) -> Fp8Tensor:
        """Quantize `x`; `amax` as in `cast.quantize`."""
        payload, grid = quantize(x, quant_scale, fmt, amax=amax, with_grid=with_grid)
        return cls(payload, quant_scale.reciprocal(), fmt, grid)

    @classmethod
    def quantize_and_sum(
        cls,
        x_MN: torch.Tensor,
        quant_scale: torch.Tensor,
        fmt: Fp8Format,
        *,
        amax: torch.Tensor | None = None,
    ) -> tuple[Fp8Tensor, torch.Tensor]:
        """A matrix quantized, and the FP32 sum of each of its columns, [N]."""
        (payload, grid), column_sum = quantize_and_sum(
            x_MN, quant_scale, fmt, amax=amax, with_grid=True
        )
        return cls(payload, quant_scale.reciprocal(), fmt, grid), column_sum

    def without_grid(self) -> Fp8Tensor:
        return Fp8Tensor(self.payload, self.dequant_scale, self.fmt)

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The payload's numbers (not yet multiplied by `dequant_scale`) in BF16 or FP32."""
        grid = self.grid if self.grid is not None else decode(self.payload, self.fmt)
        return grid.to(dtype)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, rounded once to `dtype`."""
        return (self.numbers(torch.float32) * self.dequant_scale).to(dtype)
