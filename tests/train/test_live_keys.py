"""Every key of the schema changes something that a run does: a tensor, a file, a count, a message.

A new key makes the walk fail until it has an entry in `EFFECTS`. An entry is one of

    Trains(VALUE, *JOB)      two steps differ from those at the default: losses, rates, weights
    Runs(VALUE, *JOB)        a whole run differs in its files, metrics or output
    Refused(VALUE)           every other value is refused, by this key's name
    ShownBy(NODE)            an existing test shows it, where none fits: ranks, faults
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from megafp8.data.loader import Loader
from megafp8.data.prepare import prepare
from megafp8.data.samples import Repeated
from megafp8.errors import UserError
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.step import train_step
from tests.train.runs import JOB, ROOT, TIMING_KEYS, Driver, Place, make_dataset

CALLBACK = "exp_manager.checkpoint_callback_params"
NSYS = "model.nsys_profile"
SHORT = (
    "trainer.max_steps=3",
    "trainer.val_check_interval=2",
    "model.optim.sched.warmup_steps=1",
    "model.fp8_amax_history_len=2",
)
Observed = dict[str, object]


@dataclass(frozen=True)
class Trains:
    value: object
    job: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runs:
    value: object
    job: tuple[str, ...] = ()
    sees: str = "files"  # what must differ: files, metrics or output


@dataclass(frozen=True)
class Refused:
    value: object


@dataclass(frozen=True)
class ShownBy:
    node: str


Effect = Trains | Runs | Refused | ShownBy


MODEL_KEYS = "tests/train/test_model_keys.py"
OPTIM_KEYS = ShownBy("tests/train/test_optim_keys.py::test_each_key_moves_the_weights_elsewhere")
WANDB_KEYS = ShownBy("tests/observe/test_trackers.py::test_wandb_gets_what_the_settings_say")
ROPE = ("model.position_embedding_type=rope",)
LENGTH = "model.original_max_position_embeddings=64"
SCALED = (*ROPE, "model.scale_positional_embedding=True", "model.kv_channels=16", LENGTH)
YARN = (*ROPE, "model.yarn_rotary_scaling_factor=4", "model.kv_channels=32",
        "model.original_max_position_embeddings=512")  # fmt: skip
RECOMPUTES = ShownBy(f"{MODEL_KEYS}::test_recomputation_changes_what_runs_and_no_number")
NAMED = ShownBy("tests/data/test_forms.py::test_a_named_tokenizer_must_be_that_of_the_data")
RESUMES = ShownBy("tests/train/test_resume.py::test_a_new_run_continues_from_a_checkpoint")
EXAMPLES = ShownBy("tests/train/test_finetuning.py::test_each_key_changes_the_samples")
LIMITS = ShownBy("tests/observe/test_health.py::test_limits")
FOUR_BITS = ("model.fp8_recipe=nvfp4", "model.fp8_amax_history_len=1024")
CURRENT = ("model.fp8_recipe=tensorwise", "model.fp8_amax_history_len=1024")


SUITS_EXPERTS = ("model.bias=False", "model.ffn_dropout=0")
EXPERTS = ("model.num_moe_experts=4", *SUITS_EXPERTS)
SIGMOID = (*EXPERTS, "model.moe_router_score_function=sigmoid")
EFFECTS: dict[str, Effect] = {
    "restore_from_path": ShownBy("tests/train/test_weights.py::test_run_to_transformers_and_back"),
    "model.resume_from_checkpoint": RESUMES,
    "exp_manager.resume_from_checkpoint": RESUMES,
    "model.gc_interval": Runs(2, sees="output"),
    "trainer.max_restarts": ShownBy(
        "tests/parallel/test_launch.py::test_a_rank_that_dies_is_started_again"
    ),
    "trainer.max_epochs": ShownBy("tests/train/test_finetuning.py::test_epochs_are_so_many_steps"),
    "trainer.gradient_clip_algorithm": Trains("value", ("trainer.gradient_clip_val=0.001",)),
    "model.rampup_batch_size": ShownBy(
        "tests/train/test_rampup.py::test_sizes_samples_and_rates_of_a_run"
    ),
    "model.kv_channels": Trains(16),
    "model.num_query_groups": Trains(1),
    "model.normalization": Trains("rmsnorm"),
    "model.activation": Trains("swiglu"),
    "model.openai_gelu": Trains(False),
    "model.bias": Trains(False),
    "model.add_qkv_bias": Trains(True, ("model.bias=False",)),
    "model.qk_layernorm": Trains(True),
    "model.window_size": Trains([3, 0]),
    "model.window_attn_skip_freq": Trains(2, ("model.window_size=[3,0]",)),
    "model.num_moe_experts": Trains(4, SUITS_EXPERTS),
    "model.moe_router_topk": Trains(3, EXPERTS),
    "model.moe_ffn_hidden_size": Trains(48, EXPERTS),
    "model.moe_layer_freq": Trains(2, EXPERTS),
    "model.moe_router_score_function": Trains("sigmoid", EXPERTS),
    "model.moe_router_pre_softmax": Trains(True, EXPERTS),
    "model.moe_router_topk_scaling_factor": Trains(2.5, EXPERTS),
    "model.moe_router_enable_expert_bias": Trains(True, SIGMOID),
    "model.moe_router_bias_update_rate": Trains(
        0.5, (*SIGMOID, "model.moe_router_enable_expert_bias=True")
    ),
    "model.moe_router_load_balancing_type": Trains(
        "seq_aux_loss", (*EXPERTS, "model.moe_aux_loss_coeff=1.0")
    ),
    "model.moe_aux_loss_coeff": Trains(1.0, EXPERTS),
    "model.moe_z_loss_coeff": Trains(1.0, EXPERTS),
    "model.moe_shared_expert_intermediate_size": Trains(48, EXPERTS),
    "model.transformer_block_type": Trains("post_ln"),
    "model.position_embedding_type": Trains("rope"),
    "model.rotary_percentage": Trains(0.5, ROPE),
    "model.rotary_base": Trains(100.0, ROPE),
    "model.seq_len_interpolation_factor": Trains(2, ROPE),
    "model.scale_positional_embedding": Trains(True, ROPE),
    "model.rope_scaling_factor": Trains(2.0, SCALED),
    "model.rope_low_freq_factor": Trains(2.0, SCALED),
    "model.rope_high_freq_factor": Trains(8.0, SCALED),
    "model.yarn_rotary_scaling_factor": Trains(2.0, ROPE),
    "model.yarn_beta_fast": Trains(8.0, YARN),
    "model.yarn_beta_slow": Trains(4.0, YARN),
    "model.yarn_attention_factor": Trains(2.0, YARN),
    "model.original_max_position_embeddings": Trains(256, SCALED),
    "model.share_embeddings_and_output_weights": Trains(False),
    "model.apply_query_key_layer_scaling": ShownBy(f"{MODEL_KEYS}::test_keys_of_the_function"),
    "model.fp32_residual_connection": Trains(True),
    "model.activations_checkpoint_granularity": RECOMPUTES,
    "model.activations_checkpoint_method": RECOMPUTES,
    "model.activations_checkpoint_num_layers": ShownBy(
        f"{MODEL_KEYS}::test_layers_of_a_block_and_of_a_group_count"
    ),
    "model.native_amp_init_scale": ShownBy(
        "tests/train/test_fp16.py::test_a_run_overflows_stops_and_continues"
    ),
    "model.native_amp_growth_interval": ShownBy(
        "tests/train/test_fp16.py::test_growth_interval_and_hysteresis_of_a_run"
    ),
    "model.hysteresis": ShownBy(
        "tests/train/test_fp16.py::test_growth_interval_and_hysteresis_of_a_run"
    ),
    "model.megatron_amp_O2": Trains(False),
    "model.fp8_recipe": Trains("tensorwise", ("model.fp8_amax_history_len=1024",)),
    "model.fp8_power_2_scale": Trains(True, CURRENT),
    "model.fp4_disable_rht": Trains(True, FOUR_BITS),
    "model.fp4_disable_stochastic_rounding": Trains(True, FOUR_BITS),
    "model.fp4_disable_2d_quantization": Trains(True, FOUR_BITS),
    "model.fp8_params": Trains(True),
    "model.fp8_wgrad": Trains(False),
    "model.override_linear_precision": Trains([True, False, False]),
    "model.fp8_split_accumulator": Refused([True, True, True]),
    "model.first_last_layers_bf16": Trains(True, ("model.num_layers=3",)),
    "model.num_layers_at_start_in_bf16": Trains(
        2, ("model.num_layers=4", "model.first_last_layers_bf16=True")
    ),
    "model.num_layers_at_end_in_bf16": Trains(
        2, ("model.num_layers=4", "model.first_last_layers_bf16=True")
    ),
    "model.fp8_modules": Trains('["*.fc2:high_precision"]'),
    "model.precision_schedule": Trains("[{from: 0, recipe: tensorwise}]"),
    "model.use_autocast_during_eval": Runs(False, sees="metrics"),
    "model.pad_inner_dim": ShownBy(
        "tests/config/test_precision_spec.py::test_padding_allows_odd_sizes"
    ),
    "model.fp8_health": Runs("off"),
    "model.fp8_health_max_underflow": LIMITS,
    "model.fp8_health_max_overflow": LIMITS,
    "model.fp8_health_min_snr_db": LIMITS,
    "model.fp8_accuracy_check": ShownBy(
        "tests/train/test_accuracy_check.py::"
        "test_a_stuck_scale_is_named_with_a_schedule_that_continues"
    ),
    "model.optim.sched.max_steps": OPTIM_KEYS,
    "model.optim.sched.warmup_ratio": OPTIM_KEYS,
    "model.optim.sched.constant_ratio": OPTIM_KEYS,
    "model.optim.sched.hold_steps": OPTIM_KEYS,
    "model.optim.sched.hold_ratio": OPTIM_KEYS,
    "model.optim.sched.power": OPTIM_KEYS,
    "model.optim.sched.decay_rate": OPTIM_KEYS,
    "model.optim.sched.d_model": OPTIM_KEYS,
    "model.optim.sched.wsd_decay_steps": OPTIM_KEYS,
    "model.optim.muon_momentum": OPTIM_KEYS,
    "model.optim.muon_use_nesterov": OPTIM_KEYS,
    "model.optim.muon_num_ns_steps": OPTIM_KEYS,
    "model.optim.muon_scale_mode": OPTIM_KEYS,
    "model.optim.muon_extra_scale_factor": OPTIM_KEYS,
    "model.optim.muon_tp_mode": ShownBy(
        "tests/parallel/test_muon.py::test_blocks_need_no_message_and_are_another_optimizer"
    ),
    "model.optim.sched.wsd_decay_ratio": OPTIM_KEYS,
    "model.optim.sched.wsd_decay_style": OPTIM_KEYS,
    "trainer.devices": ShownBy("tests/train/test_command_line.py::test_a_signal_to_the_launcher"),
    "trainer.num_nodes": ShownBy("tests/train/test_trials.py::test_one_command_is_one_node"),
    "trainer.max_time": ShownBy("tests/train/test_timelimit.py::test_max_time_saves_and_leaves"),
    "trainer.accelerator": Refused("gpu"),
    "trainer.precision": Trains(32, ("model.fp8=False", "model.fp8_amax_history_len=1024")),
    "trainer.max_steps": Runs(4, sees="metrics"),
    "trainer.log_every_n_steps": Runs(3, sees="metrics"),
    "trainer.val_check_interval": Runs(1, sees="metrics"),
    "trainer.limit_val_batches": Runs(2, sees="metrics"),
    "trainer.gradient_clip_val": Trains(0.01),
    "trainer.nonfinite_policy": ShownBy("tests/train/test_nonfinite.py::test_skip"),
    "trainer.fast_dev_run": Runs(2),
    "trainer.step_timeout": ShownBy(
        "tests/train/test_layouts.py::test_a_rank_that_hangs_is_named_and_shown"
    ),
    "model.pipeline_model_parallel_size": ShownBy(
        "tests/parallel/test_pipeline.py::test_each_rank_holds_its_layers"
    ),
    "model.virtual_pipeline_model_parallel_size": ShownBy(
        "tests/parallel/test_pipeline.py::test_each_rank_holds_its_layers"
    ),
    "model.pipeline_schedule": ShownBy(
        "tests/parallel/test_pipeline.py::test_each_rank_holds_its_layers"
    ),
    "model.pipeline_model_parallel_layout": ShownBy(
        "tests/parallel/test_pipeline.py::test_uneven_layers"
    ),
    "model.tp_only_amax_red": ShownBy(
        "tests/parallel/test_data_parallel.py::test_tp_only_amax_red_leaves_replicas_their_own_scales"
    ),
    "model.optim.fp8_opt_level": Trains("O2"),
    "model.optim.main_grads_dtype": Trains("fp8"),
    "model.optim.main_params_dtype": Trains("fp16"),
    "model.optim.exp_avg_dtype": Trains("bf16"),
    "model.optim.exp_avg_sq_dtype": Trains("fp8_e5m2"),
    "model.optim.low_precision_moments_of": Trains("linears", ("model.optim.exp_avg_dtype=fp8",)),
    "model.optim.main_grads_sum_dtype": Trains("fp32", ("model.optim.main_grads_dtype=fp8",)),
    "model.optim.stochastic_rounding": Trains(True, ("model.optim.exp_avg_dtype=fp8",)),
    "model.optim.fp8_grad_reduction": ShownBy(
        "tests/optim/test_masters_ranks.py::test_two_ranks_sum_as_one_process"
    ),
    "model.optim.data_parallel_sharding_strategy": ShownBy(
        "tests/optim/test_partitions_tensors.py::test_a_rank_holds_its_own_gradients_and_those_on_their_way"
    ),
    "model.optim.shard_by": ShownBy(
        "tests/optim/test_partitions_elements.py::test_elements_train_as_whole_tensors_bit_for_bit"
    ),
    "model.optim.grad_sync_dtype": ShownBy(
        "tests/parallel/test_data_parallel.py::test_bf16_reduction_sends_half"
    ),
    "model.grad_allreduce_chunk_size_mb": ShownBy(
        "tests/parallel/test_data_parallel.py::test_early_reductions_give_the_same_bits"
    ),
    "trainer.overfit_batches": Trains(1),
    "trainer.num_sanity_val_steps": Runs(1, sees="output"),
    "trainer.enable_progress_bar": ShownBy(
        "tests/observe/test_console.py::test_without_a_progress_bar_a_terminal_gets_plain_lines"
    ),
    "trainer.deterministic": ShownBy(
        "tests/train/test_profiling.py::test_deterministic_refuses_what_is_not"
    ),
    "trainer.memory_snapshot_on_oom": Refused(True),
    "exp_manager.exp_dir": Runs("elsewhere"),
    "exp_manager.name": Runs("other"),
    "exp_manager.explicit_log_dir": Runs("here", ("exp_manager.name=null",)),
    "exp_manager.resume_if_exists": ShownBy(
        "tests/train/test_continuing.py::test_resume_if_exists_off"
    ),
    "exp_manager.create_checkpoint_callback": Runs(False, (f"{CALLBACK}.every_n_train_steps=200",)),
    "exp_manager.create_tensorboard_logger": Runs(True),
    "exp_manager.create_wandb_logger": ShownBy(
        "tests/observe/test_trackers.py::test_wandb_offline"
    ),
    "exp_manager.wandb_logger_kwargs.project": ShownBy(
        "tests/observe/test_trackers.py::test_wandb_offline"
    ),
    "exp_manager.wandb_logger_kwargs.name": ShownBy(
        "tests/observe/test_trackers.py::test_wandb_offline"
    ),
    "exp_manager.wandb_logger_kwargs.entity": WANDB_KEYS,
    "exp_manager.wandb_logger_kwargs.group": WANDB_KEYS,
    "exp_manager.wandb_logger_kwargs.tags": WANDB_KEYS,
    "exp_manager.wandb_logger_kwargs.job_type": WANDB_KEYS,
    "exp_manager.wandb_logger_kwargs.notes": WANDB_KEYS,
    "exp_manager.wandb_logger_kwargs.must_start": ShownBy(
        "tests/observe/test_trackers.py::test_a_lost_connection_ends_no_run"
    ),
    "exp_manager.wandb_logger_kwargs.mode": WANDB_KEYS,
    f"{CALLBACK}.every_n_train_steps": Runs(1),
    f"{CALLBACK}.train_time_interval": ShownBy(
        "tests/train/test_continuing.py::test_train_time_interval"
    ),
    f"{CALLBACK}.save_last": Runs(False),
    f"{CALLBACK}.async_save": Runs(True, sees="output"),
    f"{CALLBACK}.keep": Runs(1),
    f"{CALLBACK}.save_top_k": Runs(1, (f"{CALLBACK}.every_n_train_steps=1", f"{CALLBACK}.keep=1")),
    f"{CALLBACK}.monitor": ShownBy("tests/checkpoint/test_best.py::test_a_run_keeps_its_best"),
    f"{CALLBACK}.mode": ShownBy("tests/checkpoint/test_best.py::test_a_run_keeps_its_best"),
    "model.micro_batch_size": Trains(1),
    "model.global_batch_size": Trains(8),
    "model.context_parallel_size": ShownBy(
        "tests/parallel/test_context_parallel.py::test_bytes_of_a_step"
    ),
    "model.sequence_parallel": ShownBy(
        "tests/parallel/test_sequence_parallel.py::test_bytes_of_a_layer"
    ),
    "model.fsdp": ShownBy("tests/parallel/test_fsdp.py::test_bytes_of_a_rank"),
    "model.fsdp_sharding_strategy": ShownBy("tests/parallel/test_fsdp.py::test_what_is_gathered"),
    "model.fsdp_grad_reduce_dtype": ShownBy(
        "tests/parallel/test_fsdp.py::test_gradients_summed_in_bf16"
    ),
    "model.expert_model_parallel_size": ShownBy(
        "tests/parallel/test_experts.py::test_bytes_of_a_step"
    ),
    "model.tensor_model_parallel_size": ShownBy(
        "tests/parallel/test_tensor_parallel.py::test_each_rank_holds_half_of_the_linears"
    ),
    "model.encoder_seq_length": Trains(16),
    "model.max_position_embeddings": Trains(64),
    "model.num_layers": Trains(1),
    "model.hidden_size": Trains(32),
    "model.ffn_hidden_size": Trains(64),
    "model.num_attention_heads": Trains(4),
    "model.init_method_std": Trains(0.01),
    "model.use_scaled_init_method": Trains(False),
    "model.hidden_dropout": Trains(0.3),
    "model.attention_dropout": Trains(0.3),
    "model.ffn_dropout": Trains(0.3),
    "model.layernorm_epsilon": Trains(1e-2),
    "model.layernorm_zero_centered_gamma": Trains(True),
    "model.make_vocab_size_divisible_by": Trains(64),
    "model.override_vocab_size": Trains(500),
    "model.tokenizer.library": Refused("sentencepiece"),
    "model.tokenizer.type": NAMED,
    "model.tokenizer.model": NAMED,
    "model.tokenizer.vocab_file": NAMED,
    "model.tokenizer.merge_file": NAMED,
    "model.data.dataloader_type": ShownBy("tests/data/test_forms.py::test_dataloader_type"),
    "model.data.shuffle_documents": Trains(False),
    "model.data.eod_mask_loss": Trains(True),
    "model.data.chat": ShownBy(
        "tests/data/test_conversations.py::test_which_examples_are_conversations"
    ),
    "model.data.train_ds.file_names": EXAMPLES,
    "model.data.train_ds.concat_sampling_probabilities": EXAMPLES,
    "model.data.train_ds.shuffle": EXAMPLES,
    "model.data.train_ds.label_key": EXAMPLES,
    "model.data.train_ds.prompt_template": EXAMPLES,
    "model.data.train_ds.add_bos": EXAMPLES,
    "model.data.train_ds.add_eos": EXAMPLES,
    "model.data.train_ds.truncation_field": EXAMPLES,
    "model.data.train_ds.truncation_method": EXAMPLES,
    "model.data.train_ds.packed_sequence": EXAMPLES,
    "model.data.validation_ds.file_names": EXAMPLES,
    "model.answer_only_loss": EXAMPLES,
    "model.data.reset_attention_mask": Trains(True),
    "model.data.reset_position_ids": Trains(True),
    "model.data.num_workers": ShownBy(
        "tests/data/test_loader.py::test_workers_change_who_reads_and_not_what"
    ),
    "model.data.validation_drop_last": ShownBy(
        "tests/data/test_forms.py::test_validation_drop_last"
    ),
    "model.tokenizer.vocab_size": ShownBy("tests/data/test_prepare.py::test_what_was_prepared"),
    "model.seed": Trains(7),
    "model.transformer_engine": Refused(False),
    "model.ub_tp_comm_overlap": Refused(True),
    "model.fp8_dot_product_attention": Refused(True),
    "model.fp8_multi_head_attention": Refused(True),
    "model.fp8": Trains(True, ("model.fp8=False", "model.fp8_amax_history_len=1024")),
    "model.fp8_e4m3": Trains(True),
    "model.fp8_hybrid": Refused(False),
    "model.fp8_margin": Trains(4),
    "model.fp8_interval": Trains(3),
    "model.fp8_amax_history_len": Trains(1),
    "model.fp8_amax_compute_algo": Trains("most_recent", ("model.fp8_amax_history_len=1024",)),
    "model.reduce_amax": ShownBy(
        "tests/fp8/test_scaling.py::test_amaxes_are_reduced_once_per_update_and_only_if_asked"
    ),
    "model.fp8_backend": ShownBy(
        "tests/train/test_transformer_engine.py::test_a_run_says_what_it_is"
    ),
    "model.te_version": ShownBy(
        "tests/config/test_backends.py::test_its_version_is_chosen_on_a_cpu_alone"
    ),
    "model.compile": ShownBy(
        "tests/train/test_compile.py::test_layers_share_graphs_and_nothing_is_compiled_again"
    ),
    "model.enable_cuda_graph": ShownBy(
        "tests/train/test_graphs.py::test_recorded_steps_have_the_bits_of_others"
    ),
    "model.enable_fsdp_float8_all_gather": ShownBy(
        "tests/parallel/test_fsdp.py::test_torchaos_weights_cross_in_fp8"
    ),
    "model.data.data_prefix": Runs("{other}", sees="metrics"),
    "model.data.index_mapping_dir": ShownBy("tests/data/test_prepare.py::test_cache_folder"),
    "model.data.splits_string": Trains([500, 500, 0]),
    "model.data.seq_length": Trains(16),
    "model.optim.name": Trains("adam"),
    "model.optim.lr": Trains(0.01),
    "model.optim.weight_decay": Trains(0.5),
    # Norms' weights are 1, and in BF16 a usual decay changes none of them in two steps.
    "model.do_layer_norm_weight_decay": Trains(True, ("model.optim.weight_decay=50",)),
    "model.optim.betas": Trains([0.5, 0.6]),
    "model.optim.eps": Trains(0.1),
    "model.optim.sched.name": Trains(
        "PolynomialDecayAnnealing", ("model.optim.sched.warmup_steps=0",)
    ),
    "model.optim.sched.warmup_steps": Trains(2),
    "model.optim.sched.constant_steps": Trains(2, ("model.optim.sched.warmup_steps=0",)),
    "model.optim.sched.min_lr": Trains(5e-4, ("model.optim.sched.warmup_steps=0",)),
    f"{NSYS}.enabled": Runs(True, ("trainer.max_steps=11",)),
    f"{NSYS}.start_step": ShownBy("tests/train/test_profiling.py::test_the_steps_asked_for"),
    f"{NSYS}.end_step": ShownBy("tests/train/test_profiling.py::test_the_steps_asked_for"),
    f"{NSYS}.ranks": ShownBy("tests/train/test_profiling.py::test_other_ranks_are_left_alone"),
    f"{NSYS}.gen_shape": ShownBy("tests/train/test_profiling.py::test_shapes_are_recorded"),
}


def words(value: object) -> str:
    return str(value).replace(" ", "").replace("'", "")


def argv(*more: str) -> list[str]:
    """Return the arguments of the tiny job; later settings replace earlier ones."""
    chosen = {word.partition("=")[0]: word for word in (*JOB, *SHORT, *more)}
    return list(chosen.values())


def two_steps(*more: str) -> Observed:
    """Return everything that two optimizer steps read and produce."""
    spec = resolve(load(argv(*more)), lambda: False)
    data = prepare(spec.data, print)
    spec = spec.with_vocabulary(data.vocab_size)
    state, train = build(spec, single_rank()), spec.train
    observed: Observed = {}
    source = data.train
    if train.overfit_batches:
        source = Repeated(source, train.overfit_batches * train.global_batch_size)
    with Loader(
        source,
        micro_batch_size=train.micro_batch_size,
        num_microbatches=train.num_microbatches(1),
        dp_rank=0,
        dp_size=1,
        consumed_samples=0,
        rules=data.rules,
    ) as loader:
        for step in (1, 2):
            microbatches = next(loader)
            observed[f"step {step}"] = train_step(state, microbatches)
            state.step += 1
    digest = hashlib.sha256()
    for param in state.model.parameters():
        digest.update(param.detach().float().numpy().tobytes())
    return observed | {"weights": digest.hexdigest()}


def whole_run(place: Place, *more: str) -> Observed:
    """Return a run's files and output, without times and dates."""
    given = {word.partition("=")[0] for word in more}
    done = place.run(*[word for word in SHORT if word.partition("=")[0] not in given], *more)
    assert done.code == 0, done.output
    files = [re.sub(r"\d{4}-\d\d-\d\d_[\d-]+|tfevents.*", "*", str(p.relative_to(place.cwd)))
             for p in place.cwd.rglob("*")]  # fmt: skip
    (metrics,) = place.cwd.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in done.output.splitlines() if " (command line; default" not in line]
    return {
        "files": sorted(files),
        "metrics": [{k: v for k, v in row.items() if k not in TIMING_KEYS} for row in rows],
        "output": [line for line in lines if not re.search(r"tok/s|continue with| s$|:\d\d", line)],
    }


