"""What the ranks of the tests of FP8-LM's reductions and ZeRO do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_numerics.kernels.compile import library
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import Pending
from megafp8.fp8.stored_formats import STORAGE_FORMATS, StorageFormat
from megafp8.parallel import scaled_data
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh, join
from megafp8.parallel.scaled_data import (
    ExchangedBucket,
    Fp8SumBucket,
    lay_out,
)
from megafp8.specs import ParallelSpec
from megafp8.specs.division import (
    WAYS,
    Divided,
    Division,
    Way,
    by_tensors,
    equal_parts,
    whole_parts,
)
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.nonfinite import first_nonfinite
from megafp8.train.saver import Saver
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load_checkpoint, placements_of
from megafp8.train.step import forward_backward, reduce_gradients, train_step
from tests.kit.cases import Case
from tests.kit.tensors import Piece, stored_states
from tests.optim.masters_bugs import IN_SUMS
from tests.optim.sharded_work import on_ranks, spoil_gradient, weights
from tests.ranks import Rank

SHAPES = ((8, 24), (3, 5), (16, 16), (1, 7), (9, 11))
FP8 = STORAGE_FORMATS["fp8"]


@dataclass(frozen=True)
class Summed:
    """A reduction of `gradients`: its way, and a planted mistake."""

    how: str  # "fp32", or the factor of the sum in FP8
    whole: bool = False  # whole tensors are owned, as in ZeRO
    bug: str | None = None
    spread: float = 1.0  # the decimal exponents between the ranks' gradients
    equal: bool = False  # all ranks have the gradients of rank 0
    steps: int = 1
    bad: float | None = None  # rank 1's last gradient has one such element


@dataclass
class Sums:
    """What a rank has afterwards: codes, scales and factors, and its traffic in bytes."""

    codes: list[torch.Tensor]
    scales: torch.Tensor
    factors: torch.Tensor
    owned: list[int]
    sent: dict[str, int]


def gradients(summed: Summed, rank: int) -> list[torch.Tensor]:
    """The third is zero on rank 0, and the fourth everywhere."""
    generator = torch.Generator().manual_seed(0 if summed.equal else rank)
    size = 10.0 ** (-summed.spread * (0 if summed.equal else rank))
    made = [size * torch.randn(shape, generator=generator) for shape in SHAPES]
    if rank == 0 and not summed.equal:
        made[2].zero_()
    made[3].zero_()
    if rank == 1 and summed.bad is not None:
        made[4][2, 3] = summed.bad
    return made


class Unshared(Axis):
    """An axis on which ranks do not agree on maxima."""

    def start_all_reduce_max(self, tensor: torch.Tensor) -> Pending:
        return Pending(tensor)


class Ungathered(Axis):
    """An axis on which a rank takes its own scales for everybody's."""

    def start_all_gather_in_place(self, tensor: torch.Tensor) -> Pending:
        return (
            Pending(tensor)
            if tensor.dtype == torch.float32
            else super().start_all_gather_in_place(tensor)
        )


@contextmanager
def planted(bug: str | None, axis: Axis) -> Iterator[Axis]:
    kinds: dict[str, type[Axis]] = {
        "a scale is not shared": Unshared,
        "scales are not sent": Ungathered,
    }
    cast: Callable[..., torch.Tensor] = scaled_data.cast_stored

    def cast_by_own_amax(
        values: torch.Tensor, scale: torch.Tensor, fmt: StorageFormat
    ) -> torch.Tensor:
        return (
            ScaledTensor.of(values, fmt).payload if values.dim() == 2 else cast(values, scale, fmt)
        )

    def cast_by_no_scale(
        values: torch.Tensor, scale: torch.Tensor, fmt: StorageFormat
    ) -> torch.Tensor:
        return cast(values, torch.ones_like(scale), fmt)

    with pytest.MonkeyPatch.context() as patch:
        if bug == "nothing is quantized again":
            patch.setattr(scaled_data, "cast_stored", cast_by_own_amax)
        if bug == "the sum is not quantized again":
            patch.setattr(scaled_data, "cast_stored", cast_by_no_scale)
        if bug in IN_SUMS:
            IN_SUMS[bug](patch)
        kind = kinds.get(bug or "", Axis)
        yield kind(axis.name, axis.size, axis.rank, axis.group, axis.traffic)


