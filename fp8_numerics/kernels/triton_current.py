"""Cast with current scaling: one scale for a tensor, or for each row, column or block of 128.

One scale for a tensor takes two launches before the cast: the amax, the two scales. Rows and
columns take three launches: all amaxes from one read, all scales, both payloads from a second read.
Blocks fit a tile, so amax, scale and payloads of both directions come from one read. A payload
whose scales go along columns is written transposed, as a product on Hopper reads it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_launch import (
    as_bytes,
    casts_in_hardware,
    check_matrix,
    empty_payload,
)
from fp8_numerics.kernels.triton_rounding import (
    dequant_of,
    fp8_codes,
    magnitude_bits,
    raise_amax,
    scales_of_amax,
    widened,
)
from fp8_numerics.kernels.triton_tile import TILE_COLS, TILE_ROWS, TILE_WARPS, tiles

BLOCK = 128
BLOCK_WARPS = 16


class PayloadAndScale(NamedTuple):
    """Hold a payload and its FP32 `dequant_scale`."""

    payload: torch.Tensor
    dequant_scale: torch.Tensor


class BothWays(NamedTuple):
    """Hold both orientations of a matrix; None stands for one that was not asked for.

    `rows` has the payload [M, N] with scales along N, `columns` the payload [N, M] with scales
    along M.
    """

    rows: PayloadAndScale | None
    columns: PayloadAndScale | None


def amax_of_matrix(x_MN: torch.Tensor) -> torch.Tensor:
    """Return max|x| as a 0-d FP32 tensor: 0 for an empty matrix, +inf if there is a NaN."""
    check_matrix("x_MN", x_MN)
    amax = torch.zeros((), dtype=torch.float32, device=x_MN.device)
    raise_amax_of(amax, x_MN)
    return amax


def raise_amax_of(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise `amax`, 0-d FP32, in place to max(amax, max|x|); `x` is contiguous, of any shape."""
    if x.numel() > 0:
        elements = TILE_ROWS * TILE_COLS
        _tensor_amax_kernel[(-(-x.numel() // elements),)](
            x, x.numel(), amax.view(torch.int32), ELEMENTS=elements, num_warps=TILE_WARPS
        )


def scales_of(
    amax: torch.Tensor, fmt: Fp8Format, *, power_2: bool, torchao: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 0-d FP32 (quant_scale, dequant_scale) of a 0-d FP32 amax.

    The rule is Transformer Engine's, or torchao's (scales.py).
    """
    quant_scale, dequant_scale = torch.empty_like(amax), torch.empty_like(amax)
    _scale_kernel[(1,)](
        amax, quant_scale, dequant_scale, 1,
        IS_E4M3=fmt.is_e4m3, TORCHAO=torchao, POWER_2=power_2, LANES=1, num_warps=1,
    )  # fmt: skip
    return quant_scale, dequant_scale


def cast_rowwise(
    x_MN: torch.Tensor,
    fmt: Fp8Format,
    *,
    power_2: bool,
    with_rows: bool = True,
    with_columns: bool = False,
) -> BothWays:
    """Cast by torchao's rule, with one scale a row [M, 1] and another one a column [N, 1]."""
    check_matrix("x_MN", x_MN)
    num_rows, num_cols = x_MN.shape
    device, is_e4m3 = x_MN.device, fmt.is_e4m3
    # Rows first, then columns: one allocation, one launch for all scales.
    count = num_rows + num_cols
    amax = torch.zeros(count, dtype=torch.float32, device=device)
    quant_scale, dequant_scale = torch.empty(2, count, dtype=torch.float32, device=device).unbind()
    payload, payload_t = _payloads(num_rows, num_cols, fmt, device, with_rows, with_columns)
    grid = tiles(num_rows, num_cols)
    if x_MN.numel() > 0:
        _line_amax_kernel[grid](
            x_MN, num_rows, num_cols, amax.view(torch.int32), with_rows, with_columns,
            TILE_ROWS=TILE_ROWS, TILE_COLS=TILE_COLS, num_warps=TILE_WARPS,
        )  # fmt: skip
    if count > 0:  # of an empty matrix too
        _scale_lines(amax, quant_scale, dequant_scale, fmt, power_2)
    if x_MN.numel() > 0:
        _line_cast_kernel[grid](
            x_MN, num_rows, num_cols, quant_scale, *_pointers(payload, payload_t, x_MN),
            IS_E4M3=is_e4m3, WITH_ROWS=with_rows, WITH_COLUMNS=with_columns,
            HARDWARE=casts_in_hardware(device), TILE_ROWS=TILE_ROWS, TILE_COLS=TILE_COLS,
            num_warps=TILE_WARPS,
        )  # fmt: skip
    of_rows, of_columns = dequant_scale[:num_rows, None], dequant_scale[num_rows:, None]
    return _both_ways((payload, payload_t), of_rows, of_columns)


def cast_blocks(
    x_MN: torch.Tensor,
    fmt: Fp8Format,
    *,
    power_2: bool,
    with_rows: bool = True,
    with_columns: bool = False,
) -> BothWays:
    """Cast by Transformer Engine's rule, with one scale for 1 x 128 elements.

    The scales are [M, ceil(N / 128)] of the rows and [N, ceil(M / 128)] of the columns; both lie
    transposed in memory, as the product on Hopper reads them.
    """
    row_blocks, col_blocks = -(-x_MN.shape[0] // BLOCK), -(-x_MN.shape[1] // BLOCK)
    of_rows = torch.empty(col_blocks, x_MN.shape[0], dtype=torch.float32, device=x_MN.device)
    of_columns = torch.empty(row_blocks, x_MN.shape[1], dtype=torch.float32, device=x_MN.device)
    payloads = _launch_blocks(x_MN, fmt, power_2, with_rows, with_columns, (of_rows, of_columns))
    return _both_ways(payloads, of_rows.t(), of_columns.t())


def cast_square_blocks(
    x_MN: torch.Tensor,
    fmt: Fp8Format,
    *,
    power_2: bool,
    with_rows: bool = True,
    with_columns: bool = False,
) -> BothWays:
    """Cast by Transformer Engine's rule for weights, with one scale for 128 x 128 elements.

    The scales are [ceil(M / 128), ceil(N / 128)], and for the columns the same ones transposed.
    """
    row_blocks, col_blocks = -(-x_MN.shape[0] // BLOCK), -(-x_MN.shape[1] // BLOCK)
    scale = torch.empty(row_blocks, col_blocks, dtype=torch.float32, device=x_MN.device)
    payloads = _launch_blocks(x_MN, fmt, power_2, with_rows, with_columns, (scale, scale))
    return _both_ways(payloads, scale, scale.t())


def _launch_blocks(
    x_MN: torch.Tensor,
    fmt: Fp8Format,
    power_2: bool,
    with_rows: bool,
    with_columns: bool,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (payload, payload_t), and write the scales: one tensor twice for square blocks."""
    check_matrix("x_MN", x_MN)
    num_rows, num_cols = x_MN.shape
    payloads = _payloads(num_rows, num_cols, fmt, x_MN.device, with_rows, with_columns)
    if x_MN.numel() > 0:
        _block_cast_kernel[-(-num_rows // BLOCK), -(-num_cols // BLOCK)](
            x_MN, num_rows, num_cols, *_pointers(*payloads, x_MN), *scales,
            IS_E4M3=fmt.is_e4m3, POWER_2=power_2, SQUARE=scales[0] is scales[1],
            WITH_ROWS=with_rows, WITH_COLUMNS=with_columns,
            HARDWARE=casts_in_hardware(x_MN.device), BLOCK=BLOCK, num_warps=BLOCK_WARPS,
        )  # fmt: skip
    return payloads


def _both_ways(
    payloads: tuple[torch.Tensor | None, torch.Tensor | None],
    of_rows: torch.Tensor,
    of_columns: torch.Tensor,
) -> BothWays:
    payload, payload_t = payloads
    return BothWays(
        None if payload is None else PayloadAndScale(payload, of_rows),
        None if payload_t is None else PayloadAndScale(payload_t, of_columns),
    )


def _payloads(
    num_rows: int,
    num_cols: int,
    fmt: Fp8Format,
    device: torch.device,
    with_rows: bool,
    with_columns: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Allocate (payload, payload_t)."""
    payload = empty_payload(num_rows, num_cols, fmt=fmt, device=device) if with_rows else None
    payload_t = empty_payload(num_cols, num_rows, fmt=fmt, device=device) if with_columns else None
    return payload, payload_t


def _pointers(
    payload: torch.Tensor | None, payload_t: torch.Tensor | None, otherwise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a kernel gets for the payloads: bytes, or any tensor for one that is None."""
    rows, columns = (otherwise if x is None else as_bytes(x) for x in (payload, payload_t))
    return rows, columns


def _scale_lines(
    amax: torch.Tensor,
    quant_scale: torch.Tensor,
    dequant_scale: torch.Tensor,
    fmt: Fp8Format,
    power_2: bool,
) -> None:
    lanes = 1024
    _scale_kernel[(-(-amax.numel() // lanes),)](
        amax, quant_scale, dequant_scale, amax.numel(),
        IS_E4M3=fmt.is_e4m3, TORCHAO=True, POWER_2=power_2, LANES=lanes,
    )  # fmt: skip


@triton.jit
def _tensor_amax_kernel(x, count, amax_bits, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    magnitude = magnitude_bits(widened(tl.load(x + at, mask=at < count, other=0.0)))
    raise_amax(amax_bits, tl.max(magnitude, axis=0))


@triton.jit
def _line_amax_kernel(
    x,
    num_rows,
    num_cols,
    amax_bits,
    with_rows: tl.constexpr,
    with_columns: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    magnitude = magnitude_bits(widened(tl.load(x + here, mask=inside, other=0.0)))
    if with_rows:
        of_row = tl.max(magnitude, axis=1)
        tl.atomic_max(amax_bits + rows, of_row, mask=rows < num_rows, sem="relaxed")
    if with_columns:
        at = amax_bits + num_rows + cols
        tl.atomic_max(at, tl.max(magnitude, axis=0), mask=cols < num_cols, sem="relaxed")


@triton.jit
def _scale_kernel(
    amax,
    quant_scale,
    dequant_scale,
    count,
    IS_E4M3: tl.constexpr,
    TORCHAO: tl.constexpr,
    POWER_2: tl.constexpr,
    LANES: tl.constexpr,
):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    amaxes = tl.load(amax + at, mask=at < count, other=0.0)
    scale = scales_of_amax(amaxes, IS_E4M3, TORCHAO, POWER_2)
    tl.store(quant_scale + at, scale, mask=at < count)
    tl.store(dequant_scale + at, dequant_of(scale), mask=at < count)


@triton.jit
def _line_cast_kernel(
    x,
    num_rows,
    num_cols,
    quant_scale,
    payload,
    payload_t,
    IS_E4M3: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    if WITH_ROWS:
        of_rows = tl.load(quant_scale + rows, mask=rows < num_rows, other=1.0)
        codes = fp8_codes(value * of_rows[:, None], IS_E4M3, HARDWARE)
        tl.store(payload + here, codes, mask=inside)
    if WITH_COLUMNS:
        of_columns = tl.load(quant_scale + num_rows + cols, mask=cols < num_cols, other=1.0)
        codes = fp8_codes(value * of_columns[None, :], IS_E4M3, HARDWARE)
        there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
        tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def _block_cast_kernel(
    x,
    num_rows,
    num_cols,
    payload,
    payload_t,
    of_rows,
    of_columns,
    IS_E4M3: tl.constexpr,
    POWER_2: tl.constexpr,
    SQUARE: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    magnitude = magnitude_bits(value)
    if SQUARE:
        amax = tl.max(tl.max(magnitude, axis=1), axis=0).to(tl.float32, bitcast=True)
        scale = scales_of_amax(tl.full((1, 1), 0.0, tl.float32) + amax, IS_E4M3, False, POWER_2)
        codes = fp8_codes(value * scale, IS_E4M3, HARDWARE)
        one = tl.arange(0, 1)
        at = (
            (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) + one[:, None] + one[None, :]
        )
        tl.store(of_rows + at, dequant_of(scale))
        if WITH_ROWS:
            tl.store(payload + here, codes, mask=inside)
        if WITH_COLUMNS:
            tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
    else:
        if WITH_ROWS:
            amax = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
            scale = scales_of_amax(amax, IS_E4M3, False, POWER_2)
            codes = fp8_codes(value * scale[:, None], IS_E4M3, HARDWARE)
            tl.store(payload + here, codes, mask=inside)
            at = tl.program_id(1).to(tl.int64) * num_rows + rows
            tl.store(of_rows + at, dequant_of(scale), mask=rows < num_rows)
        if WITH_COLUMNS:
            amax = tl.max(magnitude, axis=0).to(tl.float32, bitcast=True)
            scale = scales_of_amax(amax, IS_E4M3, False, POWER_2)
            codes = fp8_codes(value * scale[None, :], IS_E4M3, HARDWARE)
            tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
            at = tl.program_id(0).to(tl.int64) * num_cols + cols
            tl.store(of_columns + at, dequant_of(scale), mask=cols < num_cols)
