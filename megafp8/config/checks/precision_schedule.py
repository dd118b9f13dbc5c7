"""Check that each entry of `model.precision_schedule` changes something, at a step of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain, islice, pairwise, product
from typing import Any

from megafp8.config.checks.precision import NAMES, OF_RECIPE, no_match, one_format
from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE, names_bf16
from megafp8.config.precision_phases import Assigned, Product, changes_of_job, in_phases, linears_of
from megafp8.config.precision_spec import phases_of, settings_recipe, switched_off_parts
from megafp8.config.rules import Finding, Rules
from megafp8.config.values import compute_dtypes, named_linears, plain
from megafp8.specs.precision import PrecisionChange
from megafp8.specs.recipes import HIGH_PRECISION, problem

rule = Rules()

STEPS = "trainer.max_steps"
_READ = (SCHEDULE, STEPS, "trainer.precision", *NAMES, *OF_RECIPE)


@rule(*_READ)
def _entries_have_effects(v: Values) -> Iterator[Finding]:
    changes = changes_of_job(v)
    if not changes or not v["model.fp8"]:
        return
    if names_bf16(v[SCHEDULE]) and compute_dtypes(v) != ("bf16",):
        yield Finding(
            SCHEDULE,
            f"names bf16, and the run computes in trainer.precision={v['trainer.precision']}",
            "Write recipe: high_precision, which stands for trainer.precision",
        )
    findings = _order(changes, v)
    recipes = {v["model.fp8_recipe"], *(change.precision for change in changes)}
    is_known = all(problem(name) is None for name in recipes - {HIGH_PRECISION})
    if is_known and (names := named_linears(v)):
        findings = chain(findings, _effects(changes, v, names), _formats(changes, v))
    yield from islice(findings, 1)  # what is wrong with later entries may follow from it


def is_valid(entries: list[Any], values: Values) -> bool:
    """Whether these entries could be the schedule of a run of `values`, which are valid."""
    return not any(rule.findings({**values, SCHEDULE: entries}))


def _order(changes: tuple[PrecisionChange, ...], v: Values) -> Iterator[Finding]:
    """Yield what is wrong with the steps of entries."""
    for number, (first, second) in enumerate(pairwise(changes), 2):
        if second.after < first.after:
            yield Finding(
                SCHEDULE,
                f"entry {number} begins after step {second.after}, and the entry before it after "
                f"step {first.after}",
                "Write the entries in the order of their steps",
            )
    for number, change in enumerate(changes, 1):
        if change.after >= v[STEPS]:
            yield Finding(
                SCHEDULE,
                f"entry {number} begins after step {change.after}, and the run has "
                f"{STEPS}={plain(v[STEPS])}",
                f"Use a smaller number, or a fraction of the run such as 0.85; or raise {STEPS}",
            )


def _effects(
    changes: tuple[PrecisionChange, ...], v: Values, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield which entries match nothing or change nothing, and which steps mix recipes."""
    start = Assigned.by_settings(settings_recipe(v), names)
    for pattern in (pattern for change in changes for pattern in change.modules):
        if not any(fnmatchcase(name, pattern) for name in start.of_linear):
            yield no_match(SCHEDULE, pattern, names)
    present, off, number, has_fp8 = start, switched_off_parts(v), 0, False
    for after, entries in in_phases(changes):
        began = now = present.in_fp8()
        for change, later in zip(entries, _replaced(entries, start), strict=True):
            number += 1
            present = present.after([change], start, off)
            before, now = now, present.in_fp8()
            changed = {key for key in now if now[key] != before[key]}
            if changed <= later:
                yield _without_effect(number, change, bool(changed), start)
        yield from _mixed(number, present)
        if entries and now == began:
            yield Finding(
                SCHEDULE,
                f"the entries that begin after step {after} change nothing together",
                "Leave out those that a later one takes back",
            )
        has_fp8 |= set(now.values()) != {HIGH_PRECISION}
    if not has_fp8:
        yield Finding(
            SCHEDULE,
            "leaves no product in FP8 in any step",
            "Begin with a recipe, or set model.fp8=False",
        )


def _formats(changes: tuple[PrecisionChange, ...], v: Values) -> Iterator[Finding]:
    """Yield the phases whose histories have several formats, which would end the run there."""
    for phase in phases_of(v, changes):
        yield from one_format(SCHEDULE, phase.recipe)


def _replaced(entries: Sequence[PrecisionChange], start: Assigned) -> Iterator[set[Product]]:
    """Yield for each entry the products of later ones that are written with the same `from`."""
    products = [set(product(linears_of(change, start), change.products)) for change in entries]
    for number, change in enumerate(entries, 1):
        both = zip(entries[number:], products[number:], strict=True)
        yield set().union(*(theirs for later, theirs in both if later.start == change.start))


def _without_effect(
    number: int, change: PrecisionChange, is_replaced: bool, start: Assigned
) -> Finding:
    why = ": later entries of the same step replace it" if is_replaced else ""
    if not any(True for _ in linears_of(change, start)):
        why = ": no linear is in FP8"
    return Finding(
        SCHEDULE,
        f"entry {number} ({change.text}) changes nothing after step {change.after}{why}",
        "Leave the entry out, or name other modules, products or another recipe",
    )


def _mixed(number: int, assigned: Assigned) -> Iterator[Finding]:
    """Yield the linears whose products have several recipes after entry `number`."""
    for name, products in assigned.of_linear.items():
        if len(named := {*products} - {HIGH_PRECISION}) > 1:
            yield Finding(
                SCHEDULE,
                f"entry {number} gives products of {name} other recipes than its others have: "
                f"{' and '.join(sorted(named))}; a linear has one recipe at a time",
                "Leave `products` out, or give these products recipe: high_precision",
            )
