"""Cast parts of master weights, which lie on several ranks, into weights that are kept in FP8."""

from __future__ import annotations

import torch

from fp8_numerics import cast
from fp8_numerics.formats import E4M3, E5M2
from fp8_numerics.scales import amax_of_blocks, scale_of_amax
from te_cpu.enums import FORMATS
from te_cpu.quantize import without_nan


def multi_tensor_scale(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Write each tensor of the first list, times `scale`, into that of the second list."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        if not torch.isfinite(source).all():
            is_infinite.fill_(1)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    is_infinite: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Write the scale of each amax of the first list into the second, 1 / scale into the third.

    The scale is 1 for an amax that is 0 or not finite.
    """
    fmt = next(fmt for fmt in (E4M3, E5M2) if fmt.max == max_fp8)
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        floored = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
        scale.copy_(scale_of_amax(floored, fmt, power_2=force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amaxes of the blocks of a matrix [h, w] of which `tensor` has a run of elements.

    The run begins at `start_offset`, in the order of rows; other elements count as 0.
    """
    amax.zero_()
    whole = tensor.new_zeros(h * w)
    whole[start_offset : start_offset + tensor.numel()] = tensor.flatten()
    found = amax_of_blocks(without_nan(whole.view(h, w).float()), (block_len, block_len))
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


KERNELS = (
    multi_tensor_scale,
    multi_tensor_compute_scale_and_scale_inv,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
)
