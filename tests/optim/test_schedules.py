"""The learning rate by hand, against NeMo's formula, and as a shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.optim.schedules import learning_rate
from megafp8.specs import OptimSpec, ScheduleSpec
from tests.tiny import optim_spec


def spec(warmup: int, constant: int, steps: int, lr: float = 1.0, min_lr: float = 0.1) -> OptimSpec:
    schedule = ScheduleSpec(
        name="CosineAnnealing",
        warmup_steps=warmup,
        constant_steps=constant,
        min_lr=min_lr,
        max_steps=steps,
    )
    return optim_spec(lr=lr, schedule=schedule)


def rates(spec: OptimSpec) -> list[float]:
    """The rate of every step, 1 to max_steps."""
    return [learning_rate(spec, step) for step in range(1, spec.schedule.max_steps + 1)]


def nemo(spec: OptimSpec, last_epoch: int) -> float:
    """NeMo's rule, which counts steps from 0: (s + 1) / (warmup + 1) while s <= warmup, then
    min_lr + (lr - min_lr) * (1 + cos(pi * (s - warmup) / decay_steps)) / 2, then min_lr."""
    schedule, s = spec.schedule, last_epoch
    warmup = schedule.warmup_steps
    if warmup > 0 and s <= warmup:
        return spec.lr * (s + 1) / (warmup + 1)
    decay_steps = schedule.max_steps - schedule.constant_steps - warmup
    if s - warmup > decay_steps:
        return schedule.min_lr
    cosine = 0.5 * (1 + math.cos(math.pi * (s - warmup) / decay_steps))
    return (spec.lr - schedule.min_lr) * cosine + schedule.min_lr


def test_by_hand() -> None:
    """3 steps of warm-up, 4 of cosine, 2 constant ones; the cosine passes 0.85, 0.55, 0.25."""
    half = math.sqrt(0.5) / 2  # cos(45 degrees) / 2
    cosine = [0.1 + 0.9 * (0.5 + half), 0.55, 0.1 + 0.9 * (0.5 - half)]
    expected = [0.25, 0.5, 0.75, 1.0, *cosine, 0.1, 0.1]
    assert rates(spec(3, 2, 9)) == pytest.approx(expected)


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert rates(spec(0, 0, 2)) == pytest.approx([1.0, 0.55])


def test_beyond_the_end_the_rate_is_the_minimum() -> None:
    schedule = spec(2, 0, 10)
    assert learning_rate(schedule, 11) == pytest.approx(0.1)
    assert learning_rate(schedule, 10_000) == pytest.approx(0.1)


def test_warmup_to_the_very_end() -> None:
    assert rates(spec(3, 0, 3)) == pytest.approx([0.25, 0.5, 0.75])


@st.composite
def schedules(draw: Any) -> OptimSpec:
    warmup, constant = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    steps = warmup + constant + draw(st.integers(2, 500))
    lr = draw(st.floats(1e-6, 1.0))
    return spec(warmup, constant, steps, lr, lr * draw(st.floats(0, 1)))


@given(schedules())
def test_every_step_has_nemos_rate(spec: OptimSpec) -> None:
    for step, rate in enumerate(rates(spec), start=1):
        assert rate == pytest.approx(nemo(spec, step - 1), rel=1e-9, abs=1e-15)


@given(schedules())
def test_shape(spec: OptimSpec) -> None:
    """Starts above zero, rises to exactly lr after the warm-up, falls to min_lr: exactly where
    there are constant steps, else to what the cosine has left one step before its end."""
    values, schedule = rates(spec), spec.schedule
    top = schedule.warmup_steps
    assert values[0] > 0
    assert values[top] == spec.lr == max(values)
    assert all(a < b for a, b in zip(values[:top], values[1 : top + 1], strict=True))
    falling = values[top:]
    assert all(a >= b for a, b in zip(falling[:-1], falling[1:], strict=True))
    assert all(rate >= schedule.min_lr * (1 - 1e-12) for rate in falling)
    for rate in values[len(values) - schedule.constant_steps :]:
        assert rate == pytest.approx(schedule.min_lr)
    decay_steps = schedule.max_steps - schedule.constant_steps - top
    left = (spec.lr - schedule.min_lr) * (math.pi / decay_steps) ** 2 / 4
    assert values[-1] - schedule.min_lr <= left * 1.0001 + 1e-15
