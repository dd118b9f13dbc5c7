"""Quantize to NVFP4 with the better of two scales for each block: its amax becomes 6, or 4.

E2M1 has no number between 4 and 6, so that a block with much just below its amax loses less where
the amax becomes 4. After common/cast/nvfp4/quantize_4over6_nvfp4.cuh of Transformer Engine 2.17,
whose every product, quotient and sum is rounded by itself.
"""

# M rows   K elements of one

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8_numerics.nvfp4 import BLOCK, LARGEST_E2M1, LARGEST_E4M3, encoding, to_e2m1

TO_FOUR, TO_SIX = 1.5, 1.0


class Choice(NamedTuple):
    """State how a block's scale is chosen, by the settings of Transformer Engine's quantizer."""

    largest_scale: float = LARGEST_E4M3
    """The scale of a block with the amax of the tensor; beside 256 one 1.5 times as large fits."""

    is_squared: bool = False
    """Whether the errors of a block's numbers are squared before they are added up."""

    is_scaled: bool = False
    """Whether they are taken of numbers times scales (NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH=1)."""


def quantize_blocks(
    x_MK: torch.Tensor, rows: int, amax: torch.Tensor, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of E2M1 in FP32 [M, K], and the scales of blocks of `rows` x 16, in FP32.

    `amax` is that of the whole tensor (0-d FP32), or of each row [M, 1] where `rows` is 1. Of two
    scales with the same error the one for 6 is taken.
    """
    m, k = x_MK.shape
    tiles = x_MK.float().reshape(m // rows, rows, k // BLOCK, BLOCK)
    factor = encoding(amax, LARGEST_E2M1 * choice.largest_scale)
    of_block = tiles.abs().nan_to_num_(nan=0.0, posinf=float("inf")).amax((1, 3))
    base = of_block / LARGEST_E2M1 * factor
    found = []
    for expand in (TO_FOUR, TO_SIX):
        scale = (base * expand).clamp_(max=LARGEST_E4M3).to(torch.float8_e4m3fn).float()
        inverse = (1.0 / (scale * (1.0 / factor))).clamp_(max=torch.finfo(torch.float32).max)
        numbers = to_e2m1(tiles * inverse[:, None, :, None], None)
        found.append((numbers, scale, _error(tiles, numbers, scale, amax, factor, choice)))
    (fours, scale_4, error_4), (sixes, scale_6, error_6) = found
    is_four = error_4 < error_6
    numbers = torch.where(is_four[:, None, :, None], fours, sixes)
    return numbers.reshape(m, k), torch.where(is_four, scale_4, scale_6)


def _error(
    tiles: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    factor: torch.Tensor,
    choice: Choice,
) -> torch.Tensor:
    """Return the error of each block: of 16 elements in their order, then of rows by halves."""
    values = numbers * scale[:, None, :, None]  # exact, also in the FP16 of a GPU
    if choice.is_scaled:
        differences = values - tiles * factor.reshape(-1, 1, 1, 1)
    else:
        largest = torch.full_like(values, LARGEST_E2M1 * choice.largest_scale)
        differences = (values * amax.reshape(-1, 1, 1, 1)).div_(largest) - tiles
    errors = differences.square_() if choice.is_squared else differences.abs_()
    total = torch.zeros_like(errors[..., 0])
    for element in errors.unbind(-1):
        total = total + element
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
