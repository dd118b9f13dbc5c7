"""`model.fp8_backend` beside the other keys: what is refused before a run begins, and why."""

from __future__ import annotations

import pytest

from megafp8.config.load import load
from tests.config.helpers import problems, run_spec, the_problem

FP8 = "model.fp8=True"
TE, TORCHAO = "model.fp8_backend=te", "model.fp8_backend=torchao"
RECIPE = "model.fp8_recipe=tensorwise"
GATHER = "model.enable_fsdp_float8_all_gather=True"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        ([TORCHAO], "model.fp8_backend", "FP8 alone"),
        ([TORCHAO, FP8], "model.fp8_recipe", "no delayed recipe"),
        ([TORCHAO, FP8, RECIPE, "model.fp8_params=True"], "model.fp8_params", "high precision"),
        ([TORCHAO, FP8, RECIPE, "model.fp8_modules=['*.fc2:blockwise']",
          "model.hidden_size=256", "model.ffn_hidden_size=1024"],
         "model.fp8_modules", "no blockwise recipe"),
        ([TORCHAO, FP8, RECIPE, "model.tensor_model_parallel_size=2", "trainer.devices=2"],
         "model.tensor_model_parallel_size", "not tensor-parallel"),
        ([TE, "model.transformer_engine=False"], "model.fp8_backend", "not wanted"),
        ([TE, FP8, "model.fp8_interval=2"], "model.fp8_interval", "every update"),
        ([TE, FP8, "model.fp8_wgrad=False"], "model.fp8_wgrad", "ignore it"),
        ([TE, FP8, RECIPE, "model.override_linear_precision=[true,false,false]"],
         "model.override_linear_precision", "ignore it"),
        ([TE, FP8, "model.fp8_recipe=rowwise"], "model.fp8_recipe", "no rowwise recipe"),
        ([TE, FP8, "model.pad_inner_dim=True"], "model.pad_inner_dim", "do not pad"),
        ([TE, "model.ffn_dropout=0.1"], "model.ffn_dropout", "inside the MLP"),
        ([TE, FP8, "model.fp8_health=full"], "model.fp8_health", "does not show its casts"),
        ([TE, FP8, RECIPE, "model.fp8_health=scales"], "model.fp8_health", "here tensorwise"),
        ([TORCHAO, FP8, RECIPE, "model.compile=block", "model.fp8_health=full"],
         "model.fp8_health", "compiled graph"),
        ([GATHER], "model.enable_fsdp_float8_all_gather", "is torchao's"),
        ([GATHER, TORCHAO, FP8, RECIPE],
         "model.enable_fsdp_float8_all_gather", "nothing is gathered"),
        ([GATHER, TORCHAO, FP8, "model.fp8_recipe=rowwise", "model.fsdp=True",
          "trainer.devices=2"],
         "model.enable_fsdp_float8_all_gather", "rowwise has several"),
        ([GATHER, TORCHAO, FP8, RECIPE, "trainer.precision=16", "model.fsdp=True",
          "trainer.devices=2"],
         "model.enable_fsdp_float8_all_gather", "range"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(overrides: list[str], key: str, word: str) -> None:
    problem = the_problem(*overrides)
    assert problem.key == key and word in problem.reason


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ([], "native"),
        ([FP8], "native"),
        (["model.fp8_backend=native"], "native"),
        ([FP8, RECIPE, TORCHAO], "torchao"),
    ],
)
def test_who_runs(overrides: list[str], chosen: str) -> None:
    assert run_spec(*overrides).precision.backend == chosen


@pytest.mark.parametrize("overrides", [[TE], [TE, FP8], [TE, FP8, RECIPE]])
def test_transformer_engine_is_for_bf16_too_and_for_gpus_alone(overrides: list[str]) -> None:
    assert run_spec(*overrides, gpu=True).precision.backend == "te"
    for where in (["trainer.accelerator=cpu"], []):
        (problem,) = problems(lambda where=where: run_spec(*overrides, *where))
        assert problem.key == "model.fp8_backend" and "on a CPU" in problem.reason


def test_both_products_of_backward_may_stay_in_high_precision() -> None:
    load([TE, FP8, RECIPE, "model.override_linear_precision=[false,true,true]"])
