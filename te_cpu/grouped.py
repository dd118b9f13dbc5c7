"""Compute for each expert of a `GroupedLinear`: casts of its rows, its product, its padding.

A GPU does this for all experts at once; the numbers are those of one expert after the other. An
expert without rows has empty tensors.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from te_cpu.enums import WIDE
from te_cpu.errors import ProductError
from te_cpu.gemm import generic_gemm
from te_cpu.missing import missing
from te_cpu.quantize import dequantize, fill, quantize
from te_cpu.tensors import Quantizer, is_mx, is_nv, is_tiled, kind_of, row_shape, tile


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


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return how many bytes of addresses a GPU prepares for products of grouped tensors: none."""
    return 0


def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transa: bool,  # noqa: N803  # Transformer Engine's names
    B: Any,
    transb: bool,  # noqa: N803
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    workspace_setup: Any,
    workspace_cublas: Any,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any:
    """Write alpha * op(B) @ op(A) + beta * D of each expert into D, and return that.

    A and D are each a `GroupedTensor` or a list of tensors, B is a `GroupedTensor`; `alpha` and
    `beta` (FP32) have one number, or one for each expert. `bias` [experts, N] is added to the
    rounded rows, where given times `bias_scale` (FP32, one for each row).
    """
    first = 0
    operands = zip(_parts(A), _parts(B), _parts(D), strict=True)
    biases = None if bias is None else _parts(bias)
    for number, (a, b, out) in enumerate(operands):
        scale, kept = (each[number % len(each)].item() for each in (alpha, beta))
        if row_shape(a).numel() and row_shape(b).numel():
            generic_gemm(
                a, transa, b, transb, out, None, None, None, 0, False, None, False, None, 0,
                kept != 0.0, use_split_accumulator, alpha=scale, beta=kept,
            )  # fmt: skip
        else:
            out.mul_(kept) if kept else out.zero_()
        if biases is not None:
            added = biases[number].reshape(1, -1).double()
            if bias_scale is not None:  # one rounding of the sum, in FP32, as fmaf has
                added = added * bias_scale[first : first + len(out), None].double()
            out.copy_((out.double() + added).float())
        first += len(out)
    return D


def te_general_grouped_gemm_to_2_15(
    A: Any,
    transa: bool,  # noqa: N803
    B: Any,
    transb: bool,  # noqa: N803
    D: Any,
    bias: Any,
    *others: Any,
) -> Any:
    """Write the products without a factor of the bias, which 2.16 added before the `others`."""
    return te_general_grouped_gemm_for_grouped_tensor(A, transa, B, transb, D, bias, None, *others)


def _parts(grouped: Any) -> Sequence[Any]:
    """Return the tensor of each expert; those of a `GroupedTensor` share its memory."""
    if isinstance(grouped, list | tuple):
        return grouped
    found: Sequence[Any] = grouped.split_into_quantized_tensors()
    return found


def launch_grouped_dbias(
    dy: torch.Tensor,
    offsets: torch.Tensor,
    dbias: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dscales: torch.Tensor | None,
) -> None:
    """Add each expert's sum of rows of `dy` [M, N] to `dbias` [experts, N], times `scales` [M].

    With `scales` the products of each row with its expert's bias are added to `dscales` [M]. All
    sums are in FP32; `offsets` [experts + 1] says where an expert's rows begin.

    Raises:
        ProductError: Results that repeat bit for bit are asked for, and a GPU adds in any order.
    """
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0":
        raise ProductError(
            "Transformer Engine's kernel of the biases of experts adds in any order, and "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 forbids that. Leave the variable out"
        )
    places = offsets.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(places)):
        rows = dy[begin:end].float()
        if scales is not None:
            assert bias is not None and dscales is not None
            dscales[begin:end] += (rows * bias[expert].float()).sum(1)
            rows = rows * scales[begin:end, None]
        dbias[expert] += rows.sum(0)


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
    is_asked, at = getattr(quantizer, "optimize_for_gemm", False), 0
    for (rows, _), out in parts:
        if rows:
            fill(quantizer, x[at : at + rows], out)
            if is_asked and not is_tiled(quantizer):  # NVFP4 had tiles in groups first
                tile(out)
        at += rows
    if is_asked:
        grouped._with_gemm_swizzled_scales = True
        grouped.quantized_tensors = grouped.split_into_quantized_tensors()
    return grouped


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
    """Do what `group_quantize` does; a flag of 1 casts nothing, and `last_dims` is refused."""
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
    """Do what `bgrad_group_quantize` does; `last_dims`, widths that differ, is refused."""
    if last_dims is not None:
        raise missing("group_quantize", " with last_dims")
    return bgrad_group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets)


def group_dequantize(input: Any, otype: int) -> Any:
    """Return the values of a `GroupedTensor` as another one."""
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
    get_grouped_gemm_setup_workspace_size,
    te_general_grouped_gemm_for_grouped_tensor,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
    splits_to_offsets,
    splits_to_offsets_multi,
    group_quantize,
    bgrad_group_quantize,
    group_dequantize,
)
