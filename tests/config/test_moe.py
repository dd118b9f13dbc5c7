"""Test the settings of experts: by Megatron's names, with its rules, from files of NeMo."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config.architecture import function_differences, spec_of_tree, tree_of_spec
from megafp8.config.load import load, load_all
from megafp8.config.nemo import nemo_keys
from megafp8.config.resume import setting_differences
from megafp8.config.rows import Row
from megafp8.config.schema import all_keys
from megafp8.config.together import TOGETHER
from megafp8.config.values import is_layer_frequency, layer_list, layers_with_experts
from megafp8.specs import MoESpec, RunSpec
from tests.config.helpers import load_problems, run_spec, the_problem

EXPERTS = ("model.num_moe_experts=4", "model.bias=False")
FP8 = ("model.fp8=True", "model.hidden_size=128", "model.ffn_hidden_size=128")


def moe(*overrides: str, **where: Any) -> MoESpec:
    found = run_spec(*overrides, **where).model.moe
    assert found is not None
    return found


# --- the description of the model -----------------------------------------------------------------


def test_a_model_has_no_experts_unless_it_is_asked() -> None:
    spec = run_spec().model
    assert spec.moe is None and spec_of_tree(tree_of_spec(spec), 0).moe is None


def test_defaults_are_those_of_megatron() -> None:
    assert moe(*EXPERTS) == MoESpec(
        num_experts=4, top_k=2, ffn_hidden_size=1024, layers=(True,) * 4, score_function="softmax",
        pre_softmax=False, scaling_factor=1.0, has_expert_bias=False, bias_update_rate=1e-3,
        router_loss="none", router_loss_coeff=0.0, z_loss_coeff=0.0, shared_ffn_hidden_size=None,
    )  # fmt: skip


EP_2, EP_4 = "model.expert_model_parallel_size=2", "model.expert_model_parallel_size=4"
SMALL = ("model.global_batch_size=24", "model.micro_batch_size=1")  # of 3, 4 or 8 ranks
SIGMOID = "model.moe_router_score_function=sigmoid"
BIAS = "model.moe_router_enable_expert_bias=True"
FIELDS: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "num_moe_experts": (("model.num_moe_experts=6",), "num_experts", 6),
    "moe_router_topk": (("model.moe_router_topk=3",), "top_k", 3),
    "moe_ffn_hidden_size": (("model.moe_ffn_hidden_size=96",), "ffn_hidden_size", 96),
    "moe_layer_freq": (("model.moe_layer_freq=3",), "layers", (True, False, False, True)),
    "moe_router_score_function": ((SIGMOID,), "score_function", "sigmoid"),
    "moe_router_pre_softmax": (("model.moe_router_pre_softmax=True",), "pre_softmax", True),
    "moe_router_topk_scaling_factor": (
        ("model.moe_router_topk_scaling_factor=2.5",), "scaling_factor", 2.5),
    "moe_router_enable_expert_bias": ((SIGMOID, BIAS), "has_expert_bias", True),
    "moe_router_bias_update_rate": (
        (SIGMOID, BIAS, "model.moe_router_bias_update_rate=0.01"), "bias_update_rate", 0.01),
    "moe_router_load_balancing_type": (
        ("model.moe_aux_loss_coeff=0.1", "model.moe_router_load_balancing_type=seq_aux_loss"),
        "router_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (("model.moe_aux_loss_coeff=0.1",), "router_loss_coeff", 0.1),
    "moe_z_loss_coeff": (("model.moe_z_loss_coeff=1e-3",), "z_loss_coeff", 1e-3),
    "moe_shared_expert_intermediate_size": (
        ("model.moe_shared_expert_intermediate_size=48",), "shared_ffn_hidden_size", 48),
}  # fmt: skip
"""For each key of experts the settings that change it, and the field of the spec that it sets."""


def test_every_key_of_experts_is_tried() -> None:
    assert set(FIELDS) == {
        path.removeprefix("model.") for path, key in all_keys().items() if key.group == "experts"
    }


@pytest.mark.parametrize("name", FIELDS)
def test_each_key_sets_its_field_and_is_read_back(name: str) -> None:
    """What a checkpoint records gives the same description, and nothing else in it changes."""
    given, field, value = FIELDS[name]
    run = run_spec(*EXPERTS, *given)
    assert run.model.moe is not None and getattr(run.model.moe, field) == value
    model = run.resolved["model"]
    assert isinstance(model, dict) and spec_of_tree(model, 0) == run.model
    if all_keys()[f"model.{name}"].defines_function:
        function = spec_of_tree(tree_of_spec(run.model), 0)
        assert getattr(function.moe, field) == value
        plain = run_spec(*EXPERTS, *(item for item in given if name not in item)).model
        assert set(function_differences(run.model, plain)) == {name}
    else:
        assert not function_differences(run.model, run_spec(*EXPERTS, *given[:-1]).model)


def test_settings_of_an_earlier_version_describe_a_dense_model() -> None:
    run = run_spec()
    model = run.resolved["model"]
    assert isinstance(model, dict)
    old = {name: item for name, item in model.items() if "moe" not in name}
    assert len(old) < len(model) and spec_of_tree(old, 0) == run.model


def test_a_run_with_experts_does_not_continue_one_with_others() -> None:
    def differences(*other: str) -> list[str]:
        runs = [run_spec(*EXPERTS), run_spec(*EXPERTS, *other)]
        return [str(found) for found in setting_differences(*(run.resolved for run in runs))]

    (found,) = differences("model.moe_router_topk=3")
    assert "model.moe_router_topk" in found
    assert not differences("model.moe_layer_freq=[1,1,1,1]"), "each layer has experts in both"
    assert not differences("model.moe_router_topk_scaling_factor=1.0", "model.moe_z_loss_coeff=0")


# --- names of linears -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "more"),
    [("*.experts.*", ()), ("layers.3.mlp.experts.3.fc2", ()), ("layers.0.mlp.fc1", ()),
     ("*.shared.fc1", ("model.moe_shared_expert_intermediate_size=32",))],
)  # fmt: skip
def test_patterns_name_experts(pattern: str, more: tuple[str, ...]) -> None:
    job = (*EXPERTS, *FP8, "model.moe_layer_freq=[0,1,1,1]", *more)
    fp8 = run_spec(*job, f"model.fp8_modules=['{pattern}:high_precision']").precision.fp8
    assert fp8 is not None
    names = ("layers.3.mlp.experts.3.fc2", "layers.0.mlp.fc1", "layers.2.mlp.shared.fc1")
    kept = [name for name in names if fp8.precision_of(name) == "high_precision"]
    assert kept == [name for name in names if fnmatchcase(name, pattern)] and len(kept) == 1
    entry = f"[{{from: 0.5, recipe: high_precision, modules: ['{pattern}']}}]"
    assert run_spec(*job, f"model.precision_schedule={entry}").precision.schedule


@pytest.mark.parametrize(
    ("pattern", "given"),
    [("*.experts.*", ()), ("layers.0.mlp.experts.0.fc1", EXPERTS),
     ("layers.1.mlp.fc1", EXPERTS), ("layers.1.mlp.experts.4.fc1", EXPERTS),
     ("*.shared.*", EXPERTS)],
)  # fmt: skip
def test_a_pattern_that_matches_no_linear_is_refused(pattern: str, given: tuple[str, ...]) -> None:
    layers = ("model.moe_layer_freq=[0,1,1,1]",) if given else ()
    job = (*given, *layers, *FP8)
    entry = f"[{{from: 0.5, recipe: high_precision, modules: ['{pattern}']}}]"
    for setting in (f"model.fp8_modules=['{pattern}:high_precision']",
                    f"model.precision_schedule={entry}"):  # fmt: skip
        problem = load_problems(*job, setting)[0]
        assert problem.reason == f"the pattern {pattern} matches no linear"
        assert ("mlp.experts.*.fc2" in problem.hint) == bool(given)


def test_padding_has_an_effect_where_experts_alone_need_it() -> None:
    job = (*EXPERTS, *FP8, "model.pad_inner_dim=True")
    assert the_problem(*job).reason.startswith("has no effect")
    load([*job, "model.moe_ffn_hidden_size=40"])
    load([*job, "model.moe_shared_expert_intermediate_size=40"])


# --- which layers have experts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", "1111"),
        ("2", "1010"),
        ("3", "1001"),
        ("4", "1000"),
        ("99", "1000"),
        ("[0,1,1,0]", "0110"),
        ("'[0]+[1]*3'", "0111"),
        ("'([1]*1+[0])*2'", "1010"),
        ("'2*[1,0]'", "1010"),
        ("'2'", "1010"),
    ],
)
def test_layers_that_have_experts(text: str, layers: str) -> None:
    """Of a number N those are i mod N = 0, counted from 0: transformers' begin at N - 1."""
    assert moe(*EXPERTS, f"model.moe_layer_freq={text}").layers == tuple(n == "1" for n in layers)


