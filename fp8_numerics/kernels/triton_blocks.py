"""Cast in blocks along rows and along columns, as Blackwell's tensor cores read them (MXFP8).

Both directions, all scales and the sums of the columns come from one read of the matrix, in one
launch. Operands have one of two forms:

* packed: the second direction lies transposed, and scales are bytes in tiles of 128 rows x 4 blocks
  (512 bytes each; cuBLASLt and torch call the order inside SWIZZLE_32_4_4), zeros past the end;
* plain: all lies as the matrix does, with scales in FP32, for products that are emulated.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import E4M3
from fp8_numerics.kernels.triton_launch import as_bytes, casts_in_hardware, check_matrix
from fp8_numerics.kernels.triton_rounding import fp8_codes, known_bits, widened
from fp8_numerics.swizzle import swizzled_size

TILE = 128  # rows and columns of a program's tile: whole tiles of scales in both directions
TILE_WARPS = 16
MX_BLOCK = 32


class Operand(NamedTuple):
    """Hold one direction of a cast: payload and scales, in the tensor's own orientation.

    In the packed form the scales are flat bytes of E8M0 or E4M3.
    """

    payload: torch.Tensor
    scale: torch.Tensor


class BlockCast(NamedTuple):
    """Hold the operands along rows and along columns, and sums; None: it was not asked for.

    `sums` are the FP32 sums of each column over groups of rows, [P, N].
    """

    rows: Operand | None
    columns: Operand | None
    sums: torch.Tensor | None


def cast_mx(
    x_MN: torch.Tensor,
    *,
    packed: bool,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
) -> BlockCast:
    """Cast FP32, BF16 or FP16 to E4M3 with a power of two for 32 elements, rounded up.

    The rule is that of `mxfp8.py`; the last block of a row or column may be shorter.
    """
    check_matrix("x_MN", x_MN)
    m, n = x_MN.shape
    device = x_MN.device
    rows = empty_operand(m, n, MX_BLOCK, device, packed) if with_rows else None
    columns = empty_operand(n, m, MX_BLOCK, device, packed) if with_columns else None
    if columns is not None and not packed:  # as the matrix lies
        columns = Operand(
            torch.empty(m, n, dtype=E4M3.dtype, device=device),
            torch.empty(columns.scale.shape[::-1], dtype=torch.float32, device=device),
        )
    sums = torch.empty(-(-m // TILE), n, dtype=torch.float32, device=device) if with_sums else None
    if x_MN.numel() > 0:
        _mx_kernel[-(-m // TILE), -(-n // TILE)](
            x_MN, m, n, *pointers(rows, x_MN), *pointers(columns, x_MN),
            x_MN if sums is None else sums,
            WITH_ROWS=with_rows, WITH_COLUMNS=with_columns, WITH_SUMS=with_sums, PACKED=packed,
            HARDWARE=casts_in_hardware(device), TILE=TILE, BLOCK=MX_BLOCK, num_warps=TILE_WARPS,
        )  # fmt: skip
    return BlockCast(rows, turned(columns) if packed else columns, sums)


def empty_operand(
    across: int, along: int, block: int, device: torch.device, packed: bool
) -> Operand:
    """Allocate an operand [across, along] of E4M3 with scales for 1 x `block` elements."""
    payload = torch.empty(across, along, dtype=E4M3.dtype, device=device)
    blocks = -(-along // block)
    if not packed:
        return Operand(payload, torch.empty(across, blocks, dtype=torch.float32, device=device))
    size = swizzled_size(across, blocks)
    return Operand(payload, torch.empty(size, dtype=torch.float8_e8m0fnu, device=device))


def pointers(operand: Operand | None, otherwise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a kernel gets for an operand: bytes, FP32 scales as they are; or any tensor."""
    if operand is None:
        return otherwise, otherwise
    scale = operand.scale
    return as_bytes(operand.payload), as_bytes(scale) if scale.element_size() == 1 else scale


def turned(operand: Operand | None) -> Operand | None:
    """Return an operand whose payload lies transposed in the tensor's own orientation."""
    return None if operand is None else Operand(operand.payload.t(), operand.scale)


@triton.jit
def store_scales(
    to, scale, across, along, num_across, num_along, step_across, step_along,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Store scales of blocks [across, along] of an operand that has so many of both.

    Packed they are bytes in tiles; `across` then covers whole tiles. Otherwise they lie with the
    given steps in memory.
    """
    down, right = across.to(tl.int64)[:, None], along[None, :]
    if PACKED:
        tiles = (num_along + 3) // 4
        inside = right < 4 * tiles
        in_tile = down % 32 * 16 + down % 128 // 32 * 4 + right % 4
        at = (down // 128 * tiles + right // 4) * 512 + in_tile
    else:
        inside = (down < num_across) & (right < num_along)
        at = down * step_across + right * step_along
    tl.store(to + at, scale, mask=inside)


@triton.jit
def power_of(code):
    """Return 2^(code - 127) in FP32 for codes in int32; that of 0 is subnormal."""
    return tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mx_code(amax_bits):
    """Return the least code c, 254 at most, with 2^(c - 127) >= amax / 448, from amaxes' bits."""
    bits = (amax_bits.to(tl.float32, bitcast=True) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    is_least = (exponent == 0) & (mantissa <= 0x400000)  # 2^-127 is large enough
    return tl.minimum(exponent + ((mantissa > 0) & (is_least == 0)).to(tl.int32), 254)


@triton.jit
def _mx_kernel(
    x,
    num_rows,
    num_cols,
    payload,
    of_rows,
    payload_t,
    of_columns,
    sums,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    PACKED: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = TILE // BLOCK
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    row_blocks, col_blocks = (num_rows + BLOCK - 1) // BLOCK, (num_cols + BLOCK - 1) // BLOCK
    if WITH_SUMS:
        at = tl.program_id(0).to(tl.int64) * num_cols + cols
        tl.store(sums + at, tl.sum(value, axis=0), mask=cols < num_cols)
    if WITH_ROWS:
        blocks = tl.reshape(value, (TILE, BLOCKS, BLOCK))
        code = _mx_code(tl.max(known_bits(blocks), axis=2))
        codes = fp8_codes(blocks * power_of(254 - code)[:, :, None], True, HARDWARE)
        tl.store(payload + here, tl.reshape(codes, (TILE, TILE)), mask=inside)
        scale = code.to(tl.uint8) if PACKED else power_of(code)
        along = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        store_scales(of_rows, scale, rows, along, num_rows, col_blocks, col_blocks, 1, PACKED)
    if WITH_COLUMNS:
        blocks = tl.reshape(value, (BLOCKS, BLOCK, TILE))
        code = _mx_code(tl.max(known_bits(blocks), axis=1))
        codes = fp8_codes(blocks * power_of(254 - code)[:, None, :], True, HARDWARE)
        codes = tl.reshape(codes, (TILE, TILE))
        if PACKED:
            there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
            tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
        else:
            tl.store(payload_t + here, codes, mask=inside)
        scale = code.to(tl.uint8) if PACKED else power_of(code)
        along = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        store_scales(
            of_columns, tl.trans(scale), cols, along, num_cols, row_blocks, 1, num_cols, PACKED
        )
