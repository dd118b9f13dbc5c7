"""Compute for each expert of a `GroupedLinear`: casts of its rows, its product, its padding.

A GPU does this for all experts at once; the numbers are those of one expert after the other. An
expert without rows has empty tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from fp8_numerics.swizzle import swizzled
from te_cpu.enums import WIDE
from te_cpu.gemm import generic_gemm
from te_cpu.missing import missing
from te_cpu.quantize import dequantize, fill, quantize
from te_cpu.tensors import Quantizer, is_mx, is_nv, kind_of, row_shape


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Return each part of the rows in FP8, by the quantizer of its expert."""
    parts = tensor.split(list(split_sections))
    return multi_tensor_quantize(parts, quantizer_list)


def multi_tensor_quantize(
    tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Quantizer]
) -> list[Any]:
    """Return each tensor in FP8, by its own quantizer."""
    return [quantize(x, own) for x, own in zip(tensor_list, quantizer_list, strict=True)]


def fused_multi_quantize(
    input_list: Sequence[torch.Tensor],
    output_list: Sequence[Any] | None,
    quantizer_list: Sequence[Quantizer],
    otype: int,
) -> list[Any]:
    """Return each tensor in FP8; up to 2.5 the function has this name."""
    outputs = [None] * len(input_list) if output_list is None else output_list
    every = zip(input_list, quantizer_list, outputs, strict=True)
    return [quantize(x, quantizer, out) for x, quantizer, out in every]


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,  # noqa: N803  # Transformer Engine's names
    B: Sequence[Any],
    transb: bool,  # noqa: N803
    D: Sequence[torch.Tensor] | None,
    D_type: int,  # noqa: N803
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspaceSize: int,  # noqa: N803
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Write the products of all experts into D, and return the biases, in `grad` their gradients.

    With `single_output` D has one tensor, in which the experts' rows follow each other. An expert
    without rows gets zeros, unless it is to be added to what is there.
    """
    assert D is not None, "the products are written into D"
    at = 0
    for number, (a, b, own_bias, gelu) in enumerate(zip(A, B, bias, pre_gelu_out, strict=True)):
        a_shape, b_shape = row_shape(a), row_shape(b)
        rows = b_shape[-1] if transb else b_shape[:-1].numel()
        columns = a_shape[:-1].numel() if transa else a_shape[-1]
        out = D[0][at : at + rows].view(rows, columns) if single_output else D[number]
        at += rows
        if not a_shape.numel() or not b_shape.numel():
            for written in (*([] if accumulate else [out]), *([own_bias] if grad else []), gelu):
                written.zero_()
            continue
        _, of_bias, before_gelu, _ = generic_gemm(
            a, transa, b, transb, out, None, D_type, own_bias, bias_type, bool(gelu.numel()), gelu,
            grad, None, workspaceSize, accumulate, use_split_accumulator,
        )  # fmt: skip
        if of_bias is not None:
            own_bias.copy_(of_bias)
        if before_gelu is not None:
            gelu.copy_(before_gelu)
    return list(bias)


def fused_multi_row_padding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None:
    """Write the rows of each expert [rows, K] into `output`, with zeros behind them."""
    sections = output.split(list(padded_input_row_list))
    for source, target in zip(input.split(list(input_row_list)), sections, strict=True):
        target[: len(source)] = source
        target[len(source) :] = 0


def fused_multi_row_unpadding(
    input: torch.Tensor,
    output: torch.Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None:
    """Write the rows of each expert into `output`, without those that padding has added."""
    sections = input.split(list(input_row_list))
    for source, target in zip(sections, output.split(list(unpadded_input_row_list)), strict=True):
        target.copy_(source[: len(target)])


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return where each expert's numbers begin, and how many there are, int64 [experts + 1]."""
    sizes = first_dims.to(torch.int64) * logical_last_dim
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sizes as int64, and for each stride where the experts' parts end, or begin too."""
    sizes = split_sizes.to(torch.int64)
    wanted = zip(strides, include_leading_zero, dtypes, strict=True)
    offsets = [
        splits_to_offsets(sizes, stride)[not has_zero :].to(dtype)
        for stride, has_zero, dtype in wanted
    ]
    return sizes, offsets


