"""Test that each row about Transformer Engine's layers reaches all that read the table.

They are the checks of settings (`--cfg job`, `plan` and a run before its ranks), the line about
`auto`, and the backend, which judges a spec.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.backends import choose
from megafp8.cli import plan
from megafp8.config.checks import check_values
from megafp8.config.errors import COMMAND_LINE, DEFAULT
from megafp8.config.layers import Layer
from megafp8.config.merged import default_settings, merge
from megafp8.config.overrides import parse_overrides
from megafp8.config.resolve import resolve
from megafp8.config.rows import Row, condition_text
from megafp8.config.te_layers import TABLE
from megafp8.errors import ConfigError
from megafp8.specs import RunSpec
from tests.config.helpers import load_problems, run_spec

ROOT = Path(__file__).parents[2]
TE = "model.fp8_backend=te"
FP8, ROPE = "model.fp8=True", "model.position_embedding_type=rope"
FP4 = (FP8, "model.fp8_recipe=nvfp4", "trainer.precision=bf16")
ATTENTION = "model.fp8_dot_product_attention=True"
HEAD_NORMS = "model.qk_layernorm=True"
DOCUMENTS = "model.data.reset_attention_mask=True"
CURRENT = (FP8, "model.fp8_recipe=tensorwise")
SWITCH = "model.precision_schedule=[{from: 0.5, recipe: bf16}]"
SMALL = ["model.micro_batch_size=2", "model.global_batch_size=8"]
EXAMPLES: tuple[list[str], ...] = (
    ["model.activation=gelu", "model.openai_gelu=False"],
    ["model.transformer_block_type=post_ln"],
    ["model.apply_query_key_layer_scaling=True", "trainer.precision=16"],
    ["model.fp32_residual_connection=True"],
    ["model.bias=False", "model.add_qkv_bias=True"],
    [ROPE, "model.yarn_rotary_scaling_factor=4"],
    [HEAD_NORMS, "model.te_version=2.6.0", "trainer.accelerator=cpu"],
    [HEAD_NORMS, "model.layernorm_zero_centered_gamma=True"],
    [HEAD_NORMS, FP8, ATTENTION, "model.fp8_multi_head_attention=True"],
    ["model.ffn_dropout=0.1"],
    [ROPE, "model.data.reset_position_ids=True"],
    [DOCUMENTS, "trainer.devices=2", "model.tensor_model_parallel_size=2", *SMALL,
     "model.sequence_parallel=True"],
    [DOCUMENTS, "model.te_version=2.10.0", "trainer.accelerator=cpu"],
    [DOCUMENTS, FP8, ATTENTION],
    ["model.window_size=[64,0]", FP8, ATTENTION],
    ["model.megatron_amp_O2=False"],
    [FP8, "model.fp8_recipe=rowwise"],
    [*FP4[:2], "trainer.precision=32"],
    [FP8, "model.fp8_modules=['layers.0.*:tensorwise']"],
    [FP8, "model.fp8_modules=['*.mlp.fc2:high_precision']"],
    [FP8, "model.fp8_interval=2"],
    [FP8, "model.pad_inner_dim=True", "model.ffn_hidden_size=1000"],
    [FP8, "model.fp8_wgrad=False"],
    [FP8, "model.override_linear_precision=[true,false,false]"],
    [FP8, "model.fp8_split_accumulator=[true,true,true]"],
    [FP8, "model.fp8_recipe=mxfp8", "model.fp8_split_accumulator=[true,true,true]"],
    [*FP4, "model.fp8_split_accumulator=[true,true,true]"],
    [FP8, "model.fp8_recipe=blockwise", "model.fp8_split_accumulator=[false,true,true]"],
    [*CURRENT, "model.precision_schedule=[{from: 0.5, modules: '*.fc2', recipe: bf16}]"],
    [*CURRENT, "model.precision_schedule=[{from: 0.5, products: forward, recipe: bf16}]"],
    [*CURRENT, "model.precision_schedule=[{from: 0.5, recipe: rowwise}]"],
    [FP8, SWITCH],
    [*CURRENT, SWITCH, "model.fsdp=True", "trainer.devices=2", *SMALL],
    [*CURRENT, SWITCH, "model.optim.fp8_opt_level=O1"],
    [*CURRENT, SWITCH, "model.ub_tp_comm_overlap=True", "trainer.devices=2",
     "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"],
    [FP8, ATTENTION, "model.fp8_recipe=tensorwise"],
    [FP8, ATTENTION, "trainer.precision=32"],
    [FP8, ATTENTION, ROPE, "model.fp8_multi_head_attention=True"],
    ["model.compile=block"],
    ["model.enable_cuda_graph=True"],
    ["model.pipeline_model_parallel_size=2", "trainer.devices=2", *SMALL,
     "model.pipeline_schedule=ZBVZeroBubble", "model.virtual_pipeline_model_parallel_size=2"],
    ["model.context_parallel_size=2", "trainer.devices=2"],
    [FP8, "model.optim.fp8_opt_level=O1", "model.ub_tp_comm_overlap=True", "trainer.devices=2",
     "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"],
)  # fmt: skip
"""Settings that each row of the table refuses, in its order."""
IDS = [" + ".join(condition_text(*c) for c in {**r.when, **r.excludes}.items()) for r in TABLE]


def values_of(overrides: list[str]) -> dict[str, Any]:
    """Return the settings of a command line that is refused, as the checks read them."""
    parsed, wrong = parse_overrides(overrides, ())
    assert not wrong
    given = tuple(setting for override in parsed for setting in override.settings)
    merged = merge([Layer(DEFAULT, default_settings()), Layer(COMMAND_LINE, given)])
    values, unread = merged.values()
    assert not merged.problems and not unread
    return values


def spec_of(values: dict[str, Any]) -> RunSpec:
    """Return the spec of settings that no check has seen."""
    return resolve(values, lambda: True)


def test_every_row_has_an_example() -> None:
    for row, example in zip(TABLE, EXAMPLES, strict=True):
        (key,) = row.excludes
        assert key in [word.partition("=")[0] for word in example]


@pytest.mark.parametrize(("row", "example"), [*zip(TABLE, EXAMPLES, strict=True)], ids=IDS)
def test_each_row_reaches_checks_plan_auto_and_backend(
    row: Row, example: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = row.excludes
    values = values_of([*example, TE])
    (found,) = [f for f in check_values(values) if f.key == key and f.hint == row.hint]
    assert "{" not in found.reason and row.hint[0].isupper() and not row.hint.endswith(".")
    if "trainer.accelerator=cpu" not in example:  # a plan is for GPUs
        assert plan.main([*example, TE]) == 2
        assert found.reason in capsys.readouterr().err
    # `auto` chooses on GPUs alone, and a version is chosen on CPUs.
    only_te = ("model.fp8_multi_head_attention", "model.ub_tp_comm_overlap", "model.te_version")
    if key not in only_te:
        if ATTENTION not in example:  # these settings are about `te` by name
            auto = spec_of(values | {"model.fp8_backend": "auto"}).precision.auto
            assert auto is not None and found.reason in str(auto.why_not_te)
    with pytest.raises(ConfigError) as caught:
        choose.check_backend(spec_of(values), torch.device("cpu"))
    assert f"{key}=" in str(caught.value) and found.reason in str(caught.value)


THREE = ["model.openai_gelu=False", "model.transformer_block_type=post_ln", "model.fp8_interval=2"]


@pytest.mark.parametrize("where", [["--cfg", "job"], ["trainer.devices=2"]], ids=["cfg", "ranks"])
def test_all_refusals_come_together_before_ranks_start(where: list[str], tmp_path: Path) -> None:
    """One message names the three settings, the variable and the version, and no rank speaks."""
    command = [sys.executable, "pretrain_gpt.py", "model.fp8=True", TE, *THREE, *where]
    command += ["model.te_version=2.3.0", f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "NVTE_UNFUSED_FP8_UPDATE": "1"},
    )  # fmt: skip
    assert done.returncode == 2 and "rank" not in done.stderr, done.stderr
    assert "5 settings cannot be used" in done.stderr
    for word in ("tanh form", "pre-norm", "every update", "2.3.0 is too old", "NVTE_UNFUSED"):
        assert done.stderr.count(word) == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_auto_says_all_that_the_settings_rule_out() -> None:
    auto = run_spec("model.fp8=True", *THREE, gpu=True).precision.auto
    assert auto is not None
    for word in ("model.openai_gelu=False: Transformer", "pre-norm", "model.fp8_interval=2"):
        assert word in str(auto.why_not_te)


def test_a_version_that_cannot_run_is_refused_with_the_settings() -> None:
    for version, word in (("2.3.0", "too old"), ("3.0.0", "too new"), ("newest", "whole version")):
        (problem,) = load_problems(TE, f"model.te_version={version}")
        assert problem.key == "model.te_version" and word in problem.reason
    (problem,) = load_problems(TE, *FP4, "model.openai_gelu=True", "model.te_version=2.7.0")
    assert problem.key == "model.te_version" and "NVFP4BlockScaling" in problem.reason


# --- what adds up precisely -----------------------------------------------------------------------

BLOCKWISE = ["model.fp8=True", TE, "model.fp8_recipe=blockwise"]
PRECISE = "model.fp8_split_accumulator=[true,true,true]"


@pytest.mark.parametrize("gpu", [False, True])
def test_blockwise_runs_by_plain_settings(gpu: bool) -> None:
    """Transformer Engine's blockwise adds up precisely, as null says, on a GPU and on a CPU."""
    recipe = run_spec(*BLOCKWISE, gpu=gpu).precision.fp8
    assert recipe is not None and recipe.fast_accumulation == frozenset()
    choice = ["model.fp8_backend=native", *BLOCKWISE[:1], *BLOCKWISE[2:]]
    native = run_spec(*choice, gpu=gpu).precision.fp8
    assert native is not None and native.fast_accumulation == {"output"}


def test_what_blockwise_does_may_be_said_on_a_gpu() -> None:
    recipe = run_spec(*BLOCKWISE, PRECISE, gpu=True).precision.fp8
    assert recipe is not None and recipe.fast_accumulation == frozenset()
    (problem,) = load_problems(*BLOCKWISE, "model.fp8_split_accumulator=[false,true,true]")
    assert problem.key == "model.fp8_split_accumulator" and "Leave it out" in problem.hint
