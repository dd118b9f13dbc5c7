"""Compute LayerNorm or RMSNorm with the cast to FP8 in the same pass, and the norm's backward.

Forward takes two launches: each row's mean and reciprocal deviation, then tiles that normalize,
scale, round and cast in both orientations. For BF16 that moves 2 + 2 + 1 + 1 bytes an element where
a norm and a cast apart from it move 8. Backward takes one launch where a program holds whole rows,
and two where rows are too wide for its registers.

The residual stream's additions are part of these passes. Forward, the norm may read two tensors
and write their sum; backward, the gradient that reaches the norm's input by another way is added.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# M rows (tokens)   D columns (model width)   P groups of rows
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8_numerics.formats import Fp8Format
from fp8_numerics.kernels.triton_launch import casts_in_hardware, check_matrix
from fp8_numerics.kernels.triton_rounding import narrowed, rounded, widened
from fp8_numerics.kernels.triton_tile import (
    TILE_COLS,
    TILE_ROWS,
    TILE_WARPS,
    emit_tile,
    emitted,
    tiles,
)

BACKWARD_ROWS = 32  # rows whose weight gradient one program adds up
WIDEST_ROW = 8192  # columns that one program's registers hold in backward
CHUNK = 2048  # columns that a program holds at once where rows are wider
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class NormStatistics(NamedTuple):
    """Hold what backward needs besides the input, FP32 [M] each; `mean` is None for RMSNorm."""

    mean: torch.Tensor | None
    rstd: torch.Tensor


class NormCast(NamedTuple):
    """Hold the results of a norm; None stands for one that was not asked for.

    `payload` is [M, D], `payload_t` [D, M]. `plain` [M, D] are the values that were cast, in
    `out_dtype`. `total` [M, D] is the norm's input where that is a sum.
    """

    payload: torch.Tensor | None
    payload_t: torch.Tensor | None
    plain: torch.Tensor | None
    statistics: NormStatistics
    total: torch.Tensor | None


class NormGrads(NamedTuple):
    """Hold the gradients of a norm: of its input [M, D], and FP32 parts of those of its parameters.

    The sums of the parts [P, D] over P are the gradients of the weight and of the bias, which is
    None for RMSNorm. Each group of rows has its own part: the same bits in each run.
    """

    input: torch.Tensor
    weight_parts: torch.Tensor
    bias_parts: torch.Tensor | None


def norm_cast(
    x_MD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    epsilon: float,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    out_dtype: torch.dtype,
    addend_MD: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    with_rows: bool = True,
    with_columns: bool = False,
    with_plain: bool = False,
) -> NormCast:
    """Compute LayerNorm, or RMSNorm if there is no bias, and cast the result.

    It is computed in FP32 and rounded to `out_dtype` before amax and cast, as if it had been
    stored. With `addend_MD` the norm's input is x + addend, rounded to the dtype of x. Other
    arguments are those of `triton_cast.cast`.
    """
    check_matrix("x_MD", x_MD)
    num_rows, num_cols = x_MD.shape
    made = emitted(
        num_rows,
        num_cols,
        fmt,
        x_MD.device,
        with_rows=with_rows,
        with_columns=with_columns,
        plain_dtype=out_dtype if with_plain else None,
    )
    rstd = torch.empty(num_rows, device=x_MD.device)
    mean = None if bias_D is None else torch.empty_like(rstd)
    total = None
    if addend_MD is not None:
        check_matrix("addend_MD", addend_MD)
        total = torch.empty_like(x_MD)
    if x_MD.numel() > 0:
        _statistics_kernel[(num_rows,)](
            x_MD,
            x_MD if addend_MD is None else addend_MD,
            x_MD if total is None else total,
            rstd if mean is None else mean,
            rstd,
            num_cols,
            epsilon,
            CENTRED=mean is not None,
            WITH_ADDEND=total is not None,
            HARDWARE=casts_in_hardware(x_MD.device),
            LANES=triton.next_power_of_2(num_cols),
            num_warps=_row_warps(num_cols),
        )
        _normalize_kernel[tiles(num_rows, num_cols)](
            x_MD if total is None else total,
            weight_D,
            weight_D if bias_D is None else bias_D,
            rstd if mean is None else mean,
            rstd,
            num_rows,
            num_cols,
            CENTRED=mean is not None,
            DTYPE=_DTYPES[out_dtype],
            **made.arguments(quant_scale, fmt, amax),
        )
    statistics = NormStatistics(mean, rstd)
    return NormCast(made.payload, made.payload_t, made.plain, statistics, total)


def norm_backward(
    grad_MD: torch.Tensor,
    x_MD: torch.Tensor,
    weight_D: torch.Tensor,
    statistics: NormStatistics,
    addend_MD: torch.Tensor | None = None,
) -> NormGrads:
    """Return the gradients of x in its dtype, and of the weight and the bias in FP32.

    `addend_MD` is added to the gradient of x after that has been rounded.
    """
    check_matrix("grad_MD", grad_MD)
    check_matrix("x_MD", x_MD)
    if addend_MD is not None:
        check_matrix("addend_MD", addend_MD)
    num_rows, num_cols = x_MD.shape
    is_wide = num_cols > WIDEST_ROW
    groups = -(-num_rows // (TILE_ROWS if is_wide else BACKWARD_ROWS))
    grad_x = torch.empty_like(x_MD)
    mean, rstd = statistics
    parts = torch.empty(1 if mean is None else 2, groups, num_cols, device=x_MD.device)
    if x_MD.numel() > 0:
        shared = (grad_MD, x_MD, weight_D, rstd if mean is None else mean, rstd, num_rows, num_cols)
        out = (grad_x, grad_x if addend_MD is None else addend_MD, parts[0], parts[-1])
        form = {
            "CENTRED": mean is not None,
            "WITH_ADDEND": addend_MD is not None,
            "HARDWARE": casts_in_hardware(x_MD.device),
        }
        if is_wide:  # two reads: the means of each row, then tiles, which fit the registers
            row_means = torch.empty(2, num_rows, device=x_MD.device)
            _row_means_kernel[(num_rows,)](
                *shared, row_means[0], row_means[1], CENTRED=mean is not None, CHUNK=CHUNK
            )
            _tile_backward_kernel[tiles(num_rows, num_cols)](
                *shared, row_means[0], row_means[1], *out, **form,
                TILE_ROWS=TILE_ROWS, TILE_COLS=TILE_COLS, num_warps=TILE_WARPS,
            )  # fmt: skip
        else:  # one read: a program holds whole rows
            _backward_kernel[(groups,)](
                *shared, *out, **form, ROWS=BACKWARD_ROWS,
                LANES=triton.next_power_of_2(num_cols), num_warps=_row_warps(num_cols),
            )  # fmt: skip
    return NormGrads(grad_x, parts[0], None if mean is None else parts[1])


def _row_warps(num_cols: int) -> int:
    """Return the warps of a program that holds a whole row: 8 or 16 elements a thread."""
    lanes: int = triton.next_power_of_2(num_cols)
    return min(16, max(4, lanes // 256))


@triton.jit
def _read(
    grad, x, scale, mean, rstd, row, is_row, here, mask, CENTRED: tl.constexpr
):  # fmt: skip
    """Return (xhat, g, g w, reciprocal deviation) at `here`, which is 0 outside of `mask`.

    xhat is (x - mean) * deviation, or x * deviation; g is the gradient, `scale` the weight w.
    """
    deviation = tl.load(rstd + row, mask=is_row, other=0.0)
    value = widened(tl.load(x + here, mask=mask, other=0.0))
    if CENTRED:
        value = tl.where(mask, value - tl.load(mean + row, mask=is_row, other=0.0), 0.0)
    of_output = widened(tl.load(grad + here, mask=mask, other=0.0))
    return value * deviation, of_output, of_output * scale, deviation


@triton.jit
def _grad_of_row(
    grad_x, addend, here, mask, scaled, normal, of_product, of_scaled, deviation,
    CENTRED: tl.constexpr, WITH_ADDEND: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store deviation * (g w - mean(g w) - xhat mean(g w xhat)), given the means of the row.

    `scaled` is g w, `normal` xhat, `of_product` mean(g w xhat), `of_scaled` mean(g w).
    """
    result = scaled - normal * of_product
    if CENTRED:
        result = result - of_scaled
    dtype: tl.constexpr = grad_x.dtype.element_ty
    result = rounded(result * deviation, dtype, HARDWARE)
    if WITH_ADDEND:
        more = widened(tl.load(addend + here, mask=mask, other=0.0))
        result = rounded(result + more, dtype, HARDWARE)
    tl.store(grad_x + here, narrowed(result, dtype, HARDWARE), mask=mask)


