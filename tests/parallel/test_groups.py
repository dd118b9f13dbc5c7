"""A second group of parameters, with other replicas than the rest, on four gloo ranks.

Each layer has two vectors that scale the output of its MLP, one for microbatches of even and one
for those of odd number. Four replicas hold one of them each: ranks 0 and 2 the first, 1 and 3 the
second, as ranks hold different experts. One process that holds both trains as they do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafp8.models.block import TransformerLayer
from megafp8.models.init import normal, parameter
from megafp8.models.parts import Parts
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh, Replicas, join, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, OptimSpec, ParallelSpec
from megafp8.specs.geometry import DENSE, Box, Piece, why_not_a_partition
from megafp8.train import build as build_file
from megafp8.train.state import TrainState
from megafp8.train.state_dict import placements
from megafp8.train.step import forward_backward, reduce_gradients, train_step
from tests.parallel.rank_work import Case, pieces, weights
from tests.parallel.rank_work import Piece as Part
from tests.parallel.test_tensor_parallel import assembled
from tests.ranks import Rank, run_ranks
from tests.tiny import gpt_spec, optim_spec
from tests.train.skipped import O2

NUM_EXPERTS = 2
MODEL = gpt_spec()
FP8 = Fp8Recipe(amax_history_len=4)
STEPS = 2


class Scaled(nn.Module):
    """Multiplies the output of an MLP by the vector of the microbatch, which is an expert's."""

    def __init__(
        self, mlp: nn.Module, parts: Parts, layer: int, experts: range, group: str
    ) -> None:
        super().__init__()
        self.mlp, self.vectors = mlp, Vectors(parts, f"layers.{layer}.mlp.experts", experts, group)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.vectors(self.mlp(x_BSD))
        return out


class Vectors(nn.Module):
    def __init__(self, parts: Parts, name: str, experts: range, group: str) -> None:
        super().__init__()
        self.streams, shape = parts.streams, (parts.spec.hidden_size,)
        for expert in experts:
            local = (slice(0, shape[0]),)
            piece = Piece(f"{name}.{expert}.scale", shape, (0,), local, group=group)
            values = parameter(shape, [piece], normal(1.0, 7), torch.float32)
            self.register_parameter(f"of_{expert}", values)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        _, number = self.streams.position
        vector: torch.Tensor = getattr(self, f"of_{number % NUM_EXPERTS}")
        return x_BSD * vector.to(x_BSD.dtype)


def built(case: Case, mesh: Mesh, experts: range) -> TrainState:
    """The state of a model with the vectors of `experts`, which are dense in one process."""
    group = "expert" if mesh.groups else DENSE
    make_model = build_file.make_model

    def planted(*args: object) -> nn.Module:
        model = make_model(*args)  # type: ignore[arg-type]
        layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
        for index, layer in enumerate(layers):
            layer.mlp = Scaled(layer.mlp, layer.parts, index, experts, group)  # type: ignore[assignment]
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


def seen(case: Case, mesh: Mesh, experts: range) -> Seen:
    state = built(case, mesh, experts)
    forward_backward(state, case.microbatches(0, mesh))
    reduce_gradients(state)
    gradients = [grad.values().clone() for grad in state.masters.stored_grads]
    losses, norms, calls = [], [], Counter[tuple[str, str, str]]()
    for step in range(STEPS):
        before = Counter(mesh.traffic.num_calls)
        result = train_step(state, case.microbatches(step, mesh))
        calls = Counter(mesh.traffic.num_calls) - before
        state.step += 1
        losses.append(result.loss)
        norms.append(result.grad_norm)
    written = [
        (place.name, place.global_shape, Box(place.offset, tuple(place.tensor.shape)))
        for place in placements(state)
        if not place.replica
    ]
    masters = pieces(state, [stored.values() for stored in state.masters.stored])
    return Seen(
        losses, norms, pieces(state, gradients), weights(state), masters, written, dict(calls)
    )


def on_ranks(rank: Rank, cases: dict[str, Case]) -> dict[str, Seen]:
    mesh = join(ParallelSpec(devices_per_node=rank.size))
    axes = {}
    for name, groups in (("edp", [[0, 2], [1, 3]]), ("ep", [[0, 1], [2, 3]])):
        group, _ = dist.new_subgroups_by_enumeration(groups)
        (own,) = (ranks for ranks in groups if rank.index in ranks)
        axes[name] = Axis(name, len(own), own.index(rank.index), group, mesh.traffic)
    mesh = replace(mesh, groups={"expert": Replicas(axes["edp"], axes["ep"])})
    expert = axes["ep"].rank
    return {
        name: seen(
            replace(case, parallel=replace(case.parallel, devices_per_node=rank.size)),
            mesh,
            range(expert, expert + 1),
        )
        for name, case in cases.items()
    }


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


@pytest.fixture(scope="module")
def found() -> dict[str, list[Seen]]:
    results = run_ranks(on_ranks, 4, {"cases": CASES})
    return {name: [rank[name] for rank in results] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_group_with_other_replicas_trains_as_one_process(
    name: str, found: dict[str, list[Seen]]
) -> None:
    one = replace(CASES[name], parallel=ParallelSpec())
    alone = seen(one, single_rank(), range(NUM_EXPERTS))
    ranks, bound = found[name], BOUNDS.get(name, 2e-5)
    for kind in ("gradients", "weights", "masters"):
        ours = assembled([getattr(rank, kind) for rank in ranks])
        theirs = assembled([getattr(alone, kind)])
        assert ours.keys() == theirs.keys()
        assert sum(".experts." in key for key in ours) == NUM_EXPERTS * MODEL.num_layers
        for key, expected in theirs.items():
            of = theirs[key.replace("key.bias", "query.bias")].abs().max()
            assert (ours[key] - expected).abs().max() <= bound * of, (kind, key)
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=bound)
        assert rank.norms == pytest.approx(alone.norms, rel=bound)
        assert rank.norms == ranks[0].norms, "the same on all ranks, bit for bit"
    assert min(alone.norms) > 0.5, "the gradients are clipped"


@pytest.mark.parametrize("name", CASES)
def test_each_part_is_written_once(name: str, found: dict[str, list[Seen]]) -> None:
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    for rank in found[name]:
        for key, shape, box in rank.written:
            boxes.setdefault((key, shape), []).append(box)
    assert sum(".experts." in key for key, _ in boxes) >= 3 * NUM_EXPERTS * MODEL.num_layers
    for (key, shape), parts in boxes.items():
        assert why_not_a_partition(parts, shape) is None, key


def test_a_group_sends_messages_of_its_own(found: dict[str, list[Seen]]) -> None:
    for rank in found["replicas"]:
        assert rank.calls["edp", "all_reduce_sum", "float32"] == 1, "its gradients"
        assert rank.calls["ep", "all_reduce_sum", "float64"] == 1, "its part of the norm"
    for rank in found["ZeRO-1"]:
        assert rank.calls["edp", "reduce_scatter_sum", "float32"] == 1
        assert rank.calls["edp", "all_gather", "float32"] == 1
    for rank in found["FSDP"]:
        microbatches = 8 // 4
        sums = MODEL.num_layers * microbatches
        assert rank.calls["edp", "reduce_scatter_sum", "float32"] == sums
