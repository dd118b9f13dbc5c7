"""Compute what an order of pipeline work costs: how long ranks wait, and how much is in flight.

An order is a list of `Work` for each pipeline rank, done one after another. A forward pass takes
one unit of time on every stage, a backward pass two (one for the inputs' gradients, one for the
weights'), and messages take none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from megafp8.specs.parallel import (
    KEPT_SENDS,
    ONE_STAGE_SCHEDULES,
    ROUND_SCHEDULES,
    PipelineSpec,
)

Kind = Literal["F", "B", "I", "W", "R", "G"]
SECONDS: dict[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""The units of time that each kind of work takes; B is I and W together."""


class Work(NamedTuple):
    """Name one forward pass (F) or backward pass (B) of a microbatch on a stage.

    A backward pass may be divided into the inputs' gradients (I) and the weights' gradients (W).
    R and G are the moments at which a stage begins to receive its input, and the gradient of its
    output, where these are earlier than the pass that needs the message.
    """

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Times:
    """Hold the duration of a pipeline schedule and the time that its ranks wait."""

    total: int  # units from the first forward pass to the last backward pass
    idle: tuple[float, ...]  # the fraction of the total in which each rank waits

    @property
    def bubble(self) -> float:
        """Return the fraction of all ranks' time that they spend waiting."""
        return sum(self.idle) / len(self.idle)


def one_stage_order(
    schedule: Literal["GPipe", "1F1B"], rank: int, num_ranks: int, num_microbatches: int
) -> list[Work]:
    """Return the order of work of rank `rank`, which has one stage, its own number.

    GPipe (Huang et al. 2019, arXiv 1811.06965) does all forward passes, then all backward passes.
    1F1B (Narayanan et al. 2021, arXiv 2104.04473) does as many forward passes as stages follow,
    then forward and backward passes in turn.
    """
    ahead = num_microbatches if schedule == "GPipe" else min(num_microbatches, num_ranks - rank)
    order = [Work("F", rank, index) for index in range(ahead)]
    for index in range(num_microbatches):
        order.append(Work("B", rank, index))
        if ahead + index < num_microbatches:
            order.append(Work("F", rank, ahead + index))
    return order


def run_times(orders: Sequence[Sequence[Work]], num_stages: int) -> Times:
    """Return the times of `orders` if all work begins as soon as its rank and its inputs are ready.

    Raises:
        ValueError: The orders wait for each other.
    """
    done: dict[Work, int] = {}
    clock, place = [0] * len(orders), [0] * len(orders)
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                work = order[place[rank]]
                ready = _ready(work, done, num_stages)
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + SECONDS[work.kind]
                done[work] = clock[rank]
                place[rank] += 1
                left -= 1
        if left == before:
            raise _waiting(left)
    total = max(clock)
    busy = [sum(SECONDS[work.kind] for work in order) for order in orders]
    return Times(total, tuple(1 - b / total for b in busy))


def _ready(work: Work, done: Mapping[Work, int], num_stages: int) -> int | None:
    """Return the time at which the inputs of `work` are ready, or None if it is not known yet."""
    kind, stage, microbatch = work
    if kind == "F":
        return 0 if stage == 0 else done.get(Work("F", stage - 1, microbatch))
    if kind == "W":
        return done.get(Work("I", stage, microbatch))
    if stage == num_stages - 1:
        return done.get(Work("F", stage, microbatch))
    whole = done.get(Work("B", stage + 1, microbatch))
    return done.get(Work("I", stage + 1, microbatch)) if whole is None else whole


def with_receipts(orders: Sequence[Sequence[Work]]) -> list[list[Work]]:
    """Return the orders of all ranks with the moments at which their stages receive messages.

    torch's schedules of several stages have memory for a message once its sender has got that far,
    if in each round each rank does its next piece of work that can begin. Stages of one rank hand
    each other the tensors themselves; a gradient then waits as a received one does.

    Raises:
        ValueError: The orders wait for each other.
    """
    owner = {work.stage: rank for rank, order in enumerate(orders) for work in order}
    made: list[list[Work]] = [[] for _ in orders]
    done: dict[Work, int] = {}
    rest = [deque(order) for order in orders]
    while any(rest):
        before = len(done)
        for rank, order in enumerate(rest):
            if not order or _ready(order[0], done, len(owner)) is None:
                continue
            work = order.popleft()
            done[work] = 0
            made[rank].append(work)
            kind, stage, microbatch = work
            if kind == "F" and owner.get(stage + 1, rank) != rank:
                made[owner[stage + 1]].append(Work("R", stage + 1, microbatch))
            elif kind in ("B", "I") and stage > 0:
                made[owner[stage - 1]].append(Work("G", stage - 1, microbatch))
        if len(done) == before:
            raise _waiting(sum(map(len, rest)))
    return made


