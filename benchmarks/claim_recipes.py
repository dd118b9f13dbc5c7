"""Provide the recipes of published claims that are not built in, for `claims.yaml`."""

# M rows across a product's sum   K elements along it

from __future__ import annotations

from dataclasses import replace

import torch

from fp8_numerics.nvfp4 import LARGEST_E2M1, rotated
from megafp8.fp8 import Cast, Scaled, alike, blocks
from megafp8.fp8.recipes.blockwise import Blockwise
from megafp8.fp8.recipes.mxfp8 import Mxfp8
from megafp8.fp8.recipes.nvfp4 import Nvfp4
from te_cpu.four_over_six import Choice, quantize_blocks

BETTER_OF_TWO = Choice(largest_scale=256.0, is_squared=True)
"""The choice of arXiv 2512.02010: by squared errors, beside scales of at most 256."""


class Mxfp8WithE5m2Gradients(Mxfp8):
    """MXFP8 whose output gradients have two bits after their first one, and a wider range."""

    traits = replace(Mxfp8.traits, backward_formats=("e5m2",), packs=None, backends={}, advised={})

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled | None:
        """Leave gradients to the rule, since the kernel knows E4M3 alone."""
        return super().in_c(x_MN, block, cast) if cast.fmt.is_e4m3 else None


class BlockwiseWithSquareGradients(Blockwise):
    """Blockwise FP8 whose output gradients have scales for 128 x 128 elements, as weights have."""

    traits = replace(
        Blockwise.traits, grad_output=alike(blocks(128, 128), serves_both=True), backends={}
    )


class FourOverSix(Nvfp4):
    """NVFP4 whose inputs and weights have the better of two scales for each block.

    Output gradients are rounded at random, as in `nvfp4`; their blocks have one scale.
    """

    traits = replace(Nvfp4.traits, options=(), packs=None, backends={})

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled | None:
        """Leave inputs and weights to the rule, since the kernel knows one scale alone."""
        return super().in_c(x_MN, block, cast) if cast.role == "grad_output" else None

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize blocks so that their amax becomes 6 or 4, whichever loses less."""
        casts = self.traits.casts[cast.role]
        if casts.is_random:
            return super().cast(x_MK, cast)
        if cast.along == "first" and casts.rotation is not None:
            x_MK = rotated(x_MK)
        amax = x_MK.float().abs().amax().nan_to_num_(nan=float("inf"), posinf=float("inf"))
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        numbers, scale = quantize_blocks(x_MK, cast.scales.across or 1, amax, BETTER_OF_TWO)
        outer = amax / (LARGEST_E2M1 * BETTER_OF_TWO.largest_scale)
        return Scaled(numbers.to(cast.fmt.dtype), scale, outer)
