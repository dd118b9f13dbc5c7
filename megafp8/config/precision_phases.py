"""Turn the entries of `model.precision_schedule` into phases, each with a whole FP8 recipe.

A phase is what other settings could ask for too, but for the products of single linears. Entries
are applied one after the other, so that a later one wins where two name the same product of the
same linear. An entry without patterns applies to the linears that the run's other settings have in
FP8, and if it names all products, its recipe is the phase's own (`model.fp8_recipe`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Self

from megafp8.config.errors import SettingError
from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE, parse_schedule
from megafp8.specs.precision import (
    GEMMS,
    Fp8Recipe,
    ModulePrecision,
    ModuleRule,
    PrecisionChange,
)
from megafp8.specs.recipes import HIGH_PRECISION, switched_off, traits_of
from megafp8.specs.traits import GemmName

Products = tuple[ModulePrecision, ...]
"""The precision of each of a linear's products, in the order of `GEMMS`."""
Product = tuple[str, GemmName]
"""A linear's name, and one of its products."""


def changes_of(values: Values) -> tuple[PrecisionChange, ...]:
    """Return the entries of a run's schedule, in their order.

    A trial of a few steps has the changes of the whole job at the same fractions of its length.
    """
    trial, num_steps = int(values["trainer.fast_dev_run"]), int(values["trainer.max_steps"])
    changes = changes_of_job(values)
    if not trial or num_steps <= 0:
        return changes
    return tuple(replace(each, after=each.after * trial // num_steps) for each in changes)


def changes_of_job(values: Values) -> tuple[PrecisionChange, ...]:
    """Return the entries at the steps of the whole job, also for a trial of a few steps."""
    return parse_schedule(values[SCHEDULE], int(values["trainer.max_steps"]))


@dataclass(frozen=True)
class Assigned:
    """Hold the precision of all products of all linears, and the recipe of the phase itself."""

    recipe: str
    of_linear: dict[str, Products]

    @classmethod
    def by_settings(cls, recipe: Fp8Recipe, names: Sequence[str]) -> Self:
        """Return what the settings beside the schedule ask for, for the linears of these names."""
        of_linear = {name: products_of(recipe, name) for name in names}
        return cls(recipe.name, of_linear)

    def after(
        self, changes: Sequence[PrecisionChange], start: Assigned, off: Sequence[str]
    ) -> Assigned:
        """Return the assignment after changes, one after the other.

        `start` is the assignment of the settings, and `off` are the parts that are switched off in
        every recipe.
        """
        recipe, of_linear = self.recipe, dict(self.of_linear)
        for change in changes:
            chosen = switched_off(change.precision, off)
            for name in linears_of(change, start):
                both = zip(GEMMS, of_linear[name], strict=True)
                of_linear[name] = tuple(
                    chosen if gemm in change.products else p for gemm, p in both
                )
            if not change.modules and change.products == GEMMS and chosen != HIGH_PRECISION:
                recipe = chosen
        return Assigned(recipe, of_linear)

    def in_fp8(self) -> dict[Product, ModulePrecision]:
        """Return how products really run: a recipe may keep some of its own out of FP8."""
        of_product = {}
        for name, products in self.of_linear.items():
            for gemm, precision in zip(GEMMS, products, strict=True):
                traits = traits_of(precision)
                is_high = traits is None or gemm in traits.high_precision
                of_product[name, gemm] = HIGH_PRECISION if is_high else precision
        return of_product


def products_of(recipe: Fp8Recipe, linear: str) -> Products:
    """Return the precision of a linear's products under a recipe, as the settings name it."""
    precision, rule = recipe.precision_of(linear), recipe.rule_of(linear)
    kept = recipe.high_precision_gemms
    if rule is not None and rule.kept_high is not None:
        kept = rule.kept_high
    return tuple(HIGH_PRECISION if gemm in kept else precision for gemm in GEMMS)


def linears_of(change: PrecisionChange, start: Assigned) -> Iterator[str]:
    """Yield the linears that a change is about."""
    for name, products in start.of_linear.items():
        if change.modules:
            if any(fnmatchcase(name, pattern) for pattern in change.modules):
                yield name
        elif set(products) != {HIGH_PRECISION}:
            yield name


def recipe_of(assigned: Assigned, settings: Fp8Recipe, own: Fp8Recipe) -> Fp8Recipe:
    """Return the recipe that gives linears what is assigned.

    Args:
        assigned: What each product of each linear gets.
        settings: The recipe of the settings beside the schedule, whose rules may give reasons.
        own: The recipe of the phase itself, with what settings say of it.
    """
    chosen = {name: _of_one(products) for name, products in assigned.of_linear.items()}
    if all(precision == HIGH_PRECISION for precision, _ in chosen.values()):
        return replace(own, modules=(ModuleRule("*", HIGH_PRECISION, SCHEDULE),))
    kept = Counter(kept for precision, kept in chosen.values() if precision == own.name)
    usual = kept.most_common(1)[0][0] if kept else frozenset[GemmName]()
    rules = []
    for name, (precision, high) in chosen.items():
        if (precision, high) == (own.name, usual):
            continue
        rule = settings.rule_of(name)
        is_same = products_of(settings, name) == assigned.of_linear[name]
        source = rule.source if rule is not None and is_same else SCHEDULE
        is_high = precision == HIGH_PRECISION
        rules.append(ModuleRule(name, precision, source, None if is_high else high))
    return replace(own, high_precision_gemms=usual, modules=tuple(rules))


def _of_one(products: Products) -> tuple[ModulePrecision, frozenset[GemmName]]:
    """Return a linear's recipe, and its products that stay in high precision."""
    recipes = {p: None for p in products if p != HIGH_PRECISION}
    if len(recipes) > 1:  # a check refuses it, unless a run that continues keeps other steps
        reason = f"gives products of one linear several recipes at once: {', '.join(recipes)}"
        raise SettingError(SCHEDULE, None, reason, "Leave `products` out")
    both = zip(GEMMS, products, strict=True)
    high = frozenset(gemm for gemm, precision in both if precision == HIGH_PRECISION)
    return next(iter(recipes), HIGH_PRECISION), high


def in_phases(
    changes: Sequence[PrecisionChange],
) -> Iterator[tuple[int, tuple[PrecisionChange, ...]]]:
    """Yield the changes that come after the same step, with that number; the first is step 0."""
    starts = dict.fromkeys([0, *(change.after for change in changes)])
    for after in starts:
        yield after, tuple(change for change in changes if change.after == after)