def test_a_text_without_quotes_is_told_of_them() -> None:
    problem = the_problem(*EXPERTS, "model.moe_layer_freq=[0]*1+[1]*3")
    assert problem.hint == "Quote the value: 'model.moe_layer_freq=\"…\"'"


@pytest.mark.parametrize(
    "text",
    ["", "[", "__import__('os')", "[1]*10**9", "[0]*99999999", "[[0]]", "[0.5]", "[2]", "[True]",
     "[1]-[0]", "[len('a')]", "x", "-1", "0", "1.5", "(" * 5000, "[0]+" * 5000 + "[1]",
     "[1]*9999*9999", "[]", "[1]" + " " * 100_000 + "+[x]", "-" * 99_999, "[" * 99_999,
     "1*" * 49_999 + "1", "lambda:" * 9_999 + "1", "9" * 5000],
)  # fmt: skip
def test_a_text_that_is_no_list_of_layers_is_refused_and_not_run(text: str) -> None:
    assert not is_layer_frequency(text)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, None, [], [True], [2], {}, [[1]], 2**60])
def test_a_value_that_is_no_frequency_is_refused(value: object) -> None:
    assert not is_layer_frequency(value)


def test_lists_of_deepseek() -> None:
    assert layer_list("([0]*3+[1]*58)") == [0] * 3 + [1] * 58
    assert layers_with_experts("[0]*3+[1]*58", 61) == (False,) * 3 + (True,) * 58


