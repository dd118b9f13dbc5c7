"""Quantize to NVFP4: E2M1 with a scale in E4M3 for 16 elements, and one FP32 factor a tensor.

The rule is that of Transformer Engine's `NVFP4BlockScaling` from version 2.14 on
(common/cast/nvfp4/core_nvfp4.cuh). One point differs: a NaN makes the factor of its tensor
infinite, so that it cannot be lost.
"""

# M rows   K elements of a row

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from fp8_numerics.dtypes import described
from fp8_numerics.scales import widened

BLOCK = 16
LARGEST_E2M1, LARGEST_E4M3 = 6.0, 448.0
LARGEST = LARGEST_E2M1 * LARGEST_E4M3
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of Transformer Engine's rotation, the same in every layer."""
SIGN_BITS = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)
"""The same as bits: a bit is set where the sign is negative."""


@cache
def signs() -> torch.Tensor:
    """Return `SIGNS` in FP32, [16], on the CPU."""
    return torch.tensor(SIGNS, dtype=torch.float32, device="cpu")


def quantize_blocks(
    x_MK: torch.Tensor,
    rows: int,
    amax: torch.Tensor,
    byte: torch.Tensor | None,
    scale_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of E2M1 in FP32 [M, K], and the scales of blocks of `rows` x 16, in FP32.

    `amax` is that of the whole tensor (0-d FP32), or of each row [M, 1] where `rows` is 1; in BF16
    or FP16 it is widened, which is exact. `byte` (uint8 [M, K]) asks for random rounding.
    `scale_of` returns the scales before they are rounded, of the amaxes of blocks and the factor of
    the tensor's amax; without it the rule is the one above.

    Raises:
        TypeError: `x_MK`, `amax` or `byte` has another dtype.
        ValueError: `x_MK` is no matrix of whole blocks, or `amax` or `byte` has another shape.
    """
    is_matrix = isinstance(x_MK, torch.Tensor) and x_MK.dim() == 2
    if not is_matrix or x_MK.shape[0] % rows or x_MK.shape[1] % BLOCK:
        raise ValueError(
            f"x is {described(x_MK)}, and not a matrix of whole blocks of {rows} x {BLOCK}: fill "
            "rows and columns up with zeros"
        )
    (m, k), amax = x_MK.shape, widened(amax)
    if amax.numel() != 1 and (rows != 1 or amax.shape != (m, 1)):
        hint = f", or with one for each row, [{m}, 1]" if rows == 1 else ""
        raise ValueError(f"amax is {described(amax)}, and is one number of the tensor{hint}")
    if byte is not None and byte.dtype != torch.uint8:
        raise TypeError(f"byte is {described(byte)}, and random bytes are torch.uint8")
    if byte is not None and byte.shape != x_MK.shape:
        raise ValueError(f"byte is {described(byte)}, and each element of {[m, k]} has one")
    tiles = widened(x_MK, "x").reshape(m // rows, rows, k // BLOCK, BLOCK)
    factor = encoding(amax)
    of_block = tiles.abs().nan_to_num_(nan=0.0, posinf=float("inf")).amax((1, 3))
    wide = (scale_of or _times_sixth)(of_block, factor).clamp_(max=LARGEST_E4M3)
    scale = wide.to(torch.float8_e4m3fn).float()
    inverse = (1.0 / (scale * (1.0 / factor))).clamp_(max=_largest(amax))
    numbers = tiles * inverse[:, None, :, None]
    return to_e2m1(numbers.reshape(m, k), byte), scale


def _times_sixth(of_block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    sixth = factor.new_full((), LARGEST_E2M1).reciprocal_()
    return of_block * (factor * sixth)


def _largest(like: torch.Tensor) -> float:
    return float(torch.finfo(like.dtype).max)


def encoding(amax: torch.Tensor, largest: float = LARGEST) -> torch.Tensor:
    """Return the factor that brings an amax (FP32) to the largest element times scale."""
    amax = widened(amax)
    scale = amax.new_full((), largest).div(amax)  # a number by a tensor would be rounded twice
    scale = scale.clamp_(max=_largest(amax))
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def outer_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the factor of the whole tensor from number times scale to value (0-d FP32)."""
    amax = widened(amax)
    return amax.div(amax.new_full((), LARGEST))


def to_e2m1(x: torch.Tensor, byte: torch.Tensor | None) -> torch.Tensor:
    """Round FP32 numbers to those of E2M1: to nearest, or up with the chance byte / 256.

    A tie goes to the even code, which an even multiple of the step has. Larger magnitudes become 6,
    and NaN too.
    """
    magnitude = x.abs()
    if byte is None:
        magnitude = magnitude.clamp_(max=LARGEST_E2M1)
        step = _step(magnitude)
        rounded = magnitude.div_(step).round_().mul_(step)
    else:  # the product is exact, so that the sum has one rounding
        moved = byte.float().mul_(_step(magnitude).div_(256)).add_(magnitude)
        moved = moved.clamp_(max=LARGEST_E2M1)
        step = _step(moved)
        rounded = moved.div_(step).floor_().mul_(step)
    return rounded.copysign_(x).masked_fill_(x.isnan(), LARGEST_E2M1)


def _step(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the distance of E2M1's numbers: 0.5 below 2, 1 below 4, 2 from there on."""
    one = magnitude.new_ones(())
    return one.where(magnitude >= 2, 0.5) + one.where(magnitude >= 4, 0.0)


def rotated(x_MK: torch.Tensor, signs: Sequence[int] = SIGNS) -> torch.Tensor:
    """Return x with each 16 elements of a row times Hadamard's matrix with signs, in BF16.

    Raises:
        ValueError: `x_MK` is no matrix, 16 does not divide K, or there are not 16 signs.
    """
    if x_MK.dim() != 2 or x_MK.shape[1] % BLOCK or len(signs) != BLOCK:
        raise ValueError(
            f"x is {described(x_MK)} and signs has {len(signs)}: {BLOCK} elements of a row of a "
            f"matrix are rotated by {BLOCK} signs"
        )
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix *= torch.tensor(signs, dtype=torch.float64)[:, None] / 4
    turned = x_MK.double().unflatten(1, (-1, BLOCK)) @ matrix.to(x_MK.device)
    result: torch.Tensor = turned.flatten(1).float().bfloat16()
    return result