def _waiting(num_left: int) -> ValueError:
    return ValueError(f"the orders wait for each other; {num_left} pieces of work cannot begin")


def most_held(order: Sequence[Work], held: Mapping[int, int]) -> int:
    """Return the most that a rank holds at once, if a microbatch in flight holds `held[stage]`.

    A microbatch is in flight on a stage from its forward pass until the gradients of the stage's
    weights are computed.
    """
    current = most = 0
    for work in order:
        if work.kind == "F":
            current += held[work.stage]
        elif work.kind in ("B", "W"):
            current -= held[work.stage]
        most = max(most, current)
    return most


class PassBytes(NamedTuple):
    """Hold the bytes of a backward pass at its worst moment, beside what microbatches keep.

    `gathered` are whole weights, and `sums` those of a step's sums of gradients that are there.
    """

    more: int
    gathered: int
    sums: int


@dataclass(frozen=True, kw_only=True)
class StagePasses:
    """Hold the bytes of a stage's passes; with FSDP its gradients are summed during a step.

    The first backward pass of a step begins without sums, and later ones with all of them.
    """

    kept: int  # by a microbatch in flight
    received: int  # of these, the stage's input from another stage
    returned: int  # of what a backward pass needs, the output's gradient from another stage
    left: int  # whole weights that stay gathered from a forward pass to a backward pass
    sums: int
    first: PassBytes
    later: PassBytes

    @classmethod
    def alike(cls, *, kept: int, received: int, returned: int, more: int) -> StagePasses:
        """Return the passes of a stage without FSDP, each of which needs `more` bytes."""
        most = PassBytes(more, 0, 0)
        crossing = {"received": received, "returned": returned}
        return cls(kept=kept, **crossing, left=0, sums=0, first=most, later=most)


def kept_by(index: int, stages: Mapping[int, StagePasses]) -> int:
    """Return what a microbatch in flight keeps on a stage.

    An input that comes from a stage of the same rank is that stage's output, which it keeps.
    """
    return stages[index].kept - stages[index].received * (index - 1 in stages)


def worst_pass(order: Sequence[Work], stages: Mapping[int, StagePasses]) -> tuple[int, PassBytes]:
    """Return what microbatches in flight keep during the worst pass of an order, and its bytes.

    These have the weights that other stages have gathered, the sums of all stages, the messages
    that wait for their pass and, in an order with receipts, the gradients among the last messages
    that were sent. What a forward pass sends is a part of what it keeps.
    """
    in_flight, waiting, worst = 0, 0, (0, PassBytes(0, 0, 0))
    has_receipts = any(work.kind in ("R", "G") for work in order)
    sent = deque[int](maxlen=KEPT_SENDS if has_receipts else 0)
    gathered_by, received, summed = set[int](), set[Work](), dict[int, int]()
    for work in order:
        kind, index, microbatch = work
        stage = stages[index]
        if kind in ("R", "G"):
            received.add(work)
            waiting += stage.received if kind == "R" else stage.returned
        elif kind == "F":
            waiting -= stage.received * (Work("R", index, microbatch) in received)
            in_flight += kept_by(index, stages)
            gathered_by.add(index)
            if stage.returned and index + 1 not in stages:
                sent.append(0)
        elif (gradient := Work("G", index, microbatch)) in received:
            waiting -= stage.returned
            received.remove(gradient)
        if kind in ("B", "W"):
            gathered_by.discard(index)
            bytes_of_work = stage.later if index in summed else stage.first
            summed[index] = bytes_of_work.sums
            gathered = bytes_of_work.gathered + sum(stages[other].left for other in gathered_by)
            more = bytes_of_work.more + sum(sent) + waiting
            pass_bytes = PassBytes(more, gathered, sum(summed.values()))
            worst = max(worst, (in_flight, pass_bytes), key=lambda each: each[0] + sum(each[1]))
            summed[index] = stage.sums
            in_flight -= kept_by(index, stages)
        if kind in ("B", "I") and stage.received and index - 1 not in stages:
            sent.append(stage.received)
    return worst


