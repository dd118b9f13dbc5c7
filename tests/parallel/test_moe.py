"""Experts on ranks that each have a copy of all: in every layout as one process, in every recipe.

The model has experts in its first two layers, so that a pipeline has a stage without any. A layout
is compared with one process on the same microbatches, of which unequally many tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_numerics.cast import Fp8Tensor
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.fp8.quantizer import LinearQuantizer, Role
from megafp8.fp8.scaling import ScaleTable, Slot
from megafp8.models.added_loss import AddedLosses
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import Mesh, Replicas
from megafp8.parallel.parts import linears_of
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.specs.geometry import EXPERTS
from megafp8.specs.model import RecomputeSpec
from megafp8.specs.moe import MoESpec
from megafp8.specs.precision import ModuleRule
from megafp8.train import step as step_file
from megafp8.train.report.fp8 import PrecisionShare, share_of
from megafp8.train.state import TrainState
from megafp8.train.step import StepResult
from megafp8.train.validate import evaluate
from tests.checkpoint.test_layouts import same_tensors
from tests.kit.cases import Case
from tests.kit.faults import Fault, nothing, times, twice, unchanged
from tests.kit.runs import alone, on_ranks, train
from tests.kit.tensors import (
    Piece,
    Tables,
    assembled,
    assert_close,
    assert_same,
    assert_same_pieces,
    pieces,
    saved,
    tables,
    weights,
)
from tests.parallel import matrix
from tests.parallel.matrix import INTERLEAVED, ZERO, ZERO_BUBBLE
from tests.parallel.rank_work import watch
from tests.parallel.test_pipeline import SCHEDULES
from tests.parallel.test_tensor_parallel import assert_same_tables
from tests.tiny import SEQ, gpt_spec, optim_spec

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
STEPS = 2


def case_of(**changes: Any) -> Case:
    optim = optim_spec(eps=1e-2, clip_grad_norm=0.5)  # an update follows the gradient's size
    case = Case(model=MODEL, steps=STEPS, num_microbatches=4, optim=optim)
    return replace(case, **changes)


SP, CP, PP = (
    ParallelSpec(tp=2, sequence_parallel=True), ParallelSpec(cp=2), ParallelSpec(pp=2),
)  # fmt: skip
SHARDED = replace(case_of().optim, name=ZERO.name)
Cases = dict[int, dict[str, Case]]  # by the number of ranks
QUICK: Cases = {
    2: {
        "dp 2": case_of(),
        "tp 2, ZeRO-1": case_of(parallel=SP, optim=SHARDED),
        "cp 2, by sequence": case_of(model=BY_SEQUENCE, parallel=CP),
        "pp 2, zero bubble, recomputed": case_of(
            model=AGAIN, parallel=replace(PP, pipeline=ZERO_BUBBLE)
        ),
    },
    4: {"tp 2 x dp 2, ZeRO-1": case_of(parallel=SP, optim=SHARDED)},
}
SLOW: Cases = {
    2: {
        "dp 2, ZeRO-1": case_of(optim=SHARDED),
        "tp 2": case_of(parallel=SP),
        "tp 2, by sequence": case_of(model=BY_SEQUENCE, parallel=SP),
        "cp 2": case_of(parallel=CP),
        **{
            f"pp 2, {name}": case_of(parallel=replace(PP, pipeline=schedule))
            for name, schedule in SCHEDULES.items()
        },
    },
    4: {
        "tp 2 x cp 2, by sequence": case_of(model=BY_SEQUENCE, parallel=replace(SP, cp=2)),
        "tp 2 x pp 2, interleaved": case_of(parallel=replace(SP, pp=2, pipeline=INTERLEAVED)),
        "cp 2 x dp 2, ZeRO-1": case_of(parallel=CP, optim=SHARDED),
        "dp 2 x pp 2, ZeRO-1": case_of(parallel=PP, optim=SHARDED),
    },
    8: {"tp 2 x cp 2 x pp 2": case_of(parallel=replace(SP, cp=2, pp=2))},
}


def named(*groups: Cases) -> dict[str, Case]:
    each = (cases.items() for group in groups for cases in group.values())
    return dict(pair for items in each for pair in items)


def params(quick: Cases, slow: Cases) -> list[Any]:
    return [*named(quick), *(pytest.param(name, marks=pytest.mark.slow) for name in named(slow))]


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
    share: PrecisionShare | None
    initial: list[Piece]  # weights before the first step

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        return [result.grad_norm for result in self.results]


def seen(case: Case, mesh: Mesh) -> Seen:
    state = case.build(mesh)
    step_file.forward_backward(state, case.microbatches(0, mesh))
    own_counts = of_layers(state, "counts")
    step_file.reduce_gradients(state)
    gradients = pieces(state, state.masters.stored_grads)
    state, updates = case.build(mesh), dict[str, list[dict[str, torch.Tensor]]]()
    for direction, table in state.scaling.tables.items():
        watch(table, updates.setdefault(direction, []))
    share = share_of(case.spec(), state)
    initial = weights(state)
    found = Seen(gradients, own_counts, [], [], [], [], {}, updates, share, initial)
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
Ranks = Callable[[str], list[Seen]]


def runs_of(*groups: Cases) -> Ranks:
    """Return what finds the ranks of a name; the cases of a group run together, when needed."""
    found: Found = {}

    def ranks(name: str) -> list[Seen]:
        if name not in found:
            (group,) = (group for group in groups if name in named(group))
            for size, cases in group.items():
                found.update(on_ranks(seen, cases, size))
        return found[name]

    return ranks


@pytest.fixture(scope="module")
def found() -> Ranks:
    return runs_of(QUICK, SLOW)


def one_process() -> Callable[[Case], Seen]:
    """Return what tells what one process sees of a case; each model runs once."""
    known: dict[Any, Seen] = {}

    def run(case: Case) -> Seen:
        key = replace(case.model, recompute=None), case.faults
        if key not in known:
            known[key] = alone(seen, {"": case_of(model=key[0], faults=key[1])})[""]
        return known[key]

    return run


@pytest.fixture(scope="module")
def one() -> Callable[[Case], Seen]:
    return one_process()


def assert_gradients(ranks: list[Seen], one: Seen) -> None:
    ours = assembled(rank.gradients for rank in ranks)
    theirs = assembled([one.gradients])
    assert ours.keys() == theirs.keys()
    far = {n: (ours[n] - x).norm() / x.norm() for n, x in theirs.items() if x.any()}
    beyond = {name: distance.item() for name, distance in far.items() if not distance <= 2e-5}
    assert not beyond, f"gradients: {beyond}"
    assert not any(ours[name].any() for name, x in theirs.items() if not x.any())


def check_training(ranks: list[Seen], whole: Seen) -> None:
    """Gradients, losses, norms and what routers add to the loss."""
    assert_gradients(ranks, whole)
    for rank in ranks:
        assert rank.norms == pytest.approx(whole.norms, rel=1e-5), "norms"
        assert rank.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
        assert rank.losses == pytest.approx(whole.losses, rel=1e-5), "losses"
        for mine, theirs in zip(rank.results, whole.results, strict=True):
            assert mine.added == pytest.approx(theirs.added, rel=1e-5), "losses of routers"
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms), "bit for bit"
    ours, theirs = (assembled(x.weights for x in side) for side in (ranks, [whole]))
    assert_close(ours, theirs, 1e-4)


def check_counts(ranks: list[Seen], whole: Seen) -> None:
    """Each token is counted once, on one rank, and a bias follows the counts of a step once."""
    for layer, counts in whole.own_counts.items():
        having = [rank for rank in ranks if layer in rank.own_counts]
        of_ranks = torch.stack([rank.own_counts[layer] for rank in having]).sum(0)
        assert torch.equal(of_ranks, counts), "counts of ranks"
        assert torch.equal(having[0].counts[0][layer], counts), "counts of a step"
        bias = torch.zeros(len(counts))
        for step in range(len(whole.results)):
            of_step = having[0].counts[step][layer]
            assert of_step.sum() == counts.sum()
            bias += RATE * (of_step.double().mean() - of_step).sign()
            for rank in having:
                assert torch.equal(rank.counts[step][layer], of_step), "counts of a step"
                assert torch.equal(rank.biases[step][layer], bias), "biases"


@pytest.mark.parametrize("name", params(QUICK, SLOW))
def test_a_layout_trains_as_one_process(
    name: str, found: Ranks, one: Callable[[Case], Seen]
) -> None:
    case = named(QUICK, SLOW)[name]
    whole, ranks = one(case), found(name)
    check_training(ranks, whole)
    check_counts(ranks, whole)
    assert case.model.moe is not None
    assert whole.results[0].added.keys() == {case.model.moe.router_loss, "z_loss"}
    tokens = case.num_microbatches * case.batch * SEQ * MOE.top_k
    assert {counts.sum().item() for counts in whole.counts[-1].values()} == {tokens}
    assert min(whole.norms) > 0.5, "the gradients are clipped"
    assert all(bias.any() for bias in whole.biases[-1].values())


def without_group(right: Callable[..., Any], *args: Any) -> Any:
    """Leave the squares of experts out of the norm."""
    return right(*args) * (args[-1] != EXPERTS)


def over_data(right: Callable[..., Any], mesh: Mesh) -> Mesh:
    """Take the replicas of all parameters for those of experts."""
    return replace(mesh, groups={EXPERTS: Replicas(mesh.data, Axis("parts"))})


def routers_apart(right: Callable[..., Any], state: TrainState) -> None:
    """Leave the gradients of routers as they are on each rank."""
    routers = state.model.parts.routers
    grads = [grad for router in routers for grad in state.masters.grads_of(router.weight)]
    before = [grad.clone() for grad in grads]
    right(state)
    for grad, of_rank in zip(grads, before, strict=True):
        grad.copy_(of_rank)


@contextmanager
def of_another_microbatch(
    right: Callable[..., Any], self: AddedLosses, *counted: torch.Tensor
) -> Iterator[None]:
    """Recompute with the counted tokens of the microbatch whose forward pass was the last."""
    with right(self, self._is_counted_BS, self._num_counted):
        yield


@contextmanager
def recorded_again(
    right: Callable[..., Any], self: AddedLosses, *counted: torch.Tensor
) -> Iterator[None]:
    """Count a recomputed pass too."""
    with right(self, *counted):
        self._is_recording = True
        yield


ADDED = "megafp8.models.added_loss.AddedLosses"
FAULTS: dict[str, tuple[ParallelSpec, str, Callable[..., Any], str]] = {
    "counts of this rank alone": (SP, "megafp8.parallel.parts._sum_over", unchanged, "^gradients"),
    "a step's counts of a rank": (SP, "megafp8.train.step.take_counts", nothing, "^counts"),
    "the norm without the group": (
        SP, "megafp8.optim.clipping._squares", without_group, "^norms",
    ),
    "a loss counted twice": (CP, f"{ADDED}.add_mean", twice, "^losses of routers"),
    "a loss that weighs twice": (
        SP, "megafp8.parallel.parts._sum_over", partial(times, 2), "^gradients",
    ),
    "z-losses of ranks added": (
        SP, "megafp8.models.router.z_loss", partial(times, 2), "^gradients",
    ),
    "a bias moved twice": (PP, "megafp8.models.router.Router.move_bias", twice, "^biases"),
    "experts summed over data alone": (
        SP, "megafp8.parallel.mesh.Mesh.with_experts", over_data,
        r"experts\.0\.gate\.weight differs between ranks",
    ),
    "gradients of routers not summed": (
        SP, "megafp8.train.step.reduce_gradients", routers_apart,
        r"router\.weight differs between ranks",
    ),
    "counted tokens of another microbatch": (
        PP, f"{ADDED}._recomputation", of_another_microbatch, "^gradients",
    ),
    "tokens counted when recomputed": (PP, f"{ADDED}._recomputation", recorded_again, "^counts"),
}  # fmt: skip


def with_fault(name: str) -> Case:
    parallel, target, wrong, _ = FAULTS[name]
    model = AGAIN if "microbatch" in name or "recomputed" in name else MODEL
    return case_of(parallel=parallel, model=model, faults=(Fault(target, wrong),))


@pytest.fixture(scope="module")
def faulty() -> Found:
    return on_ranks(seen, {name: with_fault(name) for name in FAULTS}, 2)


@pytest.mark.parametrize("name", FAULTS)
def test_these_checks_find_an_error(name: str, faulty: Found, one: Callable[[Case], Seen]) -> None:
    ranks, whole = faulty[name], one(case_of())
    with pytest.raises(AssertionError, match=FAULTS[name][-1]):
        check_counts(ranks, whole)
        check_training(ranks, whole)


SPARSE = replace(MOE, num_experts=16, top_k=1, router_loss="none", z_loss_coeff=0.0)
"""So many experts that some have no token on a rank, or on any."""
FP8 = Fp8Recipe(amax_history_len=4)
STORED = replace(FP8, params_in_fp8=True)


def in_fp8(recipe: Fp8Recipe = FP8, **changes: Any) -> Case:
    """FP8 without losses of routers, whose unit is a microbatch: those of replicas are merged."""
    return replace(case_of(fp8=recipe, model=replace(MODEL, moe=SPARSE)), **changes)


QUICK_IN_FP8: Cases = {
    2: {"tp 2": in_fp8(parallel=SP)},
    4: {"tp 2 x dp 2, weights in FP8, ZeRO-1": in_fp8(STORED, parallel=SP, optim=SHARDED)},
}
SLOW_IN_FP8: Cases = {
    2: {
        "dp 2": in_fp8(),
        "cp 2": in_fp8(parallel=CP),
        "pp 2": in_fp8(parallel=PP),
        "tp 2, weights in FP8": in_fp8(STORED, parallel=SP),
        "tp 2, weights in FP8, ZeRO-1": in_fp8(STORED, parallel=SP, optim=SHARDED),
    }
}


def replicas(name: str) -> int:
    return 2 if "dp 2" in name else 1


@pytest.fixture(scope="module")
def in_delayed() -> Ranks:
    return runs_of(QUICK_IN_FP8, SLOW_IN_FP8, {2: IN_FP8_FAULTS})


@pytest.fixture(scope="module")
def whole_in_delayed() -> dict[tuple[bool, int], Seen]:
    """What one process sees, by whether weights are in FP8, and what is merged."""
    both = [(stored, merged) for stored in (False, True) for merged in (1, 2)]
    cases = {
        str((stored, merged)): in_fp8(STORED if stored else FP8, merged=merged)
        for stored, merged in both
    }
    found = alone(seen, cases)
    return {key: found[str(key)] for key in both}


def check_scales(ranks: list[Seen], whole: Seen) -> tuple[int, int]:
    """Return the tensors of experts without a token, and those with tokens on some ranks only."""
    ours, theirs = (assembled(x.initial for x in side) for side in (ranks, [whole]))
    assert_same(ours, theirs)
    assembled(rank.weights for rank in ranks)  # replicas agree bit for bit
    empty = one_sided = 0
    for direction, names in whole.names.items():
        rows, of_whole = {name: row for row, name in enumerate(names)}, whole.updates[direction][0]
        for rank in ranks:
            of_rank = rank.updates[direction][0]
            for row, tensor in enumerate(rank.names[direction]):
                at, is_weight = rows[tensor], tensor.endswith(".weight")
                assert of_rank["num_updates"][row] == of_whole["num_updates"][at], tensor
                # The newest entry of a history is the amax of all ranks.
                mine = of_rank["history"][row, -1].item()
                expected = of_whole["history"][at, -1].item()
                assert mine == pytest.approx(expected, rel=0 if is_weight else 0.05), tensor
                if ".experts." in tensor and not is_weight:
                    empty += expected == 0
                    one_sided += expected > 0 and of_rank["staged"][row].item() == 0
    for rank in ranks:
        assert rank.losses == pytest.approx(whole.losses, rel=2e-2)
        assert rank.losses == ranks[0].losses
    return empty, one_sided


@pytest.mark.parametrize("name", params(QUICK_IN_FP8, SLOW_IN_FP8))
def test_scales_of_an_expert_are_those_of_its_tokens_on_all_ranks(
    name: str, in_delayed: Ranks, whole_in_delayed: dict[tuple[bool, int], Seen]
) -> None:
    ranks, whole = in_delayed(name), whole_in_delayed["in FP8" in name, replicas(name)]
    empty, one_sided = check_scales(ranks, whole)
    assert empty > 0 and (one_sided > 0 or name == "pp 2")
    assert ranks[0].share is not None and ranks[0].share == whole.share
    if "pp" not in name:
        assert_same_tables(ranks)


def of_another_expert(
    right: Callable[..., Any], table: ScaleTable, name: str, *args: Any, **more: Any
) -> Slot:
    """Let the weight of each expert of odd number have the row of the one before."""
    slot: Slot = right(table, name, *args, **more)
    layer, experts, rest = name.partition(".experts.")
    if not experts or not rest.endswith("weight") or int(rest[0]) % 2 == 0:
        return slot
    number, _, rest = rest.partition(".")
    return Slot(table, table.names.index(f"{layer}{experts}{int(number) - 1}.{rest}"))


def of_own_part(right: Callable[..., Any], amaxes: torch.Tensor, *args: Any) -> torch.Tensor:
    """Take the amax of a rank's part of a weight for that of the weight."""
    return amaxes


