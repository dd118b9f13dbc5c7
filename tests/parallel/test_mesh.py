"""Which ranks form which axis."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import AXES, coordinates, group_of, groups_along
from megafp8.specs import ParallelSpec, PipelineSpec
from tests.parallel import rank_work
from tests.ranks import run_ranks

EIGHT = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}
SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


def test_megatrons_order_by_hand() -> None:
    """Tensor-parallel ranks are neighbours, then replicas, then stages (Megatron's tp-cp-dp-pp)."""
    assert groups_along(EIGHT, {"tp"}) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_along(EIGHT, {"dp"}) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_along(EIGHT, {"pp"}) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_along(EIGHT, {"tp", "cp", "dp"}) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    four = {"tp": 2, "cp": 2, "dp": 2, "pp": 1}
    assert groups_along(four, {"cp"}) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_along(four, {"cp", "dp"}) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert coordinates(EIGHT, 6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1}


@given(SIZES)
def test_ranks_of_a_group_differ_in_its_axes_alone(sizes: dict[str, int]) -> None:
    world = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    places = [coordinates(sizes, rank) for rank in range(world)]
    assert len({tuple(place.values()) for place in places}) == world
    for count in range(1, len(AXES) + 1):
        for axes in combinations(AXES, count):
            groups = groups_along(sizes, axes)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            rest = [axis for axis in AXES if axis not in axes]
            for group in groups:
                assert group == sorted(group)
                assert all(len({places[rank][axis] for rank in group}) == 1 for axis in rest)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_each_stage_is_on_one_rank(schedule: str, pp: int) -> None:
    spec = PipelineSpec(schedule=schedule, stages_per_rank=2)  # type: ignore[arg-type]
    held = [spec.stages_of(rank, pp) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(2 * pp))
    if schedule == "ZBVZeroBubble":  # both ends on the first rank, the turn on the last
        assert held[0] == [0, 2 * pp - 1] and held[-1] == [pp - 1, pp]
    else:
        assert held[0] == [0, pp] and held[-1] == [pp - 1, 2 * pp - 1]


def test_layers_of_stages() -> None:
    assert PipelineSpec().layers(6, 2) == [range(3), range(3, 6)]
    uneven = PipelineSpec(layout=(1, 3, 2, 1), stages_per_rank=2)
    assert uneven.layers(7, 2) == [range(1), range(1, 4), range(4, 6), range(6, 7)]


@pytest.mark.parametrize(
    ("spec", "of_amaxes"),
    [
        (ParallelSpec(devices_per_node=4, pp=2), {"tp", "cp", "dp"}),
        (ParallelSpec(devices_per_node=4, pp=4), {"tp", "cp", "dp"}),
        (ParallelSpec(devices_per_node=4, cp=2, tp_only_amax_red=True), {"tp", "cp"}),
    ],
    ids=["pp 2", "pp 4", "cp 2, own amaxes of replicas"],
)
def test_the_groups_are_made_of_these_ranks(spec: ParallelSpec, of_amaxes: set[str]) -> None:
    """Each rank's own number is summed over each axis; two replicas, or one of four stages."""
    sizes = {"tp": 1, "cp": spec.cp, "dp": spec.dp, "pp": spec.pp}
    spans = {axis: {axis} for axis in AXES}
    spans |= {"data": {"cp", "dp"}, "stage": {"tp", "cp", "dp"}, "amax": of_amaxes}
    for rank, found in enumerate(run_ranks(rank_work.members, 4, {"spec": spec})):
        for name, span in spans.items():
            group = next(g for g in groups_along(sizes, span) if rank in g)
            assert found[name] == (len(group), group.index(rank), group), name
        stages = found["pp"][2]
        ends = sorted({stages[0], stages[-1]}) if rank in (stages[0], stages[-1]) else [rank]
        assert found["ends"] == (len(ends), ends.index(rank), ends)
        assert found["world"] == (4, rank, [0, 1, 2, 3])


def test_a_group_of_one_rank_is_made_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a world that is bound to a GPU, torch splits NCCL's communicator, with all ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world: Any = dist.group.WORLD
    gpu, bound = torch.device("cuda", 0), []
    world.bound_device_id = gpu
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: bound.append(world.bound_device_id))
    try:
        group_of(Axis("edp"))
        assert bound == [None] and world.bound_device_id == gpu
    finally:
        dist.destroy_process_group()
