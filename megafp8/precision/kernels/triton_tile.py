"""What becomes of one tile of FP32 values: amax, payload, transposed payload, plain copy, sums."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from megafp8.precision.kernels.triton_rounding import (
    fp8_codes,
    magnitude_bits,
    raise_amax,
    rounded,
)


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
    """`value` [rows, cols] of a [num_rows, num_cols] matrix, rounded to DTYPE and then to FP8.

    `inside` is the mask of the tile's values that are of the matrix, `summed` that of its columns.
    `partial_sums` [row tiles, num_cols] takes this tile's sum of each column.
    """
    value = tl.where(inside, rounded(value, DTYPE, HARDWARE), 0.0)
    if WITH_AMAX:
        raise_amax(amax_bits, tl.max(tl.max(magnitude_bits(value), axis=1), axis=0))
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    codes = fp8_codes(value * tl.load(quant_scale), IS_E4M3, HARDWARE)
    if WITH_ROWS:
        tl.store(payload + here, codes, mask=inside)
    if WITH_COLUMNS:
        there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
        tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
    if WITH_PLAIN:
        tl.store(plain + here, value.to(DTYPE), mask=inside)
    if WITH_SUMS:
        at = tl.program_id(0).to(tl.int64) * num_cols + cols
        tl.store(partial_sums + at, tl.sum(value, axis=0), mask=summed)