@triton.jit
def _statistics_kernel(
    x,
    addend,
    total,
    mean,
    rstd,
    num_cols,
    epsilon,
    CENTRED: tl.constexpr,
    WITH_ADDEND: tl.constexpr,
    HARDWARE: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, LANES)
    inside = cols < num_cols
    here = row.to(tl.int64) * num_cols + cols
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    if WITH_ADDEND:
        dtype: tl.constexpr = total.dtype.element_ty
        more = widened(tl.load(addend + here, mask=inside, other=0.0))
        value = rounded(value + more, dtype, HARDWARE)
        tl.store(total + here, narrowed(value, dtype, HARDWARE), mask=inside)
    if CENTRED:
        average = tl.sum(value, axis=0) / num_cols
        tl.store(mean + row, average)
        value = tl.where(inside, value - average, 0.0)
    variance = tl.sum(value * value, axis=0) / num_cols
    tl.store(rstd + row, 1.0 / tl.sqrt(variance + epsilon))


@triton.jit
def _normalize_kernel(
    x,
    weight,
    bias,
    mean,
    rstd,
    num_rows,
    num_cols,
    quant_scale,
    amax_bits,
    payload,
    payload_t,
    plain,
    partial_sums,
    CENTRED: tl.constexpr,
    DTYPE: tl.constexpr,
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
    value = widened(tl.load(x + here, mask=inside, other=0.0))
    if CENTRED:
        value = value - tl.load(mean + rows, mask=rows < num_rows, other=0.0)[:, None]
    value = value * tl.load(rstd + rows, mask=rows < num_rows, other=0.0)[:, None]
    value = value * widened(tl.load(weight + cols, mask=cols < num_cols, other=0.0))[None, :]
    if CENTRED:
        value = value + widened(tl.load(bias + cols, mask=cols < num_cols, other=0.0))[None, :]
    emit_tile(
        value, rows, cols, num_rows, num_cols, inside, cols < num_cols,
        quant_scale, amax_bits, payload, payload_t, plain, partial_sums,
        DTYPE, IS_E4M3, WITH_AMAX, WITH_ROWS, WITH_COLUMNS, WITH_PLAIN, WITH_SUMS, HARDWARE,
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    grad,
    x,
    weight,
    mean,
    rstd,
    num_rows,
    num_cols,
    grad_x,
    addend,
    weight_parts,
    bias_parts,
    CENTRED: tl.constexpr,
    WITH_ADDEND: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add up the rows of a group; every row fits the program's registers."""
    cols = tl.arange(0, LANES)
    inside = cols < num_cols
    scale = widened(tl.load(weight + cols, mask=inside, other=0.0))
    of_weight = tl.zeros((LANES,), tl.float32)
    of_bias = tl.zeros((LANES,), tl.float32)
    for offset in range(ROWS):
        row = tl.program_id(0) * ROWS + offset + tl.arange(0, 1)  # a vector: masks broadcast
        is_row = row < num_rows
        here = row.to(tl.int64) * num_cols + cols
        mask = inside & is_row
        normal, of_output, scaled, deviation = _read(
            grad, x, scale, mean, rstd, row, is_row, here, mask, CENTRED
        )
        of_weight += of_output * normal
        if CENTRED:
            of_bias += of_output
        of_product = tl.sum(scaled * normal, axis=0) / num_cols
        of_scaled = tl.sum(scaled, axis=0) / num_cols
        _grad_of_row(
            grad_x, addend, here, mask, scaled, normal, of_product, of_scaled, deviation,
            CENTRED, WITH_ADDEND, HARDWARE,
        )  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * num_cols + cols
    tl.store(weight_parts + at, of_weight, mask=inside)
    if CENTRED:
        tl.store(bias_parts + at, of_bias, mask=inside)


@triton.jit
def _row_means_kernel(
    grad,
    x,
    weight,
    mean,
    rstd,
    num_rows,
    num_cols,
    of_product,
    of_scaled,
    CENTRED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store mean(g w xhat) and mean(g w) of each row, g w being gradient times weight."""
    row = tl.program_id(0) + tl.arange(0, 1)
    is_row = row < num_rows
    products = tl.zeros((CHUNK,), tl.float32)
    scaled_sums = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, num_cols, CHUNK):
        cols = begin + tl.arange(0, CHUNK)
        inside = cols < num_cols
        here = row.to(tl.int64) * num_cols + cols
        scale = widened(tl.load(weight + cols, mask=inside, other=0.0))
        normal, _, scaled, _ = _read(
            grad, x, scale, mean, rstd, row, is_row, here, inside & is_row, CENTRED
        )
        products += scaled * normal
        scaled_sums += scaled
    none = tl.zeros((1,), tl.float32)
    tl.store(of_product + row, none + tl.sum(products, axis=0) / num_cols)
    tl.store(of_scaled + row, none + tl.sum(scaled_sums, axis=0) / num_cols)


@triton.jit
def _tile_backward_kernel(
    grad,
    x,
    weight,
    mean,
    rstd,
    num_rows,
    num_cols,
    of_product,
    of_scaled,
    grad_x,
    addend,
    weight_parts,
    bias_parts,
    CENTRED: tl.constexpr,
    WITH_ADDEND: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """Do what `_backward_kernel` does, tile by tile, given the two means of each row."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    cols = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    is_row, is_col = rows < num_rows, cols < num_cols
    inside = is_row & is_col[None, :]
    here = rows.to(tl.int64) * num_cols + cols[None, :]
    scale = widened(tl.load(weight + cols, mask=is_col, other=0.0))[None, :]
    normal, of_output, scaled, deviation = _read(
        grad, x, scale, mean, rstd, rows, is_row, here, inside, CENTRED
    )
    at = tl.program_id(0).to(tl.int64) * num_cols + cols
    tl.store(weight_parts + at, tl.sum(of_output * normal, axis=0), mask=is_col)
    if CENTRED:
        tl.store(bias_parts + at, tl.sum(of_output, axis=0), mask=is_col)
    of_product = tl.load(of_product + rows, mask=is_row, other=0.0)
    of_scaled = tl.load(of_scaled + rows, mask=is_row, other=0.0)
    _grad_of_row(
        grad_x, addend, here, inside, scaled, normal, of_product, of_scaled, deviation,
        CENTRED, WITH_ADDEND, HARDWARE,
    )  # fmt: skip
