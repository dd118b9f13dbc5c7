"""Verdicts on pairs of runs follow from their losses."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megafp8.report.record import RunRecord
from megafp8.report.verdict import (
    STUDENT,
    Pair,
    averaged_gap,
    gaps_of,
    judge,
    ratio,
    weakest_tensors,
)
from tests.report.made import loss_at

NAMES = ("BF16", "FP8 delayed")


def record(
    gap: float = 0.0, *, val_loss: float | None = 2.0, path: str = "x", from_step: int = 1
) -> RunRecord:
    """Return a run whose losses are `gap` above the baseline's, relatively, from a step on."""
    metrics = [
        {"step": s, "loss": loss_at(s) * (1 + gap * (s >= from_step))} for s in range(1, 101)
    ]
    validations = [] if val_loss is None else [{"step": 100, "val_loss": val_loss * (1 + gap)}]
    summary = {"val_bits_per_byte": 1.0, "unigram_bits_per_byte": 2.7}
    return RunRecord(
        path=Path(path),
        status="finished",
        metrics=metrics,
        validations=validations,
        summary=summary,
    )


def pairs(gaps: Sequence[float], **more: Any) -> list[Pair]:
    return [Pair(seed, record(**more), record(gap, **more)) for seed, gap in enumerate(gaps)]


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([0.004], "same"),
        ([0.0], "same"),
        ([0.006], "worse"),
        ([-0.006], "better"),
        ([math.nan], "worse"),
        ([math.inf], "worse"),
        ([0.001, 0.0012, 0.0011], "same"),
        ([0.010, 0.0101, 0.0102], "worse"),
        ([-0.010, -0.0101, -0.0102], "better"),
        ([0.001, 0.009, 0.004], "undecided"),
        ([0.0008, 0.0007, 0.0042], "undecided"),  # an earlier job: ± 0.49 %
    ],
)
def test_the_word_follows_from_the_interval_of_the_gap(gaps: list[float], word: str) -> None:
    verdict = judge(pairs(gaps), 0.005, NAMES)
    assert verdict.word == word and verdict.sentence.startswith(f"{word}: the ")
    if len(gaps) > 1:
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        assert verdict.half_width == pytest.approx(STUDENT[len(gaps) - 2] * error)
    else:
        assert "more seeds" in verdict.sentence


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        (
            [-0.004, -0.006],
            "is 0.50 % lower than that of BF16, between -1.77 and +0.77 % (95 %, 2 seeds)",
        ),
        ([0.001, 0.009, 0.004], "is 0.47 % higher than that of BF16, between -0.54 and +1.47 %"),
        ([0.0, 0.00001], "is within 0.01 % of that of BF16, between -0.01 and +0.01 %"),
        ([math.nan], "is not finite, beside that of BF16; one seed"),
        ([-0.3, 0.3], "; more than 200 seeds would decide 0.5 %"),
    ],
)
def test_the_verdict_says_how_many_seeds_would_decide(gaps: list[float], said: str) -> None:
    sentence = judge(pairs(gaps), 0.005, NAMES).sentence
    assert said in sentence
    advised = re.search(r"about (\d+) seeds would decide 0.5 %", sentence)
    assert bool(advised) == (said.startswith(("is 0.50", "is 0.47")))
    if advised is not None:
        wide = lambda n: STUDENT[min(n - 1, 10) - 1] * statistics.stdev(gaps) / math.sqrt(n)  # noqa: E731
        assert wide(int(advised[1])) <= 0.005 < wide(int(advised[1]) - 1)


