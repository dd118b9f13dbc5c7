"""Order scales of blocks as Blackwell's tensor cores read them, and two numbers of FP4 in a byte.

Scales of an operand [M, K] are a matrix [M, blocks along K] of bytes. They are cut into tiles of
128 rows x 4 blocks, padded at the ends, and the tiles follow each other row by row. In a tile of
512 bytes row r and block b lie at (r % 32) * 16 + (r // 32) * 4 + b (cuBLAS documentation, "1D
Block Scaling Factors Layout"; torch calls it SWIZZLE_32_4_4).
"""

# R rows   B blocks of a row
from __future__ import annotations

import torch

TILE_ROWS, TILE_BLOCKS = 128, 4
_ROWS_INSIDE = 32


def swizzled_size(rows: int, blocks: int) -> int:
    """Return the number of bytes of the scales of an operand, with the padding of their tiles."""
    return rounded_up(rows, TILE_ROWS) * rounded_up(blocks, TILE_BLOCKS)


def swizzled(scale_RB: torch.Tensor) -> torch.Tensor:
    """Return a matrix of one-byte scales in tiles, flat; the padding is zero."""
    rows, blocks = scale_RB.shape
    padded = torch.zeros(
        rounded_up(rows, TILE_ROWS),
        rounded_up(blocks, TILE_BLOCKS),
        dtype=torch.uint8,
        device=scale_RB.device,
    )
    padded[:rows, :blocks] = scale_RB.view(torch.uint8)
    down, right = padded.shape[0] // TILE_ROWS, padded.shape[1] // TILE_BLOCKS
    tiles = padded.view(down, TILE_ROWS // _ROWS_INSIDE, _ROWS_INSIDE, right, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale_RB.dtype)


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return the scales of `rows` rows and `blocks` blocks as a matrix again."""
    down, right = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    tiles = scale.view(torch.uint8).view(
        down, right, _ROWS_INSIDE, TILE_ROWS // _ROWS_INSIDE, TILE_BLOCKS
    )
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, right * TILE_BLOCKS)
    return matrix[:rows, :blocks].contiguous().view(scale.dtype)


def fp4_numbers(packed_RB: torch.Tensor) -> torch.Tensor:
    """Return the numbers of FP4 [R, 2 B] in two of every byte, the low half first, as E4M3."""
    bytes_RB = packed_RB.view(torch.uint8)
    codes = torch.stack((bytes_RB & 15, bytes_RB >> 4), -1).flatten(-2)
    magnitude = codes & 7
    number = torch.where(magnitude < 2, magnitude * 0x30, magnitude * 4 + 0x30)
    return (number | (codes & 8) << 4).view(torch.float8_e4m3fn)


def rounded_up(size: int, step: int) -> int:
    """Return the first multiple of `step` that is not below `size`."""
    return -(-size // step) * step
