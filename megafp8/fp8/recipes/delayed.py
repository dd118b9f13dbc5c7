"""Define `delayed`: a tensor has one scale, from its earlier amaxes (Transformer Engine)."""

# M, N the tensor's own dims

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe, lazy
from megafp8.specs.traits import TENSOR, Cost, Traits, alike

if TYPE_CHECKING:
    import torch

    from megafp8.fp8 import fused, quantizer
    from megafp8.fp8.quantizer import Operands, SavedForm, TensorQuantizer, WantsFp8
else:  # settings are checked without torch
    torch, fused = lazy("torch"), lazy("megafp8.fp8.fused")
    quantizer = lazy("megafp8.fp8.quantizer")


class Delayed(Recipe):
    """The scale is in the table before the tensor is computed; scaling.py says how it moves."""

    traits = Traits(
        help="earlier amaxes of the tensor",
        input=alike(TENSOR, serves_both=True),
        weight=alike(TENSOR, serves_both=True),
        grad_output=alike(TENSOR, serves_both=True),
        backward_formats=("e5m2", "e4m3"),
        has_history=True,
        shares_weight=True,
        power_2="never",
        pads=True,
        backends={"te": "DelayedScaling"},
        cost=Cost(launches=(43, 51), sums_columns=True),
    )

    @property
    def casts_whole(self) -> bool:
        return type(self) is Delayed  # another class may give it another tensor

    def operands(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        assert tensor.slot is not None
        quant_scale, dequant_scale, amax = tensor.slot.table.cells(tensor.slot.index)
        return quantizer.cast_whole(
            tensor,
            x_MN,
            quant_scale,
            need,
            amax=amax if tensor.state.recording else None,
            dequant_scale=dequant_scale,
            with_sum=with_sum,
        )

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        return quantizer.whole_form(tensor)

    def store_scale(self, tensor: TensorQuantizer, amax: torch.Tensor) -> torch.Tensor:
        assert tensor.slot is not None
        quant_scale, _, staged = tensor.slot.table.cells(tensor.slot.index)
        if tensor.state.recording:
            staged.copy_(torch.maximum(staged, amax))
        return quant_scale

    def can_fuse(self, tensor: TensorQuantizer) -> bool:
        """Whether Triton runs: the scale is known before, so a kernel can cast its own result."""
        return tensor.state.engine.uses_triton

    def produce(
        self,
        tensor: TensorQuantizer,
        make: fused.Make,
        need: WantsFp8,
        *,
        with_plain: bool,
        with_sum: bool = False,
    ) -> tuple[Operands, fused.Produced]:
        assert tensor.slot is not None
        orients = tensor.state.engine.orients("tensor")
        quant_scale, dequant_scale, amax = tensor.slot.table.cells(tensor.slot.index)
        into = fused.CastInto(
            quant_scale,
            tensor.fmt,
            amax if tensor.state.recording else None,
            with_rows=need.last or not orients,
            with_columns=need.first and orients,
            with_plain=with_plain,
            with_sums=with_sum,
        )
        produced = make(into)
        last, first = quantizer.tensors_of_cast(
            produced.payload, produced.payload_t, quant_scale, tensor.fmt, need, dequant_scale
        )
        assert last is not None, "the product along the last dim reads the tensor in FP8"
        return quantizer.Operands(last, last if first is None else first), produced
