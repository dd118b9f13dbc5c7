"""Judge whether two configurations train equally well, from pairs of runs with the same seeds.

Both runs of a pair have the same seed, data and initial weights, so that the gap between their
losses has little noise. The gap of each seed is a relative difference of losses; the spread of the
gaps between seeds says how sure the mean gap is.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megafp8.observe.health import worst_first
from megafp8.report.record import RunRecord
from megafp8.specs import TensorHealth

MOST_SEEDS = 200  # that are advised
# Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom (any table of statistics).
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
WINDOW = 0.05  # of the logged steps over which a curve of gaps is averaged
LAST = 0.1  # of the logged steps whose mean is a run's training loss, where nothing was validated
TOLERANCE = 0.005  # the relative gap that counts as the same loss, unless a user gives another one
WORST_TENSORS = 10


Seed = int | str
"""What two runs have in common: a seed, or the name of the checkpoint that both start from."""


@dataclass(frozen=True)
class Pair:
    """Hold the two runs of one seed, or from one checkpoint."""

    seed: Seed
    base: RunRecord
    other: RunRecord


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold the answer, and the figures that it follows from.

    Attributes:
        word: `same`, `better`, `worse` or `undecided`.
        sentence: The answer in one line.
        measured: What was compared: the validation or the training loss.
        gaps: The relative difference of the final losses for each seed.
        mean: The mean of the gaps.
        half_width: Half of the 95 % confidence interval of the mean; None with one seed.
        spread_between_seeds: (largest - smallest) / smallest final loss of the baseline.
        first_difference: The first logged step at which any pair of losses differs.
        parts_at: The first step from which on the averaged gap stays beyond the tolerance.
        largest: Step and value of the averaged gap that is farthest from zero.
        learned: How far the baseline's training loss fell, relative to where it ended: the least of
            all seeds, NaN if nothing was logged.
    """

    word: str
    sentence: str
    measured: str
    gaps: dict[Seed, float]
    mean: float
    half_width: float | None
    spread_between_seeds: float | None
    first_difference: int | None
    parts_at: int | None
    largest: tuple[int, float] | None
    learned: float


def judge(pairs: Sequence[Pair], tolerance: float, names: tuple[str, str]) -> Verdict:
    """Return the verdict on pairs of finished runs.

    Args:
        pairs: The runs, one pair for each seed, at least one.
        tolerance: The largest relative gap that counts as the same loss.
        names: What the baseline and the other configuration are called.
    """
    validated = all(
        run.figure("val_loss") is not None for pair in pairs for run in (pair.base, pair.other)
    )
    finals = {pair.seed: (_final(pair.base, validated), _final(pair.other, validated))
              for pair in pairs}  # fmt: skip
    gaps = {seed: other / base - 1 for seed, (base, other) in finals.items()}
    mean = statistics.fmean(gaps.values())
    half_width = None
    if len(gaps) > 1:
        half_width = _half_width(statistics.stdev(gaps.values()), len(gaps))
    bases = [base for base, _ in finals.values()]
    averaged = averaged_gap(pairs)
    beyond = [abs(gap) > tolerance for _, gap in averaged]
    inside = max((i for i, is_beyond in enumerate(beyond) if not is_beyond), default=-1)
    falls = [_fall(pair.base) for pair in pairs]
    learned = min((fall for fall, _ in falls), key=lambda x: (not math.isnan(x), x))
    word = _word(mean, half_width or 0.0, tolerance)
    # Otherwise half of what was learned is within the tolerance, or none of it may be learned.
    can_tell = all(fall > max(2 * tolerance, noise) for fall, noise in falls)
    behind = next((bits for pair in pairs if (bits := _behind_unigram(pair.base))), None)
    is_checked = all(pair.base.figure("unigram_bits_per_byte") is not None for pair in pairs)
    if word == "same" and (not can_tell or behind or not is_checked):
        word = "undecided"
    measured = "validation loss" if validated else "training loss"
    note = ""
    if not can_tell:
        fell = f"{'rose' if learned < 0 else 'fell'} by {100 * abs(learned):.2f} %"
        if math.isnan(learned):
            fell = "is not known"
        longer = "train longer"
        if any(fall > 2 * tolerance and not fall > noise for fall, noise in falls):
            fell += ", which its scatter between the logged steps could explain"
            longer += ", or log each step (trainer.log_every_n_steps=1)"
        so = "too little to compare" if word == "undecided" else f"so {names[0]} hardly learned"
        note += f"; the training loss of {names[0]} {fell}, {so}: {longer}"
    elif behind:
        note += (
            f"; {names[0]} has {behind[0]:.3f} bits per byte, and the frequencies of the tokens "
            f"alone give {behind[1]:.3f}: train longer"
        )
    elif not is_checked:
        note += (
            f"; {names[0]} was not compared with the frequencies of the tokens alone: validate at "
            "the end"
        )
    sure = _how_sure(gaps, mean, half_width, tolerance)
    sentence = (
        f"{word}: the {measured} of {names[1]} {_in_words(mean)} that of {names[0]}{sure} "
        f"(tolerance {100 * tolerance:g} %){note}"
    )
    return Verdict(
        word=word,
        sentence=sentence,
        measured=measured,
        gaps=gaps,
        mean=mean,
        half_width=half_width,
        spread_between_seeds=max(bases) / min(bases) - 1 if len(bases) > 1 else None,
        first_difference=_first_difference(pairs),
        parts_at=averaged[inside + 1][0] if inside + 1 < len(averaged) else None,
        largest=max(averaged, key=lambda item: abs(item[1]), default=None),
        learned=learned,
    )