@pytest.mark.parametrize(
    ("last", "word", "said"),
    [
        (8.0, "undecided", "the training loss of BF16 fell by 0.00 %, too little to compare"),
        (8.0 / 1.009, "undecided", "fell by 0.90 %"),  # half of it is within 0.5 %
        (8.0 / 0.998, "undecided", "the training loss of BF16 rose by 0.20 %, too little"),
        (8.0 / 1.011, "same", ""),
        (math.nan, "undecided", "is not known"),
    ],
)
def test_a_baseline_that_hardly_learned_tells_nothing(last: float, word: str, said: str) -> None:
    found = pairs([0.0])
    for run in (found[0].base, found[0].other):
        for line in run.metrics:
            line["loss"] = 8.0 if line["step"] == 1 else last  # type: ignore[index]
    verdict = judge(found, 0.005, NAMES)
    assert verdict.word == word and said in verdict.sentence
    assert ("train longer" in verdict.sentence) == bool(said)
    worse = pairs([0.02])  # what differs does so, however little the baseline learned
    worse[0].base.metrics[:] = worse[0].base.metrics[:1]  # type: ignore[index]
    verdict = judge(worse, 0.005, NAMES)
    assert verdict.word == "worse" and "too little" not in verdict.sentence
    assert "so BF16 hardly learned: train longer" in verdict.sentence


def with_losses(losses: Sequence[float]) -> list[Pair]:
    found = pairs([0.0])
    for run in (found[0].base, found[0].other):
        run.metrics[:] = [{"step": s, "loss": loss} for s, loss in enumerate(losses, start=1)]  # type: ignore[index]
    return found


def test_a_fall_that_scatter_explains_is_not_learned() -> None:
    """A run with a learning rate of 1e-12 logged these losses, in another order."""
    scattered = [8.3681, 8.3120, 8.2843, 8.3550, 8.3630, 8.3043, 8.3609, 8.3460, 8.2559]
    verdict = judge(with_losses(scattered), 0.005, NAMES)
    assert verdict.learned > 0.013 and verdict.word == "undecided"
    assert "fell by 1.36 %, which its scatter between the logged steps could" in verdict.sentence
    learned = [loss - 0.1 * step for step, loss in enumerate(scattered)]
    assert judge(with_losses(learned), 0.005, NAMES).word == "same"


@pytest.mark.parametrize(("logged", "word"), [(2, "undecided"), (4, "undecided"), (5, "same")])
def test_few_logged_steps_tell_nothing(logged: int, word: str) -> None:
    """An even fall by n - 1 differences d has a half width of t(n - 1) d: 3.18 d and 2.78 d."""
    even = [8.0 - 0.5 * step for step in range(logged)]
    assert judge(with_losses(even), 0.005, NAMES).word == word


def test_the_scatter_is_that_of_a_fall_without_learning() -> None:
    """Of 2000 runs whose losses only scatter, at most 2.5 % and three deviations fall so far."""
    draw = random.Random(1)
    runs = [[8.0 + draw.gauss(0.0, 0.5) for _ in range(9)] for _ in range(2000)]
    told = sum(judge(with_losses(losses), 0.0, NAMES).word == "same" for losses in runs)
    assert told / 2000 < 0.025 + 3 * math.sqrt(0.025 * 0.975 / 2000)


def test_the_least_that_any_seed_learned_counts() -> None:
    found = pairs([0.0, 0.0])
    found[1].base.metrics[:] = found[1].base.metrics[:1]  # type: ignore[index]
    assert judge(found, 0.005, NAMES).word == "undecided"


def test_students_t_is_that_of_the_tables() -> None:
    """The density of t, integrated by Simpson's rule from 0, gives 0.475 at each point."""
    for n, value in enumerate(STUDENT, start=1):
        scale = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        width = value / 2000
        heights = [(1 + (i * width) ** 2 / n) ** (-(n + 1) / 2) for i in range(2001)]
        total = heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2])
        assert scale * total * width / 3 == pytest.approx(0.475, abs=3e-5)


def test_without_validation_the_training_loss_counts() -> None:
    verdict = judge(pairs([0.01], val_loss=None), 0.005, NAMES)
    assert verdict.measured == "training loss" and verdict.mean == pytest.approx(0.01)


