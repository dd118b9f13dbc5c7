"""Test that files with the keys of NVIDIA's launcher for NeMo load as they are.

The launcher's files are not part of this repository; `LAUNCHER` has keys and values of the same
kind as its GPT-3 files, and each test adds those of one family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config import dialects
from megafp8.config.errors import COMMAND_LINE, SettingError
from megafp8.config.layers import Layer, compose_layers, find_source
from megafp8.config.load import Loaded, load_all
from megafp8.config.merged import merge
from megafp8.config.nemo import nemo_keys
from megafp8.config.resolve import resolve
from megafp8.config.resume import check_continues
from megafp8.config.schema import all_keys
from megafp8.config.settings import Setting
from megafp8.errors import ConfigError
from megafp8.optim.schedules import learning_rate
from megafp8.specs import RunSpec
from tests.config.helpers import load_problems, the_problem

PATHS = ["data_dir=/data", "base_results_dir=/results"]

LAUNCHER: dict[str, Any] = {
    "run.name": "gpt3_5b",
    "run.results_dir": "${base_results_dir}/${.name}",
    "run.time_limit": "6-00:00:00",
    "run.dependency": "singleton",
    "trainer.num_nodes": 16,
    "trainer.devices": 8,
    "trainer.accelerator": "gpu",
    "trainer.precision": "bf16",
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.use_distributed_sampler": False,
    "trainer.max_epochs": None,
    "trainer.max_steps": 75000,
    "trainer.max_time": "05:23:30:00",
    "trainer.val_check_interval": 2000,
    "trainer.limit_val_batches": 50,
    "trainer.limit_test_batches": 50,
    "exp_manager.explicit_log_dir": "${training.run.results_dir}/results",
    "exp_manager.exp_dir": None,
    "exp_manager.name": "megatron_gpt",
    "exp_manager.wandb_logger_kwargs.project": "nemo_gpt3",
    "exp_manager.wandb_logger_kwargs.name": "${training.run.name}",
    "exp_manager.checkpoint_callback_params.save_top_k": 10,
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": True,
    "exp_manager.checkpoint_callback_params.filename": "megatron_llama--{step}",
    "exp_manager.checkpoint_callback_params.model_parallel_size": (
        "${multiply:${training.model.tensor_model_parallel_size}, "
        "${training.model.pipeline_model_parallel_size}}"
    ),
    "exp_manager.log_step_timing": True,
    "exp_manager.step_timing_kwargs": {"sync_cuda": True, "buffer_size": 5},
    "exp_manager.seconds_to_sleep": 60,
    "model.micro_batch_size": 4,
    "model.global_batch_size": 2048,
    "model.encoder_seq_length": 2048,
    "model.num_layers": 24,
    "model.hidden_size": 4096,
    "model.ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
    "model.num_attention_heads": 32,
    "model.layernorm_epsilon": "1e-5",
    "model.bias_activation_fusion": False,
    "model.apply_rope_fusion": True,
    "model.use_flash_attention": True,
    "model.cross_entropy_loss_fusion": True,
    "model.deterministic_mode": False,
    "model.activations_checkpoint_granularity": None,
    "model.activations_checkpoint_method": "block",
    "model.activations_checkpoint_num_layers": 0,
    "model.num_micro_batches_with_partial_activation_checkpoints": 0,
    "model.activations_checkpoint_layers_per_pipeline": 0,
    "model.overlap_p2p_comm": True,
    "model.batch_p2p_comm": False,
    "model.ub_tp_comm_overlap": True,
    "model.ub_tp_comm_overlap_cfg": {"qkv_dgrad": {"method": "bulk", "num_sm": 4}},
    "model.defer_embedding_wgrad_compute": True,
    "model.wgrad_deferral_limit": 22,
    "model.precision": "bf16",
    "model.num_moe_experts": None,
    "model.tokenizer.library": "megatron",
    "model.tokenizer.type": "GPT2BPETokenizer",
    "model.tokenizer.vocab_file": "${data_dir}/bpe/vocab.json",
    "model.tokenizer.merge_file": "${data_dir}/bpe/merges.txt",
    "model.tokenizer.use_fast": True,
    "model.fp8_hybrid": True,
    "model.fp8_amax_compute_algo": "max",
    "model.nsys_profile.trace": ["nvtx", "cuda"],
    "model.optim.name": "mcore_distributed_optim",
    "model.optim.bucket_cap_mb": 400,
    "model.optim.overlap_grad_sync": True,
    "model.optim.overlap_param_sync": True,
    "model.optim.dtype": "bf16",
    "model.optim.lr": "1.6e-4",
    "model.optim.weight_decay": 0.1,
    "model.optim.betas": [0.9, 0.95],
    "model.optim.sched.warmup_steps": 115,
    "model.optim.sched.constant_steps": 12500,
    "model.optim.sched.min_lr": "1.6e-5",
    "model.data.splits_string": "99990,8,2",
    "model.data.data_prefix": [0.5, "${data_dir}/a", 0.5, "${data_dir}/b"],
}


def launcher_yaml(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Write the launcher's file with some keys changed; return what `load` needs to find it."""
    tree: dict[str, Any] = {
        "defaults": ["_self_", {"optional tp_overlap@model.ub_tp_comm_overlap_cfg": None}],
        "hydra": {"searchpath": ["file:///opt/NeMo/conf"]},
    }
    for path, value in (LAUNCHER | changes).items():
        node = tree
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    (tmp_path / "5b.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return {"config_dir": tmp_path, "config_name": "5b"}


def load_launcher(tmp_path: Path, *overrides: str, **changes: Any) -> Loaded:
    return load_all([*PATHS, *overrides], **launcher_yaml(tmp_path, **changes))


def spec_of(loaded: Loaded) -> RunSpec:
    return resolve(loaded.values, lambda: True)


def test_a_launchers_file_runs_as_it_is(tmp_path: Path) -> None:
    loaded = load_launcher(tmp_path)
    spec = spec_of(loaded)
    assert spec.optim.name == "distributed_fused_adam" and spec.optim.lr == 1.6e-4
    assert spec.model.ffn_hidden_size == 4 * 4096
    assert spec.observe.explicit_log_dir == "/results/gpt3_5b/results"
    assert str(spec.data.prefix).count("/data/") == 2
    assert spec.data.tokenizer.vocab_file == "/data/bpe/vocab.json"
    lines = loaded.inert_lines()
    assert lines[:2] == [
        "translated: model.optim.name=mcore_distributed_optim (5b.yaml): distributed_fused_adam",
        "translated: model.optim.dtype=bf16 (5b.yaml): fp32",
    ]
    named = "\n".join(lines)
    for path in (
        "run.time_limit",
        "model.use_flash_attention",
        "model.overlap_p2p_comm",
        "exp_manager.step_timing_kwargs.buffer_size",
        "model.ub_tp_comm_overlap",
        "model.ub_tp_comm_overlap_cfg",
        "model.activations_checkpoint_num_layers",
    ):
        assert named.count(f"{path}=") == 1, path


def test_the_launchers_paths_give_one_message(tmp_path: Path) -> None:
    problem = the_problem(**launcher_yaml(tmp_path))
    assert problem.key == "base_results_dir and data_dir"
    assert problem.hint.startswith("Give base_results_dir=PATH and data_dir=PATH on the command")
    for user in ("exp_manager.explicit_log_dir", "model.data.data_prefix", "run.results_dir"):
        assert user in problem.reason
    assert problem.origin == "5b.yaml"
    (one, other) = load_problems("data_dir=/d", "model.num_layers=0", **launcher_yaml(tmp_path))
    assert {one.key, other.key} == {"base_results_dir", "model.num_layers"}


def test_a_stronger_layer_replaces_a_translated_value(tmp_path: Path) -> None:
    loaded = load_launcher(tmp_path, "model.optim.name=adamw")
    assert spec_of(loaded).optim.name == "adamw"
    assert not any("mcore" in line for line in loaded.inert_lines())


def test_spellings_of_nemo_are_translated(tmp_path: Path) -> None:
    changes = {"model.position_embedding_type": "ALiBi", "model.fsdp_grad_reduce_dtype": "fp32"}
    loaded = load_launcher(tmp_path, **changes)
    assert loaded.values["model.position_embedding_type"] == "alibi"
    assert loaded.values["model.fsdp_grad_reduce_dtype"] == 32
    centered = load_launcher(tmp_path, **{"model.normalization": "layernorm1p"})
    assert spec_of(centered).model.layernorm_zero_centered_gamma
    assert spec_of(centered).model.normalization == "layernorm"
    assert "translated: model.normalization=layernorm1p (5b.yaml): layernorm" in "\n".join(
        centered.inert_lines()
    )
    alone = load_all(["model.optim.name=mcore_distributed_optim"])
    assert alone.values["model.optim.name"] == "distributed_fused_adam"


SPELLED: dict[str, Any] = {
    "model.fp8": "hybrid", "model.fp8_param": True, "model.fp4": "e2m1", "model.qkv_bias": True,
    "model.data.dataloader_inter_document_masking": True, "model.normalization": "layernorm1p",
    "model.position_embedding_type": "RoPE", "model.optim.name": "mcore_distributed_optim",
    "model.seed": "${training.model.global_batch_size}",
}  # fmt: skip


@pytest.mark.parametrize("key", SPELLED)
def test_a_layer_has_settings_of_ours_alone_before_layers_are_merged(key: str) -> None:
    layer = Layer(COMMAND_LINE, (Setting(key, SPELLED[key], COMMAND_LINE),))
    (ours,) = dialects.translate([layer]).layers
    assert ours.settings and ours != layer and ours.origin == COMMAND_LINE
    merged = merge([ours])
    assert not merged.problems and merged.origins.keys() <= {*all_keys(), *nemo_keys()}
    (again,) = dialects.translate([ours]).layers
    assert again == ours, "nothing is left to translate"


def test_what_means_more_beside_other_settings_is_one_more_layer(tmp_path: Path) -> None:
    def beside(text: str) -> list[tuple[str, object]]:
        (tmp_path / "theirs.yaml").write_text(f"model:\n  mcore_gpt: true\n  {text}\n")
        layers = compose_layers(find_source(tmp_path, "theirs"), [])
        found = dialects.beside_others(layers)
        return [(s.key, s.value) for layer in found.layers for s in layer.settings]

    gelu = ("model.openai_gelu", True)
    assert beside("bias: true") == [gelu]
    assert beside("activation: swiglu") == []
    assert beside("openai_gelu: true\n  enable_cuda_graph: true") == [
        ("model.enable_cuda_graph", False)
    ]
    assert beside("openai_gelu: true\n  enable_cuda_graph: true\n  fp8_backend: native") == []
    lengths = "encoder_seq_length: 64\n  data: {seq_length: 32, data_impl: mock}"
    assert beside(f"openai_gelu: true\n  {lengths}") == [
        ("model.encoder_seq_length", 32), ("model.max_position_embeddings", 64),
        ("model.data.data_impl", "mock"), ("model.data.data_prefix", "mock"),
    ]  # fmt: skip


REFUSED: dict[str, dict[str, Any]] = {
    "a mixtral with capacities": {
        "model.moe_expert_capacity_factor": 1.0,
        "model.num_moe_experts": 8,
        "model.bias": False,
        "trainer.devices": 1,
        "trainer.num_nodes": 1,
    },
    "falcon": {"model.name": "megatron_falcon_gpt"},
    "chatglm": {"model.rotary_interleaved": True},
    "gemma": {"model.apply_embedding_scaling": True},
    "gemma 2": {"model.mcore_customization_config": {"attn_logit_softcapping": 50.0}},
    "mistral nemo": {"model.window_size": [1024, 1]},
    "baichuan's tokenizer": {"model.tokenizer.trust_remote_code": True},
    "starcoder's samples": {"model.data.add_fim": True},
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_would_change_numbers_is_refused_by_name(family: str, tmp_path: Path) -> None:
    problem: SettingError = the_problem(*PATHS, **launcher_yaml(tmp_path, **REFUSED[family]))
    assert problem.key.startswith(next(iter(REFUSED[family])))
    assert problem.hint and problem.origin == "5b.yaml"


def test_values_of_other_families_that_ask_for_nothing_pass(tmp_path: Path) -> None:
    given = load_launcher(
        tmp_path,
        **{
            "model.name": "megatron_gpt_full_te_layer_autocast",
            "model.mcore_customization_config": {"parallel_attention": True},
            "model.data.fim": {"rate": 0.5},
            "model.data.add_fim": False,
            "model.moe_grouped_gemm": True,
            "model.moe_router_topk": 2,
            "model.moe_token_dispatcher_type": "alltoall",
            "model.distributed_adam_bucket_merge_size": 4,
            "s3_checkpointing": {"chunk_size_MB": 64},
            "env_vars": {"NVTE_FUSED_ATTN": 1},
        },
    )
    name = {"model.name": "megatron_gpt_full_te_layer_autocast"}
    spec, plain = spec_of(given), spec_of(load_launcher(tmp_path, **name))
    for part in ("model", "optim", "precision", "parallel", "train", "data"):
        assert getattr(spec, part) == getattr(plain, part), part


def test_recomputing_no_layer_is_refused() -> None:
    problem = the_problem(
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=block",
        "model.activations_checkpoint_num_layers=0",
    )
    assert problem.key == "model.activations_checkpoint_num_layers"
    assert problem.reason == "recomputes no layer"


TIMING = {"trainer.max_steps": 100}


def test_a_timing_jobs_schedule_is_cut_and_said(tmp_path: Path) -> None:
    """115 steps of warm-up and 12500 constant ones, of 100: NeMo warms up by lr * s / 115."""
    loaded = load_launcher(tmp_path, **TIMING)
    spec = spec_of(loaded).optim
    rates = [learning_rate(spec, step) for step in range(1, 101)]
    assert rates == pytest.approx([1.6e-4 * s / 115 for s in range(100)])
    (line,) = [line for line in loaded.inert_lines() if line.startswith("cut: ")]
    assert "warmup_steps=115" in line and "constant_steps=12500" in line
    assert "trainer.max_steps=100: the run ends in the warm-up" in line
    assert not load_launcher(tmp_path).notes


@pytest.mark.parametrize(
    ("more", "positions"),
    [
        ({}, 4096),
        ({"model.max_position_embeddings": 8192}, 8192),
        ({"model.max_position_embeddings": "${.encoder_seq_length}"}, 4096),
        ({"model.position_embedding_type": "rope", "model.window_size": [2048, 0]}, 4096),
    ],
)
def test_a_shorter_length_of_samples_is_the_sequences(
    more: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    """As in NeMo, samples have `data.seq_length`; the model keeps its number of positions."""
    lengths = {"model.encoder_seq_length": 4096, "model.data.seq_length": 2048}
    loaded = load_launcher(tmp_path, **lengths, **more)
    spec = spec_of(loaded)
    assert spec.data.seq_length == loaded.values["model.encoder_seq_length"] == 2048
    assert spec.model.max_position_embeddings == positions
    assert (
        "translated: model.data.seq_length=2048 (5b.yaml): model.encoder_seq_length=2048 instead "
        f"of 4096, and model.max_position_embeddings={positions}"
    ) in loaded.inert_lines()
    same = load_launcher(tmp_path, **lengths | {"model.data.seq_length": 4096})
    assert spec_of(same).data.seq_length == 4096 and not same.notes


def test_samples_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    problem = the_problem(*PATHS, **launcher_yaml(tmp_path, **{"model.data.seq_length": 4096}))
    assert problem.key == "model.data.seq_length" and "at most 2048" in problem.hint


def test_mlperfs_keys_have_an_effect(tmp_path: Path) -> None:
    given = {"trainer.limit_val_batches": 1.0, "model.do_layer_norm_weight_decay": True}
    spec = spec_of(load_launcher(tmp_path, **given))
    assert spec.train.val_share == 1.0 and spec.optim.decays_vectors


def test_mock_data_are_random_tokens(tmp_path: Path) -> None:
    """NeMo ignores the data that the file names, and so does the run, which says so."""
    loaded = load_launcher(tmp_path, **{"model.data.data_impl": "mock"})
    assert spec_of(loaded).data.prefix == "mock"
    lines = loaded.inert_lines()
    assert (
        "translated: model.data.data_impl=mock (5b.yaml): model.data.data_prefix=mock; no data "
        "are read"
    ) in lines
    assert any("splits_string" in line and line.startswith("inert: ") for line in lines)
    assert not any("data_impl=mock" in line for line in lines if line.startswith("inert: "))
    mine = load_launcher(tmp_path, "model.data.data_impl=mock")
    assert spec_of(mine).data.prefix == "mock"
    alone = load_all(["model.data.data_impl=mock"])
    assert spec_of(alone).data.prefix == "mock"


def test_a_file_that_never_validates_may_leave_the_steps_open(tmp_path: Path) -> None:
    never = {"trainer.val_check_interval": None, "trainer.limit_val_batches": 0.0}
    never["exp_manager.create_checkpoint_callback"] = False
    assert spec_of(load_launcher(tmp_path, **never)).train.limit_val_batches == 0
    problem = the_problem(*PATHS, **launcher_yaml(tmp_path, **{"trainer.val_check_interval": None}))
    assert problem.key == "trainer.val_check_interval"


def test_data_named_beside_mock_data_are_a_mistake(tmp_path: Path) -> None:
    where = launcher_yaml(tmp_path, **{"model.data.data_impl": "mock"})
    problem = the_problem(*PATHS, "model.data.data_prefix=/mine", **where)
    assert problem.key == "model.data.data_prefix" and "data_impl=mmap" in problem.hint
    both = ["model.data.data_prefix=/mine", "model.data.data_impl=mmap"]
    assert spec_of(load_launcher(tmp_path, *both)).data.prefix == "/mine"
    problem = the_problem("model.data.data_impl=lazy")
    assert problem.key == "model.data.data_impl" and "mock" in problem.hint


def test_only_learned_positions_begin_again_in_a_nemo_file(tmp_path: Path) -> None:
    """NeMo's rotary positions are those in the sample, whatever the positions' numbers."""
    reset, kind = "model.data.reset_position_ids", "model.position_embedding_type"
    for positions, acts in (("rope", False), ("learned_absolute", True)):
        where = launcher_yaml(tmp_path, **{reset: True, kind: positions})
        loaded = load_all(PATHS, **where)
        assert spec_of(loaded).data.reset_position_ids == acts
        lines = [line for line in loaded.inert_lines() if reset in line]
        wanted = f"inert: {reset}=True (5b.yaml): has no effect with {kind}=rope"
        assert lines == ([] if acts else [wanted])
        assert spec_of(load_all([*PATHS, f"{reset}=True"], **where)).data.reset_position_ids


def test_megatrons_name_of_packed_documents(tmp_path: Path) -> None:
    """Its documents begin at position 0 and are apart, also where NeMo would drop a mask; the start
    of a run says what the key stands for. False stands for nothing."""
    masking = "model.data.dataloader_inter_document_masking"
    for value in (True, False):
        where = launcher_yaml(tmp_path, **{masking: value})
        loaded = load_all(PATHS, **where)
        data = spec_of(loaded).data
        assert data.reset_attention_mask is data.reset_position_ids is value
        lines = [line for line in loaded.inert_lines() if "reset_attention_mask" in line]
        assert not any("has no effect" in line for line in lines)
        own = spec_of(load_all([f"{masking}={value}"])).data
        assert own.reset_attention_mask is own.reset_position_ids is value
    problem = the_problem(*PATHS, f"{masking}=maybe")
    assert problem.key == masking and "Give True or False" in problem.hint


def test_documents_are_kept_apart_with_context_parallelism(tmp_path: Path) -> None:
    """As the files of Llama 3 ask for it, once the mask has an effect."""
    mask, fusion = "model.data.reset_attention_mask", "model.get_attention_mask_from_fusion"
    family = {
        "model.context_parallel_size": 2,
        "model.position_embedding_type": "rope",
        "model.data.reset_position_ids": True,
        mask: True,
    }
    where = launcher_yaml(tmp_path, **family)
    assert not spec_of(load_all(PATHS, **where)).data.reset_attention_mask
    spec = spec_of(load_all([*PATHS, f"{fusion}=False"], **where))
    assert spec.data.reset_attention_mask and spec.parallel.cp == 2
    assert not spec.data.reset_position_ids
    where = launcher_yaml(tmp_path, **family, **{"model.scale_positional_embedding": True})
    spec = spec_of(load_all([*PATHS, f"{fusion}=False"], **where))
    assert spec.model.scale_positional_embedding and spec.model.rope_scaling_factor == 8


def test_a_mask_of_documents_is_dropped_where_nemo_drops_it(tmp_path: Path) -> None:
    """With `get_attention_mask_from_fusion`, its default, NeMo gives its layers no mask."""
    mask, fusion = "model.data.reset_attention_mask", "model.get_attention_mask_from_fusion"
    for given in ({}, {fusion: True}):
        where = launcher_yaml(tmp_path, **({mask: True} | given))
        loaded = load_all(PATHS, **where)
        assert not spec_of(loaded).data.reset_attention_mask
        (line,) = [
            line for line in loaded.inert_lines() if mask in line and "has no effect" in line
        ]
        assert line == f"inert: {mask}=True (5b.yaml): has no effect with {fusion}=True"
    for override, own in (
        (f"{mask}=True", {}),
        (f"{fusion}=False", {}),
        ("name=x", {fusion: False}),
    ):
        where = launcher_yaml(tmp_path, **({mask: True} | own))
        assert spec_of(load_all([*PATHS, override], **where)).data.reset_attention_mask
    old = spec_of(load_all([*PATHS, f"{mask}=True"], **launcher_yaml(tmp_path, **{mask: True})))
    new = spec_of(load_all(PATHS, **launcher_yaml(tmp_path, **{mask: True})))
    with pytest.raises(ConfigError, match=f"Give {mask}=True to continue it"):
        check_continues(old.resolved, new.resolved, run="runs/a")
