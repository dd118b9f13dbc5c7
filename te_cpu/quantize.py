"""Casts to FP8 and back: `quantize`, `dequantize` and what goes with them.

The cast itself and the rule for scales are this project's own (`fp8.cast`,
`scale_of_amax`), which are Transformer Engine's. Its amax differs for NaN alone: the kernels take
the larger of two numbers with `fmaxf`, which passes over a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8_numerics import cast
from fp8_numerics.cast import times_scale
from fp8_numerics.scaled_mm import BLOCK
from fp8_numerics.scales import amax_of_blocks, scale_of_amax
from te_cpu import mx, nv
from te_cpu.cuda import to_cpu
from te_cpu.enums import FORMATS, WIDE
from te_cpu.missing import missing
from te_cpu.tensors import (
    Quantizer,
    coerce,
    create,
    is_blockwise,
    is_mx,
    is_nv,
    is_tiled,
    kind_of,
    operand,
    row_shape,
    tile,
    transposed,
)


def quantize(tensor: Any, quantizer: Quantizer, output: Any = None, noop: Any = None) -> Any:
    """Return the tensor in FP8, in `output` where given; `noop` holding 1 leaves that as it is."""
    x = tensor.detach().contiguous()
    out = _place(quantizer, x, x.dtype, output)
    if noop is not None and noop.item() == 1.0:
        return out
    return fill(quantizer, x, out)


def create_empty_quantized_tensor(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    return create(quantizer, shape, dtype, to_cpu(device))


def _place(quantizer: Quantizer, x: torch.Tensor, dtype: torch.dtype, output: Any) -> Any:
    """Return the tensor that the cast of `x` is written into: `output`, or a new one."""
    if output is None:
        return create(quantizer, x.shape, dtype, x.device)
    return coerce(quantizer, output)


def dequantize(input: Any, otype: int) -> torch.Tensor:
    """Return the values of a quantized tensor, in its own shape."""
    if nv.is_nv(input):
        return nv.dequantize(input, WIDE[otype])
    has_rows = getattr(input, "_rowwise_data", getattr(input, "_data", None)) is not None
    values_MK = operand(input, by_column=not has_rows).dequantize(torch.float32)
    return values_MK.reshape(row_shape(input)).to(WIDE[otype])


def bgrad_quantize(input: torch.Tensor, quantizer: Quantizer) -> list[Any]:
    """Return the sum over all dims but the last, and the tensor in FP8."""
    x = input.contiguous()
    bias = x.float().reshape(-1, x.shape[-1]).sum(0).to(x.dtype)
    return [bias, x if quantizer is None else quantize(x, quantizer)]


def fp8_transpose(
    input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    made = transposed(input)
    return made if out is None else out.copy_(made)


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    made = tensor.transpose(0, 1).contiguous()
    return made if out is None else out.copy_(made)


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    amax.fill_(amax_of(input.detach()))


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """max|x|, 0-d FP32, of all that is not NaN."""
    found = cast.amax_of(x)
    return found if torch.isfinite(found) else cast.amax_of(without_nan(x.float()))


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def finish(x32: torch.Tensor, dtype: torch.dtype, quantizer: Quantizer, out: Any = None) -> Any:
    """Return a kernel's FP32 result in `dtype` or, with a quantizer, in FP8.

    The fused kernels of delayed scaling cast from FP32; under the other recipes the result is
    rounded to `dtype` in between.
    """
    if quantizer is None:
        return x32.to(dtype) if out is None else out.copy_(x32)
    if kind_of(quantizer) != "Float8Quantizer":
        x32 = x32.to(dtype)
    return fill(quantizer, x32.contiguous(), _place(quantizer, x32, dtype, out))


def fill(quantizer: Quantizer, x: torch.Tensor, out: Any) -> Any:
    """Write the cast of `x` and its scales into `out`; a dry run's tensors have no values."""
    if x.is_meta:
        return out
    if is_nv(quantizer) or is_mx(quantizer):
        if hasattr(out, "_with_gemm_swizzled_scales"):
            out._with_gemm_swizzled_scales = False
        (nv if is_nv(quantizer) else mx).fill(quantizer, x, out)
        if is_tiled(quantizer):
            tile(out)
        return out
    if is_blockwise(quantizer):
        return _fill_blocks(quantizer, x, out)
    fmt = FORMATS[quantizer.dtype]
    if kind_of(quantizer) == "Float8CurrentScalingQuantizer":
        scale = _current_scale(quantizer, x)
        payload = cast.quantize(x, scale, fmt, amax=None, grid_dtype=None).payload
    elif kind_of(quantizer) == "Float8Quantizer":
        scale = quantizer.scale.reshape(())
        amax = torch.zeros(())
        payload = cast.quantize(x, scale, fmt, amax=amax, grid_dtype=None).payload
        amax = amax if torch.isfinite(amax) else amax_of(x)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        raise missing("quantize", f" with a {kind_of(quantizer)}")
    payload = payload.view(torch.uint8)
    if out._data is not None:
        out._data.copy_(payload)
    if out._transpose is not None:
        out._transpose.copy_(transposed(payload))
    out._scale_inv.fill_(scale.reciprocal())
    return out


def _current_scale(quantizer: Quantizer, x: torch.Tensor) -> torch.Tensor:
    """Return the scale of the tensor's own amax, or of the largest of a group of ranks."""
    workspace = getattr(quantizer, "amax", None)  # later versions keep none
    amax = torch.zeros(1) if workspace is None else workspace
    if not getattr(quantizer, "use_existing_amax", False):
        amax.fill_(amax_of(x))
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group)
    floored = amax.float().clamp(min=quantizer.amax_epsilon).reshape(())
    fmt = FORMATS[quantizer.dtype]
    scale = scale_of_amax(floored, fmt, power_2=quantizer.force_pow_2_scales)
    if getattr(quantizer, "scale", None) is not None:
        quantizer.scale.fill_(scale)
    return scale


def _fill_blocks(quantizer: Quantizer, x: torch.Tensor, out: Any) -> Any:
    """Rows and columns are quantized apart from each other, from `x`."""
    fmt, is_square = FORMATS[quantizer.dtype], quantizer.block_scaling_dim == 2
    block = (BLOCK if is_square else 1, BLOCK)
    x_MK = x.float().reshape(-1, *(x.shape[-1:] or (1,)))
    sides = (
        (x_MK, out._rowwise_data, out._rowwise_scale_inv),
        (x_MK.t().contiguous(), out._columnwise_data, out._columnwise_scale_inv),
    )
    for matrix, data, scale_inv in sides:
        if data is None:
            continue
        amax = amax_of_blocks(without_nan(matrix), block).clamp(min=quantizer.amax_epsilon)
        scale = scale_of_amax(amax, fmt, power_2=quantizer.force_pow_2_scales)
        payload = cast.quantize_scaled(times_scale(matrix, scale, block), fmt)
        data.copy_(payload.view(torch.uint8).reshape(data.shape))
        found = scale.reciprocal() if is_square else scale.reciprocal().t()
        scale_inv.zero_()[: found.shape[0], : found.shape[1]].copy_(found)
    return out


KERNELS = (
    quantize,
    create_empty_quantized_tensor,
    dequantize,
    bgrad_quantize,
    fp8_transpose,
    swap_first_dims,
    compute_amax,
)
