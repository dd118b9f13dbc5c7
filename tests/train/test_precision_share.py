"""The fraction of FP8 that a run announces is the fraction that it counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megafp8.errors import ConfigError
from megafp8.specs import Fp8Recipe
from megafp8.specs.layer import linear_names
from megafp8.specs.precision import ModuleRule
from megafp8.train.report.fp8 import (
    LinearFlops,
    require_fp8,
    share_of_ranks,
)
from megafp8.train.step import train_step
from tests.tiny import build_run, gpt_spec, microbatch, precision_share


@pytest.mark.parametrize("shape", [{}, {"activation": "swiglu", "num_query_groups": 1}])
def test_the_names_of_linears_are_those_of_the_model(shape: dict[str, Any]) -> None:
    """The patterns of model.fp8_modules are checked against them before there is a model."""
    state = build_run(compute="bf16", fp8=Fp8Recipe(), model=replace(gpt_spec(), **shape))
    rows = state.scaling.tables["forward"].names
    expected = linear_names(range(gpt_spec().num_layers))
    assert [row.removesuffix(".input") for row in rows if row.endswith(".input")] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"high_precision_gemms": frozenset({"grad_weight"})},
        {"name": "rowwise_with_gw_hp", "backward_format": "e4m3"},
        {"modules": (ModuleRule("layers.1.*", "high_precision"), ModuleRule("*", "blockwise"))},
        {"params_in_fp8": True},
    ],
)
def test_planned_share_is_the_counted_one(changes: dict[str, Any]) -> None:
    recipe = Fp8Recipe(**changes)
    state = build_run(compute="bf16", fp8=recipe)
    share = precision_share(state, gpt_spec())
    train_step(state, [microbatch(1)])
    flops = {key: n for key, n in state.counter.flops.items() if key[1] != "attention"}
    counted = sum(n for (precision, _), n in flops.items() if precision == "fp8")
    assert 0 < share.share < 1
    assert share.share == pytest.approx(counted / sum(flops.values()), rel=1e-9)


def test_what_stays_higher_is_named_with_its_reason() -> None:
    rules = (
        ModuleRule("*.fc2", "high_precision"),
        ModuleRule("layers.0.*", "high_precision", "model.first_last_layers_bf16"),
    )
    recipe = Fp8Recipe(modules=rules, high_precision_gemms=frozenset({"grad_weight"}))
    state = build_run(compute="bf16", fp8=recipe)
    text = "; ".join(precision_share(state, gpt_spec()).higher)
    assert "layers.0.mlp.fc2, layers.1.mlp.fc2 (model.fp8_modules)" in text
    assert "layers.0.mlp.fc1 (model.first_last_layers_bf16)" in text
    assert "(grad_weight, chosen by product)" in text


def test_ranks_together_hold_the_model() -> None:
    """FLOPs of two stages, two ranks and two replicas are summed; names and head appear once."""
    recipe = Fp8Recipe(modules=(ModuleRule("layers.1.*", "high_precision"),))
    whole = precision_share(build_run(compute="bf16", fp8=recipe), gpt_spec())
    quarter = LinearFlops(whole.fp8_flops // 2, whole.fp8_flops // 2, {})
    other = LinearFlops(0, whole.fp8_flops // 2, {"model.fp8_modules": ["layers.1.mlp.fc1"]})
    ranks = [quarter, quarter, other, other] * 2
    share = share_of_ranks(ranks, gpt_spec(), num_replicas=2)
    assert (share.fp8_flops, share.total_flops) == (whole.fp8_flops, whole.total_flops)
    assert share.higher[1] == "layers.1.mlp.fc1 (model.fp8_modules)"


def test_fp8_that_is_nowhere_does_not_start() -> None:
    recipe = Fp8Recipe(modules=(ModuleRule("*", "high_precision"),))
    state = build_run(compute="bf16", fp8=recipe)
    with pytest.raises(ConfigError, match="no product would run in FP8"):
        require_fp8(precision_share(state, gpt_spec()))
