"""Define rows of tables of settings that exclude or need each other, and find what they refuse."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megafp8.config.keys import Values
from megafp8.config.rules import Finding, nearest_divisors, nearest_multiples
from megafp8.config.values import (
    SIZES,
    STATES,
    WORLD,
    compute_dtypes,
    model_ranks,
    recipes_in,
    schedule_of,
    storage_of,
    world_size,
)
from megafp8.specs.data import CONVERSATIONS
from megafp8.specs.parallel import ONE_STAGE_SCHEDULES, ZERO_BUBBLE_SCHEDULES
from megafp8.specs.recipes import names_where, recipes_where
from megafp8.specs.traits import Traits

NATIVE = "or use model.fp8_backend=native, which has no such limit"

_PLACEHOLDER = re.compile(r"\{(=|multiples of |divisors of )?([\w.]+)\}")
_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "less_than": operator.lt,
    "more_than": operator.gt,
    "no_divisor_of": lambda value, other: other % value,
    "no_multiple_of": operator.mod,
    "other_than": operator.ne,
}
_DTYPE_KEYS = tuple(f"model.optim.{part}_dtype" for part in STATES)


class Condition(NamedTuple):
    """Define a condition on a setting that is more than equality with one value."""

    text: str  # is written after the key, as `=te or torchao`
    holds: Callable[[Any, Values], bool]  # the arguments are the key's value and all values
    reads: tuple[str, ...] = ()  # the other keys that `holds` reads
    named: Callable[[Values], tuple[str, ...]] = lambda _: ()  # the recipes that meet it


FP16 = Condition("=16", lambda _, values: compute_dtypes(values) == (16,))
FP32 = Condition("=32", lambda _, values: compute_dtypes(values) == (32,))
HALF = Condition("=bf16 or 16", lambda _, values: compute_dtypes(values) != (32,))
WITH_WEIGHT = Condition(" with a product of the weight", lambda value, _: any((value or [])[:2]))
ZERO_BUBBLE = Condition(
    f"={' or '.join(ZERO_BUBBLE_SCHEDULES)}",
    lambda _, values: schedule_of(values) in ZERO_BUBBLE_SCHEDULES,
    ("model.virtual_pipeline_model_parallel_size",),
)
REPLICAS = Condition(
    " with several replicas",
    lambda _, values: world_size(values) > model_ranks(values),
    (*SIZES, *WORLD),
)


class Row(NamedTuple):
    """Describe a combination of settings that is refused.

    Attributes:
        when: Keys with their values or conditions; the row applies if all of them hold.
        excludes: The key that is then refused, with its value or condition.
        reason: Why. `{model.a}` stands for the setting of that key, as `model.a=True`, `{=model.a}`
            for its value, and `{recipe}` for the first recipe that meets one of the conditions.
        hint: What to do instead, with the same placeholders.
        unproven: Whether the only reason is that no test proves the combination right.
    """

    when: Mapping[str, Any]
    excludes: Mapping[str, Any]
    reason: str
    hint: str
    unproven: bool = False


class RecipeKind(NamedTuple):
    """Define a kind of recipe by its traits, with the words that follow the key in messages."""

    text: str
    holds: Callable[[Traits], bool]

    @property
    def hint(self) -> str:
        """Return the built-in recipes of this kind: `delayed, tensorwise or blockwise`."""
        return " or ".join(", ".join(names_where(self.holds)).rsplit(", ", 1))


HISTORY = RecipeKind("with a history of amaxes", lambda traits: traits.has_history)
CURRENT = RecipeKind("without a history of amaxes", lambda traits: not traits.has_history)
WHOLE_BLOCKS = RecipeKind("that needs whole blocks", lambda traits: not traits.pads)
GATHERED = RecipeKind("whose casts ranks can gather", lambda traits: traits.gathers_tokens)
_GATHERED_BY_TE = ("MXFP8BlockScaling", "NVFP4BlockScaling")
UNTRIED_GATHER = RecipeKind(
    "with several scales for a tensor, except those of mxfp8 and nvfp4",
    lambda traits: not traits.has_one_scale and traits.backends.get("te") not in _GATHERED_BY_TE,
)
ROTATED = RecipeKind("that rotates operands", lambda traits: traits.input.rotation is not None)
NOT_GATHERED = RecipeKind(
    "whose casts ranks cannot gather", lambda traits: not traits.gathers_tokens
)
ONE_WEIGHT = RecipeKind("that quantizes a weight once", lambda traits: traits.keeps_weight)
TWO_WEIGHTS = RecipeKind("that quantizes a weight twice", lambda traits: not traits.keeps_weight)
SHARED_WEIGHT = RecipeKind("with one scale for a weight", lambda traits: traits.shares_weight)
OWN_WEIGHT = RecipeKind(
    "with several scales for a weight",
    lambda traits: traits.keeps_weight and not traits.shares_weight,
)
SCALES_OF_PARTS = RecipeKind(
    "with several scales for a weight", lambda traits: not traits.weight.last.is_one
)
TWO_FORMATS = RecipeKind("that may use E5M2", lambda traits: not traits.is_e4m3)
TWO_LEVELS = RecipeKind(
    "with scales of two levels", lambda traits: any(scales.has_outer for scales in traits.scales)
)


def is_one_of(*values: object) -> Condition:
    """Return the condition that the value is one of several."""
    return Condition(f"={' or '.join(map(str, values))}", lambda value, _: value in values)


ONE_STAGE, CONVERSATION = is_one_of(*ONE_STAGE_SCHEDULES), is_one_of(*CONVERSATIONS)


def not_(*good: object) -> Condition:
    """Return the condition that the value is none of `good`."""
    return Condition(
        f" other than {' or '.join(map(str, good))}", lambda value, _: value not in good
    )


def is_above(low: int) -> Condition:
    """Return the condition that the value is above a number; null is not."""
    return Condition(f" above {low}", lambda value, _: value is not None and value > low)


def given() -> Condition:
    """Return the condition that the value is neither False, null nor 0."""
    return Condition(" given", lambda value, _: bool(value))


def missing() -> Condition:
    """Return the condition that the value is False, null, 0 or an empty text."""
    return Condition(" missing", lambda value, _: not value)


def related(relation: str, key: str) -> Condition:
    """Return the condition that the value stands in a relation to that of another key.

    Null and an empty text stand in no relation.
    """

    def holds(value: Any, values: Values) -> bool:
        both = (value, values[key])
        return all(each not in (None, "") for each in both) and bool(_RELATIONS[relation](*both))

    return Condition(f" {relation.replace('_', ' ')} {key}", holds, (key,))


def some_recipe(kind: RecipeKind) -> Condition:
    """Return the condition that the recipe of some linear is of a kind."""
    return Condition(
        f" {kind.text} for some linear",
        lambda _, values: bool(recipes_where(recipes_in(values), kind.holds)),
        ("model.fp8_modules",),
        lambda values: recipes_where(recipes_in(values), kind.holds),
    )


def its_recipe(kind: RecipeKind) -> Condition:
    """Return the condition that the recipe of the run is of a kind."""
    return Condition(
        f" {kind.text}",
        lambda name, _: bool(recipes_where((name,), kind.holds)),
        named=lambda values: recipes_where((values["model.fp8_recipe"],), kind.holds),
    )


def _below_fp32(*parts: str) -> Callable[[Any, Values], bool]:
    return lambda _, values: any(storage_of(values)[part] != "fp32" for part in parts)


LOW_PRECISION = Condition(
    " above O0, or states below fp32 by keys of their own", _below_fp32(*STATES), _DTYPE_KEYS
)
FP8_GRADS = Condition("=fp8", _below_fp32("main_grads"), ("model.optim.fp8_opt_level",))
LOW_PARAMS = Condition(" below fp32", _below_fp32("main_params"), ("model.optim.fp8_opt_level",))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Read YAML in which a tag names what makes a condition: `!above [1]`."""