def test_where_curves_part() -> None:
    same = judge(pairs([0.0]), 0.005, NAMES)
    assert (same.first_difference, same.parts_at) == (None, None)
    assert same.largest is not None and same.largest[1] == 0.0
    parted = judge(pairs([0.02], from_step=41), 0.005, NAMES)
    assert parted.first_difference == 41
    # The mean of 5 steps is above 0.5 % as soon as two of them are 2 % higher.
    assert parted.parts_at == 42 and parted.largest == (45, pytest.approx(0.02))
    back = [Pair(0, record(), record(0.02))]
    back[0].other.metrics[-1]["loss"] = loss_at(100)  # type: ignore[index]
    assert judge(back, 0.019, NAMES).parts_at is None  # it ends within the tolerance


def test_gaps_are_of_steps_that_both_logged() -> None:
    base, other = record(), record(0.5)
    other.metrics[:3] = []  # type: ignore[index]
    other.metrics[-1]["loss"] = math.nan  # type: ignore[index]
    steps, gaps = gaps_of(Pair(0, base, other))
    assert steps == list(range(4, 101)) and gaps[0] == pytest.approx(0.5) and math.isnan(gaps[-1])
    assert averaged_gap([Pair(0, base, other)])[-1][0] == 99


SEEN = {"amax": 1.0, "quant_scale": 1.0}


def test_the_weakest_tensors() -> None:
    def line(snr: float) -> dict[str, Any]:
        return {"step": 1, "tensors": {
            "a": {**SEEN, "snr_db": snr, "underflow": 0.5},
            "b": SEEN, "c": {**SEEN, "snr_db": 30.0},
        }}  # fmt: skip

    lines = [line(9.0), line(20.0), {"step": 2, "tensors": {"a": SEEN}}, {"step": "?"}]
    lines = [{"num_nonfinite": {}} | each for each in lines]
    run = RunRecord(path=Path("x"), status="finished", health=lines)
    assert [(name, s.snr_db, s.underflow) for name, s in weakest_tensors(run).items()] == [
        ("a", 20.0, 0.5),
        ("c", 30.0, None),
    ]
    assert weakest_tensors(record()) == {}


def test_times_count_only_if_no_run_was_interrupted() -> None:
    start = {"kind": "start"}
    base = RunRecord(path=Path("a"), status="finished", events=[start],
                     summary={"wall_seconds": 10.0, "peak_memory_bytes": 100})  # fmt: skip
    other = RunRecord(path=Path("b"), status="finished", events=[start],
                      summary={"wall_seconds": 15.0, "peak_memory_bytes": 80})  # fmt: skip
    assert ratio([Pair(0, base, other)], "wall_seconds") == 1.5
    assert ratio([Pair(0, base, other)], "peak_memory_bytes") == 0.8
    twice = RunRecord(
        path=Path("b"), status="finished", events=[start, start], summary=other.summary
    )
    assert ratio([Pair(0, base, twice)], "wall_seconds") is None


def test_a_baseline_behind_token_frequencies_tells_nothing() -> None:
    found = pairs([0.0001, 0.0])
    assert judge(found, 0.005, NAMES).word == "same"
    for bits, word in ((2.784, "undecided"), (2.6, "same")):
        found[1].base.summary.update(val_bits_per_byte=bits, unigram_bits_per_byte=2.685)
        verdict = judge(found, 0.005, NAMES)
        assert verdict.word == word
        assert ("the tokens alone give 2.685: train longer" in verdict.sentence) == (bits > 2.685)
    unknown = pairs([0.0001, 0.0])
    unknown[1].base.summary.pop("unigram_bits_per_byte")
    verdict = judge(unknown, 0.005, NAMES)
    assert verdict.word == "undecided"
    assert "BF16 was not compared with the frequencies of the tokens alone" in verdict.sentence
    worse = pairs([0.02])
    worse[0].base.summary.update(val_bits_per_byte=3.0, unigram_bits_per_byte=2.685)
    assert judge(worse, 0.005, NAMES).word == "worse"
