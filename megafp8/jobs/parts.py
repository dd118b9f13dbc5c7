"""Say which part of a model the loss pays for in low precision: one part at a time stays out of it.

Beside a configuration in FP8 the same one is trained with a linear, a layer or a product in high
precision. What the loss gains is compared from the same seeds, as in every comparison.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from html import escape
from typing import Any

from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.load import Source
from megafp8.config.overrides import quoted
from megafp8.config.own_recipes import MODULES
from megafp8.config.precision_changes import SCHEDULE
from megafp8.config.precision_spec import settings_recipe
from megafp8.config.values import in_effect, named_linears
from megafp8.jobs.comparison import pairs_of
from megafp8.jobs.configurations import Comparison, Configuration
from megafp8.jobs.job import Job
from megafp8.jobs.starts import Start
from megafp8.observe.units import in_columns
from megafp8.report.record import RunRecord
from megafp8.report.tables import cell, table
from megafp8.report.verdict import (
    Verdict,
    how_many,
    judge,
    unit_of,
    with_interval,
)
from megafp8.specs.precision import GEMMS
from megafp8.specs.recipes import HIGH_PRECISION

EACH = ("linear", "layer", "product")
PRODUCTS = "model.override_linear_precision"
SHARE = "fp8_share_of_gemm_flops"
LEAST_GAIN = 5e-5
"""The least gain that the table shows as more than 0.00 %."""
COLUMNS = ("in high precision", "the loss gains", "95 % interval", "gap to the baseline",
           "GEMM FLOPs that leave low precision", "gap with it alone in FP8")  # fmt: skip


# ---- the configurations


def with_parts(
    compared: Comparison, each: str, source: Source, *, alone: bool = False
) -> Comparison:
    """Return the comparison with a configuration more for each part that may stay out of FP8.

    Args:
        compared: The baseline and one configuration in FP8.
        each: What a part is, one of `EACH`.
        source: Where settings come from that no override sets.
        alone: Whether each part is also the only one in FP8, in a further configuration.

    Raises:
        SettingError: There are several configurations, or the one has no part in FP8.
        UserError: A configuration with a part in high precision is refused.
    """
    if len(compared.others) != 1:
        hint = "Give each setting one value"
        reason = "asks which part of one configuration costs most, and there are several"
        raise SettingError("--each", each, reason, hint, origin=COMMAND_LINE)
    (recipe,) = compared.others
    start = compared.start

    def configuration(word: str, name: str, shown: str, setting: str) -> Configuration:
        key = setting.partition("=")[0]
        others = (text for text in recipe.overrides if text.partition("=")[0].lstrip("+") != key)
        overrides = (*others, setting)
        label = f"{word}-" + re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")
        return Configuration(label, shown, overrides, source.load(overrides).values)

    names = _parts(recipe.values, each)
    parts = [configuration("high", n, n, setting_of([n], recipe.values, start)) for n in names]
    only = [
        configuration("only", n, f"{n} alone in FP8", _setting_of_one(n, recipe.values, start))
        for n in (names if alone else ())
    ]
    if not parts:
        reason = f"finds no {each} of the configuration in low precision"
        raise SettingError("--each", each, reason, "Give model.fp8=True", origin=COMMAND_LINE)
    return replace(compared, parts=tuple(parts), alone=tuple(only))


def _parts(values: Mapping[str, Any], each: str) -> list[str]:
    """Return the parts in FP8: products, or patterns of linears' names, those of experts as one."""
    if not values["model.fp8"]:
        return []
    recipe = settings_recipe(values)
    if each == "product":
        kept_high = recipe.kept_high(recipe.name)
        return [name for name in GEMMS if name not in kept_high]
    low = (name for name in named_linears(values) if recipe.precision_of(name) != HIGH_PRECISION)
    shortened = (
        (r"^(layers\.\d+)\..*", r"\1.*")
        if each == "layer"
        else (r"\.experts\.\d+\.", ".experts.*.")
    )
    return list(dict.fromkeys(re.sub(*shortened, name) for name in low))


