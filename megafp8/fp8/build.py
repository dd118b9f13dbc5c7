"""Build a linear's quantizers from the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fp8_numerics.formats import E2M1, FORMATS, SIMULATED, Fp8Format
from megafp8.errors import UserError
from megafp8.fp8.draws import WHOLE, Part
from megafp8.fp8.quantizer import LinearQuantizer, Role, TensorQuantizer
from megafp8.fp8.recipes.delayed import Delayed
from megafp8.fp8.rule import CastRule, RuleUpdate
from megafp8.fp8.scaling import ReduceMax, ScalingState, Slot
from megafp8.specs import Fp8Recipe
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, label_of
from megafp8.specs.traits import ROLES, Traits


def no_reduction(role: Role) -> ReduceMax | None:
    """Return None: every tensor is whole on this rank, so no maximum over ranks is needed."""
    return None


def all_of_it(role: Role) -> Part:
    """Return that this rank has every element of a tensor."""
    return WHOLE


def linear_quantizer(
    state: ScalingState,
    name: str,
    reduce_max: Callable[[Role], ReduceMax | None] = no_reduction,
    reduce_columns: Callable[[Role], ReduceMax | None] = no_reduction,
    part: Callable[[Role], Part] = all_of_it,
) -> LinearQuantizer | None:
    """Return the quantizers of the linear `name`, or None if it stays in high precision.

    `reduce_max(role)` returns the maximum over the ranks that hold parts of that tensor, or None.
    `reduce_columns(role)` does so for those that hold the same columns of other tokens.
    `part(role)` says which part of the tensor this rank has.

    Raises:
        UserError: The recipe lacks the format that the settings name for gradients.
    """
    precision = state.recipe.precision_of(name)
    if precision == HIGH_PRECISION:
        return None
    chosen = find_recipe(precision)
    if precision == state.recipe.name:
        _check_format(state.recipe, chosen.traits)
    reductions = reduce_max, reduce_columns
    formats = {role: _format(state.recipe, precision, role) for role in ROLES}
    by_role = {
        role: _tensor_quantizer(state, chosen, name, role, formats[role], *reductions)
        for role in ROLES
    }
    tensors = {role: _with_part(tensor, part(role)) for role, tensor in by_role.items()}
    return LinearQuantizer(name, state, tensors, state.recipe.kept_high(precision, name))


def reserve_rows(state: ScalingState, name: str) -> None:
    """Register the rows of a linear that another rank has, where that rank registers its own."""
    precision = state.recipe.precision_of(name)
    if precision != HIGH_PRECISION and (chosen := find_recipe(precision)).traits.has_history:
        for role in ROLES:
            _row_of(state, chosen, name, role, is_here=False)


def _row_of(
    state: ScalingState, chosen: Recipe, name: str, role: Role, *, is_here: bool = True
) -> Slot:
    """Register the row of a tensor of a linear by the recipe `chosen`, which has histories."""
    table = state.backward if role == "grad_output" else state.forward
    update = None if type(chosen).update is Recipe.update else RuleUpdate(chosen, state)
    return table.register(f"{name}.{role}", update, is_here=is_here)


def _tensor_quantizer(
    state: ScalingState,
    chosen: Recipe,
    name: str,
    role: Role,
    fmt: Fp8Format,
    reduce_max: Callable[[Role], ReduceMax | None],
    reduce_columns: Callable[[Role], ReduceMax | None],
) -> TensorQuantizer:
    """Return what quantizes the tensor `role` of a linear to `fmt` by the recipe `chosen`."""
    settings, traits = state.recipe, chosen.traits
    power_2 = settings.power_2_scale if traits.power_2_is_choice else traits.power_2_default
    over_ranks = reduce_max(role) if traits.agrees else None
    over_tokens = reduce_columns(role) if traits.agrees_on_columns else None
    tensor = TensorQuantizer(chosen, state, name, role, fmt, power_2, over_ranks, over_tokens)
    if traits.has_history:  # casts are those of `delayed`; `update` may be the recipe's own
        slot = _row_of(state, chosen, name, role)
        if slot.table.fmt is not fmt:
            raise UserError(
                f"{name}: {label_of(settings.precision_of(name))} has gradients in {fmt.name}, and "
                f"another recipe with a history has them in {slot.table.fmt.name}, while all "
                "histories are of one format. Use one of the two recipes"
            )
        rule = chosen if isinstance(chosen, Delayed) else Delayed()
        return replace(tensor, rule=rule, slot=slot)
    if chosen.has_operands():
        return tensor
    return replace(tensor, rule=CastRule(chosen, tensor))


def _with_part(tensor: TensorQuantizer, part: Part) -> TensorQuantizer:
    """Return the quantizer of a part of a tensor; a rule that may draw must know it too."""
    tensor = replace(tensor, part=part)
    if isinstance(tensor.rule, CastRule):
        return replace(tensor, rule=CastRule(tensor.rule.recipe, tensor))
    return tensor


def _check_format(settings: Fp8Recipe, traits: Traits) -> None:
    formats = traits.backward_formats
    if settings.backward_format not in formats:
        raise UserError(
            f"backward_format={settings.backward_format!r}: {settings.name} has {formats[0]!r} "
            "alone for gradients. Leave it out"
        )


def _format(settings: Fp8Recipe, name: RecipeName, role: Role) -> Fp8Format:
    """Return the format in which the recipe of a name quantizes the tensor `role`."""
    traits = find_recipe(name).traits
    if traits.is_simulated:
        return SIMULATED
    if traits.numbers == "e2m1":
        return E2M1
    if role != "grad_output":
        return FORMATS[settings.forward_format]
    return FORMATS[settings.gradients_in(name)]
