"""Define `delayed`: a tensor has one scale, from its earlier amaxes (Transformer Engine)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import TENSOR, Cost, Traits, alike

if TYPE_CHECKING:
    from megafp8.precision.recipes.base import Quantizing, TensorQuantizer


class Delayed(Recipe):
    """The scale is in the table before the tensor is computed."""

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

    def quantizer(self, given: Quantizing) -> TensorQuantizer:
        """Return a quantizer with a row of the table."""
        from megafp8.precision.recipes.delayed import DelayedQuantizer

        state = given.state
        table = state.backward if given.role == "grad_output" else state.forward
        return DelayedQuantizer(state, table.register(f"{given.name}.{given.role}"))
