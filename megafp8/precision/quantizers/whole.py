"""One scale for a whole matrix: the cast that `delayed` and `tensorwise` share."""

from __future__ import annotations

import torch

from megafp8.precision.engine import Engine
from megafp8.precision.formats import Fp8Format
from megafp8.precision.gemm import wide_dtype
from megafp8.precision.quantizers.base import Fp8Operands, Need, SavedForm, both
from megafp8.precision.tensor import Fp8Tensor


def cast_whole(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
    engine: Engine,
    *,
    amax: torch.Tensor | None = None,
) -> Fp8Operands:
    """`amax` as in `cast.quantize`."""
    if engine.uses_triton:
        return _cast_by_triton(x_MN, quant_scale, fmt, need, engine, amax, False)[0]
    x_fp8 = Fp8Tensor.quantize(x_MN, quant_scale, fmt, amax=amax, grid_dtype=_grid_dtype(x_MN))
    return both(x_fp8, need)


def cast_whole_and_sum(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
    engine: Engine,
    *,
    amax: torch.Tensor | None = None,
) -> tuple[Fp8Operands, torch.Tensor]:
    """With the FP32 sum of each column of the tensor that was not quantized, [N]."""
    if engine.uses_triton:
        operands, total_N = _cast_by_triton(x_MN, quant_scale, fmt, need, engine, amax, True)
        assert total_N is not None
        return operands, total_N
    x_fp8, total_N = Fp8Tensor.quantize_and_sum(
        x_MN, quant_scale, fmt, amax=amax, grid_dtype=_grid_dtype(x_MN)
    )
    return both(x_fp8, need), total_N


def _grid_dtype(x_MN: torch.Tensor) -> torch.dtype:
    """What the products read that multiply this tensor's numbers: they work in its dtype."""
    return wide_dtype(x_MN.device, x_MN.dtype)


def saved_form(fmt: Fp8Format, engine: Engine) -> SavedForm:
    """One cast serves both products, or the second one's lies transposed."""
    return SavedForm("tensor", fmt.dtype, is_transposed=engine.orients("tensor"))


def _cast_by_triton(
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
    engine: Engine,
    amax: torch.Tensor | None,
    with_sum: bool,
) -> tuple[Fp8Operands, torch.Tensor | None]:
    """One pass; each orientation that is needed, or one that serves both products."""
    from megafp8.precision.kernels.triton_cast import cast

    orients = engine.orients("tensor")
    payload, payload_t, total_N = cast(
        x_MN.contiguous(),
        quant_scale,
        fmt,
        amax=amax,
        with_rows=need.last or not orients,
        with_columns=need.first and orients,
        with_sums=with_sum,
    )
    return cast_operands(payload, payload_t, quant_scale, fmt, need), total_N


def cast_operands(
    payload: torch.Tensor | None,
    payload_t: torch.Tensor | None,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: Need,
) -> Fp8Operands:
    """Of one cast: `payload` [M, N] serves both products where there is no `payload_t` [N, M]."""
    dequant_scale = quant_scale.reciprocal()
    last = None if payload is None else Fp8Tensor(payload, dequant_scale, fmt)
    if payload_t is not None:
        return Fp8Operands(last, Fp8Tensor(payload_t.t(), dequant_scale, fmt))
    return Fp8Operands(last if need.last else None, last if need.first else None)
