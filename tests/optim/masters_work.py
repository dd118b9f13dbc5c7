"""What the ranks of the tests of FP8-LM's reductions and ZeRO do."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8_numerics.kernels.compile import library
from megafp8.fp8.stored_formats import STORAGE_FORMATS
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.scaled_data import (
    ExchangedBucket,
    Fp8SumBucket,
    lay_out,
)
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
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward, reduce_gradients
from tests.kit.cases import Case
from tests.kit.faults import planted
from tests.kit.runs import Steps, each_case
from tests.kit.runs import train as train_state
from tests.kit.tensors import Piece, pieces, stored_states, weight_bytes
from tests.optim.masters_bugs import IN_SUMS, WITHOUT_RULE
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
    with planted(*((IN_SUMS | WITHOUT_RULE)[summed.bug],) if summed.bug else ()):
        for _ in range(summed.steps):
            for grad, values in zip(held.grads, gradients(summed, axis.rank), strict=True):
                grad.store(values)
            bucket.start(axis, torch.float32)
            bucket.finish(axis)
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


def sums(mesh: Mesh, jobs: dict[str, Summed]) -> dict[str, Sums]:
    return {name: sum_gradients(job, mesh.data) for name, job in jobs.items()}


@dataclass
class Trained(Steps):
    """What a rank has after some steps; values are in FP32, by logical tensor."""

    weights: dict[str, torch.Tensor]
    masters: list[Piece]
    moments: list[Piece]
    num_owned: int
    bytes_of_moments: int
    first_gradients: Sequence[Piece] = ()


def after_steps(state: TrainState, case: Case, steps: int) -> Trained:
    seen, masters = train_state(state, case, steps), state.masters
    assert all(math.isfinite(loss) for loss in seen.losses)
    moments = [stored_states(state.optimizer, name) for name in ("exp_avg", "exp_avg_sq")]
    return Trained(
        **vars(seen),
        weights=weight_bytes(state),
        masters=pieces(state, masters.stored),
        moments=[p for i, each in enumerate(moments) for p in pieces(state, each, f"{i}/")],
        num_owned=len(masters.segments),
        bytes_of_moments=sum(stored.payload.nbytes for each in moments for stored in each),
    )


def first_gradients(case: Case, mesh: Mesh) -> list[Piece]:
    state = case.build(mesh)
    forward_backward(state, case.microbatches(0, mesh))
    reduce_gradients(state)
    return pieces(state, state.masters.stored_grads)


def train_case(case: Case, mesh: Mesh) -> list[Trained]:
    """Train; a case that is saved goes on for two steps, and these are a second result."""
    state = case.build(mesh)
    found = [after_steps(state, case, case.steps)]
    if case.saves is not None:
        found.append(after_steps(state, replace(case, saves=None), 2))
    if case.begins is None:
        # a new model ends the updates of scales that Transformer Engine makes for this one
        found[0].first_gradients = first_gradients(case, mesh)
    return found


def train(rank: Rank, cases: dict[str, Case]) -> dict[str, Trained]:
    """Train every case; what follows a saved one is named after it."""
    found = {}
    for name, results in each_case(rank, train_case, cases).items():
        found |= dict(zip((name, f"{name}, continued"), results, strict=False))
    return found


def saving(cases: dict[str, Case], names: Collection[str], root: Path) -> dict[str, Case]:
    """The cases, of which those of `names` are saved."""
    return {n: replace(c, saves=root / n) if n in names else c for n, c in cases.items()}


def going_on(case: Case, step_dir: Path) -> Case:
    """Two steps of a case from a checkpoint on."""
    return replace(case, begins=step_dir, steps=2)


def exchange(mesh: Mesh, how: str, elements: int) -> tuple[int, int, bool]:
    """Sum a bucket of which rank 1 owns nine tenths and rank 3 the rest.

    Return the peak of the bytes that were made for it, the bytes sent, and whether this rank's sums
    are right: small whole numbers, which every format has exactly.
    """
    axis = mesh.dp
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
