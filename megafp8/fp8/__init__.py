"""Turn the linears of any PyTorch model into FP8 ones.

    from megafp8 import fp8

    state = fp8.convert(model, recipe="delayed", skip="lm_head")
    for batch in batches:
        with state.microbatch():
            loss = model(batch)
            loss.backward()
        optimizer.step()

`convert` returns an `Fp8State`. docs/front_door.md describes it and says what is supported.
"""

from megafp8.fp8.check import CheckReport, Refutation, check
from megafp8.fp8.convert import convert
from megafp8.fp8.linear import Fp8Error, Fp8Linear
from megafp8.fp8.recipe import recipe_named
from megafp8.fp8.state import Fp8State, HealthReport, Scale
from megafp8.specs.precision import Fp8Recipe, ModuleRule
from megafp8.specs.recipe import Cast, Recipe, Scaled, Seen
from megafp8.specs.traits import ROW, TENSOR, Casts, Cost, Scales, Traits, alike, blocks

__all__ = [
    "ROW",
    "TENSOR",
    "Cast",
    "Casts",
    "CheckReport",
    "Cost",
    "Fp8Error",
    "Fp8Linear",
    "Fp8Recipe",
    "Fp8State",
    "HealthReport",
    "ModuleRule",
    "Recipe",
    "Refutation",
    "Scale",
    "Scaled",
    "Scales",
    "Seen",
    "Traits",
    "alike",
    "blocks",
    "check",
    "convert",
    "recipe_named",
]