# --- what does not fit ----------------------------------------------------------------------------

TOP_1 = "model.moe_router_topk=1"
REFUSED: list[tuple[tuple[str, ...], str, str, str]] = [
    (("model.moe_router_topk=5",), "moe_router_topk", "more than model.num_moe_experts=4",
     "from 1 to 4"),
    ((TOP_1,), "moe_router_topk", "no gradient", "model.moe_router_pre_softmax=True"),
    ((BIAS,), "moe_router_enable_expert_bias", "sigmoid alone", SIGMOID),
    (("model.moe_layer_freq=[0,1]",), "moe_layer_freq", "2 numbers for model.num_layers=4",
     "Give 4 numbers"),
    (("model.moe_layer_freq=[0,0,0,0]",), "moe_layer_freq", "no layer has experts", "Give 1"),
    (("model.moe_layer_freq=0",), "moe_layer_freq", "at least 1", "default is 1"),
    (("model.moe_router_load_balancing_type=none", "model.moe_aux_loss_coeff=0.1"),
     "moe_aux_loss_coeff", "has no effect with", "aux_loss"),
    (("model.moe_router_load_balancing_type=seq_aux_loss",), "moe_router_load_balancing_type",
     "has no effect with model.moe_aux_loss_coeff=0.0", "moe_aux_loss_coeff above 0"),
    (("model.moe_router_load_balancing_type=global_aux_loss",), "moe_router_load_balancing_type",
     "is not supported", "aux_loss"),
    (("model.moe_router_load_balancing_type=sinkhorn",), "moe_router_load_balancing_type",
     "is not supported", "aux_loss"),
    (("model.moe_router_load_balancing_type=[aux_loss,seq_aux_loss]",),
     "moe_router_load_balancing_type", "several losses", "aux_loss"),
    (("model.moe_router_load_balancing_type=other",), "moe_router_load_balancing_type",
     "must be aux_loss", "aux_loss"),
    (("model.moe_aux_loss_coeff=[0.1,0.1]",), "moe_aux_loss_coeff", "is not a number", "at least"),
    (("model.moe_aux_loss_coeff=-1",), "moe_aux_loss_coeff", "at least 0", "default is 0.0"),
    (("model.moe_router_score_function=sqrtsoftplus",), "moe_router_score_function",
     "is not supported", "softmax or sigmoid"),
    (("model.moe_router_pre_softmax=True", SIGMOID), "moe_router_pre_softmax",
     "has no effect with model.moe_router_score_function=sigmoid", "softmax"),
    (("model.moe_router_bias_update_rate=0.1",), "moe_router_bias_update_rate",
     "has no effect with model.moe_router_enable_expert_bias=False", "enable_expert_bias=True"),
    (("model.num_moe_experts=0",), "num_moe_experts", "at least 1", "null"),
    (("model.num_moe_experts=4096", "model.num_layers=100"), "num_moe_experts", "409600 experts",
     "at most 1000"),
    (("model.moe_ffn_hidden_size=100", *FP8), "moe_ffn_hidden_size", "multiples of 16",
     "96 or 112"),
    (("model.moe_ffn_hidden_size=144", *FP8, "model.fp8_recipe=blockwise"), "moe_ffn_hidden_size",
     "multiples of 128", "128 or 256"),
    (("model.moe_shared_expert_intermediate_size=24", *FP8), "moe_shared_expert_intermediate_size",
     "multiples of 16", "16 or 32"),
    (("model.moe_shared_expert_intermediate_size=16", *FP8, "trainer.devices=2",
      "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"),
     "moe_shared_expert_intermediate_size", "16 divided by model.tensor_model_parallel_size=2",
     "32"),
    (("model.bias=True",), "bias", "no biases", "model.bias=False"),
    (("model.transformer_block_type=post_ln",), "transformer_block_type", "norms before", "pre_ln"),
    (("model.ffn_dropout=0.1",), "ffn_dropout", "no dropout", "model.ffn_dropout=0"),
    (("model.optim.name=muon",), "optim.name", "Muon", "adamw"),
    (("model.optim.exp_avg_dtype=fp16",), "optim.fp8_opt_level", "FP8-LM", "Leave"),
    ((EP_2, "trainer.devices=3", *SMALL), "expert_model_parallel_size",
     "3 ranks of a pipeline stage", "Sizes that fit: 1"),
    ((EP_4, "trainer.devices=8", "model.pipeline_model_parallel_size=4", *SMALL),
     "expert_model_parallel_size", "2 ranks of a pipeline stage", "Sizes that fit: 1, 2"),
    (("model.expert_model_parallel_size=8", "trainer.devices=8", *SMALL),
     "expert_model_parallel_size", "does not divide model.num_moe_experts=4",
     "Sizes that fit: 1, 2, 4"),
    ((EP_2, "trainer.devices=4", *SMALL, *FP8, "model.tp_only_amax_red=True"), "tp_only_amax_red",
     "would not learn", "model.expert_model_parallel_size=1"),
    ((EP_2, "trainer.devices=4", *SMALL, *FP8, "model.reduce_amax=False"), "reduce_amax",
     "would not learn", "model.expert_model_parallel_size=1"),
    (("model.compile=block",), "compile", "changes from step to step", "off"),
    (("model.fp8_backend=te", *FP8), "fp8_backend", "no experts", "native"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "key", "reason", "hint"), REFUSED, ids=lambda item: str(item)[:60]
)
def test_what_does_not_fit_is_refused(
    given: tuple[str, ...], key: str, reason: str, hint: str
) -> None:
    problem = the_problem(*EXPERTS, *given)
    assert problem.key == f"model.{key}"
    assert reason in problem.reason and hint in problem.hint, problem


