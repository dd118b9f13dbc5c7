"""A run that takes long is warned of, and the warning is true."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megafp8.specs import RunSpec
from megafp8.train import pace
from megafp8.train.pace import Pace, Span
from tests.tiny import run_spec

CPU = torch.device("cpu")


def warnings_of(spec: RunSpec, *seconds: float, step: int | None = None) -> list[str | None]:
    """Return the warnings after each step of a process."""
    it, said = Pace(), []
    for number, took in enumerate(seconds, 1):
        it.after_step(Span(1, 8, took, 0.0))
        said.append(it.slow(spec, number if step is None else step, CPU))
    return said


def test_a_short_run_is_left_alone() -> None:
    assert warnings_of(run_spec(), 100.0, 1.8, 1.8) == [None, None, None]  # 998 x 1.8 s are 1796 s


def test_a_long_run_is_warned_of_once_after_its_second_step() -> None:
    first, second, third = warnings_of(run_spec(), 60.0, 36.0, 36.0)
    assert first is None and third is None
    assert second is not None
    assert second.startswith("at 36 s a step, the 998 steps that are left take 9:58:48 on this CPU")
    # 2 steps are done, and 50 more of 36 s are half an hour.
    assert "trainer.max_steps=52 (half an hour)" in second
    # The batch is of 2 microbatches already, so it can be smaller; FP32 has no faster precision.
    assert "model.global_batch_size below 4" in second and "trainer.precision" not in second


def test_a_continued_run_counts_what_is_left() -> None:
    (_, at_end) = warnings_of(run_spec(), 60.0, 36.0, step=960)
    assert at_end is None


def test_nothing_is_named_that_is_not_there() -> None:
    spec = run_spec()
    train = dataclasses.replace(spec.train, micro_batch_size=4)
    (_, one_microbatch) = warnings_of(dataclasses.replace(spec, train=train), 4000.0, 4000.0)
    assert one_microbatch is not None
    assert "global_batch_size" not in one_microbatch and "max_steps" not in one_microbatch
    assert "a smaller model" in one_microbatch
    limited = dataclasses.replace(spec.train, max_time_seconds=1800.0)
    assert warnings_of(dataclasses.replace(spec, train=limited), 36.0, 36.0) == [None, None]


def test_a_gpu_gets_no_warning() -> None:
    it = Pace()
    it.after_step(Span(1, 8, 60.0, 0.0))
    it.after_step(Span(1, 8, 60.0, 0.0))
    assert it.slow(run_spec(), 2, torch.device("cuda")) is None


@pytest.mark.parametrize(("bf16_seconds", "is_named"), [(0.012, True), (0.001, False)])
def test_fp32_is_named_where_its_products_are_faster(
    monkeypatch: pytest.MonkeyPatch, bf16_seconds: float, is_named: bool
) -> None:
    seconds = {torch.bfloat16: bf16_seconds, torch.float32: 0.001}
    monkeypatch.setattr(pace, "_seconds_of", lambda m, k, n, dtype, device: seconds[dtype])
    (_, said) = warnings_of(run_spec(compute="bf16"), 60.0, 36.0)
    assert said is not None
    assert ("trainer.precision=32 (a new run): a product of BF16" in said) is is_named
    assert ("took 12.0 times as long" in said) is is_named


def test_products_are_really_timed() -> None:
    assert pace._seconds_of(8, 16, 8, torch.bfloat16, CPU) > 0
    assert pace._slowdown_against_fp32(run_spec(compute="fp32"), CPU) == 1.0


def test_a_line_speaks_of_all_steps_since_the_one_before() -> None:
    it = Pace()
    it.after_step(Span(1, 8, 5.0, 0.5))  # the first, which has a line of its own
    assert it.since_line() == Span(1, 8, 5.0, 0.5)
    for samples, seconds in ((8, 1.0), (16, 1.5), (16, 3.5)):  # the last measures FP8 health
        it.after_step(Span(1, samples, seconds, 0.25))
    assert it.since_line() == Span(3, 40, 6.0, 0.75)
    assert it.since_line().steps == 0 and it.total_seconds == 11.0
