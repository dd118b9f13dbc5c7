"""Compute for each expert of a `GroupedLinear`: casts of its rows, its product, its padding.

A GPU does this for all experts at once; the numbers are those of one expert after the other. An
expert without rows has empty tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_cpu.gemm import generic_gemm
from te_cpu.quantize import quantize
from te_cpu.tensors import Quantizer, row_shape


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


KERNELS = (
    split_quantize,
    multi_tensor_quantize,
    fused_multi_quantize,
    te_general_grouped_gemm,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
    splits_to_offsets,
)
