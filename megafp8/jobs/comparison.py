"""Report a comparison: the verdict on each configuration, their table, and one page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from megafp8.errors import ExitCode
from megafp8.jobs.configurations import Comparison, Configuration
from megafp8.jobs.job import Job
from megafp8.observe.units import in_columns
from megafp8.report.curves import gap_chart
from megafp8.report.page import runs_page
from megafp8.report.record import RunRecord
from megafp8.report.tables import cell, label, table
from megafp8.report.verdict import (
    Pair,
    Verdict,
    averaged_gap,
    gaps_of,
    how_many,
    judge,
    named,
    ratio,
    unit_of,
    weakest_tensors,
)
from megafp8.specs import TensorHealth

WORDS = ("worse", "undecided", "same", "better")
"""The verdicts: that on several configurations is the first of these which one of them has."""
COLUMNS = ("configuration", "verdict", "gap", "95 % interval", "gaps of the seeds")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what came out of one configuration.

    Attributes:
        name: What reports call the configuration.
        base_name: What they call the baseline.
        word: The verdict.
        sentence: The verdict in one line.
        verdict: The figures that it follows from; None if no run finished.
        pairs: The runs of each seed that both finished.
        differs: Lines that say in which settings it is not the baseline.
        signals: The tensors that FP8 harms most, the worst first.
        of_base: The signal-to-noise ratio in dB of the baseline's tensors, if it has FP8 too.
        more_costs: What else it takes in relation to the baseline, in words.
    """

    name: str
    base_name: str
    word: str
    sentence: str
    verdict: Verdict | None
    pairs: tuple[Pair, ...]
    differs: tuple[str, ...]
    signals: Mapping[str, TensorHealth]
    of_base: Mapping[str, float]
    more_costs: tuple[tuple[str, str], ...] = ()

    @property
    def costs(self) -> list[tuple[str, str]]:
        """Return what the configuration took in relation to the baseline, in words."""
        return [*costs_of(self.pairs), *self.more_costs]

    @property
    def lines(self) -> list[str]:
        """Return the figures behind the verdict, and the costs, as lines."""
        return [*_lines(self.verdict), *(f"{what}: {text}" for what, text in self.costs)]

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for a JSON file."""
        return {
            "name": self.name,
            "verdict": self.word,
            "sentence": self.sentence,
            "figures": None if self.verdict is None else asdict(self.verdict),
            "differs": list(self.differs),
            "costs": dict(self.costs),
            "weakest_tensors": [
                {
                    "name": name,
                    **{key: getattr(health, key) for key in ("snr_db", "underflow", "overflow")},
                    "snr_db_of_baseline": self.of_base.get(name),
                }
                for name, health in self.signals.items()
            ],
        }


def outcome(
    other: Configuration,
    base: Configuration,
    runs: Mapping[Job, RunRecord],
    codes: Mapping[Job, int],
    tolerance: float,
    predicted_time: str | None,
) -> Outcome:
    """Return the verdict on one configuration; it is worse if a run of it did not finish.

    Args:
        other: The configuration.
        base: The baseline.
        runs: What the jobs left, also those that did not finish.
        codes: The exit codes of the jobs.
        tolerance: The largest relative gap that counts as the same loss.
        predicted_time: The time that it takes in relation to the baseline, in words, if known.
    """
    name, base_name = other.name, base.name
    of_seed = {job.seed: run for job, run in runs.items() if job.label == other.label}
    pairs = [
        Pair(job.seed, run, of_seed[job.seed])
        for job, run in runs.items()
        if job.label == base.label and job.seed in of_seed
    ]
    of_other = {job.seed: code for job, code in codes.items() if job.label == other.label}
    failures = {seed: code for seed, code in of_other.items() if code != ExitCode.FINISHED}
    done = [pair for pair in pairs if pair.other.status == "finished"]
    verdict = judge(done, tolerance, (base_name, name)) if done else None
    word, sentence = ("worse", "") if verdict is None else (verdict.word, verdict.sentence)
    if failures:
        how = ", ".join(f"{named(seed)} ended with exit code {c}" for seed, c in failures.items())
        word, sentence = "worse", f"worse: {name} did not finish ({how}), and {base_name} did"
    return Outcome(
        name=name,
        base_name=base_name,
        word=word,
        sentence=sentence,
        verdict=verdict,
        pairs=tuple(done),
        differs=tuple(other.changed_from(base)),
        signals=weakest_tensors(pairs[0].other) if pairs else {},
        of_base=_ratios(pairs[0].base) if pairs else {},
        more_costs=() if predicted_time is None else (("predicted time", predicted_time),),
    )


def pairs_of(
    base: Configuration, other: Configuration, runs: Mapping[Job, RunRecord]
) -> list[Pair]:
    """Return the runs of two configurations from the same seeds that have both finished."""
    done = {(job.label, job.seed): run for job, run in runs.items() if run.status == "finished"}
    return [
        Pair(seed, run, done[other.label, seed])
        for (label, seed), run in done.items()
        if label == base.label and (other.label, seed) in done
    ]


def forecast(compared: Comparison, runs: Mapping[Job, RunRecord], size: float) -> str | None:
    """Return how many seeds would decide a gap of a size; None with fewer than two of them.

    It follows from the spread between the seeds whose runs have all ended, as in the verdict, and
    from that part of a model whose gain has the largest spread.
    """
    base, (recipe, *_) = compared.base, compared.others
    both = [(base, other) for other in compared.others]
    both += [(recipe, part) for part in compared.parts]
    gaps = {
        other.name: judge(pairs, size, (first.name, other.name)).gaps
        for first, other in both
        if len(pairs := pairs_of(first, other, runs)) > 1
    }
    every = [gap for found in gaps.values() for gap in found.values()]
    if len(gaps) < len(both) or not all(map(math.isfinite, every)):
        return None
    widest = max(gaps, key=lambda name: statistics.stdev(gaps[name].values()))
    seeds = gaps[widest]
    return (
        f"in advance: by the spread of {', '.join(map(named, seeds))}, {how_many(seeds, size, 2)} "
        f"would decide {100 * size:g} %{f' ({widest})' if len(both) > 1 else ''}"
    )


def _ratios(run: RunRecord) -> dict[str, float]:
    """Return the signal-to-noise ratio in dB of the tensors of a run in FP8, if it was measured."""
    tensors = run.last_health.tensors if run.last_health is not None else {}
    return {name: x.snr_db for name, x in tensors.items() if x.snr_db is not None}


def worst(outcomes: Sequence[Outcome]) -> str:
    """Return the verdict on all configurations together."""
    return min((o.word for o in outcomes), key=WORDS.index)


def costs_of(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Return what the configuration took in relation to the baseline, in words."""
    costs = []
    memory, wall = ratio(pairs, "peak_memory_bytes"), ratio(pairs, "wall_seconds")
    if memory is not None:
        costs.append(("peak memory", f"{memory:.2f} of the baseline's"))
    if wall is not None:
        costs.append(("time of whole runs", f"{wall:.2f} of the baseline's"))
        if _measures_health(pairs[0].other) != _measures_health(pairs[0].base):
            side = "the configuration" if _measures_health(pairs[0].other) else "the baseline"
            note = f"logged steps of {side} alone also measure FP8 health, which its time includes"
            costs.append(("note", note))
    precision = str(pairs[0].other.summary.get("precision", "")) if pairs else ""
    if "emulated" in precision:
        note = "products are emulated on this device, so that time says nothing about tensor cores"
        costs.append(("note", note))
    share = pairs[0].other.figure("fp8_share_of_gemm_flops") if pairs else None
    if share:
        costs.append(
            ("share of low precision", f"{100 * share:.1f} % of the GEMM FLOPs without attention")
        )
    return costs


