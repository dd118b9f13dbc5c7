"""Define `mxfp8`: 32 elements along the sum share a power of two, which is rounded up (TE)."""

# M rows across a product's sum   K elements along it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megafp8.specs.recipe import Cast, Made, Recipe, Scaled, lazy
from megafp8.specs.traits import Cost, Traits, alike, blocks

if TYPE_CHECKING:
    import torch

    from fp8_numerics import mxfp8 as arithmetic
else:  # settings are checked without torch
    arithmetic = lazy("fp8_numerics.mxfp8")

BLOCK = 32


class Mxfp8(Recipe):
    """Rows and columns are quantized separately, from high precision; all tensors are in E4M3.

    The rule is that of Transformer Engine's `MXFP8BlockScaling` from version 2.13 on
    (common/cast/mxfp8/quantize_mxfp8.cuh): the code of the scale is rounded up, so that no finite
    number of a block saturates. The amax of a block ignores NaN.
    """

    traits = Traits(
        help="those of 32 elements, rounded up to powers of two",
        input=alike(blocks(BLOCK)),
        weight=alike(blocks(BLOCK)),
        grad_output=alike(blocks(BLOCK)),
        commutes=True,
        packs="mx",
        multiple=BLOCK,
        backends={"te": "MXFP8BlockScaling"},
        cost=Cost(launches=(47, 61), sums_columns=True, bytes_written=2 + 2 / BLOCK),
        advised=dict.fromkeys(
            ((10, 0), (12, 0)),
            "a scale for 32 elements costs the cast one read, and tensor cores read it",
        ),
    )

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled:
        from fp8_numerics.block_casts import mxfp8

        made = mxfp8(x_MN, along_columns=block[0] > 1, values=cast.values)
        return Scaled(made.payload, made.scale, values=made.values)

    def in_triton(
        self,
        x_MN: torch.Tensor,
        need: Any,
        asked: tuple[Cast, Cast],
        *,
        packed: bool,
        with_sum: bool,
    ) -> Made:
        from fp8_numerics.kernels.triton_blocks import cast_mx

        rows, columns, sums = cast_mx(
            x_MN, packed=packed, with_rows=need.last, with_columns=need.first, with_sums=with_sum
        )
        last, first = (None if each is None else Scaled(*each) for each in (rows, columns))
        return Made(last, first, sums)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        return Scaled(*arithmetic.quantize_rows(x_MK, cast.fmt))