def group_quantize(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None = None,
) -> Any:
    """Return the rows of all experts [M, K] in MXFP8 or NVFP4, as one `GroupedTensor`.

    `first_dims` has the number of rows of each; without it they are as many for each. Rows behind
    the last expert's belong to no expert.
    """
    if not (is_mx(quantizer) or is_nv(quantizer)):
        raise missing("group_quantize", f" with a {kind_of(quantizer)}")
    x = tensor.detach().contiguous()
    grouped = _grouped(x, quantizer, num_tensors, first_dims, tensor_offsets)
    parts = zip(grouped.tensor_shapes, grouped.quantized_tensors, strict=True)
    at = 0
    for (rows, _), out in parts:
        if rows:
            fill(quantizer, x[at : at + rows], out)
            _tile(quantizer, out)
        at += rows
    if _is_tiled(quantizer):
        grouped._with_gemm_swizzled_scales = True
        grouped.quantized_tensors = grouped.split_into_quantized_tensors()
    return grouped


def _is_tiled(quantizer: Quantizer) -> bool:
    return bool(getattr(quantizer, "optimize_for_gemm", False))


def _tile(quantizer: Quantizer, out: Any) -> None:
    """Put the scales into tiles, as a Blackwell's products read them, if that is asked for."""
    for side in ("rowwise", "columnwise"):
        stored = getattr(out, f"_{side}_scale_inv")
        if stored is not None and _is_tiled(quantizer):
            is_turned = side == "columnwise" and is_mx(quantizer)  # those of NVFP4 lie so
            stored.copy_(swizzled(stored.t() if is_turned else stored).view_as(stored))


def _grouped(
    like: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
) -> Any:
    """Return a `GroupedTensor` of the shape of `like`, made by Transformer Engine's own Python.

    Its scales are not in tiles yet, and it says so.
    """
    module = importlib.import_module(
        "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage"
    )
    grouped = module.GroupedTensorStorage.make_grouped_tensor(
        num_tensors, first_dims, None, *like.shape, quantizer, like.device, like.dtype
    )
    grouped._with_gemm_swizzled_scales = False
    grouped.quantized_tensors = grouped.split_into_quantized_tensors()
    if tensor_offsets is not None:
        grouped.tensor_offsets = tensor_offsets
    return grouped


def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return the rows as `group_quantize` does, and each expert's sum of rows [experts, K]."""
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets)
    rows = [shape[0] for shape in grouped.tensor_shapes]
    sums = [part.float().sum(0) for part in tensor[: sum(rows)].split(rows)]
    return grouped, torch.stack(sums).to(tensor.dtype)


def group_quantize_from_2_18(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
) -> Any:
    """Refuse widths that differ, which 2.18 added. With a flag of 1 nothing is cast."""
    if last_dims is not None:
        raise missing("group_quantize", " with last_dims")
    if noop_flag is not None and noop_flag.item() == 1.0:
        return _grouped(tensor, quantizer, num_tensors, first_dims, tensor_offsets)
    return group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets)


def bgrad_group_quantize_from_2_18(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Refuse widths that differ, which 2.18 added."""
    if last_dims is not None:
        raise missing("group_quantize", " with last_dims")
    return bgrad_group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets)


def group_dequantize(input: Any, otype: int) -> Any:
    """Return the values of a `GroupedTensor` as another one."""
    if input._with_gemm_swizzled_scales:
        raise missing("group_dequantize", " of scales in tiles (optimize_for_gemm)")
    shape, dtype = input.logical_shape, WIDE[otype]
    like = torch.empty(shape, dtype=dtype)
    found = _grouped(like, None, input.num_tensors, input.first_dims, input.tensor_offsets)
    parts = input.split_into_quantized_tensors()
    values = [dequantize(part, otype).flatten() for part in parts if row_shape(part).numel()]
    whole = torch.cat(values) if values else like.flatten()
    found.rowwise_data[: len(whole)] = whole
    return found


KERNELS = (
    split_quantize,
    multi_tensor_quantize,
    fused_multi_quantize,
    te_general_grouped_gemm,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
    splits_to_offsets,
    splits_to_offsets_multi,
    group_quantize,
    bgrad_group_quantize,
    group_dequantize,
)