def setting_of(parts: Sequence[str], values: Mapping[str, Any], start: Start | None = None) -> str:
    """Return the setting that keeps parts in high precision, besides what is so already.

    From a checkpoint on it is an entry of the precision's schedule.
    """
    if start is not None:
        what = "products" if set(parts) <= set(GEMMS) else "modules"
        return start.schedule(values[SCHEDULE], [{what: list(parts), "recipe": HIGH_PRECISION}])
    if set(parts) <= set(GEMMS):
        high = zip(GEMMS, values[PRODUCTS], strict=True)
        return f"{PRODUCTS}=[{','.join(str(name in parts or is_high) for name, is_high in high)}]"
    rules = [*(f"{part}:{HIGH_PRECISION}" for part in parts), *values[MODULES]]
    return _modules(rules, values)


def _modules(rules: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return the setting of rules, without those that earlier ones leave no linear."""
    return f"{MODULES}=[{','.join(map(quoted, in_effect(rules, named_linears(values))))}]"


def _setting_of_one(part: str, values: Mapping[str, Any], start: Start | None) -> str:
    """Return the setting that leaves one part in FP8 and takes everything else out of it."""
    if part in GEMMS:
        return setting_of([name for name in GEMMS if name != part], values, start)
    recipe = settings_recipe(values)
    named = (name for name in named_linears(values) if fnmatchcase(name, part))
    kept = [(name, own) for name in named if (own := recipe.precision_of(name)) != HIGH_PRECISION]
    if start is not None:
        back = [{"modules": [name], "recipe": own} for name, own in kept]
        return start.schedule(values[SCHEDULE], [{"recipe": HIGH_PRECISION}, *back])
    return _modules([*(f"{name}:{own}" for name, own in kept), f"*:{HIGH_PRECISION}"], values)


# ---- what the loss gains


@dataclass(frozen=True)
class Gain:
    """Hold what the loss gains if one part stays in high precision.

    Attributes:
        part: The part: a pattern of linears' names, or a product.
        verdict: The part's runs over those of the recipe alone, whose gaps are below zero where the
            loss gains; None if no seed finished both.
        gap: The mean gap of its final loss to that of the baseline; infinite if a run did not
            finish.
        flops: The share of all GEMM FLOPs that leaves low precision; None if it was not counted.
        setting: What keeps the part in high precision.
        alone: The runs in which no other part is in FP8, over the baseline; None if there are none.
    """

    part: str
    verdict: Verdict | None
    gap: float
    flops: float | None
    setting: str
    alone: Verdict | None = None

    @property
    def is_sure(self) -> bool:
        """Whether all runs finished, and the whole 95 % interval of the gain is above zero."""
        verdict = self.verdict
        if verdict is None or verdict.half_width is None or not math.isfinite(self.gap):
            return False
        return verdict.mean + verdict.half_width < 0

    def as_json(self) -> dict[str, Any]:
        """Return the gain for a JSON file."""
        figures = None if self.verdict is None else asdict(self.verdict)
        gap = self.gap if math.isfinite(self.gap) else None
        return {
            "part": self.part, "figures": figures, "gap_to_baseline": gap,
            "flops": self.flops, "setting": self.setting,
            "alone": None if self.alone is None else asdict(self.alone),
        }  # fmt: skip

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Return the cells of its row under `COLUMNS`; the last one may be left out."""
        gain = interval = ""
        if self.verdict is not None:
            mean, width = -100 * self.verdict.mean, self.verdict.half_width
            gain = f"{mean:+.2f} %"
            if width is not None:
                interval = f"{mean - 100 * width:+.2f} to {mean + 100 * width:+.2f} %"
        gap = f"{100 * self.gap:+.2f} %" if math.isfinite(self.gap) else "did not finish"
        flops = "" if self.flops is None else f"{100 * self.flops:.1f} %"
        alone = "" if self.alone is None else with_interval(self.alone)
        return self.part, gain, interval, gap, flops, alone


def gains_of(compared: Comparison, runs: Mapping[Job, RunRecord], tolerance: float) -> list[Gain]:
    """Return what the loss gains with each part in high precision, the largest gain first.

    Parts are ordered by their final losses beside the baseline's, so that they have an order also
    where the recipe alone did not finish. Parts of which a run did not finish come last.
    """
    seeds = {job.seed for job in runs}
    (recipe,) = compared.others
    gains = []
    only = {part.name: one for part, one in zip(compared.parts, compared.alone, strict=False)}
    for part in compared.parts:
        names = (recipe.name, part.name)
        beside, over = pairs_of(recipe, part, runs), pairs_of(compared.base, part, runs)
        finished = len(over) == len(seeds)
        shares = [(p.base.figure(SHARE), p.other.figure(SHARE)) for p in beside]
        left = [low - kept for low, kept in shares if low is not None and kept is not None]
        gains.append(
            Gain(
                part=part.name,
                verdict=judge(beside, tolerance, names) if beside else None,
                gap=judge(over, tolerance, names).mean if finished else math.inf,
                flops=statistics.fmean(left) if left else None,
                setting=part.overrides[-1],
                alone=judge(found, tolerance, names)
                if part.name in only and (found := pairs_of(compared.base, only[part.name], runs))
                else None,
            )
        )
    return sorted(gains, key=lambda gain: gain.gap if math.isfinite(gain.gap) else math.inf)


def _num_columns(gains: Sequence[Gain]) -> int:
    """Return how many of `COLUMNS` are shown: the last one only if parts were trained alone."""
    return len(COLUMNS) - all(gain.alone is None for gain in gains)


def gain_lines(gains: Sequence[Gain], compared: Comparison) -> list[str]:
    """Return the ranking as lines, then what to set, or how many seeds would decide."""
    size = _num_columns(gains)
    rows = in_columns([COLUMNS[:size], *(gain.cells()[:size] for gain in gains)])
    return [*rows, *_advice(gains, compared)]


def _advice(gains: Sequence[Gain], compared: Comparison) -> list[str]:
    """Return what to set, or how many seeds would decide."""
    (recipe,), start = compared.others, compared.start
    finished = [gain.part for gain in gains if math.isfinite(gain.gap)]
    if not finished:
        return ["no part in high precision lets all runs finish"]
    best = gains[0]
    if best.verdict is None:
        return [
            f"{recipe.name} alone does not finish; it does with any of {', '.join(finished)} in "
            "high precision. With the first of them:",
            setting_of(finished[:1], recipe.values, start),
        ]
    sure = [gain.part for gain in gains if gain.is_sure]
    if sure:
        return [
            f"the loss gains more than chance explains with {', '.join(sure)} in high precision:",
            setting_of(sure, recipe.values, start),
        ]
    gaps, gain = best.verdict.gaps, -best.verdict.mean
    if len(gaps) < 2:
        unit = unit_of(gaps)
        more = "--seeds 1 2 3" if start is None else "--from RUN@STEP RUN@STEP RUN@STEP"
        return [f"one {unit} cannot tell a gain from chance: give at least three ({more})"]
    if not gain >= LEAST_GAIN:
        return ["the loss gains with no part in high precision"]
    return [
        f"no gain is more than chance explains; {how_many(gaps, gain)} would decide whether "
        f"the loss gains {100 * gain:.2f} % with {best.part} in high precision"
    ]


def gain_section(gains: Sequence[Gain], compared: Comparison) -> str:
    """Return the ranking as a part of the page."""
    (recipe,) = compared.others
    size = _num_columns(gains)
    rows = (
        (cell(part), cell(gain, "number", each.verdict and -each.verdict.mean),
         cell(interval, "number"), cell(gap, "number", each.gap), cell(flops, "number", each.flops),
         cell(alone, "number", each.alone and each.alone.mean))[:size]
        for each in gains
        for part, gain, interval, gap, flops, alone in [each.cells()]
    )  # fmt: skip
    lines = "".join(f"<li><code>{escape(line)}</code></li>" for line in _advice(gains, compared))
    return (
        f"<h2>What the loss of {escape(recipe.name)} gains with a part in high precision</h2>"
        f"{table(COLUMNS[:size], rows, 'sortable')}<ul>{lines}</ul>"
        "<p class=dim>Each interval is of one part alone: of twenty parts without an effect, one "
        "is expected outside of its 95 % interval.</p>"
    )
