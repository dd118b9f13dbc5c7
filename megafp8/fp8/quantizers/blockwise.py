"""Quantize with a scale per block: 1 x 128 elements along a product's sum, 128 x 128 of a weight.

The rule is Transformer Engine's `Float8BlockScaling` (the recipe of DeepSeek-V3, arXiv 2412.19437,
section 3.3). Blocks along the two dims are quantized separately, from the high-precision tensor; a
weight's blocks serve both products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.cast import quantize_scaled
from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.quantizers.base import (
    Need,
    Operands,
    SavedForm,
    TensorQuantizer,
    column_sum,
    operands_of,
)
from megafp8.fp8.quantizers.scales import amax_of_blocks, scale_of_amax
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.tensor import Fp8Tensor, times_scale
from megafp8.specs.traits import BLOCK, blocks


@dataclass(frozen=True)
class BlockwiseQuantizer(TensorQuantizer):
    """Quantize with one scale per block; `is_square` uses the square blocks of a weight."""

    state: ScalingState
    fmt: Fp8Format
    power_2: bool
    is_square: bool

    def quantize(
        self, x_MN: torch.Tensor, need: Need, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        """Quantize each block with the scale of its own amax."""
        if self.state.engine.uses_triton:
            last, first = self._by_triton(x_MN.contiguous(), need)
        elif self.is_square:
            square = self._blocks(x_MN, (BLOCK, BLOCK))
            last, first = square if need.last else None, square if need.first else None
        else:
            last = self._blocks(x_MN, (1, BLOCK)) if need.last else None
            first = self._blocks(x_MN, (BLOCK, 1)) if need.first else None
        return operands_of(x_MN, last, first), column_sum(x_MN) if with_sum else None

    def saved_form(self) -> SavedForm:
        """Return FP8 with one scale for each 128 elements of a column."""
        return SavedForm(blocks(BLOCK), self.fmt.dtype, is_transposed=self.state.engine.uses_triton)

    def _blocks(self, x_MN: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
        amax = amax_of_blocks(x_MN, block)
        quant_scale = scale_of_amax(amax, self.fmt, power_2=self.power_2)
        payload = quantize_scaled(times_scale(x_MN.float(), quant_scale, block), self.fmt)
        return self._scaled(payload, quant_scale.reciprocal(), block)

    def _scaled(
        self, payload: torch.Tensor, dequant_scale: torch.Tensor, block: tuple[int, int]
    ) -> Fp8Tensor:
        return Fp8Tensor(
            payload,
            dequant_scale,
            self.fmt,
            block=block,
            is_power_2=self.power_2,
            layout="square" if self.is_square else "block",
        )

    def _by_triton(
        self, x_MN: torch.Tensor, need: Need
    ) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
        """Return the same bits from one read, each orientation laid out as its product reads it."""
        from megafp8.fp8.kernels.triton_current import cast_blocks, cast_square_blocks

        if self.is_square and not self.state.engine.orients("square"):
            rows, _ = cast_square_blocks(x_MN, self.fmt, power_2=self.power_2)
            assert rows is not None
            square = self._scaled(*rows, (BLOCK, BLOCK))
            return square if need.last else None, square if need.first else None
        cast = cast_square_blocks if self.is_square else cast_blocks
        rows, columns = cast(
            x_MN,
            self.fmt,
            power_2=self.power_2,
            with_rows=need.last,
            with_columns=need.first,
        )
        last_block, first_block = (
            ((BLOCK, BLOCK),) * 2 if self.is_square else ((1, BLOCK), (BLOCK, 1))
        )
        return (
            None if rows is None else self._scaled(*rows, last_block),
            None
            if columns is None
            else self._scaled(columns.payload.t(), columns.dequant_scale.t(), first_block),
        )
