"""Define `rowwise_with_gw_hp`: `rowwise` with weight gradients in the compute dtype (torchao)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import ROW, TENSOR, Casts, Cost, Traits, alike

if TYPE_CHECKING:
    from megafp8.fp8.quantizers.base import Quantizing, TensorQuantizer


class RowwiseWithGwHp(Recipe):
    """The weight has one scale in the product for the input gradient."""

    traits = Traits(
        help="the amaxes of its rows and columns, with weight gradients in high precision",
        input=alike(ROW),
        weight=Casts(ROW, TENSOR),
        grad_output=alike(ROW),
        power_2="on",
        high_precision=frozenset({"grad_weight"}),
        pads=True,
        backends={"torchao": "rowwise_with_gw_hp"},
        cost=Cost(launches=(87, 97), reads_twice=True),
    )

    def quantizer(self, given: Quantizing) -> TensorQuantizer:
        """Return a quantizer of rows, and of the whole weight."""
        from megafp8.fp8.quantizers.rowwise import RowwiseQuantizer

        is_whole = given.role == "weight"
        return RowwiseQuantizer(given.state, given.fmt, given.power_2, tensorwise_first=is_whole)
