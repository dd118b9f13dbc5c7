"""Define `tensorwise`: a tensor has one scale, from its own amax (Transformer Engine, torchao)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import TENSOR, Cost, Traits, alike

if TYPE_CHECKING:
    from megafp8.fp8.quantizers.base import Quantizing, TensorQuantizer


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
    )

    def quantizer(self, given: Quantizing) -> TensorQuantizer:
        """Return a quantizer that takes the maximum over ranks."""
        from megafp8.fp8.quantizers.tensorwise import TensorwiseQuantizer

        return TensorwiseQuantizer(given.state, given.fmt, given.power_2, given.reduce_max)
