"""Matrix products: `generic_gemm`, over this project's own products."""

from __future__ import annotations

from typing import Any

import torch

from fp8_numerics.formats import E5M2
from fp8_numerics.gelu import gelu_tanh
from fp8_numerics.gemm import GemmCounter, gemm
from te_cpu import nv
from te_cpu.activations import dgelu
from te_cpu.enums import WIDE
from te_cpu.errors import ProductError, SizeError
from te_cpu.missing import missing
from te_cpu.quantize import quantize
from te_cpu.tensors import Quantizer, is_quantized, operand, row_shape

ALIGNMENT = 16  # of an FP8 matrix's innermost dim, for cuBLASLt


def generic_gemm(
    A: Any,
    transA: bool,  # noqa: N803  # Transformer Engine's names
    B: Any,
    transB: bool,  # noqa: N803
    D: torch.Tensor | None,
    quantizer: Quantizer,
    output_dtype: int | None,
    bias: torch.Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return [D, gradient of the bias, what went into GELU, None]; sums are precise on a CPU.

    cuBLAS counts columns first, so in rows this is D = op(B) @ op(A), with op(A) = A^T for
    `transA`: output = input @ weight^T ("TN"), the input's gradient = grad_output @ weight ("NN"),
    the weight's gradient = grad_output^T @ input ("NT").

    With `gelu` the tanh form follows the product and its bias; with `grad` too, its derivative at
    `gelu_in` is multiplied with the product.
    """
    if comm_overlap is not None:
        raise missing("generic_gemm", " with comm_overlap (ub_tp_comm_overlap)")
    if gelu and grad and bias is not None and bias.numel():
        raise missing("generic_gemm", " of GELU's gradient with that of a bias")
    shape = _result_shape(A, transA, B, transB)
    dtype = _result_dtype(A, D, output_dtype)
    own_bias = bias if bias is not None and bias.numel() and not grad else None
    # What comes after the product reads its sum in FP32, which is rounded once, at the end.
    is_last = alpha == 1.0 and not gelu and not accumulate
    work = dtype if is_last else torch.promote_types(dtype, torch.float32)
    product = _product(A, transA, B, transB, work, own_bias, alpha).reshape(shape)
    before_gelu = None
    if gelu and grad:
        product = dgelu(product, gelu_in.reshape(shape), None).to(dtype)
    elif gelu:
        before_gelu, product = product.to(dtype), gelu_tanh(product).to(dtype)
    elif D is None:
        product = product.to(dtype)
    if D is None:
        assert not accumulate, "there is nothing to accumulate into"
        out = product if quantizer is None else quantize(product, quantizer)
    else:
        assert D.shape == shape, f"the result is {shape}, and D is {D.shape}"
        if accumulate:
            product.add_(D if beta in (None, 1.0) else D.to(work) * beta)
        out = D.copy_(product)
    return [out, _bias_gradient(B, bias) if grad else None, before_gelu, None]


def _product(
    a: Any, trans_a: bool, b: Any, trans_b: bool, dtype: torch.dtype, bias: Any, alpha: float
) -> torch.Tensor:
    """Return the product [rows, columns] in `dtype`, with one rounding to it."""
    if is_quantized(a) and is_quantized(b):
        left, right = operand(b, by_column=trans_b), operand(a, by_column=not trans_a)
        _check_alignment(a)
        _check_alignment(b)
        if left.fmt is E5M2 and right.fmt is E5M2:
            raise ProductError(
                "CUBLAS_STATUS_NOT_SUPPORTED: cuBLAS has no product of two tensors in E5M2. Make "
                "one of them in E4M3"
            )
    elif is_quantized(a) or is_quantized(b):
        raise missing("generic_gemm", " of one operand in FP8 and one that is not")
    else:
        # A matrix in FP32 that is to be accumulated takes FP32 operands.
        wide: list[Any] = [x.detach().reshape(-1, x.shape[-1]).to(dtype) for x in (b, a)]
        if alpha != 1.0:
            wide[1], alpha = wide[1] * alpha, 1.0
        left, right = wide
    if nv.is_nv(a) and nv.is_nv(b):
        columns = not trans_a, trans_b
        left.outer = nv.scale_of_product(a, b, columns=columns, alpha=alpha)
        right.outer, alpha = torch.ones_like(left.outer), 1.0
    if alpha != 1.0:  # a factor of the sum, to which the bias is added
        right.dequant_scale = right.dequant_scale * alpha
    return gemm(
        left,
        right,
        work=dtype,
        counter=GemmCounter(),  # counted where this function is observed
        place="",
        transpose_a=trans_b,
        transpose_b=trans_a,
        bias=None if bias is None else bias.detach().to(dtype),
    )


def _result_shape(a: Any, trans_a: bool, b: Any, trans_b: bool) -> torch.Size:
    a_shape, b_shape = row_shape(a), row_shape(b)
    columns = a_shape[:-1].numel() if trans_a else a_shape[-1]
    return torch.Size([b_shape[-1], columns] if trans_b else [*b_shape[:-1], columns])


def _result_dtype(a: Any, out: torch.Tensor | None, asked: int | None) -> torch.dtype:
    if out is not None:
        return out.dtype
    if asked is not None:
        return WIDE[asked]
    return a.dtype if isinstance(a, torch.Tensor) else torch.bfloat16


def _check_alignment(tensor: Any) -> None:
    size = row_shape(tensor)[-1]
    if size % ALIGNMENT:
        raise SizeError(
            f"Transformer Engine's FP8 products need sizes that are multiples of {ALIGNMENT}, and "
            f"one operand is {list(row_shape(tensor))}. Change the sizes or the number of tokens"
        )


def _bias_gradient(grad_output: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None or not bias.numel():
        return None
    if nv.is_nv(grad_output):
        raise missing("generic_gemm", " with the gradient of a bias, of rotated columns in NVFP4")
    if is_quantized(grad_output):
        grad_output = operand(grad_output, by_column=True).dequantize(torch.float32)
    grad_32: torch.Tensor = grad_output.detach().float()
    return grad_32.reshape(-1, grad_32.shape[-1]).sum(0).to(bias.dtype)


KERNELS = (generic_gemm,)
