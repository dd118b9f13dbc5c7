"""Cast parts of master weights, which lie on several ranks, into weights that are kept in FP8."""

from __future__ import annotations

import torch

from fp8_numerics import cast
from fp8_numerics.formats import E4M3
from fp8_numerics.scales import amax_of_blocks
from te_cpu.enums import FORMATS
from te_cpu.mx import COLUMN, ROW, factor_of
from te_cpu.quantize import without_nan


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amaxes of the blocks of a matrix [h, w] of which `tensor` has a run of elements.

    The run begins at `start_offset`, in the order of rows; other elements count as 0.
    """
    _write_amaxes(tensor, amax, (h, w), start_offset, (block_len, block_len))


def _write_amaxes(
    run: torch.Tensor,
    amax: torch.Tensor,
    shape: tuple[int, int],
    start: int,
    block: tuple[int, int],
) -> None:
    """Write the amaxes of the blocks of a tensor of `shape`, which has `run` from `start` on."""
    amax.zero_()
    whole = run.new_zeros(shape[0] * shape[1])
    whole[start : start + run.numel()] = run.flatten()
    found = amax_of_blocks(without_nan(whole.view(shape).float()), block)
    amax[: found.shape[0], : found.shape[1]] = found


def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: int,
) -> None:
    """Cast the run of elements `inp` of a matrix [h, w] into `out`, bytes of the same run."""
    fmt = FORMATS[out_dtype]
    places = torch.arange(start_offset, start_offset + inp.numel())
    scales = scale[places // w // block_len, places % w // block_len]
    payload = cast.quantize_scaled(inp.flatten().float() * scales, fmt)
    out.copy_(payload.view(torch.uint8).view_as(out))


def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Write the amaxes of 32 elements of a row and of a column, of a run of a matrix's elements."""
    for amax, block in ((amax_rowwise, ROW), (amax_colwise, COLUMN)):
        _write_amaxes(input, amax, (rows, cols), start_offset, block)


def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Cast a run of a matrix's elements into bytes of the same run, by the scales of both sides."""
    places = torch.arange(start_offset, start_offset + input.numel())
    row, column = places // cols, places % cols
    for out, scale_inv, (height, width) in (
        (output_rowwise, scale_inv_rowwise, ROW),
        (output_colwise, scale_inv_colwise, COLUMN),
    ):
        code = scale_inv[row // height, column // width].int()
        payload = cast.quantize_scaled(input.flatten().float() * factor_of(code), E4M3)
        out.copy_(payload.view(torch.uint8).view_as(out))


KERNELS = (
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    mxfp8_scaling_compute_partial_amax,
    mxfp8_scaling_partial_cast,
)
