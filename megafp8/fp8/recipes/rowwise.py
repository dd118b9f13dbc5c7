"""Define `rowwise`: each row or column that a product sums over has one scale (torchao)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import ROW, Cost, Traits, alike

if TYPE_CHECKING:
    from megafp8.fp8.quantizers.base import Quantizing, TensorQuantizer


class Rowwise(Recipe):
    """Rows and columns are quantized separately, from high precision."""

    traits = Traits(
        help="the amaxes of its rows and columns",
        input=alike(ROW),
        weight=alike(ROW),
        grad_output=alike(ROW),
        power_2="on",
        pads=True,
        backends={"torchao": "rowwise"},
        cost=Cost(launches=(87, 97), reads_twice=True),
    )

    def quantizer(self, given: Quantizing) -> TensorQuantizer:
        """Return a quantizer of rows and columns."""
        from megafp8.fp8.quantizers.rowwise import RowwiseQuantizer

        return RowwiseQuantizer(given.state, given.fmt, given.power_2)
