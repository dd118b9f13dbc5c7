"""How long ranks wait in a pipeline, against the formulas of the papers that describe it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class

from megafp8.ops.torch_pipelining import few_sends
from megafp8.plan.memory import StepBytes
from megafp8.plan.pipeline import (
    PassBytes,
    StagePasses,
    Work,
    _round_size,
    most_held,
    one_stage_order,
    planned_order,
    planned_orders,
    run_times,
    short_order,
    with_receipts,
    worst_pass,
)
from megafp8.specs import PipelineSpec
from megafp8.specs.parallel import KEPT_SENDS

RANKS = st.integers(1, 9)


def has_equal_rounds(ranks: int, microbatches: int) -> bool:
    """Whether torch has an interleaved schedule for so many microbatches."""
    return microbatches % max(1, microbatches // ranks) == 0


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
    assume(has_equal_rounds(ranks, microbatches))
    for rank in range(ranks):
        held = {stage: data.draw(st.integers(0, 99)) for stage in pipeline.stages_of(rank, ranks)}
        whole = most_held(planned_order(pipeline, ranks, rank, microbatches), held)
        assert most_held(short_order(pipeline, ranks, rank, microbatches), held) == whole


BYTES = st.integers(0, 99)


@st.composite
def passes(draw: st.DrawFn) -> StagePasses:
    sums, later = draw(BYTES), PassBytes(draw(BYTES), draw(BYTES), 0)
    first = PassBytes(draw(BYTES), draw(BYTES), draw(st.integers(0, sums)))
    left = draw(st.integers(0, later.gathered))
    later, received = later._replace(sums=sums), draw(BYTES)
    return StagePasses(
        kept=received + draw(BYTES),
        received=received,
        returned=draw(BYTES),
        left=left,
        sums=sums,
        first=first,
        later=later,
    )


@given(st.sampled_from([1, 2, 5]), st.integers(2, 6), st.integers(1, 40), st.data())
def test_a_few_rounds_have_the_worst_pass_of_all(
    stages: int, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    pipeline = PipelineSpec(
        schedule="Interleaved1F1B" if stages > 1 else "1F1B", stages_per_rank=stages
    )
    assume(stages == 1 or has_equal_rounds(ranks, microbatches))
    for rank in range(ranks):
        own = {stage: data.draw(passes()) for stage in pipeline.stages_of(rank, ranks)}
        orders = planned_orders(pipeline, ranks, microbatches)
        whole = (with_receipts(orders) if stages > 1 else orders)[rank]
        short = short_order(pipeline, ranks, rank, microbatches)
        steps = [StepBytes.of_passes(order, own) for order in (short, whole)]
        assert steps[0].peak == steps[1].peak


def test_the_worst_pass_has_what_other_stages_have_gathered_and_summed() -> None:
    """By hand: stage 2 runs backward twice while stage 0's microbatches and weights are there."""
    first = StagePasses(
        kept=10,
        received=0,
        returned=2,
        left=3,
        sums=40,
        first=PassBytes(1, 5, 20),
        later=PassBytes(2, 5, 40),
    )
    second = StagePasses(
        kept=104,
        received=4,
        returned=0,
        left=0,
        sums=7,
        first=PassBytes(8, 9, 0),
        later=PassBytes(1, 9, 7),
    )
    stages = {0: first, 2: second}
    own = [Work("F", 0, 0), Work("B", 0, 0)]
    assert worst_pass(own, stages) == (10, PassBytes(1, 5, 20))
    both = [Work("F", 0, 0), Work("F", 2, 0)]
    assert worst_pass([*both, Work("B", 2, 0)], stages) == (114, PassBytes(8, 9 + 3, 0))
    back = [Work("B", 2, 0), Work("B", 0, 0)]
    assert worst_pass([*both, *back], stages) == (114, PassBytes(8, 12, 0))
    again = [*both, *back, Work("R", 2, 1), Work("F", 2, 1)]  # stage 0 has sums, no weights now
    sent = 4  # the gradient of stage 2's first input; its second output is kept anyway
    assert worst_pass([*again, Work("B", 2, 1)], stages) == (104, PassBytes(1 + sent, 9, 47))
    early = [*both, Work("G", 0, 0), Work("R", 2, 1)]  # both wait until their passes begin
    assert worst_pass([*early, Work("B", 2, 0)], stages) == (114, PassBytes(8 + 4 + 2, 12, 0))
    due = [Work("B", 0, 0), Work("F", 2, 1), Work("B", 2, 0)]
    assert worst_pass([*early, *due], stages) == (208, PassBytes(8, 9, 40))


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