def not_reduced(right: Callable[..., Any], table: ScaleTable, start: object) -> None:
    """Update a table by the amaxes of this rank alone."""
    right(table, None)


IN_FP8_FAULTS = {
    name: in_fp8(parallel=SP, faults=(Fault(f"megafp8.fp8.scaling.ScaleTable.{of}", wrong, rank),))
    for name, of, wrong, rank in (
        ("a scale of another expert", "register", of_another_expert, 1),
        ("amaxes of this rank alone", "update", not_reduced, None),
    )
}


@pytest.mark.parametrize("name", IN_FP8_FAULTS)
def test_checks_of_scales_find_an_error(
    name: str, in_delayed: Ranks, whole_in_delayed: dict[tuple[bool, int], Seen]
) -> None:
    with pytest.raises(AssertionError, match=r"^layers\.0\."):
        check_scales(in_delayed(name), whole_in_delayed[False, 1])


CURRENT = in_fp8(replace(STORED, name="tensorwise"), parallel=SP, optim=SHARDED)
"""The scale of a weight follows from its own amax, and ranks have parts of its master."""


def experts_of(case: Case, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The values of experts' weights, which are in FP8, by their names."""
    found = {}
    for linear in linears_of(case.build(mesh).model):
        if ".experts." in linear.name:
            stored, _ = linear.weight_form.operands(linear.weight, torch.float32, 1)
            assert isinstance(stored, Fp8Tensor)
            found[linear.name] = stored.dequantize(torch.float32)
    return found


def test_parts_of_an_expert_are_stored_by_the_amax_of_the_whole() -> None:
    fault = Fault("megafp8.optim.fp8_weights.largest_of_parts", of_own_part)
    both = {"right": CURRENT, "wrong": replace(CURRENT, faults=(fault,))}
    ranks, whole = on_ranks(experts_of, both, 2), alone(experts_of, {"": CURRENT})[""]
    for rank in ranks["right"]:
        assert_same(rank, whole)
    for rank in ranks["wrong"]:
        assert [name for name, values in whole.items() if not torch.equal(rank[name], values)]


Rows = list[tuple[int, int, torch.Tensor]]
"""The sample, position and values of each row."""


def places(case: Case, mesh: Mesh) -> dict[str, Rows]:
    """The rows that experts have cast in a step, by tensor."""
    state, operands = case.build(mesh), LinearQuantizer.operands
    found: dict[str, Rows] = {}

    def noted(self: LinearQuantizer, role: Role, x: torch.Tensor, **more: Any) -> Any:
        if ".experts." in self.name and role != "weight":
            if (rows := more.get("rows")) is None:
                return operands(self, role, x, **more)
            each = zip(rows.samples.tolist(), rows.positions.tolist(), x.detach(), strict=True)
            found.setdefault(f"{self.name}.{role}", []).extend(each)
        return operands(self, role, x, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearQuantizer, "operands", noted)
        step_file.forward_backward(state, case.microbatches(0, mesh))
    assert math.isfinite(evaluate(state, case.microbatches(0, mesh))[0])
    return found


ELSEWHERE = ModuleRule("*", "high_precision")
RANDOM = in_fp8(
    Fp8Recipe(name="nvfp4", modules=(ModuleRule("layers.0.mlp.experts.*", "nvfp4"), ELSEWHERE)),
    model=replace(MODEL, moe=replace(SPARSE, top_k=2)),
)
"""Only the experts of the first layer round, so that their tokens are the same in every layout."""


def test_an_expert_draws_by_the_places_of_its_tokens() -> None:
    """They are the same in every layout, and the row at a place is that of the same token."""
    layouts = {"dp": ParallelSpec(), "tp": SP, "cp": CP, "pp": PP}
    cases = {name: replace(RANDOM, parallel=parallel) for name, parallel in layouts.items()}
    ranks, whole = on_ranks(places, cases, 2), alone(places, {"": RANDOM})[""]
    of_input = {tensor: rows for tensor, rows in whole.items() if tensor.endswith("fc1.input")}
    assert sum(map(len, of_input.values())) == 4 * 2 * SEQ * 2  # experts of a token
    for name in layouts:
        for tensor, expected in whole.items():
            rows = [row for rank in ranks[name] for row in rank.get(tensor, ())]
            ours, theirs = (sorted(x, key=lambda row: row[:2]) for x in (rows, expected))
            assert [row[:2] for row in ours] == [row[:2] for row in theirs], (name, tensor)
            if tensor in of_input and theirs:
                mine, one = (torch.stack([row[2] for row in x]) for x in (ours, theirs))
                assert torch.allclose(mine, one, rtol=1e-3, atol=1e-4), (name, tensor)


@dataclass
class Done:
    losses: list[float]
    norms: list[float]
    saved: list[Piece]
    tables: Tables
    biases: dict[int, torch.Tensor]
    named: str | None


def trained(case: Case, mesh: Mesh) -> Done:
    state = case.build(mesh)
    steps = train(state, case)
    biases = of_layers(state, "bias")
    return Done(steps.losses, steps.norms, saved(state), tables(state), biases, steps.named)


def test_a_checkpoint_passes_through_every_layout(tmp_path: Path) -> None:
    """Each loads what the one before has saved: all tensors stay the same, bit for bit."""
    few = replace(MODEL, moe=replace(SPARSE, num_experts=4))
    start = in_fp8(STORED, model=few, steps=1, saves=tmp_path / "one")
    alone(trained, {"": start})
    here = first = tmp_path / "one" / step_name(1)
    layouts = {
        "tp 2, ZeRO-1": in_fp8(STORED, parallel=SP, optim=SHARDED),
        "pp 2, zero bubble": in_fp8(STORED, parallel=replace(PP, pipeline=ZERO_BUBBLE)),
        "tp 2 x dp 2, ZeRO-1": in_fp8(STORED, parallel=SP, optim=SHARDED),
        "one": in_fp8(STORED),
    }
    for name, case in layouts.items():
        layouts[name] = replace(case, model=few, steps=0, begins=here, saves=tmp_path / name)
        here = tmp_path / name / step_name(1)
    *two, four, one = layouts
    on_ranks(trained, {name: layouts[name] for name in two}, 2)
    on_ranks(trained, {four: layouts[four]}, 4)
    alone(trained, {one: layouts[one]})  # test_layouts.py goes through all others
    before, after = Reader(first), Reader(here)
    names = {"model/layers.1.mlp.router.bias", "optimizer/exp_avg/layers.0.mlp.router.weight"}
    names |= {f"model/layers.1.mlp.experts.3.{part}.weight" for part in ("gate", "up", "fc2")}
    names |= {"scaling/forward/history/layers.0.mlp.experts.3.fc1.input"}
    assert names <= set(before.names())
    assert before.read("model/layers.1.mlp.router.bias").any()
    same_tensors(before, after)


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Done]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    case = replace(in_fp8(STORED), parallel=SP, optim=SHARDED)
    cases = {
        "whole": replace(case, steps=3),
        "first": replace(case, steps=2, saves=folder),
        "rest": replace(case, steps=1, begins=folder / step_name(2)),
    }
    return on_ranks(trained, cases | SPOILED, 2)