def _in_words(gap: float) -> str:
    """Return how a loss with a relative gap compares with the baseline's."""
    if not math.isfinite(gap):
        return "is not finite, beside"
    if abs(gap) < 5e-5:
        return "is within 0.01 % of"
    return f"is {100 * abs(gap):.2f} % {'higher' if gap > 0 else 'lower'} than"


def with_interval(verdict: Verdict) -> str:
    """Return the mean gap in percent, and its 95 % interval if there are several seeds."""
    mean, width = 100 * verdict.mean, verdict.half_width
    if width is None:
        return f"{mean:+.2f} %"
    return f"{mean:+.2f} % ({mean - 100 * width:+.2f} to {mean + 100 * width:+.2f})"


def _half_width(deviation: float, seeds: int) -> float:
    """Return half of the 95 % interval of the mean of as many gaps, two or more."""
    return STUDENT[min(seeds - 1, len(STUDENT)) - 1] * deviation / math.sqrt(seeds)


def _how_sure(
    gaps: Mapping[Seed, float], mean: float, half_width: float | None, tolerance: float
) -> str:
    """Return the interval in words, and how many seeds would decide a gap of the tolerance."""
    unit = unit_of(gaps)
    if half_width is None:
        return f"; one {unit}: more {unit}s would say how sure this is"
    low, high = 100 * (mean - half_width), 100 * (mean + half_width)
    text = f", between {low:+.2f} and {high:+.2f} % (95 %, {len(gaps)} {unit}s)"
    if not tolerance < half_width < math.inf:
        return text
    return f"{text}; {how_many(gaps, tolerance)} would decide {100 * tolerance:g} %"


def unit_of(seeds: Iterable[Seed]) -> str:
    """Return what each of the given is, in a word."""
    return "checkpoint" if any(isinstance(seed, str) for seed in seeds) else "seed"


def named(seed: Seed) -> str:
    """Return what reports call a pair of runs: `seed 3`, or the name of a checkpoint."""
    return seed if isinstance(seed, str) else f"seed {seed}"


def seeds_to_show(deviation: float, size: float, least: int = 2) -> int | None:
    """Return how many seeds, `least` or more, show a mean gap of a size; None if too many.

    `deviation` is the standard deviation of the gaps between seeds, or what is expected of it.
    """
    most = range(least, MOST_SEEDS + 1)
    return next((n for n in most if _half_width(deviation, n) <= size), None)


def how_many(gaps: Mapping[Seed, float], size: float, least: int | None = None) -> str:
    """Return in words how many seeds show a mean gap of a size: `least`, or more than there are."""
    deviation, unit = statistics.stdev(gaps.values()), unit_of(gaps)
    enough = seeds_to_show(deviation, size, least or len(gaps) + 1)
    return f"more than {MOST_SEEDS} {unit}s" if enough is None else f"about {enough} {unit}s"


def _word(mean: float, half_width: float, tolerance: float) -> str:
    """Return what the confidence interval of the gap says; a NaN is worse than any number."""
    if not math.isfinite(mean):
        return "worse"
    low, high = mean - half_width, mean + half_width
    if -tolerance <= low and high <= tolerance:
        return "same"
    if low > tolerance:
        return "worse"
    return "better" if high < -tolerance else "undecided"