def torch_lists(pipeline: PipelineSpec, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """What torch's schedule does on each rank."""
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, stage_index=index, has_backward=True, submod=None,
            num_stages=ranks * pipeline.stages_per_rank, stage_index_to_group_rank={},
            is_first=False, is_last=False,
        )
        for index in pipeline.stages_of(0, ranks)
    ]  # fmt: skip
    kind = get_schedule_class(pipeline.schedule)
    schedule = kind(stages, microbatches, loss_fn=print, **few_sends(kind, KEPT_SENDS))
    lists: dict[int, list[Any]] = schedule.pipeline_order_with_comms
    return lists


def torch_plan(pipeline: PipelineSpec, ranks: int, microbatches: int) -> dict[int, list[Work]]:
    """Torch's own lists, with receipts and without sends."""
    kinds: dict[str, Any] = {each: each for each in "FBIW"} | {"RECV_F": "R", "RECV_B": "G"}
    return {
        rank: [
            Work(kinds[each.computation_type.value], each.stage_index, each.microbatch_index)
            for each in actions
            if each.computation_type.value in kinds
        ]
        for rank, actions in torch_lists(pipeline, ranks, microbatches).items()
    }


def most_waiting(order: Sequence[Work]) -> int:
    """The most messages that a rank has received before the passes that need them begin."""
    waiting, most = set[Work](), 0
    for work in order:
        if work.kind in ("R", "G"):
            waiting.add(work)
            most = max(most, len(waiting))
        elif work.kind != "W":
            waiting.discard(work._replace(kind="R" if work.kind == "F" else "G"))
    return most


@pytest.mark.parametrize(
    ("name", "stages"),
    [("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 1),
     ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 8), (4, 3), (4, 10), (8, 63)])
def test_orders_are_torchs_own(name: Any, stages: int, ranks: int, microbatches: int) -> None:
    """The passes are the same; a message may come two earlier or later, since bubbles and, before
    a stage's last passes, the turns of FSDP's sums (three from torch 2.15 on) are torch's alone.
    Messages that wait are few, however many microbatches a step has."""
    pipeline = PipelineSpec(schedule=name, stages_per_rank=stages)
    orders = planned_orders(pipeline, ranks, microbatches)
    theirs = torch_plan(pipeline, ranks, microbatches)
    for rank, ours in enumerate(with_receipts(orders)):
        assert orders[rank] == [work for work in theirs[rank] if work.kind not in ("R", "G")]
        own = pipeline.stages_of(rank, ranks)  # they hand each other gradients, and send none
        sent = [work for work in ours if work.kind != "G" or work.stage + 1 not in own]
        assert {*sent} == {*theirs[rank]}
        assert abs(most_waiting(sent) - most_waiting(theirs[rank])) <= 2
        assert most_waiting(sent) <= 2 + _round_size(ranks, microbatches)


@pytest.mark.parametrize(
    ("name", "stages"),
    [("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 2),
     ("ZBVZeroBubble", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 8), (4, 4), (4, 10), (8, 27)])
@pytest.mark.parametrize("kept", [1, KEPT_SENDS])
def test_ranks_that_keep_few_sends_never_wait_for_ever(
    name: Any, stages: int, ranks: int, microbatches: int, kept: int
) -> None:
    """By hand over torch's lists: a send is complete once its receiver has come to the receipt, and
    with `kept` on their way a rank waits. Passes wait for their messages."""
    pipeline = PipelineSpec(schedule=name, stages_per_rank=stages)
    rest = {rank: deque(each) for rank, each in torch_lists(pipeline, ranks, microbatches).items()}
    owner = {each.stage_index: rank for rank in rest for each in rest[rank]}
    sent, posted = set[tuple[str, int, int]](), set[tuple[str, int, int]]()
    on_the_way: dict[int, list[tuple[str, int, int]]] = {rank: [] for rank in rest}

    def can(rank: int, action: Any) -> bool:
        kind, stage = action.computation_type.value, action.stage_index
        place = action.microbatch_index
        if kind in ("SEND_F", "SEND_B"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            earlier = on_the_way[rank][: 1 - kept or None]
            if not posted.issuperset(earlier):
                return False
            message = (kind[-1], to, place)
            on_the_way[rank].append(message)
            sent.add(message)
        elif kind in ("RECV_F", "RECV_B"):
            posted.add((kind[-1], stage, place))
        elif kind == "F":
            return stage == 0 or owner[stage - 1] == rank or ("F", stage, place) in sent
        elif kind in ("B", "I"):
            return stage + 1 not in owner or owner[stage + 1] == rank or ("B", stage, place) in sent
        return True

    while any(rest.values()):
        moved = False
        for rank, actions in rest.items():
            while actions and can(rank, actions[0]):
                actions.popleft()
                moved = True
        assert moved, "all ranks wait"


def test_orders_that_wait_for_each_other_are_reported() -> None:
    orders = [[Work("B", 0, 0), Work("F", 0, 0)], [Work("F", 1, 0), Work("B", 1, 0)]]
    for find in (lambda: run_times(orders, 2), lambda: with_receipts(orders)):
        with pytest.raises(ValueError, match="wait for each other; 4"):
            find()
