"""Cast a matrix to FP8 in one pass, with an activation or its gradient computed on the way.

An FP8 product on Hopper reads both operands with the dim that it sums over innermost. So a tensor
that two products read is needed in two orientations, and the kernel writes both from one read. It
also takes the amax and the sum of each column. What it casts is the matrix itself, an activation of
it (GELU, tanh GELU, SwiGLU, GEGLU), or the gradient that belongs to the activation's input.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   N columns (features)   X columns of the input: N, or 2 N with gate and up
from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_launch import as_bytes, check_matrix
from fp8_numerics.kernels.triton_rounding import widened
from fp8_numerics.kernels.triton_tile import (
    TILE_COLS,
    TILE_ROWS,
    TILE_WARPS,
    emit_tile,
    emitted,
    tiles,
)

Activation = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
GATED = ("swiglu", "geglu", "geglu_tanh")

# The tile of an (activation, backward) is narrower by this factor where an element takes so many
# registers that an SM would hold fewer than 24 warps. A program of a gated gradient has two tiles.
_NARROWER: dict[tuple[Activation | None, bool], int] = {
    ("gelu", True): 2,
    ("gelu_tanh", True): 2,
    ("geglu", False): 2,
    ("swiglu", True): 4,
    ("geglu", True): 4,
    ("geglu_tanh", True): 4,
}


class CastResults(NamedTuple):
    """Hold the results of a cast; None stands for one that was not asked for.

    `payload` is [M, N], `payload_t` [N, M]. `partial_sums` FP32 [P, N] are the sums of each column
    over groups of rows. `plain` [M, N] are the values that were cast, in the input's dtype.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    partial_sums: torch.Tensor | None
    plain: torch.Tensor | None


def cast(
    x_MX: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    activation: Activation | None = None,
    grad_MN: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_sums: bool = False,
    with_plain: bool = False,
) -> CastResults:
    """Cast FP32, BF16 or FP16 with a 0-d FP32 `quant_scale`; `amax` works as in `cast.quantize`.

    With `activation`, its result for `x_MX` is cast; with `grad_MN`, the gradient of that result,
    the gradient of x. Both are computed in FP32 and rounded to the dtype of x before amax, sums and
    cast, as if they had been stored. SwiGLU and GEGLU read the gate in the first half of the
    columns and what it multiplies (up) in the second half; the gradient of x has both halves.

    Sums are taken tile by tile, and the caller adds up the tiles: the same bits in each run.
    """
    check_matrix("x_MX", x_MX)
    if grad_MN is not None:
        check_matrix("grad_MN", grad_MN)
    num_rows, width = x_MX.shape
    num_cols = width // 2 if activation in GATED else width
    out_cols = num_cols if grad_MN is None else width
    made = emitted(
        num_rows,
        out_cols,
        fmt,
        x_MX.device,
        with_rows=with_rows,
        with_columns=with_columns,
        with_sums=with_sums,
        plain_dtype=x_MX.dtype if with_plain else None,
    )
    tile_cols = TILE_COLS // _NARROWER.get((activation, grad_MN is not None), 1)
    if x_MX.numel() > 0:
        _cast_kernel[tiles(num_rows, num_cols, tile_cols)](
            x_MX,
            x_MX if grad_MN is None else grad_MN,
            num_rows,
            num_cols,
            ACTIVATION=activation or "none",
            BACKWARD=grad_MN is not None,
            **made.arguments(quant_scale, fmt, amax, tile_cols),
        )
    return CastResults(*made)


def transpose_payload(payload_MN: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as a contiguous [N, M]."""
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


@triton.jit
def gelu(x, TANH: tl.constexpr):
    """Return (gelu(x), gelu'(x)) in FP32."""
    if TANH:  # tanh(u) = 2 sigmoid(2u) - 1
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        gate = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * gate, gate + x * gate * (1.0 - gate) * slope
    gate = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * gate, gate + x * density


@triton.jit
def _cast_kernel(
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
    ACTIVATION: tl.constexpr,
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
    TANH: tl.constexpr = ACTIVATION == "gelu_tanh" or ACTIVATION == "geglu_tanh"
    GATED: tl.constexpr = (
        ACTIVATION == "swiglu" or ACTIVATION == "geglu" or ACTIVATION == "geglu_tanh"
    )
    # The matrix itself is not rounded: every number has the dtype in which it was read.
    DTYPE: tl.constexpr = tl.float32 if ACTIVATION == "none" else x.dtype.element_ty
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    is_col = cols < num_cols
    inside = (rows < num_rows)[:, None] & is_col[None, :]
    width = 2 * num_cols if GATED else num_cols
    here = rows[:, None].to(tl.int64) * width + cols[None, :]
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    if GATED:
        up = widened(tl.load(x + here + num_cols, mask=inside, other=0.0))
    if ACTIVATION == "swiglu":
        share = tl.sigmoid(value)
        slope = share * (1.0 + value * (1.0 - share))
        value = value * share
    elif ACTIVATION != "none":
        value, slope = gelu(value, TANH)
    out_cols = num_cols
    if BACKWARD:
        out_cols = width
        at = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
        of_output = widened(tl.load(grad + at, mask=inside, other=0.0))
        result = of_output * up * slope if GATED else of_output * slope
    else:
        result = value * up if GATED else value
    # Columns past the gate's end are the up's: `inside` and `is_col` leave them out. Other column
    # numbers would hide from the compiler that the columns are neighbours.
    emit_tile(
        result, rows, cols, num_rows, out_cols, inside, is_col,
        quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
        DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
    )  # fmt: skip
    if BACKWARD and GATED:
        emit_tile(
            of_output * value, rows, cols + num_cols, num_rows, out_cols, inside, is_col,
            quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
            DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
        )  # fmt: skip


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