@pytest.fixture(scope="module")
def observe(
    driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Observed]]:
    """Run a job, or return the result of an equal job that has run."""
    seen: dict[tuple[object, ...], Observed] = {}

    def call(kind: type[Effect], *more: str) -> Observed:
        if (kind, *more) not in seen:
            if kind is Trains:
                seen[kind, *more] = two_steps(f"model.data.data_prefix={dataset}", *more)
            else:
                place = Place(driver, dataset, tmp_path_factory.mktemp("live"))
                seen[kind, *more] = whole_run(place, *more)
        return seen[kind, *more]

    yield call


def test_every_key_has_an_effect() -> None:
    missing = sorted(all_keys().keys() - EFFECTS.keys())
    assert not missing, (
        f"register in {Path(__file__).name}'s EFFECTS what shows that these keys do something: "
        f"{', '.join(missing)}"
    )
    gone = sorted(EFFECTS.keys() - all_keys().keys())
    assert not gone, f"no longer in the schema: {', '.join(gone)}"


COMPARED = [key for key, effect in EFFECTS.items() if isinstance(effect, Trains | Runs)]


@pytest.mark.parametrize("key", COMPARED)
def test_a_run_changes(key: str, observe: Callable[..., Observed], dataset: Path) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Trains | Runs)
    override = f"{key}={words(effect.value)}"
    if effect.value == "{other}":
        override = f"{key}={make_dataset(dataset.with_name('other'), seed=1)}"
    usual, changed = (
        observe(type(effect), *effect.job),
        observe(type(effect), *effect.job, override),
    )
    if isinstance(effect, Trains):
        assert usual != changed, f"{override} changes no number of two steps"
    else:
        assert usual[effect.sees] != changed[effect.sees], f"{override} changes no {effect.sees}"


