"""Define `tensorwise`: a tensor has one scale, from its own amax (Transformer Engine, torchao)."""

# M, N the tensor's own dims

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe, lazy
from megafp8.specs.traits import TENSOR, Cost, Traits, alike

if TYPE_CHECKING:
    import torch

    from fp8_numerics import cast
    from fp8_numerics.kernels import triton_current
    from megafp8.fp8 import quantizer
    from megafp8.fp8.quantizer import Operands, SavedForm, TensorQuantizer, WantsFp8
else:  # settings are checked without torch
    cast = lazy("fp8_numerics.cast")
    quantizer = lazy("megafp8.fp8.quantizer")
    triton_current = lazy("fp8_numerics.kernels.triton_current")


class Tensorwise(Recipe):
    """One scale for the whole tensor, also where ranks hold parts of it."""

    traits = Traits(
        help="its own amax",
        input=alike(TENSOR, serves_both=True),
        weight=alike(TENSOR, serves_both=True),
        grad_output=alike(TENSOR, serves_both=True),
        backward_formats=("e5m2", "e4m3"),
        agrees=True,
        shares_weight=True,
        power_2="off",
        pads=True,
        backends={"te": "Float8CurrentScaling", "torchao": "tensorwise"},
        cost=Cost(launches=(83, 97), reads_twice=True, sums_columns=True),
        advised={
            (8, 9): "no history is needed, and the other recipes but delayed are emulated",
            (9, 0): "it multiplies as fast as delayed and needs no history",
        },
    )

    @property
    def casts_whole(self) -> bool:
        return type(self) is Tensorwise  # another class may give it another tensor

    def operands(
        self, tensor: TensorQuantizer, x_MN: torch.Tensor, need: WantsFp8, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        if tensor.state.engine.uses_triton:
            x_MN = x_MN.contiguous()
            amax = triton_current.amax_of_matrix(x_MN)
        else:
            amax = cast.amax_of(x_MN)
        scale, dequant_scale = self._scales(tensor, amax)
        return quantizer.cast_whole(
            tensor, x_MN, scale, need, dequant_scale=dequant_scale, with_sum=with_sum
        )

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        return quantizer.whole_form(tensor)

    def store_scale(self, tensor: TensorQuantizer, amax: torch.Tensor) -> torch.Tensor:
        return self._scales(tensor, amax)[0]

    def _scales(
        self, tensor: TensorQuantizer, amax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (quant_scale, dequant_scale); the second one only where a kernel made it."""
        if tensor.reduce_max is not None:  # in place: all ranks' parts get one scale
            tensor.reduce_max(amax)
        if tensor.state.engine.uses_triton:
            return triton_current.scales_of(amax, tensor.fmt, power_2=tensor.power_2)
        return self.scale_rule()(amax, tensor.fmt, power_2=tensor.power_2), None
