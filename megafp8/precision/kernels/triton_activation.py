"""GELU, and its gradient, with the cast to FP8 in the same pass."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from megafp8.precision.formats import E4M3, Fp8Format
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

Activation = Literal["gelu", "gelu_tanh"]


class ActivationCast(NamedTuple):
    """As `triton_cast.Cast`; `plain` [M, N] are the values that were cast, in the input's dtype."""

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    column_sum: torch.Tensor | None
    plain: torch.Tensor | None


def activation_cast(
    x_MN: torch.Tensor,
    grad_MN: torch.Tensor | None,
    kind: Activation,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
    with_plain: bool = False,
) -> ActivationCast:
    """act(x), or with the gradient of act's output `grad_MN`: grad * act'(x); then the cast.

    Computed in FP32 and rounded to x's dtype before amax, sums and cast, as if act(x) had been
    written to memory and read again.
    """
    check_matrix("x_MN", x_MN)
    if grad_MN is not None:
        check_matrix("grad_MN", grad_MN)
    num_rows, num_cols = x_MN.shape
    out = outputs(num_rows, num_cols, fmt, x_MN.device, with_rows, with_columns)
    sums = partial_sums(num_rows, num_cols, x_MN.device, with_sums)
    plain = torch.empty_like(x_MN) if with_plain else None
    if x_MN.numel() > 0:
        _activation_kernel[tiles(num_rows, num_cols)](
            x_MN,
            x_MN if grad_MN is None else grad_MN,
            num_rows,
            num_cols,
            quant_scale,
            amax_bits(amax, x_MN),
            *pointers(out, x_MN),
            x_MN if plain is None else plain,
            x_MN if sums is None else sums,
            TANH=kind == "gelu_tanh",
            BACKWARD=grad_MN is not None,
            IS_E4M3=fmt is E4M3,
            WITH_AMAX=amax is not None,
            WITH_ROWS=with_rows,
            WITH_COLUMNS=with_columns,
            WITH_PLAIN=with_plain,
            WITH_SUMS=with_sums,
            HARDWARE=casts_in_hardware(x_MN.device),
            TILE_ROWS=TILE_ROWS,
            TILE_COLS=TILE_COLS,
            num_warps=TILE_WARPS,
        )
    return ActivationCast(*out, None if sums is None else sums.sum(0), plain)


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """(gelu(x), gelu'(x)) in FP32."""
    if TANH:  # tanh(u) = 2 sigmoid(2u) - 1
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        gate = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * gate, gate + x * gate * (1.0 - gate) * slope
    gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * gate, gate + x * density


@triton.jit
def _activation_kernel(
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
    TANH: tl.constexpr,
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
    here = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    value, slope = gelu(widened(tl.load(x + here, mask=inside, other=0.0)), TANH)
    if BACKWARD:
        value = widened(tl.load(grad + here, mask=inside, other=0.0)) * slope
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
        plain,
        partial_sums,
        DTYPE=x.dtype.element_ty,
        IS_E4M3=IS_E4M3,
        WITH_AMAX=WITH_AMAX,
        WITH_ROWS=WITH_ROWS,
        WITH_COLUMNS=WITH_COLUMNS,
        WITH_PLAIN=WITH_PLAIN,
        WITH_SUMS=WITH_SUMS,
        HARDWARE=HARDWARE,
    )