def _measures_health(run: RunRecord) -> bool:
    """Whether logged steps of a run also measure FP8 health, which takes time."""
    return bool(run.config.get("model.fp8")) and run.config.get("model.fp8_health") == "full"


def _lines(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return []
    gaps = ", ".join(f"{named(seed)} {100 * gap:+.3f} %" for seed, gap in verdict.gaps.items())
    lines = [f"gap of the final {verdict.measured}: {gaps}"]
    if verdict.spread_between_seeds is not None:
        unit = unit_of(verdict.gaps)
        note = " (the seed also draws the texts)" if unit == "seed" else ""
        spread = f"{100 * verdict.spread_between_seeds:.2f} %"
        lines.append(f"spread of the baseline between {unit}s: {spread}{note}")
    if verdict.first_difference is None:
        lines.append("the training losses are equal at every logged step")
    else:
        lines.append(f"the training losses differ from step {verdict.first_difference} on")
    if verdict.largest is not None:
        step, gap = verdict.largest
        lines.append(f"the averaged gap is largest at step {step}: {100 * gap:+.2f} %")
    if verdict.parts_at is not None:
        lines.append(f"the curves part at step {verdict.parts_at}")
    else:
        lines.append("the curves do not part: the averaged gap ends within the tolerance")
    return lines


# ---- a table of several configurations


def comparison_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a row for each configuration, below a row of titles, in columns of equal width."""
    return in_columns([COLUMNS, *((o.name, o.word, *_gaps(o.verdict)) for o in outcomes)])


def _gaps(verdict: Verdict | None) -> tuple[str, str, str]:
    """Return the mean gap, its interval and the gap of each seed, in percent."""
    if verdict is None:
        return "", "", ""
    mean, width = 100 * verdict.mean, verdict.half_width
    around = "" if width is None else f"{mean - 100 * width:+.2f} to {mean + 100 * width:+.2f} %"
    gaps = ", ".join(f"{100 * gap:+.2f}" for gap in verdict.gaps.values())
    return f"{mean:+.2f} %", around, f"{gaps} %"


def _table(outcomes: Sequence[Outcome]) -> str:
    """Return the HTML table of several configurations."""
    rows = (
        (cell(o.name), cell(o.word), cell(mean, "number", o.verdict and o.verdict.mean),
         cell(interval, "number"), cell(gaps, "number"))
        for o in outcomes
        for mean, interval, gaps in [_gaps(o.verdict)]
    )  # fmt: skip
    measured = next((o.verdict.measured for o in outcomes if o.verdict is not None), "loss")
    return (
        f"<p class=dim>The gap is the final {measured} over that of "
        f"{escape(outcomes[0].base_name)}, minus 1. All runs of a seed have the same weights at "
        "the start and the same data. Each interval is of one configuration alone.</p>"
        + table(COLUMNS, rows, "sortable")
    )


# ---- the page


def comparison_page(
    outcomes: Sequence[Outcome],
    compared: Comparison,
    runs: Mapping[Job, RunRecord],
    parts: str = "",
) -> str:
    """Return the page of a comparison, with the curves of its runs.

    `parts` is HTML that follows the verdict on the only configuration.
    """
    base_name = outcomes[0].base_name
    if len(outcomes) == 1:
        (only,) = outcomes
        gaps = [(named(pair.seed), *_in_percent(gaps_of(pair))) for pair in only.pairs]
        title, details = f"{only.name} against {base_name}", ""
        more = _sentence(only) + parts + _section(only, 2)
        chart = gap_chart(f"training loss of {only.name} over {base_name}, %", gaps)
    else:
        gaps = [(o.name, *_in_percent(_averaged(o.pairs))) for o in outcomes if o.pairs]
        title = f"{len(outcomes)} configurations against {base_name}"
        more = "".join(map(_sentence, outcomes)) + _table(outcomes)
        details = "".join(f"<h2>{escape(o.name)}</h2>{_section(o, 3)}" for o in outcomes)
        chart = gap_chart(f"training loss over {base_name}, mean of the seeds, %", gaps)
    charts = [chart] if gaps else []
    names = {c.label: c.name for c in compared.configurations}
    groups = [names[job.label] for job in runs]
    return runs_page(
        title,
        list(runs.values()),
        labels=[f"{names[job.label]}, {named(job.seed)}" for job in runs],
        groups=groups,
        more=more,
        more_charts=charts,
        details=details,
    )


def _sentence(outcome: Outcome) -> str:
    """Return the verdict on a configuration as a paragraph."""
    color = "same" if outcome.word == "better" else outcome.word
    return f"<p class='verdict {color}'><span>{escape(outcome.sentence)}</span></p>"


def _section(outcome: Outcome, level: int) -> str:
    """Return the figures of one configuration, with headings of a level."""
    return "".join(
        (
            f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in outcome.lines)}</ul>",
            f"<h{level}>What differs</h{level}><ul>",
            *(f"<li>{escape(line)}</li>" for line in outcome.differs),
            "</ul>",
            _weakest(outcome, level),
        )
    )


def _weakest(outcome: Outcome, level: int) -> str:
    """Return the table of the tensors that lose most signal, if they were measured."""
    if not outcome.signals:
        return ""

    def number(value: float | None, digits: int) -> str:
        return cell() if value is None else cell(f"{value:.{digits}f}", "number", value)

    of_base = outcome.of_base
    of_both = [f"signal to noise of {outcome.base_name}, dB"] if of_base else []
    heads = ("tensor", "signal to noise, dB", *of_both, "underflow, %", "saturation, %")
    rows = (
        (label(name), number(s.snr_db, 1), *(number(of_base.get(name), 1) for _ in of_both),
         number(100 * (s.underflow or 0.0), 3), number(100 * (s.overflow or 0.0), 3))
        for name, s in outcome.signals.items()
    )  # fmt: skip
    return (
        f"<h{level}>Tensors that low precision harms most</h{level}><p class=dim>What the casts "
        "add to products in the last measured step of its first run, in the order of <code>megafp8 "
        "inspect</code>.</p>" + table(heads, rows, "sortable")
    )


def _averaged(pairs: Sequence[Pair]) -> tuple[list[int], list[float]]:
    gap_of_step = averaged_gap(pairs)
    return [step for step, _ in gap_of_step], [gap for _, gap in gap_of_step]


def _in_percent(curve: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    return curve[0], [100 * gap for gap in curve[1]]
