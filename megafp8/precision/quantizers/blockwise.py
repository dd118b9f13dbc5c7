"""Scales for blocks: 1 x 128 along a product's sum, 128 x 128 of a weight.

Transformer Engine's `Float8BlockScaling` (the recipe of DeepSeek-V3, arXiv 2412.19437, section
3.3). Blocks along the two dims are quantized apart from each other, from the high-precision tensor;
a weight's blocks serve both products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megafp8.precision.cast import quantize_scaled
from megafp8.precision.formats import Fp8Format
from megafp8.precision.quantizers.base import Fp8Operands, Need, both, column_sum
from megafp8.precision.quantizers.scales import finite_or_inf, scale_of_amax
from megafp8.precision.tensor import Fp8Tensor, spread
from megafp8.specs.precision import BLOCK


@dataclass(frozen=True)
class BlockwiseQuantizer:
    """`is_square`: a weight."""

    fmt: Fp8Format
    power_2: bool
    is_square: bool

    def quantize(self, x_MN: torch.Tensor, need: Need) -> Fp8Operands:
        if self.is_square:
            return both(self._blocks(x_MN, (BLOCK, BLOCK)), need)
        return Fp8Operands(
            self._blocks(x_MN, (1, BLOCK)) if need.last else None,
            self._blocks(x_MN, (BLOCK, 1)) if need.first else None,
        )

    def quantize_and_sum(self, x_MN: torch.Tensor, need: Need) -> tuple[Fp8Operands, torch.Tensor]:
        return self.quantize(x_MN, need), column_sum(x_MN)

    def _blocks(self, x_MN: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
        amax = amax_of_blocks(x_MN, block)
        quant_scale = scale_of_amax(amax, self.fmt, power_2=self.power_2)
        payload = quantize_scaled(x_MN, spread(quant_scale, x_MN.shape, block), self.fmt)
        return Fp8Tensor(
            payload, quant_scale.reciprocal(), self.fmt, block=block, is_power_2=self.power_2
        )


def amax_of_blocks(x_MN: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """FP32 [blocks along M, blocks along N]; +inf for a block with a NaN."""
    rows, cols = x_MN.shape
    padded = F.pad(x_MN, (0, -cols % block[1], 0, -rows % block[0]))
    tiles = padded.view(
        padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1]
    )
    return finite_or_inf(tiles.abs().amax(dim=(1, 3)).float())
