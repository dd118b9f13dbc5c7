"""The criterion by which FP8 costs accuracy, at its limits."""

from __future__ import annotations

import math

import pytest

from megafp8.observe.accuracy import (
    LOGGED_STEPS,
    Streaks,
    beyond_noise,
    beyond_range,
    noise_of_gradient,
)
from megafp8.specs import TensorHealth
from megafp8.specs.run import TensorNoise

E4M3 = {"largest": 448.0, "smallest": 2.0**-9}


@pytest.mark.parametrize(
    ("gradient", "noise", "is_beyond"),
    [(3.001, 1.0, False), (2.999, 1.0, True), (0.0, 1.0, True), (0.0, 0.0, False),
     (math.nan, 1.0, False), (1.0, math.nan, False), (math.inf, 1.0, False)],
)  # fmt: skip
def test_a_gradient_is_compared_with_its_noise(
    gradient: float, noise: float, is_beyond: bool
) -> None:
    assert (beyond_noise(gradient, noise) is not None) == is_beyond


@pytest.mark.parametrize(
    ("amax", "scale", "is_beyond"),
    [(1.0, 2.0**-8, False), (0.999, 2.0**-8, True), (0.0, 1.0, False), (math.inf, 1.0, False),
     (1059.0, 1.0, False), (1061.0, 1.0, True), (530.5, 2.0, True), (math.nan, 1.0, False)],
)  # fmt: skip
def test_an_amax_is_compared_with_the_numbers_of_its_format(
    amax: float, scale: float, is_beyond: bool
) -> None:
    """448 / (1 - 1 / sqrt(3)) is 1059.98."""
    found = beyond_range("input", TensorHealth(amax=amax, quant_scale=scale), **E4M3)
    assert (found is not None) == is_beyond


def test_the_range_follows_from_the_same_ratio() -> None:
    """Half a step at most, of even errors, has the mean square 1 / 12; the largest of 4 r is r."""
    r = 2.0 / 4
    assert r == pytest.approx(math.sqrt(3) * math.sqrt(1 / 12))


def test_ranks_that_share_the_tokens_have_the_noise_of_all() -> None:
    """One of two tensors is seen in two parts, the other whole: then both are as if whole."""
    whole = TensorNoise(10.0, 2.0, 64), TensorNoise(6.0, 1.0, 64)
    half = TensorNoise(5.0, 1.0, 32)
    assert noise_of_gradient(*whole) == pytest.approx((2 * 6 + 10 * 1 + 2 * 1) / 64)
    assert noise_of_gradient(half, whole[1]) == pytest.approx(noise_of_gradient(*whole))
    assert noise_of_gradient(whole[1], half) == pytest.approx(noise_of_gradient(*whole))


def test_a_linear_is_named_once_and_again_after_it_was_good() -> None:
    streaks, named = Streaks(), []
    bad = {"a": "why"}
    for found in [bad, bad, {}, *[bad] * (LOGGED_STEPS + 2), {}, *[bad] * LOGGED_STEPS]:
        named.append(streaks.after(found))
    assert [n for n, names in enumerate(named) if names] == [5, 11]
    assert all(names == ["a"] for names in named if names)
