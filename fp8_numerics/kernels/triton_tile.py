"""Write one tile of FP32 values in the forms that a caller asks for.

The forms are the FP8 payload, the payload transposed, the values in high precision, the amax and
the sum of each column. The first half of the file allocates them and makes the arguments of a
launch; `emit_tile` is the end of every kernel that casts with one scale.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_launch import amax_bits, as_bytes, casts_in_hardware, empty_payload
from fp8_numerics.kernels.triton_rounding import (
    fp8_codes,
    magnitude_bits,
    narrowed,
    raise_amax,
    rounded,
)

TILE_ROWS, TILE_COLS = 64, 128
TILE_WARPS = 8  # 32 elements a thread: few enough registers for 32 warps an SM
REGISTERS_WITH_SUMS = 80  # of a thread; 24 warps of an SM may have 85, in steps of 8


class Emitted(NamedTuple):
    """Hold the tensors that a kernel writes; None stands for one that was not asked for.

    `payload` is [M, N], `payload_t` [N, M]. `partial_sums` is FP32 [row tiles, N]: each row of
    tiles writes its own part, so the order of the sum is fixed. `plain` [M, N] are the values that
    were cast, in high precision.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    partial_sums: torch.Tensor | None
    plain: torch.Tensor | None

    def arguments(
        self,
        quant_scale: torch.Tensor,
        fmt: Fp8Format,
        amax: torch.Tensor | None,
        tile_cols: int = TILE_COLS,
    ) -> dict[str, Any]:
        """Return the keyword arguments of a launch that ends in `emit_tile`."""
        tensors = (self.payload, self.payload_t, self.partial_sums, self.plain)
        payload, payload_t, partial_sums, plain = (
            quant_scale if x is None else as_bytes(x) if x.element_size() == 1 else x
            for x in tensors
        )
        return {
            "quant_scale": quant_scale,
            "amax_bits": amax_bits(amax, quant_scale),
            "payload": payload,
            "payload_t": payload_t,
            "plain": plain,
            "partial_sums": partial_sums,
            "IS_E4M3": fmt.is_e4m3,
            "WITH_AMAX": amax is not None,
            "WITH_ROWS": self.payload is not None,
            "WITH_COLUMNS": self.payload_t is not None,
            "WITH_PLAIN": self.plain is not None,
            "WITH_SUMS": self.partial_sums is not None,
            "HARDWARE": casts_in_hardware(quant_scale.device),
            "TILE_ROWS": TILE_ROWS,
            "TILE_COLS": tile_cols,
            "num_warps": TILE_WARPS,
            # Triton 3.8 gives a thread 93 registers here, with which an SM holds only 16 warps.
            "maxnreg": None if self.partial_sums is None else REGISTERS_WITH_SUMS,
        }


def emitted(
    num_rows: int,
    num_cols: int,
    fmt: Fp8Format,
    device: torch.device,
    *,
    with_rows: bool,
    with_columns: bool,
    with_sums: bool = False,
    plain_dtype: torch.dtype | None = None,
) -> Emitted:
    """Allocate what a kernel is to write of an [M, N] matrix; `plain_dtype` asks for `plain`."""
    row_tiles = -(-num_rows // TILE_ROWS)
    return Emitted(
        empty_payload(num_rows, num_cols, fmt=fmt, device=device) if with_rows else None,
        empty_payload(num_cols, num_rows, fmt=fmt, device=device) if with_columns else None,
        torch.empty(row_tiles, num_cols, dtype=torch.float32, device=device) if with_sums else None,
        None
        if plain_dtype is None
        else torch.empty(num_rows, num_cols, dtype=plain_dtype, device=device),
    )


def tiles(num_rows: int, num_cols: int, tile_cols: int = TILE_COLS) -> tuple[int, int]:
    """Return the grid of a launch with one program for each tile."""
    return -(-num_rows // TILE_ROWS), -(-num_cols // tile_cols)


@triton.jit
def emit_tile(
    value,
    rows,
    cols,
    num_rows,
    num_cols,
    inside,
    summed,
    quant_scale,
    amax_bits,
    payload,
    payload_t,
    plain,
    partial_sums,
    DTYPE: tl.constexpr,
    IS_E4M3: tl.constexpr,
    WITH_AMAX: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    WITH_PLAIN: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Round `value` [rows, cols] of a [num_rows, num_cols] matrix to DTYPE, and cast it to FP8.

    `inside` is the mask of the tile's values that belong to the matrix, `summed` that of its
    columns. `partial_sums` [row tiles, num_cols] gets this tile's sum of each column.
    """
    value = tl.where(inside, rounded(value, DTYPE, HARDWARE), 0.0)
    if WITH_AMAX:
        raise_amax(amax_bits, tl.max(tl.max(magnitude_bits(value), axis=1), axis=0))
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    if WITH_ROWS or WITH_COLUMNS:
        codes = fp8_codes(value * tl.load(quant_scale), IS_E4M3, HARDWARE)
    if WITH_ROWS:
        tl.store(payload + here, codes, mask=inside)
    if WITH_COLUMNS:
        there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
        tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
    if WITH_PLAIN:
        tl.store(plain + here, narrowed(value, DTYPE, HARDWARE), mask=inside)
    if WITH_SUMS:
        at = tl.program_id(0).to(tl.int64) * num_cols + cols
        tl.store(partial_sums + at, tl.sum(value, axis=0), mask=summed)
