"""Form the axes of a run's ranks, or simulate one rank of a large job without the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from fp8_numerics.meta import planning_for
from megafp8.ops.torch_private import fsdp_without_values, join_simulated_group
from megafp8.parallel import rendezvous
from megafp8.parallel.collectives import Axis, Traffic
from megafp8.parallel.rendezvous import Store
from megafp8.specs import ParallelSpec
from megafp8.specs.geometry import DENSE, EXPERTS

AXES = ("tp", "cp", "dp", "pp")
"""Innermost first, Megatron's order: tensor-parallel ranks are neighbours, stages far apart."""


@dataclass(frozen=True)
class Replicas:
    """Hold how the ranks of a pipeline stage repeat and divide the parameters of a group.

    data    the ranks that have the same part; they sum its gradients
    parts   the ranks that have the other parts, which make up the group together
    """

    data: Axis
    parts: Axis


@dataclass(frozen=True)
class Mesh:
    """Hold every group of ranks that communicates, as seen from this rank.

    world   all ranks
    tp      the ranks that share each matrix
    cp      the ranks that share each sequence
    dp      replicas that train on other samples
    pp      the stages of one pipeline, in order
    data    dp x cp: the ranks whose gradients of the same weights are summed
    stage   tp x cp x dp: all ranks of this rank's pipeline stage, which hold the same layers
    ep      the ranks that divide the experts: so many consecutive ones of a stage
    edp     those of a stage that have the same experts
    amax    the ranks over which amaxes are reduced: `stage`, or tp x cp alone
    ends    the first and the last rank of this pipeline; size 1 for the ranks between
    """

    device: torch.device
    world: Axis
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    data: Axis
    stage: Axis
    ep: Axis
    edp: Axis
    amax: Axis
    ends: Axis
    traffic: Traffic
    store: Store | None = None  # the ranks' common key-value store; None with one rank
    # Ranks wait in this group for one that works on files. None with one rank, or simulated ranks.
    agreement: dist.ProcessGroup | None = None
    # Groups of parameters with other replicas than `data`, by the name that their pieces have.
    groups: Mapping[str, Replicas] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0 of the run."""
        return self.world.rank == 0

    def with_experts(self) -> Mesh:
        """Return the mesh of a model with experts, each of which is whole on its ranks.

        Every rank of a stage has all of them, or `ep` ranks have equally many each. With neither
        tensor nor expert parallelism their replicas are those of all parameters.
        """
        if self.tp.size == self.ep.size == 1:
            return self
        return replace(self, groups={EXPERTS: Replicas(self.edp, self.ep)})

    def replicas_of(self, group: str) -> Replicas:
        """Return how the ranks hold the parameters of a group."""
        return Replicas(self.data, self.tp) if group == DENSE else self.groups[group]


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the position of a global rank on each of `AXES`."""
    place = {}
    for axis in AXES:
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def groups_along(sizes: Mapping[str, int], axes: Collection[str]) -> list[list[int]]:
    """Return the global ranks of every group that spans `axes`.

    Within a group only the coordinates on `axes` differ.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place in product(*(range(sizes[axis]) for axis in reversed(AXES))):
        at = dict(zip(reversed(AXES), place, strict=True))
        rank = 0
        for axis in reversed(AXES):
            rank = rank * sizes[axis] + at[axis]
        groups.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
    return [sorted(group) for group in groups.values()]


def expert_groups(
    stages: Sequence[Sequence[int]], ep: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that divide the experts, and those that have the same ones.

    `stages` are the ranks of each pipeline stage. As in Megatron-core `ep` consecutive ones of them
    divide the experts: the place of a rank in its stage modulo `ep` says which experts it has.
    """
    starts = [(stage, start) for stage in stages for start in range(0, len(stage), ep)]
    divide = [list(stage[start : start + ep]) for stage, start in starts]
    return divide, [list(stage[place::ep]) for stage in stages for place in range(ep)]


def single_rank(device: torch.device | None = None) -> Mesh:
    """Return the mesh of one process without process groups."""
    return _mesh(device or torch.device("cpu"), dict.fromkeys(AXES, 1), 0)


