"""The rules of built-in recipes, written again as a user would: functions of a matrix."""

from __future__ import annotations

import torch

from fp8_numerics.cast import times_scale
from fp8_numerics.scales import scale_of_amax, scale_of_amax_torchao
from megafp8.fp8 import ROW, TENSOR, Cast, Recipe, Scaled, Traits, alike, blocks


def _amax(x_MK: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    tiles = x_MK.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    amax = tiles.abs().amax((1, 3)).float()
    return amax.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _scaled(x_MK: torch.Tensor, quant: torch.Tensor, cast: Cast, block: tuple[int, int]) -> Scaled:
    numbers = times_scale(x_MK.float(), quant, block).clamp(-cast.fmt.max, cast.fmt.max)
    return Scaled(numbers.to(cast.fmt.dtype), quant.reciprocal())


class Tensorwise(Recipe):
    """One scale for a tensor, from its amax over all ranks."""

    traits = Traits(
        input=alike(TENSOR, serves_both=True),
        weight=alike(TENSOR, serves_both=True),
        grad_output=alike(TENSOR, serves_both=True),
        backward_formats=("e5m2", "e4m3"),
        agrees=True,
        shares_weight=True,
        power_2="off",
        pads=True,
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize with the scale of the tensor's amax."""
        amax = _amax(x_MK, (x_MK.shape[0], x_MK.shape[1]))[0, 0]
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        quant = self.scale_of_amax(amax, cast)
        numbers = (x_MK.float() * quant).clamp(-cast.fmt.max, cast.fmt.max)
        return Scaled(numbers.to(cast.fmt.dtype), quant.reciprocal())

    def scale_of_amax(self, amax: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return Transformer Engine's scale."""
        return scale_of_amax(amax, cast.fmt, power_2=cast.power_2)


class Rowwise(Recipe):
    """One scale for each row along the sum."""

    traits = Traits(
        input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), power_2="on", pads=True
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize each row with the scale of its amax."""
        block = (1, x_MK.shape[1])
        quant = scale_of_amax_torchao(_amax(x_MK, block), cast.fmt, power_2=cast.power_2)
        return _scaled(x_MK, quant, cast, block)


class Blockwise(Recipe):
    """One scale for 128 elements along the sum, and for squares of 128 of a weight."""

    traits = Traits(
        input=alike(blocks(128)),
        weight=alike(blocks(128, 128), serves_both=True),
        grad_output=alike(blocks(128)),
        power_2="on",
        multiple=128,
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize each block with the scale of its amax."""
        block = (cast.scales.across or 1, cast.scales.along or 1)
        quant = scale_of_amax(_amax(x_MK, block), cast.fmt, power_2=cast.power_2)
        return _scaled(x_MK, quant, cast, block)
