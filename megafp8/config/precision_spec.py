"""Turn the keys that concern precision into the `PrecisionSpec`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megafp8.config.keys import Values
from megafp8.config.precision_phases import Assigned, changes_of, in_phases, recipe_of
from megafp8.config.schema import spec_fields
from megafp8.config.values import (
    PRECISIONS,
    layers_in_bf16,
    named_linears,
    parse_modules,
    recipes_in,
    split_accumulator,
)
from megafp8.specs import Fp8Recipe, LossScaleSpec, PrecisionSpec
from megafp8.specs.precision import (
    GEMMS,
    AttentionInFp8,
    AutoBackend,
    ModuleRule,
    PrecisionChange,
    PrecisionPhase,
)
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, recipes_where, switched_off
from megafp8.specs.traits import FormatName, GemmName, Traits

_PARTS = {
    "model.fp4_disable_rht": "rht",
    "model.fp4_disable_stochastic_rounding": "sr",
    "model.fp4_disable_2d_quantization": "2d",
}
"""The keys that switch parts of a recipe off, and the recipe's names of these parts."""


def precision_spec(values: Values, auto: AutoBackend | None) -> PrecisionSpec:
    """Return the precision that a checked configuration asks for.

    Args:
        values: All settings by their dotted paths.
        auto: What the settings say of Transformer Engine where no backend was named.
    """
    compute = PRECISIONS[values["trainer.precision"]]
    backend = values["model.fp8_backend"]
    fp8: Fp8Recipe | None = None
    phases: tuple[PrecisionPhase, ...] = ()
    if values["model.fp8"]:
        phases = tuple(phases_of(values, changes_of(values)))
        fp8 = phases[0].recipe if phases else settings_recipe(values)
    return PrecisionSpec(
        **spec_fields("precision", values),
        compute=compute,
        attention_in_fp8=_attention_in_fp8(values),
        fp8=fp8,
        schedule=phases,
        loss_scale=_loss_scale(values) if compute == "fp16" else None,
        backend="native" if backend == "auto" else backend,
        auto=auto,
    )


def _loss_scale(values: Values) -> LossScaleSpec:
    first = float(values["model.native_amp_init_scale"])
    return LossScaleSpec(**spec_fields("precision.loss_scale", values), init_scale=first)


def _attention_in_fp8(values: Values) -> AttentionInFp8:
    if not values["model.fp8_dot_product_attention"]:
        return "none"
    return "whole" if values["model.fp8_multi_head_attention"] else "core"


def phases_of(values: Values, changes: Sequence[PrecisionChange]) -> Iterator[PrecisionPhase]:
    """Yield the phases of a run whose schedule has these changes, from step 0 on; none without."""
    if not changes:
        return
    settings, off = settings_recipe(values), switched_off_parts(values)
    present = start = Assigned.by_settings(settings, named_linears(values))
    for after, begin_here in in_phases(changes):
        present = present.after(begin_here, start, off)
        own = settings
        if present.recipe != settings.name:
            own = settings_recipe({**values, "model.fp8_recipe": present.recipe})
        recipe = recipe_of(present, settings, own)
        yield PrecisionPhase(after=after, changes=begin_here, recipe=recipe)


def switched_off_parts(values: Values) -> tuple[str, ...]:
    """Return the parts that are switched off in every recipe of a run."""
    return tuple(part for key, part in _PARTS.items() if values[key])


def settings_recipe(values: Values) -> Fp8Recipe:
    """Return the recipe that the settings beside `model.precision_schedule` ask for."""
    off = switched_off_parts(values)
    name = switched_off(values["model.fp8_recipe"], off)
    traits = find_recipe(name).traits
    power_2 = values["model.fp8_power_2_scale"]
    precise = dict(zip(GEMMS, split_accumulator(values), strict=True))
    # Only here does the format of linears under other recipes not follow from the main recipe's.
    has_choice = recipes_where(recipes_in(values), lambda other: not other.is_e4m3)
    of_others = _asked_format(values) if traits.is_e4m3 and has_choice else None
    return Fp8Recipe(
        **spec_fields("precision.fp8", values),
        name=name,
        forward_format="e4m3",
        backward_format=gradient_format(values, traits),
        power_2_scale=traits.power_2_default if power_2 is None else power_2,
        high_precision_gemms=_high_precision_gemms(values),
        fast_accumulation=frozenset(gemm for gemm in GEMMS if not precise[gemm]),
        modules=module_rules(values, off),
        modules_backward_format=of_others,
    )


def gradient_format(values: Values, traits: Traits) -> FormatName:
    """Return the format of output gradients under a run's main recipe: the one that is asked for.

    Without `fp8_e4m3` and `fp8_hybrid`, or if the recipe has it not, it is the recipe's first.
    """
    asked, first = _asked_format(values), traits.backward_formats[0]
    return first if asked is None or asked not in traits.backward_formats else asked


def _asked_format(values: Values) -> FormatName | None:
    """Return the format of output gradients that `fp8_e4m3` and `fp8_hybrid` ask for, if any."""
    e4m3, hybrid = values["model.fp8_e4m3"], values["model.fp8_hybrid"]
    return "e4m3" if e4m3 else "e5m2" if hybrid or e4m3 is False else None


def module_rules(values: Values, off: tuple[str, ...] = ()) -> tuple[ModuleRule, ...]:
    """Return the rules for single linears, first those of `fp8_modules`, then the layers in BF16.

    `off` are parts that are switched off in every recipe.
    """
    return (*_modules(values, off), *_layers_in_bf16(values))


def _modules(values: Values, off: tuple[str, ...]) -> Iterator[ModuleRule]:
    """Yield the rules of `fp8_modules`, whose recipes have parts switched off like the main one."""
    for rule in parse_modules(values["model.fp8_modules"]) or ():
        yield replace(rule, precision=switched_off(rule.precision, off))


def _high_precision_gemms(values: Values) -> frozenset[GemmName]:
    overridden = zip(GEMMS, values["model.override_linear_precision"], strict=True)
    high = {gemm for gemm, is_high in overridden if is_high}
    return frozenset(high if values["model.fp8_wgrad"] else {*high, "grad_weight"})


def _layers_in_bf16(values: Values) -> Iterator[ModuleRule]:
    """Yield `first_last_layers_bf16` as rules over the names of linears."""
    kept = layers_in_bf16(
        values["model.num_layers"],
        values["model.first_last_layers_bf16"],
        values["model.num_layers_at_start_in_bf16"],
        values["model.num_layers_at_end_in_bf16"],
    )
    for layer in kept:
        yield ModuleRule(f"layers.{layer}.*", HIGH_PRECISION, "model.first_last_layers_bf16")
