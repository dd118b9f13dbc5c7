"""A second group of parameters, with other replicas than the rest, on four gloo ranks.

Each layer has two vectors that scale the output of its MLP, one for microbatches of even and one
for those of odd number. Four replicas hold one of them each: ranks 0 and 2 the first, 1 and 3 the
second, as ranks hold different experts. One process that holds both trains as they do. With four
vectors each rank has one of its own, which has no replicas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafp8.errors import RunError
from megafp8.models.block import TransformerLayer
from megafp8.models.init import normal, parameter
from megafp8.models.parts import Parts
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh, Replicas, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, OptimSpec, ParallelSpec
from megafp8.specs.geometry import DENSE, Box, Piece, why_not_a_partition
from megafp8.train import build as build_file
from megafp8.train.state import TrainState
from megafp8.train.state_dict import placements
from megafp8.train.step import forward_backward, reduce_gradients
from tests.kit.cases import Case
from tests.kit.runs import on_mesh, on_ranks, train
from tests.kit.tensors import Piece as Part
from tests.kit.tensors import assembled, assert_close, pieces, weights
from tests.tiny import gpt_spec, optim_spec
from tests.train.skipped import O2

MODEL = gpt_spec()
FP8 = Fp8Recipe(amax_history_len=4)
STEPS = 2


class Scaled(nn.Module):
    """Multiplies the output of an MLP by the vector of the microbatch, which is an expert's."""

    def __init__(self, mlp: nn.Module, vectors: nn.Module) -> None:
        super().__init__()
        self.mlp, self.vectors = mlp, vectors

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.vectors(self.mlp(x_BSD))
        return out


class Vectors(nn.Module):
    def __init__(
        self, parts: Parts, name: str, experts: range, group: str, num_experts: int
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.streams, shape = parts.streams, (parts.spec.hidden_size,)
        for expert in experts:
            local = (slice(0, shape[0]),)
            piece = Piece(f"{name}.{expert}.scale", shape, (0,), local, group=group)
            values = parameter(shape, [piece], normal(1.0, 7), torch.float32)
            self.register_parameter(f"of_{expert}", values)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        _, number = self.streams.position
        vector: torch.Tensor = getattr(self, f"of_{number % self.num_experts}")
        return x_BSD * vector.to(x_BSD.dtype)


def built(case: Case, mesh: Mesh, experts: range, num_experts: int) -> TrainState:
    """The state of a model with the vectors of `experts`, which are dense in one process."""
    group = "expert" if mesh.groups else DENSE
    make_model = build_file.make_model

    def planted(*args: object) -> nn.Module:
        model = make_model(*args)  # type: ignore[arg-type]
        layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
        for index, layer in enumerate(layers):
            name = f"layers.{index}.mlp.experts"
            vectors = Vectors(layer.parts, name, experts, group, num_experts)
            layer.mlp = Scaled(layer.mlp, vectors)  # type: ignore[assignment]
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_file, "make_model", planted)
        return case.build(mesh)


@dataclass
class Seen:
    losses: list[float]
    norms: list[float]
    gradients: list[Part]
    weights: list[Part]
    masters: list[Part]
    written: list[tuple[str, tuple[int, ...], Box]]  # what this rank writes to a checkpoint
    calls: dict[tuple[str, str, str], int]  # of a step


def seen(case: Case, mesh: Mesh, experts: range, num_experts: int) -> Seen:
    state = built(case, mesh, experts, num_experts)
    forward_backward(state, case.microbatches(0, mesh))
    reduce_gradients(state)
    gradients = [grad.values().clone() for grad in state.masters.stored_grads]
    first = train(state, case, STEPS - 1)
    before = Counter(mesh.traffic.num_calls)
    last = train(state, case, 1)
    calls = Counter(mesh.traffic.num_calls) - before
    written = [
        (place.name, place.global_shape, Box(place.offset, tuple(place.tensor.shape)))
        for place in placements(state)
        if not place.replica
    ]
    masters = pieces(state, state.masters.stored)
    return Seen(
        first.losses + last.losses, first.norms + last.norms,
        pieces(state, gradients), weights(state), masters, written, dict(calls),
    )  # fmt: skip


def seen_on_ranks(case: Case, mesh: Mesh, num_experts: int) -> Seen:
    """On ranks in groups of `num_experts`, each of which has the vector of one expert."""
    rank = mesh.world.rank
    grid = torch.arange(mesh.world.size).view(-1, num_experts)
    axes = {}
    for name, groups in (("edp", grid.T.tolist()), ("ep", grid.tolist())):
        (own,) = (ranks for ranks in groups if rank in ranks)
        group = None if len(own) == 1 else dist.new_subgroups_by_enumeration(groups)[0]
        axes[name] = Axis(name, len(own), own.index(rank), group, mesh.traffic)
    mesh = replace(mesh, groups={"expert": Replicas(axes["edp"], axes["ep"])})
    return seen(case, mesh, range(axes["ep"].rank, axes["ep"].rank + 1), num_experts)


