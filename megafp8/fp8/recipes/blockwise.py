"""Define `blockwise`: 1 x 128 elements along the sum share a scale, 128 x 128 of a weight (TE).

The rule is Transformer Engine's `Float8BlockScaling` (the recipe of DeepSeek-V3, arXiv 2412.19437,
section 3.3).
"""

# M, N the tensor's own dims

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe, lazy
from megafp8.specs.traits import BLOCK, Cost, Traits, alike, blocks

if TYPE_CHECKING:
    import torch

    from fp8_numerics import block_casts, cast, scales
    from fp8_numerics.cast import Fp8Tensor
    from fp8_numerics.kernels import triton_current
    from megafp8.fp8 import quantizer
    from megafp8.fp8.quantizer import Operands, SavedForm, TensorQuantizer, WantsFp8
else:  # settings are checked without torch
    block_casts = lazy("fp8_numerics.block_casts")
    cast, scales = lazy("fp8_numerics.cast"), lazy("fp8_numerics.scales")
    quantizer = lazy("megafp8.fp8.quantizer")
    triton_current = lazy("fp8_numerics.kernels.triton_current")

_LINE, _SQUARE = blocks(BLOCK), blocks(BLOCK, BLOCK)


class Blockwise(Recipe):
    """Blocks along the two dims are quantized separately; a weight's serve both products."""

    traits = Traits(
        help="those of its blocks",
        input=alike(_LINE),
        weight=alike(_SQUARE, serves_both=True),
        grad_output=alike(_LINE),
        commutes=True,
        power_2="on",
        multiple=BLOCK,
        backends={"te": "Float8BlockScaling"},
        cost=Cost(launches=(55, 65)),
    )

    def operands(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        if tensor.state.engine.uses_triton:
            last, first = self._by_triton(tensor, x_MN.contiguous(), need)
        elif self._is_square(tensor):
            square = self._blocks(tensor, x_MN, (BLOCK, BLOCK))
            last, first = square if need.last else None, square if need.first else None
        else:
            last = self._blocks(tensor, x_MN, (1, BLOCK)) if need.last else None
            first = self._blocks(tensor, x_MN, (BLOCK, 1)) if need.first else None
        sums_PN = cast.column_sums(x_MN) if with_sum else None
        return quantizer.operands_of(x_MN, last, first), sums_PN

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        is_transposed = tensor.state.engine.uses_triton
        return quantizer.SavedForm(_LINE, tensor.fmt.dtype, is_transposed=is_transposed)

    def _is_square(self, tensor: TensorQuantizer) -> bool:
        return self.traits.casts[tensor.role].serves_both

    def _blocks(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, block: tuple[int, int]
    ) -> Fp8Tensor:
        """Return the tensor in FP8 with one scale for each block of `block` rows and columns."""
        exact = tensor.power_2
        values = quantizer.values_dtype(tensor, x_MN, along_first=block[1] == 1, is_exact=exact)
        made = block_casts.current(x_MN, block, tensor.fmt, power_2=exact, values=values)
        if made is not None:  # by a kernel in C, with the same bits
            return self._scaled(tensor, made.payload, made.scale, block, made.values)
        amax = scales.amax_of_blocks(x_MN, block)
        quant_scale = self.scale_rule()(amax, tensor.fmt, power_2=tensor.power_2)
        # Scaled in FP32, so that nothing is rounded to the dtype of the tensor before FP8.
        scaled = cast.times_scale(x_MN.float(), quant_scale, block)
        payload = cast.quantize_scaled(scaled, tensor.fmt)
        return self._scaled(tensor, payload, quant_scale.reciprocal(), block)

    def _scaled(
        self,
        tensor: TensorQuantizer,
        payload: torch.Tensor,
        dequant_scale: torch.Tensor,
        block: tuple[int, int],
        values: torch.Tensor | None = None,
    ) -> Fp8Tensor:
        """Return a payload [M, N] with the scales of its blocks."""
        return cast.Fp8Tensor(
            payload,
            dequant_scale,
            tensor.fmt,
            values,
            block=block,
            is_exact_in_bf16=tensor.power_2,
            layout="square" if self._is_square(tensor) else "block",
        )

    def _by_triton(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8
    ) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
        """Return the same bits from one read, each orientation laid out as its product reads it."""
        fmt, power_2, is_square = tensor.fmt, tensor.power_2, self._is_square(tensor)
        if is_square and not tensor.state.engine.orients("square"):
            rows, _ = triton_current.cast_square_blocks(x_MN, fmt, power_2=power_2)
            assert rows is not None
            square = self._scaled(tensor, *rows, (BLOCK, BLOCK))
            return square if need.last else None, square if need.first else None
        kernel = triton_current.cast_square_blocks if is_square else triton_current.cast_blocks
        rows, columns = kernel(
            x_MN, fmt, power_2=power_2, with_rows=need.last, with_columns=need.first
        )
        across = BLOCK if is_square else 1
        last = None if rows is None else self._scaled(tensor, *rows, (across, BLOCK))
        if columns is None:
            return last, None
        payload, scale = columns.payload.t(), columns.dequant_scale.t()
        return last, self._scaled(tensor, payload, scale, (BLOCK, across))
