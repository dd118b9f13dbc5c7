"""Hold everything of FP8; seen from outside, turn the linears of a PyTorch model into FP8 ones.

    from megafp8 import fp8

    state = fp8.convert(model, recipe="delayed", skip="lm_head")
    for batch in batches:
        with state.microbatch():
            loss = model(batch)
            loss.backward()
        optimizer.step()

`convert` returns an `Fp8State`. docs/guide/own_model.md describes it and says what is supported.
The names of `__all__` are for use from outside the package; modules are not.

The recipes are read where torch is not loaded, so a public name loads its module when it is first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8_coverage import coverage
    from megafp8.fp8.checker import CheckReport, Refutation, check
    from megafp8.fp8.conversion import convert
    from megafp8.fp8.converted import Fp8Error, Fp8Linear
    from megafp8.fp8.recipe_settings import recipe_named
    from megafp8.fp8.state import Fp8State, HealthReport, Scale
    from megafp8.ops.memory import keep_freed_memory
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
    "coverage",
    "keep_freed_memory",
    "recipe_named",
]
_HOMES = (
    ("fp8_coverage", "coverage"),
    ("megafp8.specs.traits", "ROW TENSOR Casts Cost Scales Traits alike blocks"),
    ("megafp8.specs.recipe", "Cast Recipe Scaled Seen"),
    ("megafp8.specs.precision", "Fp8Recipe ModuleRule"),
    ("megafp8.fp8.checker", "CheckReport Refutation check"),
    ("megafp8.fp8.conversion", "convert"),
    ("megafp8.fp8.converted", "Fp8Error Fp8Linear"),
    ("megafp8.fp8.recipe_settings", "recipe_named"),
    ("megafp8.fp8.state", "Fp8State HealthReport Scale"),
    ("megafp8.ops.memory", "keep_freed_memory"),
)
_HOME_OF = {name: module for module, names in _HOMES for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