def _condition(loader: Any, name: str, node: yaml.SequenceNode) -> Condition:
    given_values = loader.construct_sequence(node)
    if name in ("recipe", "some_recipe", "named"):  # the names of constants of this module
        given_values = [globals()[value] for value in given_values]
    condition: Condition = _MAKERS[name](*given_values)
    return condition


_Loader.add_multi_constructor("!", _condition)
_MAKERS: dict[str, Callable[..., Condition]] = {
    "above": is_above,
    "given": given,
    "missing": missing,
    "named": lambda condition: condition,
    "not": not_,
    "one_of": is_one_of,
    "recipe": its_recipe,
    "some_recipe": some_recipe,
    **{name: partial(related, name) for name in _RELATIONS},
}


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return the rows of a table in YAML; together.yaml and related.yaml say what they may hold."""
    table = yaml.load(path.read_text("utf-8"), Loader=_Loader)
    hints = (re.sub(r"\{([A-Z_]+)\}", lambda m: globals()[m[1]].hint, r["hint"]) for r in table)
    return tuple(
        Row(**{"when": {}} | row | {"hint": hint}) for row, hint in zip(table, hints, strict=True)
    )


def condition_text(key: str, test: Any) -> str:
    """Return a key and its value or condition as a text: `model.fp8_backend=te`."""
    if isinstance(test, Condition):
        return f"{key}{test.text}"
    return f"{key}={'null' if test is None else test}"


def refusals(rows: Iterable[Row], values: Values) -> Iterator[Finding]:
    """Yield what rows refuse. A row is skipped if a key that it reads is not in `values`."""
    for row in rows:
        if _applies(row, values):
            (key,) = row.excludes
            tests = [*row.when.values(), *row.excludes.values()]
            named = [n for t in tests if isinstance(t, Condition) for n in t.named(values)]
            texts = (row.reason.replace("{recipe}", next(iter(named), "")), row.hint)
            if all(m[2] in values for text in texts for m in _PLACEHOLDER.finditer(text)):
                yield Finding(key, *(_filled(text, key, values) for text in texts))


def _applies(row: Row, values: Values) -> bool:
    for key, test in chain(row.when.items(), row.excludes.items()):
        if key not in values:
            return False
        if not isinstance(test, Condition):
            if values[key] != test:
                return False
        elif not (values.keys() >= {*test.reads} and test.holds(values[key], values)):
            return False
    return True


def _filled(text: str, refused: str, values: Values) -> str:
    """Return a text with the settings and values that its placeholders stand for."""

    def said(match: re.Match[str]) -> str:
        how, key = match.groups()
        if how is None:
            return f"{key}={values[key]}"
        if how == "multiples of ":
            return nearest_multiples(values[refused], values[key])
        if how == "divisors of ":
            return nearest_divisors(values[key], values[refused])
        return str(values[key])

    return _PLACEHOLDER.sub(said, text)