@pytest.mark.parametrize(
    ("key", "given"),
    [("sequence_parallel", ("trainer.devices=2", "model.tensor_model_parallel_size=2")),
     ("fsdp", ("trainer.devices=2", "model.fsdp=True")),
     ("enable_cuda_graph", ("trainer.accelerator=gpu", "model.enable_cuda_graph=True")),
     ("fp8_backend", ("model.fp8_backend=torchao", *FP8, "model.fp8_recipe=tensorwise"))],
)  # fmt: skip
def test_what_other_rules_refuse_too_is_refused_for_experts(
    key: str, given: tuple[str, ...]
) -> None:
    dense, found = _problems_of(*given), _problems_of(*EXPERTS, *given)
    assert f"model.{key}" in found and found != dense


def _problems_of(*given: str) -> dict[str, str]:
    try:
        load(given)
    except Exception:
        return {problem.key: problem.reason for problem in load_problems(*given)}
    return {}


def test_every_row_of_the_table_says_what_to_do_with_the_experts() -> None:
    def of_experts(row: Row) -> bool:
        return "model.num_moe_experts" in row.when

    rows = [row for row in TOGETHER if of_experts(row)]
    assert len(rows) >= 10
    assert all("leave model.num_moe_experts out" in row.hint for row in rows)


