"""Experts on ranks that each have a copy of all: in every layout as one process, in every recipe.

The model has experts in its first two layers, so that a pipeline has a stage without any. A layout
is compared with one process on the same microbatches, of which unequally many tokens count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from megafp8.errors import ConfigError
from megafp8.fp8.scaling import ScaleTable
from megafp8.models.added_loss import AddedLosses
from megafp8.models.router import Router
from megafp8.parallel.mesh import Mesh, single_rank
from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.moe import MoESpec
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult, forward_backward, reduce_gradients
from tests.kit.cases import Case
from tests.kit.faults import Fault, nothing, times, twice
from tests.kit.runs import alone, on_ranks, train
from tests.kit.tensors import Piece, assembled, assert_close, pieces, weights
from tests.parallel.matrix import INTERLEAVED, ZERO, ZERO_BUBBLE
from tests.parallel.rank_work import watch
from tests.parallel.test_pipeline import SCHEDULES
from tests.tiny import gpt_spec, optim_spec

RATE = 0.125  # of the biases: whole multiples of it are exact in FP32, and they change choices
MOE = MoESpec(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    layers=(True, True, False, False),
    score_function="sigmoid",
    scaling_factor=2.5,
    has_expert_bias=True,
    bias_update_rate=RATE,
    router_loss="aux_loss",
    router_loss_coeff=0.5,
    z_loss_coeff=0.1,
    shared_ffn_hidden_size=32,
)
MODEL = gpt_spec(
    num_layers=4,
    bias=False,
    activation="swiglu",
    normalization="rmsnorm",
    position_embedding_type="rope",
    init_method_std=0.1,
    moe=MOE,
)
AGAIN = replace(MODEL, recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
BY_SEQUENCE = replace(MODEL, moe=replace(MOE, router_loss="seq_aux_loss"))
STEPS = 3


def case_of(**changes: Any) -> Case:
    optim = optim_spec(eps=1e-2, clip_grad_norm=0.5)  # an update follows the gradient's size
    case = Case(model=MODEL, steps=STEPS, num_microbatches=4, optim=optim)
    return replace(case, **changes)


SP, PP = ParallelSpec(tp=2, sequence_parallel=True), ParallelSpec(pp=2)
SHARDED = replace(case_of().optim, name=ZERO.name)
TWO = {
    "dp 2": case_of(),
    "dp 2, ZeRO-1": case_of(optim=SHARDED),
    "tp 2": case_of(parallel=SP),
    "tp 2, ZeRO-1": case_of(parallel=SP, optim=SHARDED),
    "cp 2": case_of(parallel=ParallelSpec(cp=2)),
    "pp 2": case_of(parallel=PP),
    "pp 2, zero bubble, recomputed": case_of(
        model=AGAIN, parallel=replace(PP, pipeline=ZERO_BUBBLE)
    ),
    "tp 2, by sequence": case_of(model=BY_SEQUENCE, parallel=SP),
    "cp 2, by sequence": case_of(model=BY_SEQUENCE, parallel=ParallelSpec(cp=2)),
}
FOUR = {
    "tp 2 x dp 2, ZeRO-1": case_of(parallel=SP, optim=SHARDED),
    "tp 2 x cp 2": case_of(parallel=replace(SP, cp=2)),
    "tp 2 x pp 2, interleaved": case_of(parallel=replace(SP, pp=2, pipeline=INTERLEAVED)),
}


@dataclass
class Seen:
    gradients: list[Piece]  # of the first step's sum
    own_counts: dict[int, torch.Tensor]  # by layer, of the first step: of this rank alone
    results: list[StepResult]
    counts: list[dict[int, torch.Tensor]]  # of each step, of all ranks
    biases: list[dict[int, torch.Tensor]]
    weights: list[Piece]
    names: dict[str, list[str]]
    updates: dict[str, list[dict[str, torch.Tensor]]]  # of scale tables, `staged` before each

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        return [result.grad_norm for result in self.results]


def seen(case: Case, mesh: Mesh) -> Seen:
    state = case.build(mesh)
    forward_backward(state, case.microbatches(0, mesh))
    own_counts = of_layers(state, "counts")
    reduce_gradients(state)
    gradients = pieces(state, state.masters.stored_grads)
    state, updates = case.build(mesh), dict[str, list[dict[str, torch.Tensor]]]()
    for direction, table in state.scaling.tables.items():
        watch(table, updates.setdefault(direction, []))
    found = Seen(gradients, own_counts, [], [], [], [], {}, updates)
    for _ in range(case.steps):
        found.results += train(state, case, 1).results
        found.counts.append(of_layers(state, "counts"))
        found.biases.append(of_layers(state, "bias"))
    found.weights = weights(state)
    found.names = {direction: table.names for direction, table in state.scaling.tables.items()}
    return found


def of_layers(state: TrainState, name: str) -> dict[int, torch.Tensor]:
    return {r.layer: getattr(r, name).clone() for r in state.model.parts.routers}


Found = dict[str, list[Seen]]


@pytest.fixture(scope="module")
def found() -> Found:
    return on_ranks(seen, TWO, 2) | on_ranks(seen, FOUR, 4)


@pytest.fixture(scope="module")
def one() -> Callable[[Case], Seen]:
    """What one process sees of a case; each model runs once."""
    known: dict[Any, Seen] = {}

    def run(case: Case) -> Seen:
        model = replace(case.model, recompute=None)
        if model not in known:
            known[model] = alone(seen, {"": case_of(model=model)})[""]
        return known[model]

    return run


def assert_gradients(ranks: list[Seen], one: Seen) -> None:
    ours = assembled(rank.gradients for rank in ranks)
    theirs = assembled([one.gradients])
    assert ours.keys() == theirs.keys()
    far = {n: (ours[n] - x).norm() / x.norm() for n, x in theirs.items() if x.any()}
    assert not {name: distance for name, distance in far.items() if not distance <= 2e-5}
    assert not any(ours[name].any() for name, x in theirs.items() if not x.any())


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_layout_trains_as_one_process(
    name: str, found: Found, one: Callable[[Case], Seen]
) -> None:
    ranks, whole = found[name], one((TWO | FOUR)[name])
    assert_gradients(ranks, whole)
    for rank in ranks:
        assert rank.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
        assert rank.losses == pytest.approx(whole.losses, rel=1e-5)
        assert rank.norms == pytest.approx(whole.norms, rel=1e-5)
        for mine, theirs in zip(rank.results, whole.results, strict=True):
            assert mine.added == pytest.approx(theirs.added, rel=1e-5)
            assert mine.added.keys() == {MOE_LOSS[name], "z_loss"}
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms), "bit for bit"
    ours, theirs = (assembled(x.weights for x in side) for side in (ranks, [whole]))
    assert_close(ours, theirs, 1e-4)
    assert min(whole.norms) > 0.5, "the gradients are clipped"


MOE_LOSS = {
    name: case.model.moe.router_loss  # type: ignore[union-attr]
    for name, case in (TWO | FOUR).items()
}


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_counts_and_biases_are_those_of_all_ranks(
    name: str, found: Found, one: Callable[[Case], Seen]
) -> None:
    """Each token is counted once, on one rank, and a bias follows the counts of a step once."""
    ranks, whole, case = found[name], one((TWO | FOUR)[name]), (TWO | FOUR)[name]
    tokens = case.num_microbatches * 2 * 16
    for layer in (0, 1):
        having = [rank for rank in ranks if layer in rank.own_counts]
        assert sum(rank.own_counts[layer] for rank in having).tolist() == (  # type: ignore[union-attr]
            whole.own_counts[layer].tolist()
        )
        bias = torch.zeros(MOE.num_experts)
        for step in range(STEPS):
            counts = having[0].counts[step][layer]
            assert counts.sum() == tokens * MOE.top_k
            bias += RATE * (counts.double().mean() - counts).sign()
            for rank in having:
                assert torch.equal(rank.counts[step][layer], counts)
                assert torch.equal(rank.biases[step][layer], bias)
        assert torch.equal(having[0].counts[0][layer], whole.counts[0][layer])
        assert torch.equal(having[0].biases[0][layer], whole.biases[0][layer])
        assert bias.any()
