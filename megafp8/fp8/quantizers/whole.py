"""Cast with one scale for a whole matrix, as `delayed` and `tensorwise` do."""

from __future__ import annotations

import torch

from megafp8.fp8.engine import Engine
from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.gemm import wide_dtype
from megafp8.fp8.quantizers.base import Need, Operands, SavedForm, operands_of, serving_both
from megafp8.fp8.tensor import Fp8Tensor
from megafp8.specs.traits import TENSOR


def cast_whole(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
    engine: Engine,
    *,
    amax: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    with_sum: bool = False,
) -> tuple[Operands, torch.Tensor | None]:
    """Cast `x_MN` with a 0-d FP32 `quant_scale`; `amax` works as in `cast.quantize`.

    `dequant_scale` is the reciprocal of the scale, for a caller that has it already.
    The second result has the FP32 sums of each column of `x_MN` itself over groups of rows, [P, N],
    if `with_sum` is set.
    """
    if engine.uses_triton:
        scales = (quant_scale, dequant_scale)
        return _cast_by_triton(x_MN, scales, fmt, need, engine, amax, with_sum)
    # The products that multiply this tensor's numbers work in its own dtype.
    sums_PN, grid_dtype = None, wide_dtype(x_MN.device, x_MN.dtype)
    if with_sum:
        x_fp8, total_N = Fp8Tensor.quantize_and_sum(
            x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype
        )
        sums_PN = total_N[None]
    else:
        x_fp8 = Fp8Tensor.quantize(x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
    return serving_both(x_MN, x_fp8, need), sums_PN


def saved_form(fmt: Fp8Format, engine: Engine) -> SavedForm:
    """Return the form of an input in FP8: one cast for both products, or a transposed one."""
    return SavedForm(TENSOR, fmt.dtype, is_transposed=engine.orients("tensor"))


def _cast_by_triton(
    x_MN: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None],
    fmt: Fp8Format,
    need: Need,
    engine: Engine,
    amax: torch.Tensor | None,
    with_sum: bool,
) -> tuple[Operands, torch.Tensor | None]:
    """Cast in one pass that writes each orientation that is needed, or one for both products."""
    from megafp8.fp8.kernels.triton_cast import cast

    orients, (quant_scale, dequant_scale) = engine.orients("tensor"), scales
    payload, payload_t, sums_PN, _ = cast(
        x_MN.contiguous(),
        quant_scale,
        fmt,
        amax=amax,
        with_rows=need.last or not orients,
        with_columns=need.first and orients,
        with_sums=with_sum,
    )
    last, first = tensors_of_cast(payload, payload_t, quant_scale, fmt, need, dequant_scale)
    return operands_of(x_MN, last, first), sums_PN


def tensors_of_cast(
    payload: torch.Tensor | None,
    payload_t: torch.Tensor | None,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
    dequant_scale: torch.Tensor | None = None,
) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
    """Return one cast as the products (along the last dim, along the first) read it.

    `payload` [M, N] serves both products where there is no `payload_t` [N, M]. None stands for a
    product that is not in FP8.
    """
    if dequant_scale is None:
        dequant_scale = quant_scale.reciprocal()
    last = None if payload is None else Fp8Tensor(payload, dequant_scale, fmt)
    if payload_t is not None:
        return last, Fp8Tensor(payload_t.t(), dequant_scale, fmt)
    return last if need.last else None, last if need.first else None
