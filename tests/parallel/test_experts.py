"""Experts that are divided over ranks: every layout as one process, bytes, scales, checkpoints.

Model, microbatches and checks are those of test_moe.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.step_directories import step_name
from megafp8.parallel.collectives import Axis
from megafp8.parallel.experts import AllToAll
from megafp8.parallel.mesh import Mesh, Replicas
from megafp8.plan.memory import rank_memory
from megafp8.specs import ParallelSpec
from megafp8.specs.geometry import EXPERTS
from megafp8.specs.precision import ModuleRule
from megafp8.train.generate import sample
from megafp8.train.state import TrainState
from tests.checkpoint.test_layouts import same_tensors
from tests.kit.cases import Case
from tests.kit.faults import Fault, nothing
from tests.kit.runs import alone, on_ranks, train
from tests.kit.tensors import assert_same, assert_same_pieces
from tests.parallel import matrix
from tests.parallel.matrix import INTERLEAVED, ZERO_BUBBLE
from tests.parallel.test_moe import (
    AGAIN,
    BY_SEQUENCE,
    CP,
    ELSEWHERE,
    MODEL,
    MOE,
    PP,
    RANDOM,
    RECIPES,
    SHARDED,
    SP,
    SPARSE,
    STORED,
    Cases,
    Done,
    Found,
    Ranks,
    Seen,
    case_of,
    check_counts,
    check_scales,
    check_training,
    in_fp8,
    named,
    one_process,
    params,
    places,
    runs_of,
    seen,
    trained,
    without_group,
)
from tests.parallel.test_pipeline import SCHEDULES
from tests.parallel.test_tensor_parallel import assert_same_tables
from tests.tiny import SEQ

EP, EP_4 = ParallelSpec(ep=2), ParallelSpec(ep=4)
SP_EP, CP_EP, PP_EP = (replace(parallel, ep=2) for parallel in (SP, CP, PP))
QUICK: Cases = {
    2: {
        "ep 2": case_of(parallel=EP),
        "ep 2, ZeRO-1, recomputed": case_of(parallel=EP, model=AGAIN, optim=SHARDED),
    },
    4: {
        "tp 2 x dp 2, ep 2, ZeRO-1": case_of(parallel=SP_EP, optim=SHARDED),
        "ep 2 x pp 2, zero bubble": case_of(parallel=replace(PP_EP, pipeline=ZERO_BUBBLE)),
    },
}
SLOW: Cases = {
    2: {
        "tp 2, ep 2": case_of(parallel=SP_EP),
        "cp 2, ep 2, by sequence": case_of(model=BY_SEQUENCE, parallel=CP_EP),
    },
    4: {
        "ep 4": case_of(parallel=EP_4),
        "ep 2, edp 2, ZeRO-1": case_of(parallel=EP, optim=SHARDED),
        "tp 2 x dp 2, ep 4": case_of(parallel=replace(SP, ep=4)),
        "cp 2 x dp 2, ep 4, ZeRO-1": case_of(parallel=replace(CP, ep=4), optim=SHARDED),
        **{
            f"ep 2 x pp 2, {name}": case_of(parallel=replace(PP_EP, pipeline=schedule))
            for name, schedule in SCHEDULES.items()
        },
        "ep 2 x pp 2, interleaved, recomputed": case_of(
            model=AGAIN, parallel=replace(PP_EP, pipeline=INTERLEAVED)
        ),
    },
}


@pytest.fixture(scope="module")
def found() -> Ranks:
    return runs_of(QUICK, SLOW)


@pytest.fixture(scope="module")
def one() -> Callable[[Case], Seen]:
    return one_process()


@pytest.mark.parametrize("name", params(QUICK, SLOW))
def test_a_layout_trains_as_one_process(
    name: str, found: Ranks, one: Callable[[Case], Seen]
) -> None:
    ranks, whole = found(name), one(named(QUICK, SLOW)[name])
    check_training(ranks, whole)
    check_counts(ranks, whole)
    experts = {
        weight.name for rank in ranks for weight in rank.weights if ".experts." in weight.name
    }
    for rank in ranks:
        own = [weight.name for weight in rank.weights if ".experts." in weight.name]
        assert len(own) == len(set(own)) and set(own) < experts


def test_bytes_of_a_step() -> None:
    """Rows go there and back in each pass, with their weights in FP32; counts before them.

    A rank sums no gradient of an expert, which no other has; in one process it would be half.
    """
    ranks = on_ranks(bytes_of_a_step, {"": case_of(parallel=EP, num_microbatches=2)}, 2)[""]
    rows, layers = 2 * SEQ * MOE.top_k, sum(MOE.layers)  # of a rank and microbatch
    width = MODEL.hidden_size
    passed = 4 * (2 * rows * 4 * width + 2 * rows * 2)  # of both ranks: rows, and weights
    assert sum(rank["ep", "all_to_all", "float32"] for rank in ranks) == layers * passed
    for rank in ranks:
        assert rank["ep", "all_gather", "int64"] == layers * 8 * MOE.num_experts
        assert {dtype for axis, _, dtype in rank if axis == "ep"} == {"float32", "int64", "float64"}
        assert not any(axis == "edp" for axis, *_ in rank)
        experts = layers * MOE.num_experts * 3 * MOE.ffn_hidden_size * width
        dense = rank["dp", "all_reduce_sum", "float32"] // 4
        assert dense == rank["parameters", "", ""] - experts // 2


def bytes_of_a_step(case: Case, mesh: Mesh) -> dict[tuple[str, str, str], int]:
    state = case.build(mesh)
    steps = train(state, case, 1)
    count = sum(param.numel() for param in state.model.parameters())
    assert rank_memory(case.spec(), 0).num_params == count, "what is checked before a run"
    return steps.traffic | {("parameters", "", ""): count}


@pytest.mark.parametrize("rows", [0, 3, 16, 37])
def test_simulated_ranks_get_equally_many_rows(rows: int) -> None:
    """Four ranks divide 16 experts, and each of them sends so many rows."""
    counts, shares, sent = torch.empty(16, dtype=torch.int64, device="meta"), [], []
    for rank in range(4):
        route: Any = AllToAll(Axis("ep", 4, rank)).route(counts, rows)
        assert len(route.sizes) == 4 and len(route.order) == sum(route.paths.received)
        assert sum(route.sizes) == len(route.order) and len(set(route.paths.received)) == 1
        shares.append(sum(route.sizes))
        sent.append(route.paths.sent)
    assert sum(shares) == 4 * rows and max(shares) - min(shares) <= 4
    assert sent == 4 * [[share // 4 for share in shares]]


# --- planted errors -------------------------------------------------------------------------------


def to_another_rank(right: Callable[..., Any], axis: Axis, rows: torch.Tensor, *how: Any) -> Any:
    """Send the first rank's first row to the last rank, and one more of the last rank's to it."""
    return right(axis, rows.roll(1, 0), *how)


def times_ep(right: Callable[..., Any], state: TrainState) -> None:
    """Take the gradients of experts as often as there are ranks that divide these."""
    right(state)
    for param in state.masters.params_of[EXPERTS]:
        for grad in state.masters.grads_of(param):
            grad *= 2


def norm_of_own_experts(right: Callable[..., Any], mesh: Mesh) -> Mesh:
    return replace(mesh, groups={EXPERTS: Replicas(mesh.edp, Axis("parts"))})


def of_local_number(right: Callable[..., Any], exchange: AllToAll, num_experts: int) -> range:
    """Name a rank's experts from 0 on."""
    return range(len(right(exchange, num_experts)))


