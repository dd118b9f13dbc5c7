"""Define `mxfp8`: 32 elements along the sum share a power of two, which is rounded up (TE)."""

# M rows across a product's sum   K elements along it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megafp8.specs.recipe import Cast, Made, Recipe, Scaled
from megafp8.specs.traits import Cost, Traits, alike, blocks

if TYPE_CHECKING:
    import torch

BLOCK = 32
LARGEST_CODE = 254
"""The code of the largest scale, 2^127; the code 255 of E8M0 stands for NaN."""


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
    )

    def in_c(self, x_MN: torch.Tensor, block: tuple[int, int], cast: Cast) -> Scaled:
        """Quantize blocks of rows or of columns as `cast` does."""
        from megafp8.fp8.block_casts import mxfp8

        return Scaled(*mxfp8(x_MN, along_columns=block[0] > 1))

    def in_triton(
        self,
        x_MN: torch.Tensor,
        need: Any,
        asked: tuple[Cast, Cast],
        *,
        packed: bool,
        with_sum: bool,
    ) -> Made:
        """Quantize blocks of rows and of columns in one launch."""
        from megafp8.fp8.kernels.triton_blocks import cast_mx

        rows, columns, sums = cast_mx(
            x_MN, packed=packed, with_rows=need.last, with_columns=need.first, with_sums=with_sum
        )
        last, first = (None if each is None else Scaled(*each) for each in (rows, columns))
        return Made(last, first, sums)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize each block of 32 elements with the scale of its amax."""
        tiles = x_MK.float().unflatten(1, (-1, BLOCK))
        amax = tiles.abs().nan_to_num_(nan=0.0, posinf=float("inf")).amax(-1)
        code = _code(amax * (1.0 / cast.fmt.max))
        numbers = tiles * power_of(LARGEST_CODE - code)[..., None]
        payload = numbers.clamp_(-cast.fmt.max, cast.fmt.max).to(cast.fmt.dtype)
        return Scaled(payload.flatten(1), power_of(code))


def _code(v: torch.Tensor) -> torch.Tensor:
    """Return the least code c (int32) with 2^(c - 127) >= v, for FP32 v >= 0; 254 at most."""
    import torch

    bits = v.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    is_least = (exponent == 0) & (mantissa <= 0x400000)  # 2^-127 is large enough
    return (exponent + ((mantissa > 0) & ~is_least)).clamp_(max=LARGEST_CODE)


def power_of(code: torch.Tensor) -> torch.Tensor:
    """Return 2^(code - 127) in FP32, for codes in int32; that of 0 is subnormal."""
    import torch

    return torch.where(code == 0, 0x400000, code << 23).to(torch.int32).view(torch.float32)
