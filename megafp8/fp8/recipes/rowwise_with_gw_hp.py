"""Define `rowwise_with_gw_hp`: `rowwise` with weight gradients in the compute dtype (torchao)."""

from __future__ import annotations

from megafp8.fp8.recipes.rowwise import Rowwise
from megafp8.specs.traits import ROW, TENSOR, Casts, Cost, Traits, alike


class RowwiseWithGwHp(Rowwise):
    """The rule is that of `rowwise`; the weight has one scale in the product for `grad_input`."""

    traits = Traits(
        help="the amaxes of its rows and columns, with weight gradients in high precision",
        input=alike(ROW),
        weight=Casts(ROW, TENSOR),
        grad_output=alike(ROW),
        agrees_on_columns=True,
        power_2="on",
        high_precision=frozenset({"grad_weight"}),
        pads=True,
        backends={"torchao": "rowwise_with_gw_hp"},
        cost=Cost(launches=(87, 97), reads_twice=True),
    )
