"""Learning rates by hand, against NeMo's formulas written anew, torch's and Megatron's schedulers,
and as shapes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.config.values import SCHEDULES
from megafp8.optim.schedules import FORMULAS, WSD_DECAYS, learning_rate
from megafp8.specs import OptimSpec, ScheduleSpec
from tests.tiny import optim_spec


def spec(
    warmup: int,
    constant: int,
    steps: int,
    lr: float = 1.0,
    min_lr: float = 0.1,
    name: str = "CosineAnnealing",
    **more: Any,
) -> OptimSpec:
    schedule = ScheduleSpec(
        name=name,
        warmup_steps=warmup,
        constant_steps=constant,
        min_lr=min_lr,
        max_steps=steps,
        **more,
    )
    return optim_spec(lr=lr, schedule=schedule)


def rates(spec: OptimSpec) -> list[float]:
    """The rate of every step, 1 to max_steps."""
    return [learning_rate(spec, step) for step in range(1, spec.schedule.max_steps + 1)]


NEMOS = [name for name in SCHEDULES if name != "WSD"]  # which is Megatron's

# ---- by hand: 3 steps of warm-up (a quarter, half, three quarters), the rest in so many steps

WARM = [0.25, 0.5, 0.75, 1.0]


def test_every_name_that_the_configuration_knows() -> None:
    assert FORMULAS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("WarmupPolicy", {}, [*WARM, 1, 1, 1, 1]),
        ("WarmupHoldPolicy", {}, [*WARM, 1, 1, 1, 1]),
        # 5 steps from 1 to 0.1, the last of which is the step after the run's end.
        ("WarmupAnnealing", {}, [*WARM, 0.82, 0.64, 0.46, 0.28]),
        ("PolynomialDecayAnnealing", {}, [*WARM, 0.82, 0.64, 0.46, 0.28]),
        (
            "PolynomialDecayAnnealing",
            {"power": 2.0},
            [*WARM, 0.1 + 0.9 * 0.64, 0.1 + 0.9 * 0.36, 0.1 + 0.9 * 0.16, 0.1 + 0.9 * 0.04],
        ),
        # Two held steps leave 3 to fall.
        ("PolynomialHoldDecayAnnealing", {"hold_steps": 2}, [*WARM, 1, 1, 0.7, 0.4]),
        # Without a hold NeMo falls by s / (M - W) from step 0 on: s = 4, 5 of 5, then min_lr.
        ("PolynomialHoldDecayAnnealing", {}, [*WARM, 0.28, 0.1, 0.1, 0.1]),
        ("SquareAnnealing", {}, [*WARM, 0.64, 0.36, 0.16, 0.1]),
        # sqrt((8 - s) / 8) for s = 4 to 7
        ("SquareRootAnnealing", {}, [*WARM, 0.5**0.5, 0.375**0.5, 0.5, 0.125**0.5]),
        # 4 / (s + 1) under the root
        ("InverseSquareRootAnnealing", {}, [*WARM, 0.8**0.5, (2 / 3) ** 0.5, 0.571428571**0.5,
                                            0.5**0.5]),
        # Half of min(s^-1/2, s / W^1.5) for a width of 4; s = 0 counts as 1.
        ("NoamAnnealing", {"d_model": 4},
         [0.096225045, 0.096225045, 0.192450090, 0.288675135, 0.25, 0.223606798, 0.204124145,
          0.188982237]),
        ("NoamHoldAnnealing", {"hold_steps": 2}, [*WARM, 1, 1, 0.75**0.5, 0.6**0.5]),
        ("NoamHoldAnnealing", {"hold_steps": 2, "decay_rate": 1.0}, [*WARM, 1, 1, 0.75, 0.6]),
        ("NoamHoldAnnealing", {"decay_rate": 1.0}, [*WARM, 0.75, 0.6, 0.5, 3 / 7]),
    ],
)  # fmt: skip
def test_by_hand(name: str, more: dict[str, Any], expected: list[float]) -> None:
    assert rates(spec(3, 0, 8, name=name, **more)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("warmup", "constant", "steps", "expected"),
    [
        # NVIDIA's timing jobs have 115 and 12500 of 100 steps: all of them are in the warm-up.
        (115, 12500, 100, [s / 115 for s in range(100)]),
        (3, 6, 6, [0, 1 / 3, 2 / 3, 1, 0.1, 0.1]),
        (2, 5, 6, [0, 0.5, 1, 0.1, 0.1, 0.1]),
        (0, 9, 3, [0.1, 0.1, 0.1]),
        (9, 0, 3, [0.1, 0.2, 0.3]),
    ],
)
def test_a_cosine_longer_than_the_run_is_cut_by_hand(
    warmup: int, constant: int, steps: int, expected: list[float]
) -> None:
    assert rates(spec(warmup, constant, steps)) == pytest.approx(expected)


def test_min_lr_is_a_floor_where_nemo_has_one() -> None:
    for name in ("SquareAnnealing", "SquareRootAnnealing"):
        assert min(rates(spec(3, 0, 8, min_lr=0.6, name=name))[3:]) == 0.6
    noam = spec(3, 0, 8, min_lr=0.2, name="NoamAnnealing", d_model=4)
    assert rates(noam)[4:] == pytest.approx([0.25, 0.223606798, 0.204124145, 0.2])
    hold = spec(3, 0, 8, min_lr=0.6, name="NoamHoldAnnealing", decay_rate=1.0)
    assert rates(hold)[4:] == pytest.approx([0.75, 0.6, 0.6, 0.6])
    assert min(rates(spec(3, 0, 8, min_lr=0.9, name="InverseSquareRootAnnealing"))) < 0.8


def test_cosine_by_hand() -> None:
    """3 steps of warm-up, 4 of cosine, 2 constant ones; the cosine passes 0.85, 0.55, 0.25. With
    constant steps the warm-up is Megatron's, from 0."""
    half = math.sqrt(0.5) / 2  # cos(45 degrees) / 2
    cosine = [0.1 + 0.9 * (0.5 + half), 0.55, 0.1 + 0.9 * (0.5 - half)]
    expected = [0, 1 / 3, 2 / 3, 1.0, *cosine, 0.1, 0.1]
    assert rates(spec(3, 2, 9)) == pytest.approx(expected)
    assert rates(spec(3, 0, 7)) == pytest.approx([*WARM, *cosine])


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_has_the_full_rate(name: str) -> None:
    if name != "NoamHoldAnnealing":  # which needs one
        more = {"d_model": 1} if name == "NoamAnnealing" else {}
        assert rates(spec(0, 0, 4, name=name, **more))[0] == pytest.approx(1.0)


