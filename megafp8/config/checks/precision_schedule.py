"""Check that each entry of `model.precision_schedule` changes something, at a step of the run."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise

from megafp8.config.checks.precision import no_match
from megafp8.config.keys import Values
from megafp8.config.precision_changes import SCHEDULE, names_bf16
from megafp8.config.precision_phases import Assigned, assignments, changes_of, linears_of
from megafp8.config.precision_spec import settings_recipe, switched_off_parts
from megafp8.config.rules import Finding, Rules
from megafp8.config.values import LAYERS_NAMED, compute_dtypes, plain
from megafp8.specs.precision import PrecisionChange
from megafp8.specs.recipes import HIGH_PRECISION, problem

rule = Rules()

STEPS = "trainer.max_steps"
_READ = (
    "model.fp8",
    SCHEDULE,
    STEPS,
    "trainer.fast_dev_run",
    "trainer.precision",
    "model.num_layers",
    "model.fp8_recipe",
    "model.fp8_modules",
    "model.fp8_backend",
    "model.fp8_wgrad",
    "model.fp8_e4m3",
    "model.fp8_power_2_scale",
    "model.fp8_split_accumulator",
    "model.override_linear_precision",
    "model.first_last_layers_bf16",
    "model.num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16",
    "model.fp4_disable_rht",
    "model.fp4_disable_stochastic_rounding",
    "model.fp4_disable_2d_quantization",
)


@rule(*_READ)
def _entries_have_effects(v: Values) -> Iterator[Finding]:
    changes = changes_of(v)
    if not changes or not v["model.fp8"]:
        return
    if names_bf16(v[SCHEDULE]) and compute_dtypes(v) != ("bf16",):
        yield Finding(
            SCHEDULE,
            f"names bf16, and the run computes in trainer.precision={v['trainer.precision']}",
            "Write recipe: high_precision, which stands for trainer.precision",
        )
    yield from _order(changes, v)
    recipes = {v["model.fp8_recipe"], *(change.precision for change in changes)}
    is_known = all(problem(name) is None for name in recipes - {HIGH_PRECISION})
    if is_known and v["model.num_layers"] <= LAYERS_NAMED:
        yield from _effects(changes, v)


def _order(changes: tuple[PrecisionChange, ...], v: Values) -> Iterator[Finding]:
    """Yield what is wrong with the steps of entries, the first mistake alone."""
    for (first, second), number in zip(pairwise(changes), range(2, len(changes) + 1), strict=True):
        if second.after < first.after:
            yield Finding(
                SCHEDULE,
                f"entry {number} begins after step {second.after}, and the entry before it after "
                f"step {first.after}",
                "Write the entries in the order of their steps",
            )
            return
    for number, change in enumerate(changes, 1):
        if change.after >= v[STEPS]:
            yield Finding(
                SCHEDULE,
                f"entry {number} begins after step {change.after}, and the run has "
                f"{STEPS}={plain(v[STEPS])}",
                f"Use a smaller number, or a fraction of the run such as 0.85; or raise {STEPS}",
            )
            return


def _effects(changes: tuple[PrecisionChange, ...], v: Values) -> Iterator[Finding]:
    """Yield the first entry that matches nothing, changes nothing, or mixes recipes."""
    start = Assigned.by_settings(settings_recipe(v), v["model.num_layers"])
    for change in changes:
        for pattern in change.modules:
            if not any(fnmatchcase(name, pattern) for name in start.of_linear):
                yield no_match(SCHEDULE, pattern, v["model.num_layers"])
                return
    began = before = start
    has_fp8 = False
    both = zip(changes, assignments(changes, start, switched_off_parts(v)), strict=True)
    for number, (change, after) in enumerate(both, 1):
        is_last_here = number == len(changes) or changes[number].after != change.after
        mixed = (name for name, p in after.of_linear.items() if len({*p} - {HIGH_PRECISION}) > 1)
        if is_last_here and (name := next(mixed, None)) is not None:
            named = sorted({*after.of_linear[name]} - {HIGH_PRECISION})
            yield Finding(
                SCHEDULE,
                f"entry {number} gives products of {name} other recipes than its others have: "
                f"{' and '.join(named)}; a linear has one recipe at a time",
                "Leave `products` out, or give these products recipe: high_precision",
            )
            return
        if after.in_fp8() == before.in_fp8():
            what = "" if any(True for _ in linears_of(change, start)) else ": no linear is in FP8"
            yield Finding(
                SCHEDULE,
                f"entry {number} ({change.text}) changes nothing after step {change.after}{what}",
                "Leave the entry out, or name other modules, products or another recipe",
            )
            return
        if is_last_here:
            if after.in_fp8() == began.in_fp8():
                yield Finding(
                    SCHEDULE,
                    f"the entries that begin after step {change.after} change nothing together",
                    "Leave out those that a later one takes back",
                )
                return
            began = after
            has_fp8 |= any(set(p) != {HIGH_PRECISION} for p in after.in_fp8().values())
        before = after
    if changes[0].after == 0 and not has_fp8:
        yield Finding(
            SCHEDULE,
            "leaves no product in FP8 in any step",
            "Begin with a recipe, or set model.fp8=False",
        )