@pytest.mark.parametrize(
    "more", [(), ("model.tensor_model_parallel_size=2", "model.sequence_parallel=True")]
)
def test_experts_are_divided_over_ranks_of_a_stage(more: tuple[str, ...]) -> None:
    layout = (EP_4, "trainer.devices=8", "model.pipeline_model_parallel_size=2", *more)
    run, whole = run_spec(*EXPERTS, *SMALL, *layout), run_spec(*EXPERTS, *SMALL)
    assert run.parallel.ep == 4 and run.parallel.tp * run.parallel.dp == 4
    assert not setting_differences(whole.resolved, run.resolved), "a checkpoint loads in both"


@pytest.mark.parametrize(
    "name", [*(n for n in FIELDS if n != "num_moe_experts"), "expert_model_parallel_size"]
)
def test_a_key_of_experts_alone_has_no_effect_and_is_refused(name: str) -> None:
    given = FIELDS[name][0] if name in FIELDS else (EP_2, "trainer.devices=2")
    found = load_problems(*given)
    assert f"model.{name}" in {problem.key for problem in found}
    for problem in found:
        assert problem.reason == "has no effect with model.num_moe_experts=null"
        assert "Set model.num_moe_experts" in problem.hint


@pytest.mark.parametrize(
    "given",
    [(TOP_1, "model.moe_router_pre_softmax=True"), (TOP_1, SIGMOID),
     ("model.num_moe_experts=1", TOP_1, "model.moe_router_pre_softmax=True"),
     ("model.moe_router_load_balancing_type=none",), (*FP8, "model.moe_ffn_hidden_size=48"),
     ("model.add_qkv_bias=True",), ("model.activations_checkpoint_granularity=full",
      "model.activations_checkpoint_method=uniform"), ("model.optim.name=distributed_fused_adam",)],
    ids=str,
)  # fmt: skip
def test_what_fits_is_accepted(given: tuple[str, ...]) -> None:
    load([*EXPERTS, *given])


# --- names of Megatron and files of NeMo ----------------------------------------------------------

MEGATRON = """
num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
moe_shared_expert_overlap use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size
moe_layer_freq moe_ffn_hidden_size moe_router_load_balancing_type moe_enable_routing_replay
moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8
moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased
use_grouped_gemm_for_dense_mlp moe_grouped_gemm moe_use_grouped_tensor moe_single_grouped_weight
moe_single_grouped_bias moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping
moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging
moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference
moe_token_drop_policy moe_layer_recompute moe_permute_fusion moe_router_fusion
moe_apply_probs_on_input moe_latent_size moe_flex_dispatcher_num_sms moe_deepep_num_sms
moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
moe_hybridep_num_sms_preprocessing moe_ncclep_zero_copy moe_dispatch_fwd_dtype
moe_combine_bwd_dtype moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor
inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type moe_paged_stash
moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
moe_paged_stash_buffer_size_factor_cpu expert_model_parallel_size expert_tensor_parallel_size
expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size moe_grad_scale_func
overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad moe_use_upcycling
moe_upcycling_granularity
""".split()
"""The fields about experts of Megatron-core 0.20 (d98e8a64), and its two of the command line."""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("num_local_experts", "num_moe_experts"), ("num_experts", "num_moe_experts"),
     ("num_experts_per_tok", "moe_router_topk"), ("router_aux_loss_coef", "moe_aux_loss_coeff"),
     ("moe_intermediate_size", "moe_ffn_hidden_size")],
)  # fmt: skip
def test_names_of_transformers_lead_to_ours(theirs: str, ours: str) -> None:
    assert the_problem(f"+model.{theirs}=8").hint == f"Did you mean model.{ours}?"