def as_received(right: Callable[..., Any], *args: Any) -> Any:
    """Leave the rows in the order of ranks."""
    route = right(*args)
    return replace(route, order=route.order.sort().values)


def weights_of_rank(right: Callable[..., Any], ctx: Any, *grads: torch.Tensor) -> Any:
    """Send no gradients of weights back."""
    rows, weights, *others = right(ctx, *grads)
    return rows, torch.zeros_like(weights), *others


ROUTES = "megafp8.parallel.experts"
FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a row to another rank": (
        "megafp8.parallel.collectives.Axis.exchange_rows", to_another_rank, "^gradients",
    ),
    "rows in the order of ranks": (f"{ROUTES}.AllToAll.route", as_received, "^gradients"),
    "no gradient of weights": (f"{ROUTES}._Dispatch.backward", weights_of_rank, "^gradients"),
    "gradients times ep": ("megafp8.train.step.reduce_gradients", times_ep, "^gradients"),
    "the norm without experts": (
        "megafp8.optim.clipping._squares", without_group, "^norms",
    ),
    "the norm of a rank's experts": (
        "megafp8.parallel.mesh.Mesh.with_experts", norm_of_own_experts, "^norms",
    ),
    "local numbers": (
        f"{ROUTES}.AllToAll.own", of_local_number, r"experts\.0\.gate\.weight differs",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty() -> Found:
    cases = {
        name: case_of(parallel=EP, faults=(Fault(target, wrong),))
        for name, (target, wrong, _) in FAULTS.items()
    }
    return on_ranks(seen, cases, 2)


@pytest.mark.parametrize("name", FAULTS)
def test_these_checks_find_an_error(name: str, faulty: Found, one: Callable[[Case], Seen]) -> None:
    ranks, whole = faulty[name], one(case_of())
    with pytest.raises(AssertionError, match=FAULTS[name][-1]):
        check_training(ranks, whole)


# --- no row for a rank, and all for one expert ----------------------------------------------------


def the_first_ones(right: Callable[..., Any], scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the same experts for every token, all of one rank."""
    return torch.arange(count).expand(len(scores_TE), count)


ALL_TO_ONE = Fault("megafp8.models.router.best", the_first_ones)


def test_a_rank_without_rows_takes_part(one: Callable[[Case], Seen]) -> None:
    """All rows are those of two experts of the first rank; forward, backward and update."""
    case = case_of(faults=(ALL_TO_ONE,))
    parallel = {"": EP, "recomputed": EP}
    cases = {
        name: replace(case, parallel=each, model=AGAIN if name else MODEL)
        for name, each in parallel.items()
    }
    whole = one(case)
    for ranks in on_ranks(seen, cases, 2).values():
        check_training(ranks, whole)
        check_counts(ranks, whole)
        grads = [p for p in ranks[1].gradients if ".experts." in p.name]
        assert grads and not any(piece.tensor.any() for piece in grads)


def sampled(case: Case, mesh: Mesh) -> list[int]:
    more: dict[str, Any] = {"vocab_size": 96, "temperature": 1.0, "seed": 5}
    return sample(case.build(mesh), [1, 2, 3], 4, **more)


def other_logits(right: Callable[..., Any], *args: Any) -> torch.Tensor:
    logits: torch.Tensor = right(*args) * math.nan
    return logits


def test_ranks_write_one_text() -> None:
    """All ranks take the same number of tokens, whatever roundings do to the logits of one."""
    fault = Fault("megafp8.train.generate.whole_logits", other_logits, rank=1)
    ranks = on_ranks(sampled, {"": case_of(parallel=EP, faults=(fault,))}, 2)[""]
    assert ranks[0] == ranks[1] == alone(sampled, {"": case_of()})[""] and len(ranks[0]) == 4


# --- FP8 ------------------------------------------------------------------------------------------

QUICK_IN_FP8: Cases = {
    2: {"ep 2": in_fp8(parallel=EP)},
    4: {"tp 2 x dp 2, ep 2, weights in FP8, ZeRO-1": in_fp8(STORED, parallel=SP_EP, optim=SHARDED)},
}
SLOW_IN_FP8: Cases = {
    2: {
        "tp 2, ep 2, weights in FP8": in_fp8(STORED, parallel=SP_EP),
        "cp 2, ep 2": in_fp8(parallel=CP_EP),
    },
    4: {
        "ep 2 x pp 2": in_fp8(parallel=PP_EP),
        "tp 2 x dp 2, ep 4": in_fp8(parallel=replace(SP, ep=4)),
    },
}


@pytest.fixture(scope="module")
def in_delayed() -> Ranks:
    return runs_of(QUICK_IN_FP8, SLOW_IN_FP8)


@pytest.fixture(scope="module")
def whole_in_delayed() -> Callable[[Case, int], Seen]:
    """What one process sees, which runs the microbatches of so many replicas as one."""
    known: dict[Any, Seen] = {}

    def run(case: Case, merged: int) -> Seen:
        if (key := (case.fp8, merged)) not in known:
            assert case.fp8 is not None
            known[key] = alone(seen, {"": in_fp8(case.fp8, merged=merged)})[""]
        return known[key]

    return run


@pytest.mark.parametrize("name", params(QUICK_IN_FP8, SLOW_IN_FP8))
def test_scales_do_not_depend_on_the_ranks_of_experts(
    name: str, in_delayed: Ranks, whole_in_delayed: Callable[[Case, int], Seen]
) -> None:
    ranks, case = in_delayed(name), named(QUICK_IN_FP8, SLOW_IN_FP8)[name]
    whole = whole_in_delayed(case, 1 if name.startswith(("tp 2, ", "cp 2, ")) else 2)
    empty, one_sided = check_scales(ranks, whole)
    assert empty > 0 and one_sided > 0, "amaxes come from the rank that has the expert"
    assert ranks[0].share is not None and ranks[0].share == whole.share
    if "pp" not in name:
        assert_same_tables(ranks)


def rows_of_own_experts(case: Case, mesh: Mesh) -> None:
    case.build(mesh)


def test_amaxes_of_different_experts_are_never_reduced_together() -> None:
    """If each rank had rows of its own experts alone, those of others would lie in their place."""
    case = in_fp8(parallel=EP, faults=(Fault("megafp8.parallel.parts.reserve_rows", nothing),))
    difference = r"forward scales is layers\.0\.mlp\.experts\.0\.fc1\.input on rank 0 and layers\."
    with pytest.raises(RuntimeError, match=difference):
        on_ranks(rows_of_own_experts, {"": case}, 2)


def test_an_expert_draws_by_the_places_of_tokens_of_other_ranks() -> None:
    cases = {"ep": replace(RANDOM, parallel=EP), "tp": replace(RANDOM, parallel=SP_EP)}
    ranks, whole = on_ranks(places, cases, 2), alone(places, {"": RANDOM})[""]
    for name in cases:
        for tensor, expected in whole.items():
            rows = [row for rank in ranks[name] for row in rank.get(tensor, ())]
            ours, theirs = (sorted(x, key=lambda row: row[:2]) for x in (rows, expected))
            assert [row[:2] for row in ours] == [row[:2] for row in theirs], (name, tensor)
            if tensor.endswith("fc1.input") and theirs:
                mine, one = (torch.stack([row[2] for row in x]) for x in (ours, theirs))
                assert torch.allclose(mine, one, rtol=1e-3, atol=1e-4), (name, tensor)


DIVIDED = {
    2: {"ep 2": (EP, 2), "tp 2, ep 2": (SP_EP, 1), "cp 2, ep 2": (CP_EP, 1)},
    4: {"ep 2 x pp 2": (PP_EP, 2), "ep 4": (EP_4, 4)},
}
"""Layouts with their numbers of replicas, whose microbatches one process has as one."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", RECIPES)
def test_every_recipe_trains_with_divided_experts(precision: str) -> None:
    """Replicas agree bit for bit, and losses are near those of one process; also without rows.

    Experts alone quantize: a dense linear's scale is that of its rank's tokens, an expert's that of
    the tokens of all ranks. The first step differs by orders of sums alone, and the second by the
    signs of small gradients too, as Adam's first update has the learning rate's size for each.
    """
    compute, recipe = RECIPES[precision]
    if recipe is not None:
        rules = (ModuleRule("layers.*.mlp.experts.*", recipe.name), ELSEWHERE)
        recipe = replace(recipe, modules=rules)
    sizes: dict[str, Any] = matrix.WIDE if precision in matrix.BATCHES else {}
    model = replace(MODEL, moe=replace(SPARSE, ffn_hidden_size=64), **sizes)
    batch = matrix.BATCHES.get(precision, 2)
    case = case_of(compute=compute, fp8=recipe, model=model, batch=batch)
    for faults in ((), (ALL_TO_ONE,)):
        case = replace(case, faults=faults)
        whole_of = {
            count: alone(seen, {"": replace(case, merged=count)})[""] for count in (1, 2, 4)
        }
        found = [
            (name, whole_of[layouts[name][1]], ranks)
            for size, layouts in DIVIDED.items()
            for name, ranks in on_ranks(
                seen, {name: replace(case, parallel=layouts[name][0]) for name in layouts}, size
            ).items()
        ]
        for name, whole, ranks in found:
            for rank in ranks:
                assert rank.losses == ranks[0].losses, name
                if name.startswith("ep"):  # else BF16 sums round otherwise, and near ties choose so
                    assert rank.losses[0] == pytest.approx(whole.losses[0], rel=1e-3), name
                    assert rank.norms[0] == pytest.approx(whole.norms[0], rel=1e-2), name
                assert rank.losses == pytest.approx(whole.losses, rel=2e-2), name
                assert rank.norms == pytest.approx(whole.norms, rel=matrix.NORMS_BOUND), name


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_passes_through_every_layout_of_experts(tmp_path: Path) -> None:
    """Each loads what the one before has saved: all tensors stay the same, bit for bit."""
    whole = in_fp8(STORED)
    groups: Cases = {
        2: {"start": replace(whole, parallel=EP, steps=2), "tp 2": replace(whole, parallel=SP)},
        4: {
            "ep 2 x pp 2": replace(whole, parallel=PP_EP),
            "tp 2 x dp 2, ep 4, ZeRO-1": replace(whole, parallel=replace(SP, ep=4), optim=SHARDED),
            "ep 2, edp 2, ZeRO-1": replace(whole, parallel=EP, optim=SHARDED),
        },
        1: {"one": whole},
    }
    here: Path | None = None
    for size, cases in groups.items():
        for name, case in cases.items():
            saves = tmp_path / name
            steps = case.steps if here is None else 0
            cases[name] = replace(case, steps=steps, begins=here, saves=saves)
            here = saves / step_name(2)
        alone(trained, cases) if size == 1 else on_ranks(trained, cases, size)
    assert here is not None
    before, after = Reader(tmp_path / "start" / step_name(2)), Reader(here)
    names = {f"model/layers.1.mlp.experts.15.{part}.weight" for part in ("gate", "up", "fc2")}
    names |= {"scaling/forward/history/layers.0.mlp.experts.15.fc1.input"}
    names |= {"optimizer/exp_avg/layers.0.mlp.experts.8.fc2.weight"}
    assert names <= set(before.names())
    amax = "scaling/forward/amax/layers.0.mlp.experts.15.fc1.weight"
    assert before.read(amax) > 0, "the rank that has the expert says what it has staged"
    same_tensors(before, after)


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Done]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    case = replace(in_fp8(STORED), parallel=EP, optim=SHARDED)
    cases = {
        "whole": replace(case, steps=3),
        "first": replace(case, steps=2, saves=folder),
        "rest": replace(case, steps=1, begins=folder / step_name(2)),
    }
    return on_ranks(trained, cases, 2)


def test_a_run_continues_bit_for_bit(continued: dict[str, list[Done]]) -> None:
    for whole, rest in zip(continued["whole"], continued["rest"], strict=True):
        assert (whole.losses[2:], whole.norms[2:]) == (rest.losses, rest.norms)
        assert_same_pieces(rest.saved, whole.saved)
        for direction, fields in whole.tables.items():
            assert_same(rest.tables[direction], fields)
        assert all(torch.equal(rest.biases[layer], bias) for layer, bias in whole.biases.items())