@pytest.mark.parametrize("key", [k for k, e in EFFECTS.items() if isinstance(e, Refused)])
def test_other_values_are_refused_by_name(key: str) -> None:
    effect = EFFECTS[key]
    assert isinstance(effect, Refused)
    given = argv("model.data.data_prefix=builtin", f"{key}={words(effect.value)}")
    with pytest.raises(UserError, match=re.escape(key.rpartition(".")[2])):
        resolve(load(given), lambda: False)


@pytest.mark.parametrize(
    "node", sorted({e.node for e in EFFECTS.values() if isinstance(e, ShownBy)})
)
def test_the_tests_named_exist(node: str) -> None:
    file, _, name = node.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    tests = {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)}
    assert name in tests, node
    marks = [ast.unparse(mark) for mark in tests[name].decorator_list]
    left_out = {f"pytest.mark.{marker}" for marker in ("slow", "gpu", "slurm", "hosts")}
    assert not left_out & set(marks), f"{node} does not run in `make test`; name a quicker one"


WHOLE = "model.fp8_amax_history_len=1024"  # the default, where SHORT's other length is refused
BACKGROUNDS = {
    "FP32": ("model.fp8=False", WHOLE, "trainer.precision=32"),
    "BF16": ("model.fp8=False", WHOLE),
    "tensorwise": ("model.fp8_recipe=tensorwise", WHOLE),
    "rowwise": ("model.fp8_recipe=rowwise", WHOLE),
    "most recent": ("model.fp8_amax_compute_algo=most_recent", WHOLE),
    "without clipping": ("trainer.gradient_clip_val=0",),
    "without biases": ("model.bias=False",),
    "ALiBi": ("model.position_embedding_type=alibi",),
    "SwiGLU": ("model.activation=swiglu",),
    "constant rate": ("model.optim.sched.name=WarmupPolicy", "model.optim.sched.min_lr=0"),
}
SHOWN_ELSEWHERE = {
    # The tokenizer's files name the length, and no step reads it without learned positions.
    ("ALiBi", "model.max_position_embeddings"),
    # The recipe has these values unless others are given: only E4M3, and powers of two as scales.
    ("rowwise", "model.fp8_e4m3"),
    ("rowwise", "model.fp8_power_2_scale"),
}
"""Backgrounds and keys whose effect is outside two steps, or whose value the background has."""


@pytest.mark.slow
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_beside_other_settings_a_key_changes_two_steps_or_is_refused(
    background: str, observe: Callable[..., Observed]
) -> None:
    """Every key that trains is tried beside each background, with nothing else set."""
    job, silent = BACKGROUNDS[background], []
    observe(Trains, *job)  # the background itself runs
    own = {word.partition("=")[0] for word in job}
    for key, effect in EFFECTS.items():
        if not isinstance(effect, Trains) or key in own or (background, key) in SHOWN_ELSEWHERE:
            continue
        if all_keys()[key].is_default(effect.value):
            continue  # the default need not be reported where it has no effect
        given = {word.partition("=")[0]: word for word in (*effect.job, *job)}
        beside = list(given.values())
        try:
            usual = observe(Trains, *beside)
            changed = observe(Trains, *beside, f"{key}={words(effect.value)}")
        except UserError as error:
            assert str(error)
            continue
        if usual == changed:
            silent.append(key)
    assert not silent, f"accepted beside {background}, and nothing changes: {silent}"