def test_every_name_of_megatron_is_known() -> None:
    known = all_keys().keys() | nemo_keys().keys()
    assert [name for name in MEGATRON if f"model.{name}" not in known] == []
    ours = {path for path in known if "moe" in path or "expert" in path}
    assert {path.removeprefix("model.") for path in ours} - set(MEGATRON) == {
        "moe_ncclep_static_shape"  # of Megatron Bridge
    }


INERT = ["moe_grouped_gemm=True", "moe_permute_fusion=True", "moe_router_fusion=True",
         "moe_shared_expert_overlap=True", "overlap_moe_expert_parallel_comm=True",
         "moe_per_layer_logging=True", "moe_router_dtype=fp32", "moe_router_dtype=null",
         "moe_token_dispatcher_type=alltoall", "moe_token_dispatcher_type=allgather",
         "expert_tensor_parallel_size=1", "expert_tensor_parallel_size=null",
         "moe_expert_capacity_factor=-1.0", "moe_token_drop_policy=position",
         "moe_input_jitter_eps=0.0"]  # fmt: skip


@pytest.mark.parametrize("given", INERT)
def test_what_changes_no_number_is_named_at_the_start(given: str) -> None:
    name = given.partition("=")[0]
    loaded = load_all([*EXPERTS, f"model.{given}"])
    assert loaded.values == load(EXPERTS)
    (line,) = [line for line in loaded.inert_lines() if f"model.{name}=" in line]
    assert nemo_keys()[f"model.{name}"].note in line


def test_a_router_without_a_dtype_is_told_to_have_fp32() -> None:
    loaded = load_all([*EXPERTS, "model.moe_router_dtype=null"])
    assert any("the router computes in FP32" in line for line in loaded.inert_lines())


NOT_IN_THIS_VERSION = [
    "moe_router_dtype=fp64", "moe_token_dispatcher_type=flex",
    "expert_tensor_parallel_size=2", "moe_expert_capacity_factor=1.25",
    "moe_pad_expert_input_to_capacity=True", "moe_input_jitter_eps=0.01",
    "moe_router_padding_for_quantization=True", "moe_router_padding_for_fp8=True",
    "moe_shared_expert_gate=True", "moe_apply_probs_on_input=True", "moe_latent_size=64",
    "moe_enable_routing_replay=True", "moe_paged_stash=True", "moe_router_num_groups=2",
    "moe_router_group_topk=2", "moe_router_topk_limited_devices=2", "moe_enable_deepep=True",
    "moe_single_grouped_weight=True", "moe_use_grouped_tensor=True",
    "moe_mlp_glu_interleave_size=32", "moe_token_dropping=True", "moe_router_force_biased=0.1",
    "moe_router_force_load_balancing=True", "moe_expert_rank_capacity_factor=1.0",
    "moe_use_upcycling=True", "moe_dispatch_fwd_dtype=mxfp8", "moe_combine_bwd_dtype=mxfp8",
    "multi_latent_attention=True", "mtp_num_layers=1",
]  # fmt: skip


@pytest.mark.parametrize("given", NOT_IN_THIS_VERSION)
def test_what_this_version_lacks_is_refused_by_name(given: str) -> None:
    name, _, value = given.partition("=")
    problem = the_problem(*EXPERTS, f"model.{given}")
    assert problem.key == f"model.{name}" and str(problem.value) == value
    assert problem.reason and "Leave it out" in problem.hint