def sum_gradients(summed: Summed, axis: Axis) -> Sums:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    sizes = [param.numel() for param in params]
    if summed.whole:
        owners = [min(index * axis.size // 3, axis.size - 1) for index in range(len(params))]
        places = whole_parts(sizes, owners, axis.size)
    else:
        places = equal_parts(sizes, axis.size)
    held = lay_out(places, params, FP8)
    fixed = {"auto": axis.size**-0.5, "pre": 1 / axis.size, "post": 1.0}
    factors = torch.full((len(params),), fixed.get(summed.how, 1.0))
    bucket = ExchangedBucket(held, stays=summed.whole)
    if summed.how != "fp32":
        bucket = Fp8SumBucket(
            held, stays=summed.whole, factors=factors, adapts=summed.how == "auto"
        )
    before = dict(axis.traffic.num_bytes)
    with planted(summed.bug, axis) as used:
        for _ in range(summed.steps):
            for grad, values in zip(held.grads, gradients(summed, axis.rank), strict=True):
                grad.store(values)
            bucket.start(used, torch.float32)
            bucket.finish(used)
    return Sums(
        [grad.payload.view(torch.uint8).clone() for grad in held.grads],
        held.scales.clone(),
        factors,
        [index for index, _ in held.places.owned_by(axis.rank)],
        {
            f"{operation} {dtype}": count - before.get((name, operation, dtype), 0)
            for (name, operation, dtype), count in axis.traffic.num_bytes.items()
        },
    )


def sums(rank: Rank, jobs: dict[str, Summed]) -> dict[str, Sums]:
    torch.set_num_threads(1)
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    return {name: sum_gradients(job, mesh.data) for name, job in jobs.items()}


@dataclass
class Trained:
    """What a rank has after some steps; values are in FP32, by logical tensor."""

    losses: list[float]
    norms: list[float]
    first_gradients: list[Piece]
    weights: dict[str, torch.Tensor]
    masters: list[Piece]
    moments: list[Piece]
    num_owned: int
    bytes_of_moments: int
    traffic: dict[tuple[str, str, str], int]  # of the last step
    named: str | None = None


def stored_pieces(state: TrainState, tensors: list[ScaledTensor], prefix: str = "") -> list[Piece]:
    num_shards = state.masters.shards.size
    return [
        Piece(p.name, p.global_shape, p.offset, p.tensor.clone())
        for segment, stored in zip(state.masters.segments, tensors, strict=True)
        for p in placements_of(prefix, segment, stored.values(), state.mesh, num_shards=num_shards)
        if p.replica == 0 or num_shards == 1
    ]


def after_steps(state: TrainState, case: Case, steps: int, spoiled: int | None = None) -> Trained:
    mesh, masters, optimizer = state.mesh, state.masters, state.optimizer
    losses, norms, traffic, named = [], [], {}, None
    for _ in range(steps):
        before = dict(mesh.traffic.num_bytes)
        batches = case.microbatches(state.step, mesh)
        hook = None
        if state.step == spoiled and mesh.data.rank == 1:
            model: Any = state.model
            hook = model.layers[0].register_forward_hook(spoil_gradient)
        result = train_step(state, batches)
        if hook is not None:
            hook.remove()
        if not result.is_finite:
            named = first_nonfinite(state, batches)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        state.step += 1
        traffic = {key: n - before.get(key, 0) for key, n in mesh.traffic.num_bytes.items()}
    moments = [stored_states(optimizer, name) for name in ("exp_avg", "exp_avg_sq")]
    return Trained(
        losses,
        norms,
        [],
        weights(state),
        stored_pieces(state, masters.stored),
        [p for i, each in enumerate(moments) for p in stored_pieces(state, each, f"{i}/")],
        len(masters.segments),
        sum(stored.payload.nbytes for each in moments for stored in each),
        {key: count for key, count in traffic.items() if count},
        named,
    )


def first_gradients(case: Case, mesh: Mesh) -> list[Piece]:
    state = case.build(mesh)
    forward_backward(state, case.microbatches(0, mesh))
    reduce_gradients(state)
    return stored_pieces(state, state.masters.stored_grads)


def train(
    rank: Rank,
    cases: dict[str, Case],
    root: Path | None = None,
    saved: tuple[str, ...] = (),
    loads: dict[str, tuple[Path, Case]] | None = None,
    spoiled: dict[str, int] | None = None,
) -> dict[str, Trained]:
    """Train every case; those of `saved` are written. Then continue the checkpoints of `loads`."""
    torch.set_num_threads(1)
    meshes: dict[tuple[int, ...], Mesh] = {}

    def mesh_of(case: Case) -> tuple[Case, Mesh]:
        spec = on_ranks(case.parallel, rank)
        sizes = (spec.tp, spec.cp, spec.pp)
        if sizes not in meshes:
            meshes[sizes] = join(spec)
        return replace(case, parallel=spec), meshes[sizes]

    found = {}
    for name, asked in cases.items():
        case, mesh = mesh_of(asked)
        state = case.build(mesh)
        found[name] = after_steps(state, case, case.steps, (spoiled or {}).get(name))
        if name in saved:
            assert root is not None
            Saver(root / name, keep=1, meta={}).save(state)
            found[f"{name}, continued"] = after_steps(state, case, 2)
        # a new model ends the updates of scales that Transformer Engine makes for this one
        found[name].first_gradients = first_gradients(case, mesh)
    for name, (step_dir, asked) in (loads or {}).items():
        case, mesh = mesh_of(asked)
        state = case.build(mesh)
        load_checkpoint(step_dir, state, print)
        found[name] = after_steps(state, case, 2)
    assert all(math.isfinite(loss) for one in found.values() for loss in one.losses)
    return found


def exchange(rank: Rank, how: str, elements: int) -> tuple[int, int, bool]:
    """Sum a bucket of which rank 1 owns nine tenths and rank 3 the rest.

    Return the peak of the bytes that were made for it, the bytes sent, and whether this rank's sums
    are right: small whole numbers, which every format has exactly.
    """
    torch.set_num_threads(1)
    axis = join(on_ranks(ParallelSpec(), rank)).dp
    fmt = STORAGE_FORMATS["fp32"] if how == "FP32" else FP8
    shapes, owners = ((9, elements), (elements,)), (1, 3)
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sizes = [param.numel() for param in params]
    held = lay_out(whole_parts(sizes, owners, axis.size), params, fmt)
    bucket = ExchangedBucket(held, stays=True)
    if how == "summed in FP8":
        bucket = Fp8SumBucket(held, stays=True, factors=torch.full((2,), 0.25), adapts=False)
    values = [torch.arange(param.numel()).view(param.shape) % 5 - 2.0 for param in params]
    for grad, value in zip(held.grads, values, strict=True):
        grad.store(value * (1 + axis.rank % 2))
    before = sum(axis.traffic.num_bytes.values())
    library()  # is compiled and tried on its first use
    with LiveBytes() as alive:
        bucket.start(axis, torch.float32)
        bucket.finish(axis)
        most = alive.most
    key = ("dp", "all_to_all", "float32" if how == "FP32" else "uint8")
    assert sum(axis.traffic.num_bytes.values()) - before < axis.traffic.num_bytes[key] + 4096
    own = [index for index, owner in enumerate(owners) if owner == axis.rank]
    right = all(torch.equal(held.grads[index].values(), 6 * values[index]) for index in own)
    return most, axis.traffic.num_bytes[key], right


def by_turns(divided: Divided) -> Division:
    """Give the ranks one parameter after the other."""
    return by_tensors(divided, [at % divided.num_ranks for at in range(len(divided.members))])


def train_with_turns(rank: Rank, cases: dict[str, Case]) -> dict[str, Trained]:
    """Train every case, with one more partition, `turns`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WAYS, "turns", Way(by_turns))
        return train(rank, cases)