def test_a_run_continues_bit_for_bit(continued: dict[str, list[Done]]) -> None:
    for whole, rest in zip(continued["whole"], continued["rest"], strict=True):
        assert (whole.losses[2:], whole.norms[2:]) == (rest.losses, rest.norms)
        assert_same_pieces(rest.saved, whole.saved)
        for direction, fields in whole.tables.items():
            assert_same(rest.tables[direction], fields)
        assert all(torch.equal(rest.biases[layer], bias) for layer, bias in whole.biases.items())


SPOILED = {"spoiled": case_of(steps=2, spoiled=1), "not spoiled": case_of(steps=1)}


def test_a_skipped_step_moves_no_bias(continued: dict[str, list[Done]]) -> None:
    """Rank 1's gradients are not finite, and both ranks skip the step."""
    for rank, before in zip(continued["spoiled"], continued["not spoiled"], strict=True):
        assert math.isfinite(rank.losses[1]) and not math.isfinite(rank.norms[1])
        assert_same_pieces(rank.saved, before.saved)
        assert all(torch.equal(rank.biases[n], bias) for n, bias in before.biases.items())
        assert rank.named == continued["spoiled"][0].named is not None


RECIPES = {
    name: matrix.PRECISIONS[name] for name in matrix.precisions_of("dp 2") if " te" not in name
}
EVERYWHERE = {
    2: {"dp 2": ParallelSpec(), "tp 2": SP, "cp 2": CP, "pp 2, recomputed": PP},
    4: {"tp 2 x dp 2, ZeRO-1": SP},
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", RECIPES)
def test_every_recipe_trains_in_every_layout(precision: str) -> None:
    """Replicas agree bit for bit, and losses are near those of one process."""
    compute, recipe = RECIPES[precision]
    sizes: dict[str, Any] = matrix.WIDE if precision in matrix.BATCHES else {}
    model = replace(MODEL, moe=replace(SPARSE, ffn_hidden_size=64), **sizes)
    batch = matrix.BATCHES.get(precision, 2)
    case = case_of(compute=compute, fp8=recipe, model=model, batch=batch)
    merged = {count: alone(seen, {"": replace(case, merged=count)})[""] for count in (1, 2)}
    for size, layouts in EVERYWHERE.items():
        cases = {
            name: replace(
                case,
                parallel=parallel,
                model=replace(model, recompute=AGAIN.recompute if "recomputed" in name else None),
                optim=SHARDED if "ZeRO" in name else case.optim,
            )
            for name, parallel in layouts.items()
        }
        for name, ranks in on_ranks(seen, cases, size).items():
            whole = merged[replicas(name)]
            assembled(rank.weights for rank in ranks)
            for rank in ranks:
                assert rank.losses == ranks[0].losses, name
                assert rank.losses == pytest.approx(whole.losses, rel=2e-2), name
                assert rank.norms == pytest.approx(whole.norms, rel=matrix.NORMS_BOUND), name
