"""Check the recipe that a caller of `fp8.convert` gives, field by field."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args, get_type_hints

from megafp8.fp8.converted import Fp8Error
from megafp8.specs.precision import GEMMS, MARGINS, UPDATES, Fp8Recipe, ModuleRule
from megafp8.specs.recipe import Recipe
from megafp8.specs.recipes import (
    HIGH_PRECISION,
    RECIPES,
    RecipeError,
    find_recipe,
    load_recipe,
    names_code,
    problem,
    recipes_where,
    register_recipe,
)
from megafp8.specs.traits import FormatName

HISTORY_FIELDS = ("margin", "interval", "amax_history_len", "amax_compute_algo", "reduce_amax")
"""The fields that act only with a recipe that has a history."""
ALGORITHMS = get_args(get_type_hints(Fp8Recipe)["amax_compute_algo"])


class Check(NamedTuple):
    """Say which values a field of `Fp8Recipe` may have, how to say so, and what to do."""

    accepts: Callable[[object], bool]
    what: str  # completes "must be …"
    hint: str


BOOL = Check(lambda value: isinstance(value, bool), "True or False", "Use True or False")


def recipe_named(name: str) -> Fp8Recipe:
    """Return a recipe with the settings that its source has.

    `delayed` and `tensorwise` cast gradients to E5M2, with scales as they come; `nvfp4` is in
    E2M1; the others are E4M3 throughout, with scales that are powers of two.

    Raises:
        Fp8Error: There is no recipe of this name.
    """
    _require("recipe", name)
    return Fp8Recipe(name=name, power_2_scale=find_recipe(name).traits.power_2_default)


def _require(subject: str, name: object, *more: str) -> None:
    """Raise `Fp8Error` unless a name is a recipe or one of `more`; import code that it names."""
    if names_code(name):
        try:
            load_recipe(str(name))
        except RecipeError as error:
            reason = str(error).removeprefix(f"{name}: ")
            raise Fp8Error(f"{subject}={name!r}", reason, "Correct the file") from error
    elif not isinstance(name, str) or (name not in more and problem(name) is not None):
        raise _unknown(subject, name, (*RECIPES, *more))


def checked_recipe(recipe: str | Fp8Recipe | type[Recipe]) -> Fp8Recipe:
    """Return the recipe that is meant; raise `Fp8Error` where a setting could not be honoured."""
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        try:
            return recipe_named(register_recipe(recipe))
        except RecipeError as error:
            raise Fp8Error(f"recipe={recipe.__name__}", str(error), "Correct the class") from error
    if isinstance(recipe, str):
        return recipe_named(recipe)
    if not isinstance(recipe, Fp8Recipe):
        raise Fp8Error(
            f"recipe={recipe!r}",
            "is neither a name nor an Fp8Recipe nor a subclass of Recipe",
            f"Use one of {RECIPES}",
        )
    _check_fields(recipe)
    recipe = dataclasses.replace(recipe)  # code that `name` stands for is imported now
    _check_rules(recipe)
    if recipe.params_in_fp8:
        raise Fp8Error(
            "recipe.params_in_fp8=True",
            "a converted module keeps its own parameters",
            "Leave it out; `pretrain_gpt.py` with model.fp8_params=True keeps weights in FP8 alone",
        )
    if recipe.high_precision_gemms == set(GEMMS):
        raise Fp8Error(
            f"recipe.high_precision_gemms={sorted(recipe.high_precision_gemms)}",
            "leaves no product in FP8",
            "Leave one of the three out",
        )
    _check_effects(recipe)
    return recipe


def _unknown(subject: str, value: object, known: Sequence[str]) -> Fp8Error:
    """Return the error for a value that is none of the known names."""
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Use one of them"
    plural = "recipes" if tuple(known) == RECIPES else "values"
    return Fp8Error(f"{subject}={value!r}", f"the {plural} are {', '.join(known)}", hint)


def _is_whole(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_one_of(names: Sequence[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


def _is_gemms(value: object) -> bool:
    return isinstance(value, frozenset) and value <= set(GEMMS)


def _is_rules(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(rule, ModuleRule) for rule in value)


def _names(names: Sequence[str]) -> Check:
    quoted = [repr(name) for name in names]
    return Check(_is_one_of(names), f"one of {', '.join(quoted)}", f"Use {' or '.join(quoted)}")


GEMM_SET = Check(_is_gemms, f"a frozenset of {', '.join(GEMMS)}", "Use frozenset({'grad_weight'})")
SPAN = Check(_is_whole(*UPDATES), f"a whole number from {UPDATES[0]} to {UPDATES[1]}", "Use 16")
FORMAT_OR_NONE = _names(get_args(FormatName))._replace(
    accepts=lambda value: value is None or _is_one_of(get_args(FormatName))(value)
)
CHECKS: dict[str, Check] = {
    "name": Check(lambda name: isinstance(name, str), "a recipe's name", "Use 'delayed'"),
    "forward_format": _names(get_args(FormatName)),
    "backward_format": FORMAT_OR_NONE,
    "modules_backward_format": FORMAT_OR_NONE,
    "margin": Check(
        _is_whole(*MARGINS), f"a whole number from {MARGINS[0]} to {MARGINS[1]}", "Use 0 or 1"
    ),
    "interval": SPAN._replace(hint="Use 1"),
    "amax_history_len": SPAN,
    "amax_compute_algo": _names(ALGORITHMS),
    "reduce_amax": BOOL,
    "power_2_scale": BOOL,
    "params_in_fp8": BOOL,
    "high_precision_gemms": GEMM_SET,
    "fast_accumulation": GEMM_SET,
    "fp8_in_evaluation": BOOL,
    "pad_inner_dim": BOOL,
    "modules": Check(
        _is_rules, "a tuple of fp8.ModuleRule", "Use (fp8.ModuleRule('*.fc2', 'high_precision'),)"
    ),
}
"""What every field of `Fp8Recipe` may hold by itself. A field without an entry is our own bug."""


def _check_fields(recipe: Fp8Recipe) -> None:
    """Raise `Fp8Error` for the first field whose type or value is wrong by itself."""
    for field in dataclasses.fields(Fp8Recipe):
        value, check = getattr(recipe, field.name), CHECKS[field.name]
        if check.accepts(value):
            if field.name == "name":
                _require("recipe.name", value)
            continue
        raise Fp8Error(f"recipe.{field.name}={value!r}", f"must be {check.what}", check.hint)


def _check_rules(recipe: Fp8Recipe) -> None:
    """Raise `Fp8Error` for a rule whose own fields are wrong."""
    for index, rule in enumerate(recipe.modules):
        subject = f"recipe.modules[{index}]"
        if not isinstance(rule.pattern, str) or not rule.pattern:
            raise Fp8Error(
                f"{subject}.pattern={rule.pattern!r}",
                "must be a name or pattern of linears",
                "Use a string such as '*.fc2'",
            )
        _require(f"{subject}.precision", rule.precision, HIGH_PRECISION)
        if not isinstance(rule.source, str):
            raise Fp8Error(f"{subject}.source={rule.source!r}", "must be a string", "Leave it out")
        if rule.kept_high is not None and not _is_gemms(rule.kept_high):
            hint = GEMM_SET.hint
            raise Fp8Error(
                f"{subject}.kept_high={rule.kept_high!r}", f"must be {GEMM_SET.what}, or None", hint
            )


def _check_effects(recipe: Fp8Recipe) -> None:
    """Raise `Fp8Error` for a setting that would change nothing."""
    formats = find_recipe(recipe.name).traits.backward_formats
    if recipe.backward_format not in formats:
        raise Fp8Error(
            f"recipe.backward_format={recipe.backward_format!r}",
            f"is no format that {recipe.name} has for gradients",
            f"Leave it out, or use {' or '.join(map(repr, formats))}",
        )
    used, fmt = recipe.names, recipe.modules_backward_format
    if fmt and not recipes_where(
        used - {recipe.name},
        lambda traits: len(traits.backward_formats) > 1 and fmt in traits.backward_formats,
    ):
        raise Fp8Error(
            f"recipe.modules_backward_format={fmt!r}",
            "has no effect without a rule in `modules` whose recipe has a choice of formats",
            "Leave it out",
        )
    if not recipes_where(used, lambda traits: traits.has_history):
        _refuse_history(recipe)
    standard = Fp8Recipe.amax_history_len
    if recipe.amax_compute_algo == "most_recent" and recipe.amax_history_len != standard:
        raise Fp8Error(
            f"recipe.amax_history_len={recipe.amax_history_len}",
            "has no effect with amax_compute_algo='most_recent'",
            "Leave it out, or use amax_compute_algo='max'",
        )
    if recipe.power_2_scale and not recipes_where(used, lambda traits: traits.power_2 != "never"):
        raise Fp8Error(
            "recipe.power_2_scale=True",
            "scales of delayed scaling are used as they come",
            "Leave it out, or use recipe name 'tensorwise'",
        )


def _refuse_history(recipe: Fp8Recipe) -> None:
    """Raise for the first option of delayed scaling that a recipe without history has set."""
    standard = Fp8Recipe()
    for option in HISTORY_FIELDS:
        if (value := getattr(recipe, option)) != getattr(standard, option):
            raise Fp8Error(
                f"recipe.{option}={value!r}",
                f"has no effect: {recipe.name} takes scales from the tensor itself",
                "Leave it out, or use recipe name 'delayed'",
            )
