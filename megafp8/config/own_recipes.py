"""Import the recipes of others that settings name, if the user has named or trusted them.

Settings name no code to run, with this one exception: a recipe's file or module, given on the
command line, or in a YAML file if the command line also has `--trust-recipe`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from hydra.core.override_parser.types import Transformer
from hydra.errors import HydraException

from megafp8.config.errors import COMMAND_LINE, DEFAULT, SettingError, raise_if_any
from megafp8.config.keys import Values
from megafp8.config.overrides import ParsedOverride, parse_overrides
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.config.rules import Origins
from megafp8.config.settings import Setting
from megafp8.config.values import parse_modules
from megafp8.specs.recipes import RecipeError, load_recipe, names_code

TRUST = "--trust-recipe"
RECIPE, MODULES = "model.fp8_recipe", "model.fp8_modules"
_MOST_VALUES = 10_000  # a sweep has no more jobs


def load_own_recipes(
    values: Values,
    origins: Origins,
    *,
    trusts_files: bool = False,
    given: Collection[str] | None = None,
) -> list[SettingError]:
    """Import the code that recipes' names choose, and return what is wrong with them.

    Args:
        values: Settings by their dotted paths.
        origins: The layers that set them.
        trusts_files: Whether the command line trusts the recipes that YAML files name.
        given: The names that the user has typed. A value of the command line need not be one: it
            may be an interpolation, as `${name}`, of what a YAML file says, and the overrides of a
            sweep's job may be those of `hydra.sweeper.params`. None stands for names that another
            process has checked.
    """
    problems = []
    for key, name in _named(values):
        origin = origins.get(key, DEFAULT)
        is_typed = origin == COMMAND_LINE and (given is None or name in given)
        if not is_typed and not trusts_files:
            where = "an interpolation or hydra.sweeper" if origin == COMMAND_LINE else origin
            problems.append(_untrusted(key, name, where))
            continue
        try:
            load_recipe(name)
        except RecipeError as error:
            reason = str(error).removeprefix(f"{name}: ")
            hint = f"Correct the file, and test it: megafp8 recipe check {name}"
            problems.append(SettingError(key, name, reason, hint, origin=origin))
    return problems


def names_given(overrides: Sequence[ParsedOverride]) -> frozenset[str]:
    """Return the names of code that a command line has, as they were typed."""
    settings = [s for override in overrides for s in (*override.settings, *_each(override))]
    named = (_named({"model.fp8": True, s.key: s.value}) for s in settings)
    return frozenset(name for names in named for _, name in names)


def _each(override: ParsedOverride) -> list[Setting]:
    """Return the settings of all values of an override that may choose recipes."""
    key = override.text.partition("=")[0].lstrip("+")
    if override.sweep is None or key not in (RECIPE, MODULES, SCHEDULE):
        return []
    texts: list[str] = []
    with suppress(HydraException, ValueError):  # an interval; the sweep reports what is wrong
        values = override.sweep.sweep_iterator(transformer=Transformer.encode)
        texts = [f"{key}={value}" for value in islice(values, _MOST_VALUES)]
    return [s for parsed in parse_overrides(texts, ())[0] for s in parsed.settings]


def load_recipes_of(values: Values) -> None:
    """Import the recipes of settings whose names another process has checked and trusts.

    Raises:
        SettingError: A recipe cannot be imported here.
    """
    raise_if_any(load_own_recipes(values, dict.fromkeys(values, COMMAND_LINE)))


def _named(values: Values) -> Iterator[tuple[str, str]]:
    """Yield each key with a name of code that it has; none where FP8 is off."""
    if not values.get("model.fp8"):
        return
    recipe = values.get(RECIPE)
    if isinstance(recipe, str) and names_code(recipe):
        yield RECIPE, recipe
    for rule in parse_modules(values.get(MODULES)) or ():
        if names_code(rule.precision):
            yield MODULES, rule.precision
    for change in parse_schedule(values.get(SCHEDULE)):
        if names_code(change.precision):
            yield SCHEDULE, change.precision


def _untrusted(key: str, name: str, origin: str) -> SettingError:
    # Other keys than the recipe's have a list, of which the name is only a part.
    given = f"{key}={name}" if key == RECIPE else f"{key}=…"
    return SettingError(
        key,
        name,
        "names code to run, which a file may do only if the command line trusts it",
        f"Read the code first. Then give {given} on the command line, or add {TRUST}",
        origin=origin,
    )