def _behind_unigram(run: RunRecord) -> tuple[float, float] | None:
    """Return the bits per byte of a run and of token frequencies, if the run's are not fewer.

    Such a model has learned little more than biases and embeddings, on which FP8 has no effect.
    """
    own, unigram = run.figure("val_bits_per_byte"), run.figure("unigram_bits_per_byte")
    return (own, unigram) if own is not None and unigram is not None and own >= unigram else None


def _fall(run: RunRecord) -> tuple[float, float]:
    """Return how far a run's training loss fell, and how far scatter alone may make it fall.

    Both are relative to where the loss ended. Half of the mean square of the successive differences
    is the variance of one logged loss (von Neumann and others, 1941); a trend makes it larger, not
    smaller. The fall is the first loss minus the mean of the last n, so that its variance is
    1 + 1/n of that. The second figure is the half width of its 95 % interval by Student's t with
    one degree of freedom for each difference; infinite without a difference.
    """
    losses = [loss for line in run.metrics if math.isfinite(loss := float(line["loss"]))]
    end = _final(run, validated=False)
    if not losses or math.isnan(end) or end == 0:
        return math.nan, math.inf
    steps = [after - before for before, after in itertools.pairwise(losses)]
    if not steps:
        return losses[0] / end - 1, math.inf
    variance = statistics.fmean(step * step for step in steps) / 2
    error = math.sqrt(variance * (1 + 1 / _num_last(len(losses))))
    return losses[0] / end - 1, STUDENT[min(len(steps), len(STUDENT)) - 1] * error / end


def _final(run: RunRecord, validated: bool) -> float:
    if validated:
        return run.figure("val_loss") or math.nan
    losses = [float(line["loss"]) for line in run.metrics]
    last = losses[-_num_last(len(losses)) :]
    return statistics.fmean(last) if last else math.nan


def _num_last(logged: int) -> int:
    """Return of how many losses the mean is a run's training loss."""
    return max(1, round(LAST * logged))


def gaps_of(pair: Pair) -> tuple[list[int], list[float]]:
    """Return the steps that both runs logged, and the relative gaps of their training losses."""
    base = {line["step"]: float(line["loss"]) for line in pair.base.metrics}
    gap_of_step = [
        (int(line["step"]), float(line["loss"]) / base[line["step"]] - 1)
        for line in pair.other.metrics
        if base.get(line["step"])
    ]
    return [step for step, _ in gap_of_step], [gap for _, gap in gap_of_step]


def averaged_gap(pairs: Sequence[Pair]) -> list[tuple[int, float]]:
    """Return steps and gaps of the training loss, averaged over all seeds and over steps."""
    by_step: dict[int, list[float]] = {}
    for pair in pairs:
        for step, gap in zip(*gaps_of(pair), strict=True):
            if math.isfinite(gap):
                by_step.setdefault(step, []).append(gap)
    means = [(step, statistics.fmean(by_step[step])) for step in sorted(by_step)]
    width = max(1, round(WINDOW * len(means)))
    return [
        (means[i][0], statistics.fmean(gap for _, gap in means[max(0, i - width + 1) : i + 1]))
        for i in range(width - 1, len(means))
    ]


def _first_difference(pairs: Sequence[Pair]) -> int | None:
    different_steps = [
        step for pair in pairs for step, gap in zip(*gaps_of(pair), strict=True) if gap != 0.0
    ]
    return min(different_steps, default=None)


def weakest_tensors(run: RunRecord) -> dict[str, TensorHealth]:
    """Return what the tensors lose that are harmed most, the worst first; nothing if unmeasured."""
    tensors = run.last_health.tensors if run.last_health is not None else {}
    return {name: tensors[name] for name in worst_first(tensors)[:WORST_TENSORS]}


def ratio(pairs: Sequence[Pair], figure: str) -> float | None:
    """Return the median over seeds of a figure of the other runs over that of the baseline."""
    known = [
        (pair.base.figure(figure), pair.other.figure(figure))
        for pair in pairs
        if figure != "wall_seconds" or not (_continued(pair.base) or _continued(pair.other))
    ]
    ratios = [other / base for base, other in known if base and other]
    return statistics.median(ratios) if ratios else None


def _continued(run: RunRecord) -> bool:
    """Whether the time of the last process is not the time of the whole run."""
    return [event.get("kind") for event in run.events].count("start") != 1
