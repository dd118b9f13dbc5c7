"""Batch ramp-up has Megatron's sizes, reads every sample once and in order, and keeps rates."""

from __future__ import annotations

import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.data.loader import Loader
from megafp8.specs import RampupSpec, TrainSpec
from tests.tiny import run_spec
from tests.train.runs import Place, assert_same

RAMP = "model.rampup_batch_size=[2,2,10]"


def train_spec(global_batch_size: int, micro: int, ramp: RampupSpec | None) -> TrainSpec:
    spec = run_spec().train
    return replace(spec, global_batch_size=global_batch_size, micro_batch_size=micro, rampup=ramp)


@st.composite
def ramps(draw: Any) -> tuple[TrainSpec, int]:
    """Draw a ramp, and a number of data-parallel ranks that fit it."""
    micro, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    unit = micro * dp
    start, increment = (unit * draw(st.integers(1, 4)) for _ in range(2))
    end = start + increment * draw(st.integers(1, 9))
    ramp = RampupSpec(start=start, increment=increment, samples=draw(st.integers(1, 700)))
    return train_spec(end, micro, ramp), dp


def sizes(spec: TrainSpec, until: int = 1000) -> list[int]:
    consumed, out = 0, []
    while consumed < until:
        out.append(spec.batch_size_at(consumed))
        consumed += out[-1]
    return out


@settings(max_examples=60)
@given(ramps())
def test_every_step_has_megatrons_size(ramp: tuple[TrainSpec, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    spec, dp = ramp
    assert spec.rampup is not None
    megatron = calculator.RampupBatchsizeNumMicroBatchesCalculator(
        spec.global_batch_size,
        spec.micro_batch_size,
        dp,
        False,
        1,
        spec.rampup.start,
        spec.rampup.increment,
        spec.rampup.samples,
    )
    consumed = 0
    for size in sizes(spec):
        megatron.update(consumed, True)
        assert size == megatron.get_current_global_batch_size()
        assert spec.num_microbatches(dp, consumed) == megatron.get()
        consumed += size


@given(ramps())
def test_it_grows_from_start_to_the_global_batch(ramp: tuple[TrainSpec, int]) -> None:
    spec, dp = ramp
    assert spec.rampup is not None
    found = sizes(spec)
    assert found[0] == spec.rampup.start and found == sorted(found)
    assert {(size - found[0]) % spec.rampup.increment for size in found} == {0}
    # At the last sample, Megatron's floating-point numbers may give one increment less.
    last = spec.batch_size_at(spec.rampup.samples)
    assert spec.global_batch_size - last in (0, spec.rampup.increment)
    assert spec.batch_size_at(spec.rampup.samples + 1) == spec.global_batch_size
    assert all(size % (spec.micro_batch_size * dp) == 0 for size in found)
    assert spec.num_microbatches(dp) * spec.micro_batch_size * dp == spec.global_batch_size


def test_by_hand() -> None:
    """The ramp goes from 8 to 32 in three increments over 100 samples: 33.3 samples for each."""
    spec = train_spec(32, 8, RampupSpec(start=8, increment=8, samples=100))
    assert sizes(spec, 300) == [8] * 5 + [16] * 2 + [24] * 2 + [32] * 6
    assert sizes(replace(spec, rampup=None), 100) == [32] * 4


class Numbers:
    """Return n, n + 1 as sample n."""

    seq_length = 1

    def __getitem__(self, index: int) -> Any:
        return np.array([index, index + 1])


@settings(max_examples=40, deadline=None)
@given(ramps(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_samples_over_stops_are_those_of_an_undisturbed_run(
    ramp: tuple[TrainSpec, int], stops: list[int]
) -> None:
    """Each process of the run ends after some steps.

    All ranks together read each number once, in order, and each process continues with the batch
    that the one before would have read next.
    """
    spec, dp = ramp
    consumed, seen, steps = 0, [], []
    for num_steps in stops:
        per_rank = []
        for rank in range(dp):
            with Loader(
                Numbers(),
                micro_batch_size=spec.micro_batch_size,
                num_microbatches=lambda at: spec.num_microbatches(dp, at),
                dp_rank=rank,
                dp_size=dp,
                consumed_samples=consumed,
            ) as loader:
                per_rank.append([next(loader) for _ in range(num_steps)])
                end = loader.consumed_samples
        for step in zip(*per_rank, strict=True):
            for microbatches in zip(*step, strict=True):
                seen += [int(n) for batch in microbatches for n in batch.tokens_BS[:, 0]]
            steps.append(len(step[0]) * dp * spec.micro_batch_size)
        consumed = end
        assert consumed == len(seen)
    assert seen == list(range(len(seen)))
    assert steps == sizes(spec, until=consumed)


# ---- whole runs


def test_a_run_stopped_within_and_after_the_ramp_continues(place: Place, ramped: Place) -> None:
    for stop in (2, 6):
        done = place.run(RAMP, fault=["signalled", int(signal.SIGTERM), stop])
        assert done.code == 75, done.output
    assert place.run(RAMP).code == 0
    assert_same(place, ramped)


@pytest.fixture(scope="module")
def ramped(driver: Any, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(driver, dataset, tmp_path_factory.mktemp("ramped"))
    done = place.run(RAMP)
    assert done.code == 0, done.output
    assert "microbatches of 2, from 2 in steps of 2 over 10 samples" in done.output
    return place


def test_sizes_samples_and_rates_of_a_run(ramped: Place, undisturbed: Any) -> None:
    rows = [row for row in ramped.metrics() if "lr" in row]
    expected = [2] * 5 + [4] * 7  # 10 of 10 samples are the end of the ramp
    assert [row["global_batch_size"] for row in rows] == expected
    assert [row["consumed_samples"] for row in rows] == np.cumsum(expected).tolist()
    theirs = [row for row in undisturbed[0].metrics() if "lr" in row]
    assert [row["lr"] for row in rows] == [row["lr"] for row in theirs]
    assert "global_batch_size" not in theirs[0]


@pytest.mark.slow
def test_two_ranks_agree(place: Place) -> None:
    """Two data-parallel ranks divide the ramp's batches, and train on the same samples."""
    flags = ["model.micro_batch_size=1", "trainer.devices=2", "model.hidden_dropout=0"]
    flags += ["model.attention_dropout=0", "model.ffn_dropout=0", "trainer.max_steps=7"]
    flags += ["model.fp8=False", "model.fp8_amax_history_len=1024", RAMP]
    done = place.run(*flags)
    assert done.code == 0, done.output
    alone = [flag for flag in flags if "devices" not in flag]
    done = place.run(*alone, "exp_manager.name=alone")
    assert done.code == 0, done.output
    mine, theirs = (
        [row for row in place.metrics(name) if "lr" in row] for name in ("job", "alone")
    )
    assert [r["consumed_samples"] for r in mine] == [r["consumed_samples"] for r in theirs]
    assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)
