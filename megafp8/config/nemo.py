"""NeMo's keys that megafp8 knows and does not act on: which values pass, and why no other does.

A key here is *inert* where NeMo's own default is among the values that pass: given so, it is
accepted and named at the start of the run. Any other value is refused with the reason and the way
out. The keys that do something are in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megafp8.config.errors import SettingError
from megafp8.config.keys import Values
from megafp8.config.values import plain


@dataclass(frozen=True, kw_only=True)
class NemoKey:
    """One key that changes nothing here. `nemo` is its default in NeMo, as it is written there."""

    path: str
    nemo: Any
    accepts: tuple[Any, ...]  # first the value that says what megafp8 does
    why: str  # of any other value: "… " after "key=value (origin): "
    hint: str
    note: str  # what megafp8 does
    same_as: Callable[[Values], Any] | None = None  # passes too: what follows from live keys
    any_text: bool = False
    in_megatron_gpt_config: bool = True

    @property
    def ours(self) -> Any:
        """The value in the composed tree where nobody gives one."""
        return self.accepts[0]

    def passes(self, value: Any, values: Values) -> bool:
        """Whether a value asks for no more than what happens anyway."""
        if self.any_text and (value is None or isinstance(value, str)):
            return True
        if any(_same(value, good) for good in self.accepts):
            return True
        if self.same_as is None:
            return False
        try:
            return _same(value, self.same_as(values))
        except (KeyError, ZeroDivisionError):
            return True  # a live key that it follows from is refused already

    def problem(self, value: Any, origin: str) -> SettingError:
        return SettingError(
            self.path, "null" if value is None else value, self.why, self.hint, origin=origin
        )

    @property
    def accepted_text(self) -> str:
        if self.any_text:
            return "any text"
        return " or ".join(plain(value) for value in self.accepts)


def _same(value: Any, good: Any) -> bool:
    """Equal in meaning: 0 is not False, and "1" is not 1 but 1.0 is."""
    if isinstance(value, bool) or isinstance(good, bool):
        return value is good
    return bool(value == good)


NO_EQUIVALENT = "has no equivalent here"
LESS_MEMORY = "Use model.activations_checkpoint_granularity, or a smaller model.micro_batch_size"


def _key(
    path: str,
    nemo: Any,
    note: str,
    *,
    passes: tuple[Any, ...] | None = None,
    why: str = "",
    hint: str = "",
    same_as: Callable[[Values], Any] | None = None,
    any_text: bool = False,
    later: bool = False,
) -> NemoKey:
    """Return one row. `passes`: the values that pass, where these are not NeMo's default alone.

    `later`: the key is not in NeMo's `megatron_gpt_config.yaml`, but in later versions or Megatron.
    """
    accepts = (nemo,) if passes is None else passes
    reason = why or "would change nothing"
    if not any_text:
        reason += f"; {note}" if why else f": {note}"
    return NemoKey(
        path=path,
        nemo=nemo,
        accepts=accepts,
        why=reason,
        hint=hint or f"Leave it out, or give {path}={plain(accepts[0])}",
        note=note,
        same_as=same_as,
        any_text=any_text,
        in_megatron_gpt_config=not later,
    )


def _model_ranks(v: Values) -> int:
    ranks: int = v["model.tensor_model_parallel_size"] * v["model.pipeline_model_parallel_size"]
    return ranks


def _layers_but_one(v: Values) -> int:
    layers: int = v["model.num_layers"] - 1
    return layers


_KEYS = (
    _key("name", "megatron_gpt", "a label, for ${name} in other keys", any_text=True),
    _key("trainer.logger", False, "the loggers are exp_manager's",
         hint="Use exp_manager.create_tensorboard_logger or exp_manager.create_wandb_logger"),
    _key("trainer.enable_checkpointing", False, "checkpoints are exp_manager's",
         hint="Use exp_manager.create_checkpoint_callback and checkpoint_callback_params"),
    _key("trainer.use_distributed_sampler", False, "the data of each rank follows from its place"),
    _key("trainer.max_epochs", -1, "the length of a run is counted in steps", passes=(-1, None),
         hint="Use trainer.max_steps"),
    _key("trainer.limit_test_batches", 500, "pretraining has no test stage", passes=(500, 0)),
    _key("trainer.accumulate_grad_batches", 1, "it follows from the batch sizes",
         hint="Use model.global_batch_size: its microbatches are accumulated"),
    _key("trainer.limit_train_batches", None, "the length of a run is counted in steps",
         passes=(None, 1.0),
         hint="Use trainer.max_steps, or trainer.overfit_batches for a few batches", later=True),
    _key("trainer.benchmark", False, "there are no convolutions for cuDNN to choose"),
    _key("trainer.enable_model_summary", False, "a run says its shape at the start"),
    _key("exp_manager.create_neptune_logger", False, "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.project", None, "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.name", None, "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.prefix", "train", "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.log_model_checkpoints", False,
         "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.tags", None, "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.neptune_logger_kwargs.description", None, "there is no Neptune logger",
         hint="Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"),
    _key("exp_manager.resume_ignore_no_checkpoint", True,
         "a run without a checkpoint begins at step 0",
         hint="Look into the run's checkpoints/ before, where it must exist"),
    _key("exp_manager.checkpoint_callback_params.always_save_nemo", False,
         "no .nemo files are written",
         hint="Checkpoints are safetensors with a manifest; nothing else is written"),
    _key("exp_manager.checkpoint_callback_params.save_nemo_on_train_end", False,
         "no .nemo files are written",
         hint="Checkpoints are safetensors with a manifest; nothing else is written"),
    _key("exp_manager.checkpoint_callback_params.filename",
         "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}",
         "checkpoints are named step_NNN by their step"),
    _key("exp_manager.checkpoint_callback_params.model_parallel_size",
         "${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}",
         "it follows from the parallel sizes", passes=(1,), same_as=_model_ranks,
         hint="Leave it out"),
    _key("exp_manager.checkpoint_callback_params.dirpath", None,
         "checkpoints are in the run's own directory", hint="Use exp_manager.explicit_log_dir",
         later=True),
    _key("exp_manager.checkpoint_callback_params.every_n_epochs", None,
         "the length of a run is counted in steps",
         hint="Use exp_manager.checkpoint_callback_params.every_n_train_steps", later=True),
    _key("exp_manager.checkpoint_callback_params.save_best_model", False,
         "a run ends with its last step's weights",
         hint="Use exp_manager.checkpoint_callback_params.save_top_k=1, which keeps the best",
         later=True),
    _key("exp_manager.checkpoint_callback_params.save_weights_only", False,
         "checkpoints hold all that continues a run", later=True),
    _key("exp_manager.checkpoint_callback_params.verbose", False, "each checkpoint is reported",
         passes=(False, True), later=True),
    _key("model.mcore_gpt", False, "there is one implementation, of Megatron core's shape",
         passes=(True, False)),
    _key("model.expert_model_parallel_size", 1, "there are no experts", why=NO_EQUIVALENT),
    _key("model.do_layer_norm_weight_decay", False, "norms and biases do not decay",
         why=NO_EQUIVALENT),
    _key("model.pre_process", True, "the embedding is always there"),
    _key("model.post_process", True, "the head is always there"),
    _key("model.persist_layer_norm", True, "torch chooses the kernel"),
    _key("model.headscale", False, "heads are not scaled", why=NO_EQUIVALENT),
    _key("model.normalize_attention_scores", True, "scores are scaled by 1 / sqrt(head size)",
         why=NO_EQUIVALENT),
    _key("model.attention_type", "multihead", "attention is multi-head", why=NO_EQUIVALENT),
    _key("model.tokenizer.delimiter", None, "the tokenizer's own files say how it cuts text",
         why=NO_EQUIVALENT),
    _key("model.tokenizer.sentencepiece_legacy", False,
         "the tokenizer's own files say how it cuts text", why=NO_EQUIVALENT),
    _key("model.fp16_lm_cross_entropy", False, "the loss is computed in FP32", why=NO_EQUIVALENT),
    _key("model.use_cpu_initialization", False, "weights are equal whatever device makes them",
         passes=(False, True)),
    _key("model.onnx_safe", False, "nothing is exported to ONNX", why=NO_EQUIVALENT),
    _key("model.apex_transformer_log_level", 30, "Apex logs nothing here"),
    _key("model.sharp", False, "the network decides", why=NO_EQUIVALENT),
    _key("model.enable_megatron_timers", False, "the times of a step are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.log_every_n_steps", 10,
         "the times of a step are in metrics.jsonl", why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.log_mode", "minmax",
         "the times of a step are in metrics.jsonl", why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.barrier", False, "the times of a step are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.overlap_p2p_comm", False,
         "messages between stages are ordered by model.pipeline_schedule"),
    _key("model.batch_p2p_comm", True,
         "messages between stages are ordered by model.pipeline_schedule"),
    _key("model.grad_div_ar_fusion", True,
         "gradients are one flat FP32 buffer, divided once after its reduction"),
    _key("model.gradient_accumulation_fusion", False,
         "a weight gradient is rounded to the compute dtype, then added to its FP32 sum",
         passes=(False, True)),
    _key("model.gradient_as_bucket_view", True,
         "gradients are one flat FP32 buffer, divided once after its reduction"),
    _key("model.sync_batch_comm", False,
         "gradients are one flat FP32 buffer, divided once after its reduction"),
    _key("model.nccl_communicator_config_path", None, "NCCL has its defaults", why="is not read",
         hint="Leave it out; NCCL reads its NCCL_* environment variables"),
    _key("model.validation_param_sync_overlap", False, "there is nothing to synchronize"),
    _key("model.bias_activation_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.bias_dropout_add_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.masked_softmax_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.get_attention_mask_from_fusion", True,
         "torch chooses the kernels, with the same results"),
    _key("model.apply_rope_fusion", False, "torch chooses the kernels", why="cannot be promised"),
    _key("model.fsdp_sharded_checkpoint", False,
         "checkpoints are sharded safetensors, which load into any layout", passes=(False, True)),
    _key("model.dist_ckpt_format", "zarr",
         "checkpoints are sharded safetensors, which load into any layout"),
    _key("model.dist_ckpt_load_on_device", True,
         "checkpoints are sharded safetensors, which load into any layout"),
    _key("model.num_micro_batches_with_partial_activation_checkpoints", None,
         "what is computed again is the same in every microbatch and stage", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.activations_checkpoint_layers_per_pipeline", None,
         "what is computed again is the same in every microbatch and stage", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.ub_tp_comm_overlap", False, "Transformer Engine's user buffers are not used",
         why=NO_EQUIVALENT),
    _key("model.ub_tp_comm_overlap_cfg", None, "Transformer Engine's user buffers are not used",
         why=NO_EQUIVALENT),
    _key("model.use_flash_attention", False,
         "torch's scaled_dot_product_attention chooses the kernel", why="cannot be promised"),
    _key("model.cpu_offloading", False, "nothing is moved to the host's memory", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.cpu_offloading_num_layers", "${sum:${.num_layers},-1}",
         "nothing is moved to the host's memory", passes=(None,), same_as=_layers_but_one,
         why=NO_EQUIVALENT, hint="Leave it out"),
    _key("model.cpu_offloading_activations", True, "nothing is moved to the host's memory",
         passes=(True, False)),
    _key("model.cpu_offloading_weights", True, "nothing is moved to the host's memory",
         passes=(True, False)),
    _key("model.fp8_dot_product_attention", False, "attention is never in FP8", why=NO_EQUIVALENT,
         later=True),
    _key("model.fp8_multi_head_attention", False, "attention is never in FP8", why=NO_EQUIVALENT,
         later=True),
    _key("model.use_emha", False, "attention is torch's", why=NO_EQUIVALENT),
    _key("model.data.data_impl", "mmap", "data is Megatron's indexed format, mapped into memory",
         why=NO_EQUIVALENT),
    _key("model.data.mmap_bin_files", True, "data is Megatron's indexed format, mapped into memory",
         why=NO_EQUIVALENT),
    _key("model.data.skip_warmup", True, "mapped files are not read ahead"),
    _key("model.data.no_seqlen_plus_one_input_tokens", False,
         "a sample has one token more than its targets", why=NO_EQUIVALENT),
    _key("model.data.pad_samples_to_global_batch_size", False,
         "training never ends within a batch"),
    _key("model.data.exchange_indices_distributed", False,
         "each node reads or makes its own indices"),
    _key("model.optim.overlap_grad_sync", True,
         "a bucket of gradients is reduced as soon as it is complete", later=True),
    _key("model.optim.overlap_param_sync", False, "weights are gathered before the next step",
         later=True),
    _key("model.optim.contiguous_grad_buffer", True,
         "with distributed_fused_adam gradients and weights lie in flat buffers",
         passes=(True, False), later=True),
    _key("model.optim.contiguous_param_buffer", True,
         "with distributed_fused_adam gradients and weights lie in flat buffers",
         passes=(True, False), later=True),
    _key("model.optim.bucket_cap_mb", 100,
         "the size of a bucket is model.grad_allreduce_chunk_size_mb",
         hint="Use model.grad_allreduce_chunk_size_mb", later=True),
    _key("model.optim.sched.cycle", False,
         "a polynomial would begin again only after the run's last step", later=True),
    _key("model.optim.sched.last_epoch", -1, "a run continues at the step of its checkpoint",
         later=True),
)  # fmt: skip


@cache
def nemo_keys() -> Mapping[str, NemoKey]:
    """Return every key that is known and not in the schema, by its dotted path."""
    return {key.path: key for key in _KEYS}


@cache
def nemo_sections() -> frozenset[str]:
    """Return every inner node above the keys: `model`, `model.nsys_profile`, …"""
    parts = [path.split(".") for path in nemo_keys()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
