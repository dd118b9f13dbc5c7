"""A recipe as a user writes it: blocks of 32 elements, scales that are powers of two, E4M3."""

from __future__ import annotations

import torch

from megafp8.fp8 import Cast, Recipe, Scaled, Traits, alike, blocks


class BlocksOf32(Recipe):
    """Each block of 32 elements along the sum has the largest power of two that fits."""

    traits = Traits(
        input=alike(blocks(32)),
        weight=alike(blocks(32)),
        grad_output=alike(blocks(32)),
        commutes=True,
        multiple=32,
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize each block by its amax."""
        tiles = x_MK.float().unflatten(1, (-1, 32))
        amax = tiles.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)
        exponent = torch.log2(amax.clamp(min=1e-30) / cast.fmt.max).ceil().clamp(-100, 100)
        scale = torch.exp2(exponent)
        numbers = (tiles / scale[..., None]).clamp(-cast.fmt.max, cast.fmt.max)
        return Scaled(numbers.flatten(1).to(cast.fmt.dtype), scale)
