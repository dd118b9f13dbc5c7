"""Define `delayed`: a tensor has one scale, from its earlier amaxes (Transformer Engine)."""

from __future__ import annotations

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import TENSOR, Cost, Traits, alike


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
