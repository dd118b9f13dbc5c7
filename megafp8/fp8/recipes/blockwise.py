"""Define `blockwise`: 1 x 128 elements along the sum share a scale, 128 x 128 of a weight (TE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import BLOCK, Cost, Traits, alike, blocks

if TYPE_CHECKING:
    from megafp8.fp8.quantizers.base import Quantizing, TensorQuantizer

_LINE, _SQUARE = blocks(BLOCK), blocks(BLOCK, BLOCK)


class Blockwise(Recipe):
    """Blocks along the two dims are quantized separately; a weight's serve both products."""

    traits = Traits(
        help="those of its blocks",
        input=alike(_LINE),
        weight=alike(_SQUARE, serves_both=True),
        grad_output=alike(_LINE),
        power_2="on",
        multiple=BLOCK,
        backends={"te": "Float8BlockScaling"},
        cost=Cost(launches=(55, 65)),
    )

    def quantizer(self, given: Quantizing) -> TensorQuantizer:
        """Return a quantizer of blocks."""
        from megafp8.fp8.quantizers.blockwise import BlockwiseQuantizer

        is_square = given.role == "weight"
        return BlockwiseQuantizer(given.state, given.fmt, given.power_2, is_square)