def test_beyond_the_end_the_rate_is_the_minimum() -> None:
    for name in SCHEDULES:
        if name == "NoamAnnealing":  # has no end
            continue
        schedule = spec(2, 0, 10, name=name)
        assert learning_rate(schedule, 12) == pytest.approx(0.1), name
        assert learning_rate(schedule, 10_000) == pytest.approx(0.1), name


def test_warmup_to_the_very_end() -> None:
    for name in NEMOS:
        if name != "NoamAnnealing":
            assert rates(spec(3, 0, 3, name=name)) == pytest.approx([0.25, 0.5, 0.75]), name


# ---- against others' schedulers

DECAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "CosineAnnealing": ("CosineAnnealingLR", {"T_max": 20, "eta_min": 0.0}),
    "WarmupAnnealing": ("LinearLR", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 20}),
    "PolynomialDecayAnnealing": ("PolynomialLR", {"total_iters": 20, "power": 3.0}),
}


@pytest.mark.parametrize("name", DECAYS)
def test_after_the_warmup_they_are_torchs(name: str) -> None:
    kind, arguments = DECAYS[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.7)
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments)
    ours = spec(5, 0, 25, lr=0.7, min_lr=0.0, name=name, power=3.0)
    for rate in rates(ours)[5:]:
        assert rate == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def megatron_rates(lr: float, warmup: int, decay_steps: int, **more: Any) -> Iterator[float]:
    """The rate of each step by Megatron's scheduler, from a warm-up that begins at 0 to 0.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = megatron.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=0.1,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        **more,
    )
    while True:
        yield optimizer.param_groups[0]["lr"]
        scheduler.step(1)


@pytest.mark.parametrize(("warmup", "constant"), [(5, 4), (0, 3), (1, 1)])
def test_cosine_with_constant_steps_is_megatrons(warmup: int, constant: int) -> None:
    theirs = megatron_rates(0.7, warmup, 40 - constant, lr_decay_style="cosine")
    for rate in rates(spec(warmup, constant, 40, lr=0.7)):
        assert rate == pytest.approx(next(theirs), abs=1e-12)


@pytest.mark.parametrize("style", WSD_DECAYS)
@pytest.mark.parametrize(
    ("warmup", "decay"), [(5, 8), (0, 8), (1, 1), (5, 40), (5, 38), (0, 50), (39, 8)]
)
def test_wsd_is_megatrons(warmup: int, decay: int, style: str) -> None:
    more = {"wsd_decay_steps": decay, "lr_wsd_decay_style": style}
    theirs = megatron_rates(0.7, warmup, 40, lr_decay_style="WSD", **more)
    more = {"wsd_decay_steps": decay, "wsd_decay_style": style}
    ours = spec(warmup, 0, 40, lr=0.7, name="WSD", **more)
    for step in range(1, 50):
        assert learning_rate(ours, step) == pytest.approx(next(theirs), rel=1e-15 * 4, abs=0), step


@pytest.mark.parametrize("decay", [0, 8])
def test_a_prolonged_wsd_continues_at_the_same_rate(decay: int) -> None:
    short, long = (spec(5, 0, n, name="WSD", wsd_decay_steps=decay) for n in (40, 400))
    stable = range(1, 40 - decay + 2)
    assert [learning_rate(short, n) for n in stable] == [learning_rate(long, n) for n in stable]
    assert {learning_rate(long, n) for n in range(6, 393)} == {1.0}


# ---- against NeMo's rules for any sizes


def nemo(spec: OptimSpec, s: int) -> float:
    """NeMo's rules in its own order of cases, which counts steps from 0."""
    lr, sched = spec.lr, spec.schedule
    low, warm, last, name = sched.min_lr, sched.warmup_steps, sched.max_steps, sched.name
    hold = 0 if sched.hold_steps is None else sched.hold_steps + warm
    if name == "NoamAnnealing":
        s = max(1, s)
        peak = s**-0.5 if warm == 0 else min(s**-0.5, s * warm**-1.5)
        value = lr * sched.d_model**-0.5 * peak  # type: ignore[operator]
        return max(value, low) if s > warm else value
    if warm > 0 and s <= warm:
        from_zero = name == "CosineAnnealing" and sched.constant_steps > 0
        return lr * s / warm if from_zero else lr * (s + 1) / (warm + 1)
    if name.endswith(("HoldDecayAnnealing", "HoldAnnealing")) and warm <= s < hold:
        return lr
    if s > last - (sched.constant_steps if name == "CosineAnnealing" else 0):
        return low
    if name in ("WarmupPolicy", "WarmupHoldPolicy"):
        return lr
    if name == "CosineAnnealing":
        span = last - sched.constant_steps - warm
        return (lr - low) * (1 + math.cos(math.pi * (s - warm) / span)) / 2 + low
    if name == "WarmupAnnealing":
        return low + (1 - (s - warm) / (last - warm)) * (lr - low)
    if name == "PolynomialDecayAnnealing":
        return (lr - low) * (1 - (s - warm) / (last - warm)) ** sched.power + low
    if name == "PolynomialHoldDecayAnnealing":
        span = last - max(warm, hold)
        return (lr - low) * (1 - min(s - hold, span) / span) ** sched.power + low
    if name == "SquareAnnealing":
        return max(low, lr * ((last - s) / (last - warm)) ** 2)
    if name == "SquareRootAnnealing":
        return max(low, lr * ((last - s) / last) ** 0.5)
    if name == "InverseSquareRootAnnealing":
        return lr / ((s + 1) / (warm + 1)) ** 0.5
    assert name == "NoamHoldAnnealing"
    since = max(1, (s - (hold - warm if hold > 0 else 0)) ** sched.decay_rate)
    return max(low, lr * max(1, warm**sched.decay_rate) / since)