def refused(mesh: Mesh) -> str:
    """What the ranks say where two of them have changed places, so that replicas differ."""
    half = mesh.world.rank // 2
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    one = Axis("edp", 2, half, group, mesh.traffic)
    mesh = replace(mesh, groups={"expert": Replicas(one, Axis("ep"))})
    with pytest.raises(RunError) as error:
        built(case_of(optim_spec()), mesh, range(half, half + 1), 2)
    return str(error.value)


def test_ranks_do_not_sum_gradients_of_different_parameters() -> None:
    """Those that would are told apart by name before the first step; all ranks say the same."""
    (text,) = set(on_mesh(refused, 4))
    assert (
        "ranks would reduce different tensors together: row 0 of the expert parameters is" in text
    )
    assert "layers.0.mlp.experts.0.scale (0,) on rank 0 and " in text
    assert "layers.0.mlp.experts.1.scale (0,) on rank 2" in text


def case_of(optim: OptimSpec, **changes: object) -> Case:
    return Case(model=MODEL, num_microbatches=8, optim=optim, **changes)  # type: ignore[arg-type]


ZERO = "distributed_fused_adam"
SMOOTH = dict(eps=1e-2, clip_grad_norm=0.5)  # the update follows the gradient's size
CASES = {
    "replicas": case_of(optim_spec(**SMOOTH), parallel=ParallelSpec(grad_bucket_bytes=4096)),
    "ZeRO-1": case_of(optim_spec(name=ZERO, **SMOOTH)),
    "FSDP": case_of(optim_spec(**SMOOTH), parallel=ParallelSpec(fsdp=FsdpSpec())),
    "by value": case_of(optim_spec(eps=1e-2, clip_grad_norm=0.01, clip_algorithm="value")),
    "BF16": case_of(optim_spec(name=ZERO, **SMOOTH), compute="bf16"),
    "FP8-LM": case_of(
        optim_spec(name=ZERO, storage=O2, shard_by="elements", **SMOOTH), compute="bf16", fp8=FP8
    ),
}
BOUNDS = {"BF16": 2e-2, "FP8-LM": 0.5}
"""Sums are rounded to BF16 or to FP8; one of another group's ranks would be twice or half of it."""


LAYOUTS = [(name, 2) for name in CASES] + [("ZeRO-1", 4), ("FSDP", 4)]
Found = dict[tuple[str, int], list[Seen]]


@pytest.fixture(scope="module")
def found() -> Found:
    results: Found = {}
    for num_experts in (2, 4):
        cases = {name: CASES[name] for name, count in LAYOUTS if count == num_experts}
        ranks = on_ranks(seen_on_ranks, cases, 4, num_experts=num_experts)
        results |= {(name, num_experts): of_ranks for name, of_ranks in ranks.items()}
    return results


@pytest.mark.parametrize(("name", "num_experts"), LAYOUTS)
def test_a_group_with_other_replicas_trains_as_one_process(
    name: str, num_experts: int, found: Found
) -> None:
    one = replace(CASES[name], parallel=ParallelSpec())
    alone = seen(one, single_rank(), range(num_experts), num_experts)
    ranks, bound = found[name, num_experts], BOUNDS.get(name, 2e-5)
    for kind in ("gradients", "weights", "masters"):
        ours = assembled([getattr(rank, kind) for rank in ranks])
        theirs = assembled([getattr(alone, kind)])
        assert sum(".experts." in key for key in ours) == num_experts * MODEL.num_layers
        assert_close(ours, theirs, bound)
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=bound)
        assert rank.norms == pytest.approx(alone.norms, rel=bound)
        assert rank.norms == ranks[0].norms, "the same on all ranks, bit for bit"
    assert min(alone.norms) > 0.5, "the gradients are clipped"


@pytest.mark.parametrize(("name", "num_experts"), LAYOUTS)
def test_each_part_is_written_once(name: str, num_experts: int, found: Found) -> None:
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    for rank in found[name, num_experts]:
        for key, shape, box in rank.written:
            boxes.setdefault((key, shape), []).append(box)
    assert sum(".experts." in key for key, _ in boxes) >= 3 * num_experts * MODEL.num_layers
    for (key, shape), parts in boxes.items():
        assert why_not_a_partition(parts, shape) is None, key


def test_a_group_sends_messages_of_its_own(found: Found) -> None:
    for rank in found["replicas", 2]:
        assert rank.calls["edp", "all_reduce_sum", "float32"] == 1, "its gradients"
        assert rank.calls["ep", "all_reduce_sum", "float64"] == 1, "its part of the norm"
    for rank in found["ZeRO-1", 2]:
        assert rank.calls["edp", "reduce_scatter_sum", "float32"] == 1
        assert rank.calls["edp", "all_gather", "float32"] == 1
    for rank in found["FSDP", 2]:
        microbatches = 8 // 4
        sums = MODEL.num_layers * microbatches
        assert rank.calls["edp", "reduce_scatter_sum", "float32"] == sums
