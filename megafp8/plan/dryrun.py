"""Compute the memory of one rank of a job by building its parts on torch's meta device.

Tensors on the meta device have shapes and dtypes but no values, so that any rank of a job of any
size can be built on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megafp8.models.init import pieces_of
from megafp8.ops.torch_private import storage_key
from megafp8.parallel.fsdp import local_of
from megafp8.parallel.mesh import AXES, coordinates, simulated_rank
from megafp8.plan.dryrun_step import fsdp_step_bytes, step_bytes
from megafp8.plan.memory import RankMemory
from megafp8.plan.pipeline import Times, planned_orders, run_times
from megafp8.specs import RunSpec
from megafp8.specs.division import padded_rows
from megafp8.specs.held import HeldBytes
from megafp8.specs.parameters import num_parameters
from megafp8.specs.rank_shape import rank_shape
from megafp8.train.build import build, start_only
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.report.fp8 import LinearFlops, linear_flops
from megafp8.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class RankShare(RankMemory):
    """Describe one rank's part of a job, with its bytes as they were counted."""

    rank: int
    place: dict[str, int]  # its coordinates on the mesh, and among ranks that divide experts
    layers: tuple[int, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
    """The logical name, logical shape, local shape and dtype of every piece."""
    kept: dict[int, int]  # by stage, for the backward pass of one microbatch
    linears: LinearFlops | None  # the FLOPs in FP8; None without FP8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describe a whole job, over all its ranks."""

    num_params: int  # of the whole model, copies not included
    stages: tuple[LinearFlops, ...]  # by pipeline rank; empty without FP8
    num_microbatches: int  # of each data-parallel rank in a step
    times: Times | None  # of the pipeline's schedule; None without pipeline stages


def ranks_to_show(spec: RunSpec) -> list[int]:
    """Return the first rank of the first, the middle and the last pipeline stage."""
    parallel = spec.parallel
    ranks_per_stage = parallel.world_size // parallel.pp
    return [stage * ranks_per_stage for stage in sorted({0, parallel.pp // 2, parallel.pp - 1})]


@contextmanager
def simulated(spec: RunSpec, rank: int) -> Iterator[TrainState]:
    """Yield the parts of `rank`, on the meta device."""
    with simulated_rank(spec.parallel, rank) as mesh:
        state = build(spec, mesh)
        try:
            yield state
        finally:
            state.backend.forget()


def rank_share(spec: RunSpec, rank: int) -> RankShare:
    """Build the part of `rank`, run one microbatch through it, and return its description.

    `spec.model.vocab_size` must be known.
    """
    start = 0 if spec.parallel.fsdp is None else start_bytes(spec, rank)
    with simulated(spec, rank) as state:
        sizes = {axis: getattr(spec.parallel, axis) for axis in AXES}
        recipe, layers = spec.precision.fp8, rank_shape(spec, state.mesh.pp.rank).layers
        ep = state.mesh.ep
        if spec.parallel.fsdp is None:
            held = held_bytes(state)
            step, kept = step_bytes(state, spec)
        else:
            step, kept = fsdp_step_bytes(state, spec)
            held = held_bytes(state)
        return RankShare(
            rank=rank,
            pipeline_rank=state.mesh.pp.rank,
            place=coordinates(sizes, rank) | ({"ep": ep.rank} if ep.size > 1 else {}),
            layers=layers,
            num_layers=len(layers),
            shapes=tuple(shapes_of(state)),
            num_params=sum(param.numel() for param in state.model.parameters()),
            held=held,
            step=step,
            kept=kept,
            linears=None if recipe is None else linear_flops(state.backend.planned(state.model)),
            start=start,
        )


def start_bytes(spec: RunSpec, rank: int) -> int:
    """Return the most bytes that a rank holds until its master weights are made."""
    alive = LiveBytes("meta")
    with simulated_rank(spec.parallel, rank) as mesh, alive:
        start_only(spec, mesh).forget()
    return alive.most


def whole_layout(spec: RunSpec) -> Layout:
    """Describe a whole job from one rank of each stage; the ranks of a stage have equal parts."""
    parallel = spec.parallel
    ranks_per_stage = parallel.world_size // parallel.pp
    stages, num_microbatches = [], spec.train.num_microbatches(parallel.dp)
    for stage in range(parallel.pp if spec.precision.fp8 is not None else 0):
        with simulated(spec, stage * ranks_per_stage) as state:
            stages.append(linear_flops(state.backend.planned(state.model)))
    times = None
    if parallel.pp > 1:
        orders = planned_orders(parallel.pipeline, parallel.pp, num_microbatches)
        times = run_times(orders, parallel.pp * parallel.pipeline.stages_per_rank)
    return Layout(
        num_params=num_parameters(spec.model),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        times=times,
    )


def shapes_of(state: TrainState) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
    """Yield the logical name, logical shape, local shape and dtype of every piece on this rank.

    With FSDP the local shape is that of the rows in the rank's shard.
    """
    masters = state.masters
    for param in state.model.parameters():
        first, end = 0, param.shape[0]
        if masters.holds_rows:
            first = min(end, masters.shards.rank * padded_rows(end, masters.shards.size))
            end = first + local_of(param).shape[0]
        for piece in pieces_of(param):
            local = tuple(part.stop - part.start for part in piece.local)
            of_rows = min(end, piece.local[0].stop) - max(first, piece.local[0].start)
            local = (max(0, of_rows), *local[1:])
            is_plain = any(memory is param for memory in state.backend.memory_of(param))
            dtype = str(param.dtype).removeprefix("torch.") if is_plain else "fp8"
            yield piece.name, piece.global_shape, local, dtype


def held_bytes(state: TrainState) -> HeldBytes:
    """Return the bytes of the state, each storage once; its tensors may be real or meta ones.

    FSDP's parameters are shards of master weights, and their gradients those of the newest step.
    """
    seen: set[int] = set()

    def own(tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        parts = map(local_of, tensors)
        for memory in (memory for x in parts for memory in state.backend.memory_of(x)):
            storage = memory.untyped_storage()
            key = storage_key(storage)
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
        return total

    masters = state.masters
    own_masters = own(masters.masters) if masters.holds_rows else 0
    return HeldBytes(
        weights=own(state.model.parameters()),
        masters=own_masters + own(masters.masters),
        moments=own(state.optimizer.all_state_tensors()),
        gradients=own([*masters.own_grads, *masters.param_grads, *masters.grads]),
        scaling=own(state.backend.scaling_tensors(state.model)),
    )