@st.composite
def schedules(draw: Any, name: str | None = None, cut: bool = False) -> OptimSpec:
    name = name or draw(st.sampled_from(sorted(NEMOS)))
    read = SCHEDULES[name]
    warmup = draw(st.integers(name == "NoamHoldAnnealing", 50))
    constant = draw(st.integers(0, 50)) if "constant_steps" in read else 0
    hold = draw(st.none() | st.integers(0, 50)) if "hold_steps" in read else None
    steps = warmup + constant + (hold or 0) + draw(st.integers(2, 300))
    if cut:  # the parts are longer than the run
        steps = draw(st.integers(1, max(1, warmup + constant + (hold or 0) - 1)))
    lr = draw(st.floats(1e-6, 1.0))
    return spec(
        warmup,
        constant,
        steps,
        lr,
        lr * draw(st.floats(0, 1)),
        name,
        hold_steps=hold,
        power=draw(st.floats(0.25, 4)),
        decay_rate=draw(st.floats(0.25, 2)),
        d_model=draw(st.integers(1, 4096)),
    )


@given(schedules())
def test_every_step_has_nemos_rate(spec: OptimSpec) -> None:
    for step, rate in enumerate([*rates(spec), learning_rate(spec, spec.schedule.max_steps + 2)]):
        last = spec.schedule.max_steps
        expected = nemo(spec, step if step < last else last + 1)
        assert rate == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(schedules(cut=True))
def test_every_step_of_a_cut_schedule_has_nemos_rate(spec: OptimSpec) -> None:
    assert rates(spec) == pytest.approx(
        [nemo(spec, step) for step in range(spec.schedule.max_steps)], rel=1e-9, abs=1e-15
    )


@given(schedules("CosineAnnealing"))
def test_shape_of_the_cosine(spec: OptimSpec) -> None:
    """Rises to lr after the warm-up, falls to min_lr: exactly where there are constant
    steps, else to what the cosine has left one step before its end."""
    values, schedule = rates(spec), spec.schedule
    top = schedule.warmup_steps
    assert values[0] > 0 or schedule.constant_steps > 0 < top
    assert values[top] == max(values) == pytest.approx(spec.lr, rel=1e-14)
    assert all(a < b for a, b in zip(values[:top], values[1 : top + 1], strict=True))
    falling = values[top:]
    assert all(a >= b for a, b in zip(falling[:-1], falling[1:], strict=True))
    assert all(rate >= schedule.min_lr * (1 - 1e-12) for rate in falling)
    for rate in values[len(values) - schedule.constant_steps :]:
        assert rate == pytest.approx(schedule.min_lr)
    decay_steps = schedule.max_steps - schedule.constant_steps - top
    left = (spec.lr - schedule.min_lr) * (math.pi / decay_steps) ** 2 / 4
    assert values[-1] - schedule.min_lr <= left * 1.0001 + 1e-15
