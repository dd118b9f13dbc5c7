"""Blends: weights hold at every prefix, exactly, and nothing depends on the order of asking."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megafp8.data import blend as blend_module
from megafp8.data.blend import BlendedSamples, BlendSchedule, JoinedSamples

WEIGHTS = st.lists(st.decimals("0.001", 100, places=3).map(str), min_size=1, max_size=24)


def worst_deviation(schedule: BlendSchedule, weights: list[str], first: int, last: int) -> Fraction:
    """max |count - weight * n| over the datasets and all prefixes from `first` to `last`."""
    exact = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    counts = schedule.counts(first)
    worst = Fraction(0)
    for n in range(first, last):
        dataset, sample = schedule[n]
        assert sample == counts[dataset], "each dataset's own samples come in order"
        counts[dataset] += 1
        deviations = (abs(c - w * (n + 1)) for c, w in zip(counts, exact, strict=True))
        worst = max(worst, *deviations)
    assert counts == schedule.counts(last)
    return worst


@given(WEIGHTS)
def test_weights_hold_to_within_one_sample_at_every_prefix(weights: list[str]) -> None:
    size = len(weights)
    bound = 1 - Fraction(1, 2 * size - 2) if size > 1 else Fraction(0)
    assert worst_deviation(BlendSchedule(weights), weights, 0, 300) <= bound < 1


@given(WEIGHTS, st.integers(0, 10**15))
def test_the_order_repeats_after_a_period_and_can_be_entered_anywhere(
    weights: list[str], far: int
) -> None:
    schedule = BlendSchedule(weights)
    start = far // schedule.period * schedule.period
    assert worst_deviation(BlendSchedule(weights), weights, start, start + 40) < 1
    for n in (0, 1, 17):
        dataset, sample = schedule[n]
        assert schedule[start + n] == (
            dataset,
            sample + start // schedule.period * schedule.weights[dataset],
        )


def test_taking_the_most_lagging_dataset_would_not_do() -> None:
    """The rule that Megatron has, in exact numbers, on weights where ours holds."""
    numbers = [3, 57, 3, 10, 3, 14, 52, 57, 20, 41, 19]
    weights = [str(number) for number in numbers]
    exact = [Fraction(number, sum(numbers)) for number in numbers]
    counts, worst = [0] * len(weights), Fraction(0)
    for n in range(200):
        lag = [w * max(n, 1) - c for w, c in zip(exact, counts, strict=True)]
        counts[lag.index(max(lag))] += 1
        worst = max(worst, *(abs(c - w * (n + 1)) for c, w in zip(counts, exact, strict=True)))
    assert worst > 1
    assert worst_deviation(BlendSchedule(weights), weights, 0, 200) < 1


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend_module, "CHUNK", 64)


def test_across_chunks_and_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ["0.31", "0.123457", "0.2", "0.000003"]
    chunked = BlendSchedule(weights)
    whole = [chunked[n] for n in range(1000)]
    order = np.random.default_rng(0).permutation(1000)[:200]
    fresh = BlendSchedule(weights)
    assert [fresh[int(n)] for n in order] == [whole[n] for n in order]
    monkeypatch.setattr(blend_module, "CHUNK", 4096)
    one = BlendSchedule(weights)
    assert [one[n] for n in range(1000)] == whole


class Numbers:
    def __init__(self, first: int, epoch: int) -> None:
        self.first, self.num_samples_per_epoch = first, epoch
        self.num_samples, self.seq_length = epoch, 1

    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        return np.array([self.first + index])


def test_blended_samples_come_from_their_sources() -> None:
    blended = BlendedSamples([Numbers(0, 10), Numbers(1000, 50)], ["1", "3"])
    got = [int(blended[n][0]) for n in range(8)]
    assert sorted(got) == [0, 1, 1000, 1001, 1002, 1003, 1004, 1005]
    assert blended.num_samples_per_epoch == 40, "then the first has been read whole"


def test_joined_samples_are_one_after_another() -> None:
    joined = JoinedSamples([Numbers(0, 3), Numbers(100, 0), Numbers(200, 2)])
    assert [int(joined[n][0]) for n in range(joined.num_samples)] == [0, 1, 2, 200, 201]
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            joined[wrong]
