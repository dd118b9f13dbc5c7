"""A matrix to FP8 in one pass over it: amax, payload, transposed payload, column sums.

An FP8 product on Hopper reads both operands with the dim it sums over innermost, so a tensor that
two products read is needed in both orientations; this writes both from one read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megafp8.precision.formats import E4M3, Fp8Format
from megafp8.precision.kernels.triton_launch import (
    amax_bits,
    as_bytes,
    casts_in_hardware,
    check_matrix,
    empty_payload,
)
from megafp8.precision.kernels.triton_rounding import widened
from megafp8.precision.kernels.triton_tile import emit_tile

TILE_ROWS, TILE_COLS = 64, 128
TILE_WARPS = 8  # 32 elements a thread: few enough registers for 32 warps an SM


class Cast(NamedTuple):
    """`payload` [M, N], `payload_t` [N, M], `column_sum` FP32 [N]; None where not asked for."""

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    column_sum: torch.Tensor | None


def cast(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
) -> Cast:
    """Cast FP32, BF16 or FP16 with a 0-d FP32 `quant_scale`; `amax` as in `cast.quantize`.

    Sums are taken of the values before the cast, tile by tile and then over tiles: the same bits
    in each run.
    """
    check_matrix("x_MN", x_MN)
    num_rows, num_cols = x_MN.shape
    out = outputs(num_rows, num_cols, fmt, x_MN.device, with_rows, with_columns)
    sums = partial_sums(num_rows, num_cols, x_MN.device, with_sums)
    if x_MN.numel() > 0:
        _cast_kernel[tiles(num_rows, num_cols)](
            x_MN,
            num_rows,
            num_cols,
            quant_scale,
            amax_bits(amax, x_MN),
            *pointers(out, x_MN),
            x_MN if sums is None else sums,
            IS_E4M3=fmt is E4M3,
            WITH_AMAX=amax is not None,
            WITH_ROWS=with_rows,
            WITH_COLUMNS=with_columns,
            WITH_SUMS=with_sums,
            HARDWARE=casts_in_hardware(x_MN.device),
            TILE_ROWS=TILE_ROWS,
            TILE_COLS=TILE_COLS,
            num_warps=TILE_WARPS,
        )
    return Cast(*out, None if sums is None else sums.sum(0))


def transpose_payload(payload_MN: torch.Tensor) -> torch.Tensor:
    """The same bytes as a contiguous [N, M]."""
    num_rows, num_cols = payload_MN.shape
    payload_t = torch.empty((num_cols, num_rows), dtype=payload_MN.dtype, device=payload_MN.device)
    if payload_MN.numel() > 0:
        _transpose_kernel[tiles(num_rows, num_cols)](
            as_bytes(payload_MN.contiguous()),
            as_bytes(payload_t),
            num_rows,
            num_cols,
            TILE_ROWS=TILE_ROWS,
            TILE_COLS=TILE_COLS,
            num_warps=TILE_WARPS,
        )
    return payload_t


def tiles(num_rows: int, num_cols: int) -> tuple[int, int]:
    return -(-num_rows // TILE_ROWS), -(-num_cols // TILE_COLS)


def outputs(
    num_rows: int,
    num_cols: int,
    fmt: Fp8Format,
    device: torch.device,
    with_rows: bool,
    with_columns: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Empty (payload, payload_t)."""
    payload = empty_payload(num_rows, num_cols, fmt=fmt, device=device) if with_rows else None
    payload_t = empty_payload(num_cols, num_rows, fmt=fmt, device=device) if with_columns else None
    return payload, payload_t


def pointers(
    out: tuple[torch.Tensor | None, torch.Tensor | None], otherwise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    payload, payload_t = out
    return (
        otherwise if payload is None else as_bytes(payload),
        otherwise if payload_t is None else as_bytes(payload_t),
    )


def partial_sums(
    num_rows: int, num_cols: int, device: torch.device, with_sums: bool
) -> torch.Tensor | None:
    """FP32 [row tiles, N]: each row of tiles writes its own part, so the order is fixed."""
    if not with_sums:
        return None
    return torch.empty(-(-num_rows // TILE_ROWS), num_cols, device=device)


@triton.jit
def _cast_kernel(
    x,
    num_rows,
    num_cols,
    quant_scale,
    amax_bits,
    payload,
    payload_t,
    partial_sums,
    IS_E4M3: tl.constexpr,
    WITH_AMAX: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    emit_tile(
        value,
        rows,
        cols,
        num_rows,
        num_cols,
        inside,
        cols < num_cols,
        quant_scale,
        amax_bits,
        payload,
        payload_t,
        x,
        partial_sums,
        DTYPE=tl.float32,  # as it was read: no rounding
        IS_E4M3=IS_E4M3,
        WITH_AMAX=WITH_AMAX,
        WITH_ROWS=WITH_ROWS,
        WITH_COLUMNS=WITH_COLUMNS,
        WITH_PLAIN=False,
        WITH_SUMS=WITH_SUMS,
        HARDWARE=HARDWARE,
    )


@triton.jit
def _transpose_kernel(
    payload, payload_t, num_rows, num_cols, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr
):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    there = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
    codes = tl.load(payload + here, mask=inside, other=0)
    tl.store(payload_t + there, tl.trans(codes), mask=tl.trans(inside))