def test_without_experts_a_file_may_keep_what_nothing_reads(tmp_path: Path) -> None:
    """NeMo's files of dense models have keys of experts, which NeMo does not read there."""
    nothing = {"num_moe_experts": None, "moe_router_topk": None, "moe_aux_loss_coeff": None}
    assert _mixtral(tmp_path, **nothing).model.moe is None
    assert moe(*EXPERTS, *(f"model.{name}=null" for name in [*nothing][1:])) == moe(*EXPERTS)
    more = {"num_moe_experts": None, "moe_expert_capacity_factor": 1.0, "moe_router_topk": 1,
            "moe_token_dispatcher_type": "flex", "moe_shared_expert_gate": True}  # fmt: skip
    assert _mixtral(tmp_path, **more).model.moe is None


MIXTRAL: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": 4, "encoder_seq_length": 64,
    "max_position_embeddings": 64, "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 224,
    "num_attention_heads": 4, "num_query_groups": 2, "init_method_std": 0.02,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0,
    "normalization": "rmsnorm", "layernorm_epsilon": 1e-5, "bias": False,
    "activation": "fast-swiglu", "position_embedding_type": "rope", "rotary_base": 1000000.0,
    "share_embeddings_and_output_weights": False, "megatron_amp_O2": True, "mcore_gpt": True,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1, "sequence_parallel": False, "num_moe_experts": 8,
    "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.02,
    "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_z_loss_coeff": None,
    "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_permute_fusion": True, "moe_input_jitter_eps": None,
    "tokenizer": {"library": "builtin"},
    "data": {"data_prefix": "builtin", "seq_length": 64, "splits_string": "98,1,1"},
    "optim": {"name": "mcore_distributed_optim", "lr": 1e-3,
              "sched": {"min_lr": 1e-4}},
}  # fmt: skip
"""NeMo's file of Mixtral, made small."""


def _mixtral(tmp_path: Path, *overrides: str, **changes: Any) -> RunSpec:
    model = {name: item for name, item in (MIXTRAL | changes).items() if item != "left out"}
    tree = {"name": "mixtral", "model": model, "exp_manager": {"exp_dir": None},
            "trainer": {"devices": 1, "num_nodes": 1, "precision": "bf16", "max_steps": 8,
                        "val_check_interval": 4, "limit_val_batches": 1}}  # fmt: skip
    (tmp_path / "mixtral.yaml").write_text(yaml.safe_dump(tree))
    return run_spec(*overrides, config_dir=tmp_path, config_name="mixtral")


def test_nemos_file_of_mixtral_is_loaded_as_it_is(tmp_path: Path) -> None:
    assert _mixtral(tmp_path).model.moe == MoESpec(
        num_experts=8, top_k=2, ffn_hidden_size=224, layers=(True,) * 4, router_loss="aux_loss",
        router_loss_coeff=0.02,
    )  # fmt: skip
    loaded = load_all([], config_dir=tmp_path, config_name="mixtral")
    named = "\n".join(loaded.inert_lines())
    for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type",
                 "moe_expert_capacity_factor"):  # fmt: skip
        assert named.count(f"model.{name}=") == 1, name


def test_a_file_may_have_what_nemo_reads_in_another_mode_alone(tmp_path: Path) -> None:
    """DeepSeek's files ask for `pre_softmax` with a sigmoid, where Megatron does not read it."""
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True,
               "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0,
               "moe_router_enable_expert_bias": True, "moe_layer_freq": "[0]*1+[1]*3",
               "moe_router_topk_scaling_factor": 2.5}  # fmt: skip
    found = _mixtral(tmp_path, **sigmoid).model.moe
    assert found is not None and found.layers == (False, True, True, True)
    assert found.has_expert_bias and found.scaling_factor == 2.5
    assert (found.pre_softmax, found.router_loss) == (False, "none")
    loaded = load_all([], config_dir=tmp_path, config_name="mixtral")
    lines = "\n".join(loaded.inert_lines())
    for name in ("moe_router_pre_softmax", "moe_router_load_balancing_type"):
        assert f"model.{name}=" in lines, lines
