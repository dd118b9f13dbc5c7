"""Find environment variables of Transformer Engine that ask for another rule than the settings.

They were read in the sources of 2.4, 2.12 and 2.20. Variables that only choose a kernel
(`NVTE_FLASH_ATTN`, `NVTE_BIAS_GELU_NVFUSION`, …) are left alone: the rule stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megafp8.specs import Fp8Recipe

UNFUSED_UPDATE = "NVTE_UNFUSED_FP8_UPDATE"


class Variable(NamedTuple):
    """One environment variable, for which recipes it matters, what it does and what to do."""

    name: str
    matters: Callable[[Fp8Recipe | None], bool]
    effect: str
    hint: str


def _is(name: str) -> Callable[[Fp8Recipe | None], bool]:
    return lambda recipe: recipe is not None and recipe.name == name


VARIABLES = (
    Variable(
        UNFUSED_UPDATE,
        _is("delayed"),
        "chooses another update of delayed scaling, which puts zeros into the histories of weights "
        "that were not cast",
        "Unset it",
    ),
    Variable(
        "NVTE_APPLY_QK_LAYER_SCALING",
        lambda recipe: True,
        "divides the queries of each layer by its number and multiplies the scores again, which "
        "model.apply_query_key_layer_scaling=False does not ask for",
        "Unset it",
    ),
    Variable(
        "NVTE_DPA_FP8_RECIPE",
        lambda recipe: recipe is not None,
        "chooses a recipe for FP8 attention, and attention runs in high precision here",
        "Unset it",
    ),
    Variable(
        "NVTE_BACKWARD_OVERRIDE",
        lambda recipe: recipe is not None,
        "takes the backward products out of FP8, which no setting asks for",
        "Unset it",
    ),
    Variable(
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        lambda recipe: (
            _is("tensorwise")(recipe) and recipe is not None and not recipe.power_2_scale
        ),
        "asks for power-of-two scales, and model.fp8_power_2_scale=False does not",
        "Unset it, or use model.fp8_power_2_scale=True",
    ),
    Variable(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        lambda recipe: _is("blockwise")(recipe) and recipe is not None and recipe.power_2_scale,
        "asks for FP32 scales, and model.fp8_power_2_scale=True does not",
        "Unset it, or use model.fp8_power_2_scale=False",
    ),
)


def why_not(recipe: Fp8Recipe | None) -> str | None:
    """Return what the environment asks for that the settings do not, with a hint, or None."""
    return next(_problems(recipe), None)


def _problems(recipe: Fp8Recipe | None) -> Iterator[str]:
    for variable in VARIABLES:
        value = os.environ.get(variable.name, "").strip()
        if value not in ("", "0") and variable.matters(recipe):
            yield f"the environment's {variable.name}={value} {variable.effect}. {variable.hint}"