def short_order(pipeline: PipelineSpec, pp: int, rank: int, num_microbatches: int) -> list[Work]:
    """Return an order in which a rank holds as much as in that of so many microbatches.

    In its middle an order repeats itself with each round, of `pp` microbatches or a few more.
    Forward passes are less than two rounds ahead of backward passes, so that three rounds have all
    of the middle; with the microbatches that make no whole round they hold as much as all.
    """
    name, enough = pipeline.schedule, num_microbatches
    if name != "GPipe":
        size = _round_size(pp, num_microbatches) if name in ROUND_SCHEDULES else pp
        enough = min(num_microbatches, 3 * size + num_microbatches % size)
    if name in ONE_STAGE_SCHEDULES or pp == 1:
        return planned_order(pipeline, pp, rank, enough)
    return list(_with_receipts(pipeline, pp, enough)[rank])


@cache
def _with_receipts(pipeline: PipelineSpec, pp: int, num_microbatches: int) -> list[list[Work]]:
    return with_receipts(planned_orders(pipeline, pp, num_microbatches))


def planned_orders(pipeline: PipelineSpec, pp: int, num_microbatches: int) -> list[list[Work]]:
    """Return the order of each of `pp` pipeline ranks' passes."""
    return [planned_order(pipeline, pp, rank, num_microbatches) for rank in range(pp)]


def planned_order(pipeline: PipelineSpec, pp: int, rank: int, num_microbatches: int) -> list[Work]:
    """Return the passes of one of `pp` pipeline ranks in order; these orders are torch's own.

    A rank with several stages begins some forward passes and then runs backward and forward passes
    in turn, both in equal rounds of at least `pp` microbatches. With zero bubble the weights'
    gradients come `rank` backward passes later (ZB-H1, Qi et al. 2024, arXiv 2401.10241).
    """
    name, stages = pipeline.schedule, pipeline.stages_of(rank, pp)
    if pp == 1:
        return [Work(kind, 0, index) for index in range(num_microbatches) for kind in ("F", "B")]
    if name == "GPipe" or name == "1F1B":
        return one_stage_order(name, rank, pp, num_microbatches)
    if name == "ZBVZeroBubble":
        return _v_order(stages[0], stages[1], pp, rank, num_microbatches)
    size = _round_size(pp, num_microbatches)
    is_whole = name == "Interleaved1F1B"
    forwards = _in_rounds("F", stages, size, num_microbatches)
    num_warm_up = (2 if is_whole else 1) * (pp - 1 - rank) + (len(stages) - 1) * size + 1
    order, rest = forwards[:num_warm_up], iter(forwards[num_warm_up:])
    of_weights = deque[Work]()
    for backward in _in_rounds("B" if is_whole else "I", stages[::-1], size, num_microbatches):
        order.append(backward)
        if not is_whole:
            of_weights.append(backward._replace(kind="W"))
        if len(of_weights) > rank:
            order.append(of_weights.popleft())
        order.extend([forward] if (forward := next(rest, None)) else [])
    return [*order, *of_weights]


def _v_order(first: int, second: int, pp: int, rank: int, num_microbatches: int) -> list[Work]:
    """Return the order of a rank with two stages of a V (Qi et al. 2024, arXiv 2405.15362).

    It is a part of the order of at least `2 * pp - 1` microbatches.
    """
    count, behind = max(2 * pp - 1, num_microbatches), pp - rank
    one: tuple[tuple[Kind, int], ...] = (("F", first), ("I", first), ("W", first))
    other: tuple[tuple[Kind, int], ...] = (("F", second), ("I", second), ("W", second))
    turns = [*one[:1] * (2 * behind - 1), *(other[0], one[0]) * rank, *other * behind]
    turns += (*one, *other) * (count - pp)
    turns += [*(one[1], other[1]) * rank, *one[1:] * behind, *other[2:] * rank, *one[2:] * rank]
    done: Counter[tuple[Kind, int]] = Counter()
    order = []
    for kind, stage in turns:
        if done[kind, stage] < num_microbatches:
            order.append(Work(kind, stage, done[kind, stage]))
            done[kind, stage] += 1
    return order


def _round_size(pp: int, num_microbatches: int) -> int:
    """Return the microbatches of each of the equal rounds of torch's interleaved schedules."""
    return num_microbatches // max(1, num_microbatches // pp)


def _in_rounds(kind: Kind, stages: Sequence[int], size: int, num_microbatches: int) -> list[Work]:
    """Return all passes of one kind, rounds of `size` microbatches on each stage in turn."""
    return [
        Work(kind, stage, microbatch)
        for begin in range(0, num_microbatches, size)
        for stage in stages
        for microbatch in range(begin, min(begin + size, num_microbatches))
    ]
