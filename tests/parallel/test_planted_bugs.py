"""What the other tests check would tell if a group were wrong, or a reduction missing or double."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from megafp8.parallel.mesh import single_rank
from megafp8.specs import Fp8Recipe, ParallelSpec
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel import matrix
from tests.parallel.rank_work import Outcome, run_case
from tests.parallel.test_tensor_parallel import (
    Outcomes,
    assert_gradients_close,
    assert_same_tables,
    assert_tables_follow_specification,
)
from tests.te_sources import need_sources
from tests.tiny import gpt_spec

FP8 = Fp8Recipe(amax_history_len=4)
MODEL = gpt_spec(num_layers=2)
TP, PP = ParallelSpec(tp=2), ParallelSpec(pp=2)
SP = ParallelSpec(tp=2, sequence_parallel=True)
OF_LINEARS = (
    "output is not summed",
    "output is summed twice",
    "grad_input is not summed",
    "grad_input is summed twice",
)
OF_GRADIENTS = {
    **{bug: TP for bug in OF_LINEARS},
    "gradients are not summed": ParallelSpec(),
    "gradients are summed twice": ParallelSpec(),
    "tied gradients are not summed": PP,
    "tied gradients are summed twice": PP,
    "norms' gradients are not summed": SP,
    "norms' gradients are summed twice": SP,
    **{f"{bug}, sp": SP for bug in OF_LINEARS},
}
CASES = {
    **{
        name: Case(model=MODEL, steps=1, parallel=s, bug=name.removesuffix(", sp"))
        for name, s in OF_GRADIENTS.items()
    },
    "sp": Case(model=MODEL, steps=1, parallel=SP),
    "tp": Case("bf16", FP8, MODEL, steps=2, parallel=TP),
    "amax is not reduced": Case(
        "bf16", FP8, MODEL, steps=2, parallel=TP, bug="amax is not reduced"
    ),
    "amax is reduced over replicas alone": Case(
        "bf16", FP8, MODEL, steps=2, parallel=TP, bug="amax is reduced over replicas alone"
    ),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, Outcomes]:
    return on_ranks(run_case, CASES, 2)


@pytest.fixture(scope="module")
def one() -> dict[str, Outcome]:
    return {"fp32": run_case(Case(model=MODEL, steps=1), single_rank())}


@pytest.mark.parametrize("bug", OF_GRADIENTS)
def test_the_gradients_tell(ranks: dict[str, Outcomes], one: dict[str, Outcome], bug: str) -> None:
    with pytest.raises(AssertionError):
        assert_gradients_close(ranks[bug], one["fp32"], 1e-5)


def test_the_specification_tells_whose_amaxes_were_reduced(ranks: dict[str, Outcomes]) -> None:
    """(Over stages they cannot be: the one waits for what the other sends after it.)"""
    assert_tables_follow_specification(ranks["tp"], FP8)
    for bug in ("amax is not reduced", "amax is reduced over replicas alone"):
        with pytest.raises(AssertionError):
            assert_tables_follow_specification(ranks[bug], FP8)


def test_these_checks_pass_what_is_right(
    ranks: dict[str, Outcomes], one: dict[str, Outcome]
) -> None:
    assert_gradients_close(ranks["sp"], one["fp32"], 1e-5)
    assert_gradients_close([copy.deepcopy(one["fp32"])], one["fp32"], 0.0)


TE_MODEL = replace(MODEL, activation="gelu-tanh")  # its GELU is the tanh form
TE_BUGS = {
    "te's output is not summed": TP,
    "te's grad_input is not summed": TP,
    "gradients are not summed": ParallelSpec(),
    "gradients are summed twice": ParallelSpec(),
    "tied gradients are not summed": PP,
    "tied gradients are summed twice": PP,
    "norms' gradients are not summed": SP,
    "norms' gradients are summed twice": SP,
}


@pytest.mark.slow
def test_transformer_engine_s_gradients_tell() -> None:
    """In FP32 each bug leaves the bound of first gradients, which the layouts without it keep; in
    FP8 the ranks' tables differ where amaxes are not reduced."""
    need_sources(DEFAULT_VERSION)
    plain = Case(model=TE_MODEL, steps=1, backend="te")
    fp8 = replace(plain, compute="bf16", fp8=FP8, parallel=TP)
    cases = {name: replace(plain, parallel=spec, bug=name) for name, spec in TE_BUGS.items()}
    right = {
        f"right {spec}": replace(plain, parallel=spec) for spec in (TP, SP, PP, ParallelSpec())
    }
    amax = "te's amax is not reduced"
    cases |= right | {"fp8": fp8, amax: replace(fp8, bug=amax)}
    ranks = on_ranks(run_case, cases, 2)
    (one,) = on_ranks(run_case, {"one": plain}, 1)["one"]
    for name in right:
        assert_gradients_close(ranks[name], one, 1e-5)
    for name in TE_BUGS:
        with pytest.raises(AssertionError):
            assert_gradients_close(ranks[name], one, 1e-5)
    assert_same_tables(ranks["fp8"])
    with pytest.raises(AssertionError):
        assert_same_tables(ranks[amax])


OF_RECIPES = [
    name
    for name, (_, fp8) in matrix.PRECISIONS.items()
    if fp8 and name not in {*matrix.IN_TE, *matrix.LEVELS}
]
"""The levels' rows are of FSDP alone, and these bugs are not."""


@pytest.mark.slow
@pytest.mark.parametrize("precision", OF_RECIPES)
def test_the_matrix_tells(precision: str) -> None:
    """Twenty steps with each bug leave the matrix's bound of losses, or that of norms.

    Bugs are planted in all layouts with `delayed`, and with sequence parallelism in every recipe;
    the random rounding of `nvfp4` makes the widest bounds.
    """
    torch.set_num_threads(1)
    bounds = matrix.bounds_of(matrix.PAGE)
    chosen = {
        name: spec
        for name, spec in OF_GRADIENTS.items()
        if precision == "FP8 delayed" or spec.sequence_parallel
    }
    cases = {
        name: matrix.case_of(precision, spec, bug=name.removesuffix(", sp"))
        for name, spec in chosen.items()
    }
    results = on_ranks(run_case, cases, 2)
    ones: dict[int, Outcome] = {}
    inside = {}
    for name, spec in chosen.items():
        replicas = 2 // (spec.tp * spec.cp * spec.pp)
        if replicas not in ones:
            merged = matrix.case_of(precision, merged=replicas)
            ones[replicas] = run_case(merged, single_rank())
        one, ranks, bound = (
            ones[replicas],
            results[name],
            bounds[precision, replicas, matrix.kind_of("tp 2")],
        )
        losses = max(matrix.distance(rank.losses, one.losses) for rank in ranks)
        norms = max(matrix.norms_distance(precision, rank.norms, one.norms) for rank in ranks)
        print(f"{name}: losses {losses:.1e} (bound {bound:.1e}), norms {norms:.1e}")
        if losses <= bound and norms <= matrix.NORMS_BOUND:
            inside[name] = (losses, norms)
    assert not inside
