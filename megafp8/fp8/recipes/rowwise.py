"""Define `rowwise`: each row or column that a product sums over has one scale (torchao)."""

# M, N the tensor's own dims

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe, lazy
from megafp8.specs.traits import ROW, Cost, Traits, alike

if TYPE_CHECKING:
    import torch

    from fp8_numerics import block_casts, cast, scales
    from fp8_numerics.cast import Fp8Tensor
    from fp8_numerics.kernels import triton_cast, triton_current
    from megafp8.fp8 import quantizer
    from megafp8.fp8.quantizer import Operands, SavedForm, TensorQuantizer, WantsFp8
else:  # settings are checked without torch
    block_casts = lazy("fp8_numerics.block_casts")
    cast, scales = lazy("fp8_numerics.cast"), lazy("fp8_numerics.scales")
    quantizer = lazy("megafp8.fp8.quantizer")
    triton_cast = lazy("fp8_numerics.kernels.triton_cast")
    triton_current = lazy("fp8_numerics.kernels.triton_current")


class Rowwise(Recipe):
    """Rows and columns are quantized separately, both from the tensor in high precision."""

    traits = Traits(
        help="the amaxes of its rows and columns",
        input=alike(ROW),
        weight=alike(ROW),
        grad_output=alike(ROW),
        agrees_on_columns=True,
        power_2="on",
        pads=True,
        backends={"torchao": "rowwise"},
        cost=Cost(launches=(87, 97), reads_twice=True),
    )

    def operands(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        if tensor.state.engine.uses_triton:
            last, first = self._by_triton(tensor, x_MN.contiguous(), need)
        else:
            last = self._along(tensor, x_MN, dim=1) if need.last else None
            first = self._along(tensor, x_MN, dim=0) if need.first else None
        sums_PN = cast.column_sums(x_MN) if with_sum else None
        return quantizer.operands_of(x_MN, last, first), sums_PN

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        is_transposed = tensor.state.engine.uses_triton
        return quantizer.SavedForm(ROW, tensor.fmt.dtype, is_transposed=is_transposed)

    def scale_rule(self) -> Callable[..., torch.Tensor]:
        return scales.scale_of_amax_torchao

    def _is_whole(self, tensor: TensorQuantizer, dim: int) -> bool:
        """Whether a sum along `dim` needs one scale for the whole tensor (`RowwiseWithGwHp`)."""
        return dim == 0 and self.traits.casts[tensor.role].first.is_one

    def _along(self, tensor: TensorQuantizer, x_MN: torch.Tensor, dim: int) -> Fp8Tensor:
        """Quantize with one scale for all elements along `dim`."""
        is_whole = self._is_whole(tensor, dim)
        if not is_whole and (dim == 1 or tensor.reduce_columns is None):
            block = (1, x_MN.shape[1]) if dim == 1 else (x_MN.shape[0], 1)
            values = quantizer.values_dtype(
                tensor, x_MN, along_first=dim == 0, is_exact=tensor.power_2
            )
            made = block_casts.current(
                x_MN, block, tensor.fmt, power_2=tensor.power_2, torchao=True, values=values
            )
            if made is not None:
                return self._scaled(tensor, made.payload, made.scale, dim, made.values)
        amax = cast.amax_of(x_MN).view(1, 1) if is_whole else cast.amax_along(x_MN, dim)
        if dim == 0 and tensor.reduce_columns is not None:  # in place
            tensor.reduce_columns(amax)
        quant_scale = self.scale_rule()(amax, tensor.fmt, power_2=tensor.power_2)
        # The product is in FP32, so that nothing is rounded to the dtype of the tensor before FP8.
        payload = cast.quantize_scaled(x_MN.float() * quant_scale, tensor.fmt)
        return self._scaled(tensor, payload, quant_scale.reciprocal(), dim)

    def _scaled(
        self,
        tensor: TensorQuantizer,
        payload: torch.Tensor,
        dequant_scale: torch.Tensor,
        dim: int,
        values: torch.Tensor | None = None,
    ) -> Fp8Tensor:
        """Return a payload [M, N] with a scale for each row (`dim` 1) or for each column (0)."""
        rows, cols = payload.shape
        block = (1, cols) if dim == 1 else (rows, 1)
        if is_whole := self._is_whole(tensor, dim):
            block = (rows, cols)
        return cast.Fp8Tensor(
            payload,
            dequant_scale,
            tensor.fmt,
            values,
            block=block,
            is_exact_in_bf16=tensor.power_2,
            layout="tensor" if is_whole else "row",
        )

    def _by_triton(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8
    ) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
        """Return the same bits, with the second quantization laid out as its product reads it."""
        fmt, power_2 = tensor.fmt, tensor.power_2
        is_shared = need.first and tensor.reduce_columns is not None
        by_columns = need.first and not is_shared and not self._is_whole(tensor, dim=0)
        rows, columns = triton_current.cast_rowwise(
            x_MN, fmt, power_2=power_2, with_rows=need.last, with_columns=by_columns
        )
        first = None
        if columns is not None:
            payload, scale = columns.payload.t(), columns.dequant_scale.t()
            first = self._scaled(tensor, payload, scale, dim=0)
        elif is_shared:  # other ranks' maxima come between the amaxes and the cast
            first = self._along(tensor, x_MN, dim=0)
            first = replace(first, payload=first.payload.t().contiguous().t())
        elif need.first:
            quant_scale, dequant_scale = triton_current.scales_of(
                triton_current.amax_of_matrix(x_MN), fmt, power_2=power_2, torchao=True
            )
            payload_t = triton_cast.cast(
                x_MN, quant_scale, fmt, with_rows=False, with_columns=True
            ).payload_t
            assert payload_t is not None
            first = self._scaled(tensor, payload_t.t(), dequant_scale.view(1, 1), dim=0)
        return None if rows is None else self._scaled(tensor, *rows, dim=1), first