def join(spec: ParallelSpec) -> Mesh:
    """Join the ranks that the launcher's environment (RANK, WORLD_SIZE, …) describes."""
    on_gpu = spec.accelerator == "gpu"
    device = rendezvous.local_gpu() if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if spec.world_size == 1:
        return single_rank(device)
    store = None
    if not dist.is_initialized():  # a second mesh over the same ranks reuses the group
        store = rendezvous.connect("nccl" if on_gpu else "gloo")
    mesh = _mesh_of(spec, device)
    return replace(mesh, store=store, agreement=rendezvous.group_that_waits())


def group_of(axis: Axis) -> dist.ProcessGroup | None:
    """Return the axis's process group, for libraries that take None for all ranks.

    If the axis has only this rank and the run has more, the group holds this rank alone. The result
    is None only if there are no process groups.
    """
    if axis.size > 1 or not dist.is_initialized():
        return axis.group
    # The group holds only this rank, so the others need not call this. But of a world that is bound
    # to a GPU, torch makes each group by a split of NCCL, in which all ranks take part.
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    return group


def leave() -> None:
    """Destroy the process groups, on all ranks or on none.

    NCCL finishes pending work before it destroys a group and waits for the other ranks to do the
    same. A rank that fails alone must leave its groups as they are and end its process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _mesh_of(spec: ParallelSpec, device: torch.device) -> Mesh:
    sizes = {"tp": spec.tp, "cp": spec.cp, "dp": spec.dp, "pp": spec.pp}
    return _mesh(device, sizes, dist.get_rank(), spec.tp_only_amax_red, spec.ep)


def _mesh(
    device: torch.device,
    sizes: Mapping[str, int],
    rank: int,
    tp_only_amax_red: bool = False,
    ep: int = 1,
) -> Mesh:
    """Return this rank's mesh; every rank creates all groups, in the same order."""
    traffic = Traffic()
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def axis(name: str, groups: list[list[int]]) -> Axis:
        own_ranks = next((group for group in groups if rank in group), [rank])
        key = tuple(map(tuple, groups))
        if len(groups[0]) > 1 and key not in made:
            made[key], _ = dist.new_subgroups_by_enumeration(groups)
        return Axis(name, len(own_ranks), own_ranks.index(rank), made.get(key), traffic)

    spans: dict[str, tuple[str, ...]] = {name: (name,) for name in AXES}
    spans |= {"data": ("cp", "dp"), "stage": ("tp", "cp", "dp")}
    spans["amax"] = ("tp", "cp") if tp_only_amax_red else spans["stage"]
    axes = {name: axis(name, groups_along(sizes, span)) for name, span in spans.items()}
    if sizes["cp"] == 1:
        axes["data"] = axes["dp"]
    stages = groups_along(sizes, spans["stage"])
    for name, groups in zip(("ep", "edp"), expert_groups(stages, ep), strict=True):
        axes[name] = axis(name, groups)
    ends = [sorted({group[0], group[-1]}) for group in groups_along(sizes, ("pp",))]
    world_size = len(groups_along(sizes, AXES)[0])
    world = Axis("world", world_size, rank, dist.group.WORLD if world_size > 1 else None, traffic)
    made_axes: Any = axes | {"ends": axis("ends", ends)}
    return Mesh(device, world, traffic=traffic, **made_axes)


@contextmanager
def simulated_rank(spec: ParallelSpec, rank: int) -> Iterator[Mesh]:
    """Yield the mesh of `rank` on the meta device, which is the default device in the context.

    The meta device stands for the accelerator of `spec`.
    """
    assert not dist.is_initialized(), "this process is a rank already"
    assert 0 <= rank < spec.world_size, f"rank {rank} of {spec.world_size}"
    device, planned = torch.device("meta"), "cuda" if spec.accelerator == "gpu" else "cpu"
    if spec.world_size == 1:
        with device, planning_for(planned):
            yield single_rank(device)
        return
    join_simulated_group(rank, spec.world_size)
    try:
        mesh = _mesh_of(spec, device)
        sharded = nullcontext() if spec.fsdp is None else fsdp_without_values()
        with sharded, device, planning_for(planned):
            yield mesh
    finally:
        leave()
