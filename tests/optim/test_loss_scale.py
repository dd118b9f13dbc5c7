"""FP16's loss scale against torch's own rule, and against a count over the whole history."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.optim.loss_scale import LossScale
from megafp8.specs import LossScaleSpec

HISTORIES = st.lists(st.booleans(), max_size=60)  # whether each step overflowed


def scales(spec: LossScaleSpec, history: list[bool]) -> list[float]:
    """The scale after each step."""
    scale, out = LossScale(spec), []
    for overflowed in history:
        scale.update(overflowed=overflowed)
        out.append(scale.scale)
    return out


@given(HISTORIES, st.integers(1, 5), st.sampled_from([1.0, 2.0**16, 2.0**32, 2.0**126]))
def test_without_hysteresis_it_is_torchs(history: list[bool], interval: int, init: float) -> None:
    scale, tracker = torch.full((), init), torch.zeros((), dtype=torch.int32)
    expected = []
    for overflowed in history:
        found = torch.full((), float(overflowed))
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, interval)
        expected.append(scale.item())
    spec = LossScaleSpec(
        init_scale=init, growth_interval=interval, hysteresis=1, min_scale=2.0**-100
    )
    assert scales(spec, history) == expected


@given(HISTORIES, st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_rule(history: list[bool], interval: int, hysteresis: int, floor: int) -> None:
    """Each step is judged from the history alone, whose runs are counted anew."""
    spec = LossScaleSpec(
        init_scale=2.0**4,
        growth_interval=interval,
        hysteresis=hysteresis,
        min_scale=2.0 ** (4 - floor),
    )
    exponent, expected = 4, []
    for end in range(1, len(history) + 1):
        last = history[end - 1]
        run = 0
        while run < end and history[end - 1 - run] == last:
            run += 1
        if last and run >= hysteresis:
            exponent = max(exponent - 1, 4 - floor)
        elif not last and run % interval == 0:
            exponent += 1
        expected.append(2.0**exponent)
    assert scales(spec, history) == expected


def test_nemos_defaults() -> None:
    """The first overflow is forgiven, each further one halves; 1000 finite steps double."""
    scale = LossScale(LossScaleSpec())
    for expected in (2.0**32, 2.0**31, 2.0**30):
        scale.update(overflowed=True)
        assert scale.scale == expected
    for _ in range(999):
        scale.update(overflowed=False)
    assert scale.scale == 2.0**30
    scale.update(overflowed=False)
    assert scale.scale == 2.0**31


@given(HISTORIES, HISTORIES)
def test_a_restored_scale_continues_as_without_a_stop(
    before: list[bool], after: list[bool]
) -> None:
    spec = LossScaleSpec(init_scale=2.0**10, growth_interval=3)
    whole = LossScale(spec)
    for overflowed in before:
        whole.update(overflowed=overflowed)
    restored = LossScale(spec)
    restored.set_state(whole.state())
    for overflowed in after:
        whole.update(overflowed=overflowed)
        restored.update(overflowed=overflowed)
        assert restored.state() == whole.state()


@pytest.mark.parametrize("value", ["nan", "inf", 0, -1])
def test_a_scale_that_cannot_be_is_refused(value: object) -> None:
    scale = LossScale(LossScaleSpec(init_scale=2.0))
    with pytest.raises(ValueError, match="no positive finite number"):
        scale.set_state({**scale.state(), "scale": value})
    assert scale.scale == 2.0


def test_minimum() -> None:
    scale = LossScale(LossScaleSpec(init_scale=2.0, hysteresis=1))
    assert not scale.is_at_minimum
    scale.update(overflowed=True)
    assert scale.is_at_minimum and scale.scale == 1.0
    scale.update(overflowed=True)
    assert scale.scale == 1.0
