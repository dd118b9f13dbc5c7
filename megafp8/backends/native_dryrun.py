"""Let our own linears make, on the meta device, the tensors that a GPU's FP8 kernels make.

Without values nothing casts or multiplies in FP8, and an emulation makes tensors in high precision
that a GPU does not. In a dry run of a GPU a cast makes its bytes and scales, and a product its
result. An operand of FP4 has a byte for each number, as the plan counts it for inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor, column_sums
from fp8_numerics.gemm import Engine
from fp8_numerics.philox import Rows
from megafp8.fp8.quantizer import READERS, LinearQuantizer, Operands, operands_of
from megafp8.fp8.scaling import ScalingState
from megafp8.parallel.parts import linears_of
from megafp8.specs.recipes import find_recipe
from megafp8.specs.traits import GemmName, Role, Scales


@contextmanager
def as_on_a_gpu(model: nn.Module, scaling: ScalingState) -> Iterator[None]:
    """Let the FP8 linears of a model on the meta device cast and multiply as on a GPU."""
    before = scaling.engine
    quantizers = [linear.quantizer for linear in linears_of(model) if linear.quantizer is not None]
    scaling.engine = Engine(layouts=frozenset({"tensor"}), matmul=_product)
    for quantizer in quantizers:
        setattr(quantizer, "operands", partial(_operands, quantizer))  # noqa: B010
    try:
        yield
    finally:
        scaling.engine = before
        for quantizer in quantizers:
            delattr(quantizer, "operands")


def _operands(
    quantizer: LinearQuantizer,
    role: Role,
    x_MN: torch.Tensor,
    *,
    with_first: bool = True,
    with_sum: bool = False,
    rows: Rows | None = None,
) -> tuple[Operands, torch.Tensor | None]:
    """Return what `LinearQuantizer.operands` returns on a GPU.

    A product reads its operand with the dim that it sums over innermost, so each has its own.
    """
    by_last, by_first = (gemm in quantizer.fp8_gemms for gemm in READERS[role])
    is_on = quantizer.state.fp8_enabled
    traits = find_recipe(quantizer.state.recipe.precision_of(quantizer.name)).traits
    casts, last, first = traits.casts[role], None, None
    if by_last and is_on:
        last = _operand(quantizer, role, x_MN, casts.last)
    if by_first and with_first and is_on:
        turned = _operand(quantizer, role, x_MN.t(), casts.first)
        first = Fp8Tensor(turned.payload.t(), turned.dequant_scale, turned.fmt)
    return operands_of(x_MN, last, first), column_sums(x_MN) if with_sum else None


def _operand(
    quantizer: LinearQuantizer, role: Role, x_MK: torch.Tensor, scales: Scales
) -> Fp8Tensor:
    """Return an operand [M, K] whose scales have their memory, but pass for one scale."""
    fmt, (rows, inner) = quantizer.tensors[role].fmt, x_MK.shape
    traits = find_recipe(quantizer.state.recipe.precision_of(quantizer.name)).traits
    count = scales.count(rows, inner)
    if role == "weight":  # the scales of packed ones are bytes
        product: tuple[GemmName, ...] = ("output",)
        scale_bytes = traits.weight_bytes(rows, inner, product) - rows * inner
        count = max(1, scale_bytes // torch.float32.itemsize)
    payload = torch.empty(rows, inner, dtype=fmt.dtype, device=x_MK.device)
    return Fp8Tensor(payload, torch.empty(count, device=x_MK.device)[0], fmt)


def _product(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    **scales: Any,
) -> torch.Tensor:
    """Return the result of a product on tensor cores, [M, N]."""
    if out is not None:
        return out
    return torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=out_dtype, device=a_MK.device)
