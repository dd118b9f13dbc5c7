"""FP8 linears of two ranks: codes, scales, outputs and gradients against the whole tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.specs import Fp8Recipe, FsdpSpec, ParallelSpec
from tests.fp8.test_recipes import recipe_of
from tests.kit.cases import Case
from tests.kit.runs import on_ranks
from tests.parallel.linear_oracle import Checker, problem_of
from tests.parallel.linear_records import Watched, watch_case
from tests.parallel.scale_bugs import BUGS
from tests.tiny import gpt_spec, optim_spec

MODEL = gpt_spec(num_layers=1)
WIDE = gpt_spec(num_layers=1, hidden_size=64)
SQUARES = gpt_spec(num_layers=1, hidden_size=256, ffn_hidden_size=512)
"""A model whose weights are several blocks of 128 x 128 each way on each of two ranks."""
RECIPES: dict[str, Fp8Recipe] = {
    "delayed": recipe_of("delayed", amax_history_len=4),
    "tensorwise": recipe_of("tensorwise"),
    "rowwise": recipe_of("rowwise"),
    "rowwise_with_gw_hp": recipe_of(
        "rowwise_with_gw_hp", high_precision_gemms=frozenset({"grad_weight"})
    ),
    "blockwise": recipe_of("blockwise"),
    "mxfp8": recipe_of("mxfp8"),
    "nvfp4": recipe_of("nvfp4"),
}
LAYOUTS = {
    "tp": ParallelSpec(tp=2),
    "sp": ParallelSpec(tp=2, sequence_parallel=True),
    "cp": ParallelSpec(cp=2),
    "dp": ParallelSpec(),
    "ZeRO-1": ParallelSpec(),
    "FSDP": ParallelSpec(fsdp=FsdpSpec()),
}
SLOW = ("mxfp8", "nvfp4")
STORED = ("delayed", "tensorwise", "blockwise")
"""The recipes that keep weights in FP8 alone."""


def case_of(layout: str, recipe: Fp8Recipe, compute: str) -> Case:
    case = Case(compute, recipe, MODEL, parallel=LAYOUTS[layout])
    if recipe.name in ("mxfp8", "nvfp4"):  # the tokens of each of two ranks are whole blocks
        case = replace(case, model=WIDE, batch=4)
    if recipe.name == "blockwise" and layout == "sp":
        case = replace(case, batch=16)
    if layout == "ZeRO-1":
        case = replace(case, optim=optim_spec(name="distributed_fused_adam"))
    return case


def cases() -> dict[str, Case]:
    found = {}
    for compute in ("fp32", "bf16"):
        for layout in LAYOUTS:
            for name, recipe in RECIPES.items():
                if name in SLOW and compute == "fp32" and layout not in ("tp", "sp"):
                    continue  # the specification's loops are slow; casts see no layout there
                found[f"{layout} {name} {compute}"] = case_of(layout, recipe, compute)
                whole = name == "blockwise" and layout in ("ZeRO-1", "FSDP")
                if name not in STORED or whole:
                    continue
                stored = replace(recipe, params_in_fp8=True, fp8_in_evaluation=False)
                found[f"{layout} {name} fp8_params {compute}"] = case_of(layout, stored, compute)
    for layout in ("tp", "sp"):
        recipe = replace(RECIPES["blockwise"], power_2_scale=False)  # each block has another scale
        case = replace(case_of(layout, recipe, "bf16"), model=SQUARES, batch=16)
        found[f"{layout} blockwise squares bf16"] = case
    return found


CASES = cases()
GATHERS = ("the scale of gathered inputs", "a rank's own scales for all ranks")
OF_ONE_AMAX = (
    ("tp", "own amax of a row's input"),
    ("tp", "own amax of a column's weight"),
    ("sp", "own amax of sequences' inputs"),
    ("sp", "own amax of sequences' gradients"),
)
PLANTED = {
    "the scale of gathered inputs": "sp delayed",
    "the scale of gathered gradients": "sp tensorwise",
    "the order of gathered gradients": "sp delayed",
    "output of ranks that share a linear": "tp delayed",
    "grad_input of ranks that share a linear": "tp tensorwise",
    "grad_weight of ranks that share a linear": "sp delayed",
    "the sum of outputs": "tp delayed",
    "the scattered sum of outputs": "sp tensorwise",
    "evaluation of fp8_params": "ZeRO-1 delayed fp8_params",
    "evaluation of FSDP's bytes": "FSDP tensorwise fp8_params",
    "training with fp8_params": "dp delayed fp8_params",
    "training with FSDP's bytes": "FSDP delayed fp8_params",
    "training with weights that FSDP gathers": "FSDP delayed",
    "the scale that ranks agree on": "ZeRO-1 tensorwise fp8_params",
    "own amax of a row's input": "tp tensorwise",
    "own amax of a row's weight": "tp tensorwise",
    "own amax of a column's weight": "tp tensorwise",
    "own amax of a column's gradient": "tp tensorwise",
    "own amax of sequences' inputs": "sp tensorwise",
    "own amax of sequences' gradients": "sp tensorwise",
    "a bias' sums in BF16": "dp delayed",
    "own amaxes of sequences' columns": "sp rowwise",
    "gathered values of products in high precision": "sp rowwise_with_gw_hp",
    "a rank's own scales for all ranks": "sp rowwise",
}
OF_PARTS = ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
"""The recipes whose scales cross ranks beside the bytes."""
AGAIN = [
    *((bug, f"sp {name}") for name in OF_PARTS for bug in GATHERS),
    *((bug, f"{layout} nvfp4") for layout, bug in OF_ONE_AMAX),
]
WITH_BUGS = {
    f"{bug}, {name}": replace(CASES[f"{name} bf16"], faults=BUGS[bug])
    for bug, name in dict.fromkeys([*PLANTED.items(), *AGAIN])
}
"""BF16's bound is the wider one."""


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Watched]]:
    return on_ranks(watch_case, CASES | WITH_BUGS, 2)


@pytest.mark.parametrize("name", CASES)
def test_linears_of_ranks_are_those_of_the_whole_tensors(
    ranks: dict[str, list[Watched]], name: str
) -> None:
    """Codes and scales bit for bit; results within the bound of FP32 sums and of roundings to the
    compute dtype, of which ranks that sum make one more; evaluation with what the bytes mean."""
    Checker(CASES[name], ranks[name]).check()


@pytest.mark.parametrize("name", WITH_BUGS)
def test_a_scale_that_is_wrong_by_three_percent_is_found(
    ranks: dict[str, list[Watched]], name: str
) -> None:
    problem = problem_of(Checker(WITH_BUGS[name], ranks[name]).check)
    assert problem is not None


def test_every_bug_is_planted() -> None:
    assert set(PLANTED) == set(BUGS)
