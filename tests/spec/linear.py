"""One FP8 linear: quantize three operands, then three products in float64.

Source: the three GEMMs of Micikevicius et al. 2022 (arXiv 2209.05433), operands as in Transformer
Engine's linear: each of `input`, `weight` and `grad_output` is quantized once and used twice.

Shapes: M rows (tokens), K input features, N output features.

    output      [M, N] = input @ weight.T + bias
    grad_input  [M, K] = grad_output @ weight
    grad_weight [N, K] = grad_output.T @ input
    grad_bias   [N]    = sum over M of the grad_output that was *not* quantized

Grid values have at most 4 significant bits, so every product of two is exact in float64; both
dequant_scales (float32) multiply to an exact float64 and are applied to the sum once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.spec.delayed import dequant_scale_of
from tests.spec.formats import Codes, Floats32, Floats64, Format, dequantize, quantize


@dataclass(frozen=True)
class Operand:
    """A quantized matrix and the factor that undoes its scale."""

    codes: Codes
    fmt: Format
    dequant_scale: np.float32

    @property
    def grid(self) -> Floats64:
        """The values before the scale is undone."""
        return dequantize(self.codes, self.fmt)

    @property
    def values(self) -> Floats64:
        """The matrix that the payload stands for, exact in float64."""
        return self.grid * np.float64(self.dequant_scale)


@dataclass(frozen=True)
class Product:
    """A matrix product, and the same product of magnitudes, to which error bounds are relative."""

    values: Floats64
    magnitudes: Floats64


@dataclass(frozen=True)
class LinearResult:
    """Operands and results. `*_magnitudes` are products of magnitudes, without the bias: an FP32
    accumulation of K terms is within about K * 2^-24 of them."""

    input: Operand
    weight: Operand
    grad_output: Operand
    output: Floats64
    grad_input: Floats64
    grad_weight: Floats64
    grad_bias: Floats64
    output_magnitudes: Floats64
    grad_input_magnitudes: Floats64
    grad_weight_magnitudes: Floats64


def operand(x: Floats32, quant_scale: np.float32, fmt: Format) -> Operand:
    """Quantize one matrix."""
    return Operand(quantize(x, quant_scale, fmt), fmt, dequant_scale_of(quant_scale))


def matmul(left: Operand, right: Operand, equation: str) -> Product:
    """The product of two operands; `equation` is einsum's."""
    scale = np.float64(left.dequant_scale) * np.float64(right.dequant_scale)
    a, b = left.grid, right.grid
    return Product(
        values=np.einsum(equation, a, b, optimize=True) * scale,
        magnitudes=np.einsum(equation, np.abs(a), np.abs(b), optimize=True) * scale,
    )


def linear(
    input: Floats32,
    weight: Floats32,
    bias: Floats32 | None,
    grad_output: Floats32,
    *,
    input_scale: np.float32,
    weight_scale: np.float32,
    grad_output_scale: np.float32,
    forward_format: Format,
    backward_format: Format,
) -> LinearResult:
    """Forward and backward of one FP8 linear; all `*_scale` are quant_scales."""
    input_MK = operand(input, input_scale, forward_format)
    weight_NK = operand(weight, weight_scale, forward_format)
    grad_output_MN = operand(grad_output, grad_output_scale, backward_format)

    output = matmul(input_MK, weight_NK, "mk,nk->mn")
    grad_input = matmul(grad_output_MN, weight_NK, "mn,nk->mk")
    grad_weight = matmul(grad_output_MN, input_MK, "mn,mk->nk")
    bias_N = np.zeros(weight.shape[0]) if bias is None else bias.astype(np.float64)

    return LinearResult(
        input=input_MK,
        weight=weight_NK,
        grad_output=grad_output_MN,
        output=output.values + bias_N,
        grad_input=grad_input.values,
        grad_weight=grad_weight.values,
        grad_bias=grad_output.astype(np.float64).sum(axis=0),
        output_magnitudes=output.magnitudes,
        grad_input_magnitudes=grad_input.magnitudes,
        grad_weight_magnitudes=grad_weight.magnitudes,
    )
