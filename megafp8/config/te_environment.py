"""Find environment variables with which Transformer Engine would follow another rule than asked.

They were read in the sources of 2.4, 2.12 and 2.20. Variables that only choose a kernel
(`NVTE_FLASH_ATTN`, …) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from megafp8.config.keys import Values
from megafp8.config.rules import Finding
from megafp8.config.te_layers import BACKEND, FP8_ATTENTION, RECIPE
from megafp8.specs.recipes import find_recipe, te_class

Matters = Callable[[Values], bool]
UNFUSED_UPDATE = "NVTE_UNFUSED_FP8_UPDATE"


class Variable(NamedTuple):
    """Describe one environment variable: where it matters, what it does and what to do.

    `asks` says whether a value of it asks for the other rule.
    """

    name: str
    matters: Matters
    effect: str
    hint: str
    asks: Callable[[str], bool] = lambda value: value not in ("", "0")


def _in_fp8(values: Values) -> bool:
    return bool(values.get("model.fp8"))


def _attention_in_fp8(values: Values) -> bool:
    return bool(values.get(FP8_ATTENTION))


def _is(name: str, power_2: bool | None = None) -> Matters:
    """Return whether FP8 runs by this class of Transformer Engine.

    If `power_2` is given, the scales must be powers of two, or must not be.
    """

    def matters(values: Values) -> bool:
        if not _in_fp8(values) or te_class(recipe := str(values.get(RECIPE))) != name:
            return False
        given, usual = values.get("model.fp8_power_2_scale"), find_recipe(recipe).traits
        return power_2 is None or power_2 == (usual.power_2_default if given is None else given)

    return matters


VARIABLES = (
    Variable(
        UNFUSED_UPDATE,
        _is("DelayedScaling"),
        "chooses another update of delayed scaling, which puts zeros into the histories of weights "
        "that were not cast",
        "Unset it",
    ),
    Variable(
        "NVTE_APPLY_QK_LAYER_SCALING",
        lambda _: True,
        "divides the queries of each layer by its number and multiplies the scores again, which "
        "model.apply_query_key_layer_scaling=False does not ask for",
        "Unset it",
    ),
    Variable(
        "NVTE_DPA_FP8_RECIPE",
        _in_fp8,
        "chooses another recipe for FP8 attention, or none, than the settings",
        "Unset it",
    ),
    Variable(
        "NVTE_BACKWARD_OVERRIDE",
        _in_fp8,
        "takes the backward products out of FP8, which no setting asks for",
        "Unset it",
    ),
    Variable(
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        _is("Float8CurrentScaling", power_2=False),
        "asks for power-of-two scales, and model.fp8_power_2_scale=False does not",
        "Unset it, or use model.fp8_power_2_scale=True",
    ),
    Variable(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        _is("Float8BlockScaling", power_2=True),
        "asks for FP32 scales, and model.fp8_power_2_scale=True does not",
        "Unset it, or use model.fp8_power_2_scale=False",
    ),
    Variable(
        "NVTE_FP8_DPA_BWD",
        _attention_in_fp8,
        "takes the backward pass of attention out of FP8, and "
        "model.fp8_dot_product_attention=True asks for it",
        "Unset it, or leave model.fp8_dot_product_attention out",
        asks=lambda value: value != "" and not value.strip("+-0"),  # it reads an integer
    ),
    Variable(
        "NVTE_UnfusedDPA_Emulate_FP8",
        _attention_in_fp8,
        "lets attention compute in high precision on rounded numbers, and "
        "model.fp8_dot_product_attention=True asks for products in FP8",
        "Unset it, or leave model.fp8_dot_product_attention out",
        asks=lambda value: value == "1",
    ),
)


def findings(values: Values, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the environment asks for that the settings do not."""
    for variable in VARIABLES:
        value = environment.get(variable.name, "").strip()
        if variable.asks(value) and variable.matters(values):
            reason = f"the environment's {variable.name}={value} {variable.effect}"
            yield Finding(BACKEND, reason, variable.hint)
