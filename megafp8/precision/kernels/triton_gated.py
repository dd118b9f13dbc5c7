"""Gated activations (SwiGLU, GEGLU), and their gradients, with the cast to FP8 in the same pass."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns of the result; gate and up lie beside each other: [M, 2N]
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from megafp8.precision.formats import E4M3, Fp8Format
from megafp8.precision.kernels.triton_activation import ActivationCast, gelu
from megafp8.precision.kernels.triton_cast import (
    TILE_COLS,
    TILE_ROWS,
    TILE_WARPS,
    outputs,
    partial_sums,
    pointers,
    tiles,
)
from megafp8.precision.kernels.triton_launch import amax_bits, casts_in_hardware, check_matrix
from megafp8.precision.kernels.triton_rounding import widened
from megafp8.precision.kernels.triton_tile import emit_tile

GatedActivation = Literal["swiglu", "geglu"]


def gated_cast(
    x_M2N: torch.Tensor,
    grad_MN: torch.Tensor | None,
    kind: GatedActivation,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
    with_plain: bool = False,
) -> ActivationCast:
    """f(gate) * up [M, N]; or, given the gradient of that, the gradients of gate and up [M, 2N].

    Computed in FP32 and rounded to x's dtype once, before amax, sums and cast.
    """
    check_matrix("x_M2N", x_M2N)
    is_backward = grad_MN is not None
    if grad_MN is not None:
        check_matrix("grad_MN", grad_MN)
    num_rows, num_cols = x_M2N.shape[0], x_M2N.shape[1] // 2
    width = 2 * num_cols if is_backward else num_cols
    out = outputs(num_rows, width, fmt, x_M2N.device, with_rows, with_columns)
    sums = partial_sums(num_rows, width, x_M2N.device, with_sums)
    plain = x_M2N.new_empty(num_rows, width) if with_plain else None
    if x_M2N.numel() > 0:
        _gated_kernel[tiles(num_rows, num_cols)](
            x_M2N,
            x_M2N if grad_MN is None else grad_MN,
            num_rows,
            num_cols,
            quant_scale,
            amax_bits(amax, x_M2N),
            *pointers(out, x_M2N),
            x_M2N if plain is None else plain,
            x_M2N if sums is None else sums,
            SILU=kind == "swiglu",
            BACKWARD=is_backward,
            IS_E4M3=fmt is E4M3,
            WITH_AMAX=amax is not None,
            WITH_ROWS=with_rows,
            WITH_COLUMNS=with_columns,
            WITH_PLAIN=with_plain,
            WITH_SUMS=with_sums,
            HARDWARE=casts_in_hardware(x_M2N.device),
            TILE_ROWS=TILE_ROWS,
            TILE_COLS=TILE_COLS,
            num_warps=TILE_WARPS,
        )
    return ActivationCast(*out, None if sums is None else sums.sum(0), plain)


@triton.jit
def _gated_kernel(
    x,
    grad,
    num_rows,
    num_cols,
    quant_scale,
    amax_bits,
    payload,
    payload_t,
    plain,
    partial_sums,
    SILU: tl.constexpr,
    BACKWARD: tl.constexpr,
    IS_E4M3: tl.constexpr,
    WITH_AMAX: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    WITH_PLAIN: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    gate_at = rows[:, None].to(tl.int64) * (2 * num_cols) + cols[None, :]
    gate = widened(tl.load(x + gate_at, mask=inside, other=0.0))
    up = widened(tl.load(x + gate_at + num_cols, mask=inside, other=0.0))
    if SILU:
        share = tl.sigmoid(gate)
        value, slope = gate * share, share * (1.0 + gate * (1.0 - share))
    else:
        value, slope = gelu(gate, False)
    if BACKWARD:
        grad_at = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
        of_output = widened(tl.load(grad + grad_at, mask=inside, other=0.0))
        width = 2 * num_cols
        # Columns past the gate's end are the up's: `inside` and `summed` leave them out. Other
        # column numbers would hide from the compiler that the columns are neighbours.
        summed = cols < num_cols
        up_cols = cols + num_cols
        emit_tile(
            of_output * up * slope, rows, cols, num_rows, width, inside, summed,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE=x.dtype.element_ty, IS_E4M3=IS_E4M3, WITH_AMAX=WITH_AMAX, WITH_ROWS=WITH_ROWS,
            WITH_COLUMNS=WITH_COLUMNS, WITH_PLAIN=WITH_PLAIN, WITH_SUMS=WITH_SUMS,
            HARDWARE=HARDWARE,
        )  # fmt: skip
        emit_tile(
            of_output * value, rows, up_cols, num_rows, width, inside, summed,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE=x.dtype.element_ty, IS_E4M3=IS_E4M3, WITH_AMAX=WITH_AMAX, WITH_ROWS=WITH_ROWS,
            WITH_COLUMNS=WITH_COLUMNS, WITH_PLAIN=WITH_PLAIN, WITH_SUMS=WITH_SUMS,
            HARDWARE=HARDWARE,
        )  # fmt: skip
    else:
        emit_tile(
            value * up, rows, cols, num_rows, num_cols, inside, cols < num_cols,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE=x.dtype.element_ty, IS_E4M3=IS_E4M3, WITH_AMAX=WITH_AMAX, WITH_ROWS=WITH_ROWS,
            WITH_COLUMNS=WITH_COLUMNS, WITH_PLAIN=WITH_PLAIN, WITH_SUMS=WITH_SUMS,
            HARDWARE=HARDWARE,
        )  # fmt: skip
