"""How long ranks wait in a pipeline, against the formulas of the papers that describe it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.plan.pipeline import (
    Work,
    most_held,
    most_in_flight,
    one_stage_order,
    planned_order,
    run_times,
)
from megafp8.specs import PipelineSpec

RANKS = st.integers(1, 9)
SCHEDULES = st.sampled_from(["GPipe", "1F1B"])


@given(RANKS, st.integers(1, 24), SCHEDULES)
def test_the_bubble_of_one_stage_a_rank(
    ranks: int, microbatches: int, schedule: Literal["GPipe", "1F1B"]
) -> None:
    """(p - 1) / (m + p - 1) of the time (Narayanan et al. 2021, 2.2), wherever m is at least p."""
    orders = [one_stage_order(schedule, rank, ranks, microbatches) for rank in range(ranks)]
    assert all(len(set(order)) == 2 * microbatches for order in orders)
    times = run_times(orders, ranks)
    if schedule == "GPipe" or microbatches >= ranks:
        assert times.total == 3 * (microbatches + ranks - 1)
        assert times.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(RANKS, st.integers(1, 24))
def test_what_is_in_flight(ranks: int, microbatches: int) -> None:
    for rank in range(ranks):
        held = {rank: 7}
        ahead = one_stage_order("GPipe", rank, ranks, microbatches)
        assert most_held(ahead, held) == 7 * microbatches
        in_turn = one_stage_order("1F1B", rank, ranks, microbatches)
        assert most_held(in_turn, held) == 7 * min(microbatches, ranks - rank)


@given(
    st.sampled_from([("Interleaved1F1B", 2), ("Interleaved1F1B", 5), ("InterleavedZeroBubble", 3),
                     ("ZBVZeroBubble", 2)]),
    st.integers(2, 7),
    st.integers(1, 50),
    st.data(),
)  # fmt: skip
def test_a_few_rounds_hold_as_much_as_all(
    schedule: tuple[Any, int], ranks: int, microbatches: int, data: st.DataObject
) -> None:
    pipeline = PipelineSpec(schedule=schedule[0], stages_per_rank=schedule[1])
    for rank in range(ranks):
        held = {stage: data.draw(st.integers(0, 99)) for stage in pipeline.stages_of(rank, ranks)}
        whole = most_held(planned_order(pipeline, ranks, rank, microbatches), held)
        assert most_in_flight(pipeline, ranks, rank, microbatches, held) == whole


def test_weights_gradients_fill_the_bubble_and_keep_what_they_need() -> None:
    """Two ranks, two microbatches: the last weights' gradients wait for nobody."""
    orders = [
        [Work("F", 0, 0), Work("F", 0, 1), Work("I", 0, 0), Work("I", 0, 1), Work("W", 0, 0),
         Work("W", 0, 1)],
        [Work("F", 1, 0), Work("I", 1, 0), Work("F", 1, 1), Work("I", 1, 1), Work("W", 1, 0),
         Work("W", 1, 1)],
    ]  # fmt: skip
    times = run_times(orders, 2)
    assert times.total == 8 and times.idle == (0.25, 0.25)
    assert most_held(orders[1], {1: 1}) == 2


def test_orders_that_wait_for_each_other_are_reported() -> None:
    orders = [[Work("B", 0, 0), Work("F", 0, 0)], [Work("F", 1, 0), Work("B", 1, 0)]]
    with pytest.raises(ValueError, match="wait for each other; 4"):
        run_times(orders, 2)
