"""List NeMo's keys that have no effect in megafp8, with the values that are accepted.

Such a key is *inert*: with an accepted value, mostly NeMo's default, it is named at the start of
the run and changes nothing. Any other value is refused with the reason and a hint. The keys that
have an effect are in the schema.
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
    """Describe a key of NeMo that has no effect in megafp8.

    Attributes:
        path: The dotted path.
        nemo: The default as NeMo's file has it.
        accepts: The values that are accepted; the first one describes what megafp8 does.
        why: Why any other value is refused; it follows `key=value (origin): ` in the message.
        hint: What to do instead of giving another value.
        note: What megafp8 does.
        same_as: Computes one more value that is accepted from the keys that have an effect.
        any_text: Whether every text is accepted.
        in_megatron_gpt_config: Whether NeMo's `megatron_gpt_config.yaml` has the key.
    """

    path: str
    nemo: Any
    accepts: tuple[Any, ...]
    why: str
    hint: str
    note: str
    same_as: Callable[[Values], Any] | None = None
    any_text: bool = False
    in_megatron_gpt_config: bool = True

    @property
    def ours(self) -> Any:
        """Return the value in the composed tree if no layer gives one."""
        return self.accepts[0]

    def passes(self, value: Any, values: Values) -> bool:
        """Whether a value is accepted, since megafp8 does what the value asks for anyway."""
        if self.any_text and (value is None or isinstance(value, str)):
            return True
        if any(_same(value, good) for good in self.accepts):
            return True
        if self.same_as is None:
            return False
        try:
            return _same(value, self.same_as(values))
        except (KeyError, ZeroDivisionError):
            return True  # a key that the value is computed from is refused already

    def problem(self, value: Any, origin: str) -> SettingError:
        """Return the error for a value that is not accepted."""
        return SettingError(
            self.path, "null" if value is None else value, self.why, self.hint, origin=origin
        )

    @property
    def accepted_text(self) -> str:
        """Return the accepted values in words: `True or False`."""
        if self.any_text:
            return "any text"
        return " or ".join(plain(value) for value in self.accepts)


def _same(value: Any, good: Any) -> bool:
    """Whether two values mean the same: 1.0 and 1 do; 0 and False, or "1" and 1, do not."""
    if isinstance(value, bool) or isinstance(good, bool):
        return value is good
    return bool(value == good)


NO_EQUIVALENT = "has no equivalent in megafp8"
LOGGERS = (
    "Use exp_manager.create_tensorboard_logger, exp_manager.create_wandb_logger or metrics.jsonl"
)
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
    """Return the description of one key.

    Args:
        path: The dotted path.
        nemo: The default as NeMo's file has it.
        note: What megafp8 does.
        passes: The values that are accepted, if NeMo's default is not the only one.
        why: Why any other value is refused, if it is for more than having no effect.
        hint: What to do instead, if it is more than to leave the key out.
        same_as: Computes one more value that is accepted.
        any_text: Whether every text is accepted.
        later: Whether the key comes from a later version of NeMo or from Megatron, and is not in
            `megatron_gpt_config.yaml`.
    """
    accepts = (nemo,) if passes is None else passes
    reason = why or "is not supported"
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
    _key("name", "megatron_gpt", "a label, which other keys can use as ${name}", any_text=True),
    _key("trainer.logger", False, "loggers are chosen under exp_manager",
         hint="Use exp_manager.create_tensorboard_logger or exp_manager.create_wandb_logger"),
    _key("trainer.enable_checkpointing", False, "checkpoints are configured under exp_manager",
         hint="Use exp_manager.create_checkpoint_callback and checkpoint_callback_params"),
    _key("trainer.use_distributed_sampler", False, "each rank reads its own part of the data"),
    _key("trainer.max_epochs", -1, "the length of a run is counted in steps", passes=(-1, None),
         hint="Use trainer.max_steps"),
    _key("trainer.limit_test_batches", 500, "pretraining has no test stage", passes=(500, 0)),
    _key("trainer.accumulate_grad_batches", 1,
         "the number of microbatches follows from the batch sizes",
         hint="Use model.global_batch_size, whose microbatches are accumulated"),
    _key("trainer.limit_train_batches", None, "the length of a run is counted in steps",
         passes=(None, 1.0),
         hint="Use trainer.max_steps, or trainer.overfit_batches for a few batches", later=True),
    _key("trainer.benchmark", False, "a GPT has no convolutions, which cuDNN's benchmark is for"),
    _key("trainer.enable_model_summary", False, "every run prints its model's size at the start"),
    _key("exp_manager.create_neptune_logger", False, "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.project", None, "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.name", None, "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.prefix", "train", "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.log_model_checkpoints", False,
         "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.tags", None, "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.neptune_logger_kwargs.description", None, "there is no Neptune logger",
         hint=LOGGERS),
    _key("exp_manager.resume_ignore_no_checkpoint", True,
         "a run without a checkpoint begins at step 0",
         hint="Look into the run's checkpoints/ before the start if one must exist"),
    _key("exp_manager.checkpoint_callback_params.always_save_nemo", False,
         "no .nemo files are written",
         hint="Leave it out; checkpoints are safetensors files with a manifest"),
    _key("exp_manager.checkpoint_callback_params.save_nemo_on_train_end", False,
         "no .nemo files are written",
         hint="Leave it out; checkpoints are safetensors files with a manifest"),
    _key("exp_manager.checkpoint_callback_params.filename",
         "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}",
         "checkpoints are named step_NNN by their step"),
    _key("exp_manager.checkpoint_callback_params.model_parallel_size",
         "${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}",
         "the size follows from the parallel sizes", passes=(1,), same_as=_model_ranks,
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
         "checkpoints hold everything that a run needs to continue", later=True),
    _key("exp_manager.checkpoint_callback_params.verbose", False, "each checkpoint is reported",
         passes=(False, True), later=True),
    _key("model.mcore_gpt", False, "the one implementation has Megatron Core's architecture",
         passes=(True, False)),
    _key("model.expert_model_parallel_size", 1, "models have no experts", why=NO_EQUIVALENT),
    _key("model.do_layer_norm_weight_decay", False, "norms and biases have no weight decay",
         why=NO_EQUIVALENT),
    _key("model.pre_process", True, "a model always has its embedding"),
    _key("model.post_process", True, "a model always has its output layer"),
    _key("model.persist_layer_norm", True, "torch chooses the kernel"),
    _key("model.headscale", False, "attention heads have no scale", why=NO_EQUIVALENT),
    _key("model.normalize_attention_scores", True, "scores are scaled by 1 / sqrt(head size)",
         why=NO_EQUIVALENT),
    _key("model.attention_type", "multihead", "attention is multi-head", why=NO_EQUIVALENT),
    _key("model.tokenizer.delimiter", None, "the tokenizer's own files define how it splits text",
         why=NO_EQUIVALENT),
    _key("model.tokenizer.sentencepiece_legacy", False,
         "the tokenizer's own files define how it splits text", why=NO_EQUIVALENT),
    _key("model.fp16_lm_cross_entropy", False, "the loss is computed in FP32", why=NO_EQUIVALENT),
    _key("model.use_cpu_initialization", False, "initial weights are the same on every device",
         passes=(False, True)),
    _key("model.onnx_safe", False, "nothing is exported to ONNX", why=NO_EQUIVALENT),
    _key("model.apex_transformer_log_level", 30, "Apex is not used"),
    _key("model.sharp", False, "NCCL decides whether the network reduces", why=NO_EQUIVALENT),
    _key("model.enable_megatron_timers", False, "step times are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.log_every_n_steps", 10, "step times are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.log_mode", "minmax", "step times are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.megatron_timer_kwargs.barrier", False, "step times are in metrics.jsonl",
         why=NO_EQUIVALENT),
    _key("model.overlap_p2p_comm", False,
         "model.pipeline_schedule determines the order of messages between stages"),
    _key("model.batch_p2p_comm", True,
         "model.pipeline_schedule determines the order of messages between stages"),
    _key("model.grad_div_ar_fusion", True,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction"),
    _key("model.gradient_accumulation_fusion", False,
         "weight gradients are added to FP32 sums, unrounded where the device has such a product",
         passes=(False, True)),
    _key("model.gradient_as_bucket_view", True,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction"),
    _key("model.sync_batch_comm", False,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction"),
    _key("model.nccl_communicator_config_path", None, "NCCL runs with its defaults",
         why="is not read",
         hint="Leave it out; NCCL reads its NCCL_* environment variables"),
    _key("model.validation_param_sync_overlap", False,
         "validation does not synchronize parameters"),
    _key("model.bias_activation_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.bias_dropout_add_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.masked_softmax_fusion", True, "torch chooses the kernels, with the same results"),
    _key("model.get_attention_mask_from_fusion", True,
         "torch chooses the kernels, with the same results"),
    _key("model.apply_rope_fusion", False, "torch chooses the kernels",
         why="cannot be guaranteed"),
    _key("model.fsdp_sharded_checkpoint", False,
         "checkpoints are sharded safetensors, which load into any layout", passes=(False, True)),
    _key("model.dist_ckpt_format", "zarr",
         "checkpoints are sharded safetensors, which load into any layout"),
    _key("model.dist_ckpt_load_on_device", True,
         "checkpoints are sharded safetensors, which load into any layout"),
    _key("model.num_micro_batches_with_partial_activation_checkpoints", None,
         "recomputation is the same in every microbatch and stage", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.activations_checkpoint_layers_per_pipeline", None,
         "recomputation is the same in every microbatch and stage", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.ub_tp_comm_overlap", False, "Transformer Engine's user buffers are not used",
         why=NO_EQUIVALENT),
    _key("model.ub_tp_comm_overlap_cfg", None, "Transformer Engine's user buffers are not used",
         why=NO_EQUIVALENT),
    _key("model.use_flash_attention", False,
         "torch's scaled_dot_product_attention chooses the kernel", why="cannot be guaranteed"),
    _key("model.cpu_offloading", False, "nothing is moved to the host's memory", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.cpu_offloading_num_layers", "${sum:${.num_layers},-1}",
         "nothing is moved to the host's memory", passes=(None,), same_as=_layers_but_one,
         why=NO_EQUIVALENT, hint="Leave it out"),
    _key("model.cpu_offloading_activations", True, "nothing is moved to the host's memory",
         passes=(True, False)),
    _key("model.cpu_offloading_weights", True, "nothing is moved to the host's memory",
         passes=(True, False)),
    _key("model.fp8_dot_product_attention", False, "attention is never computed in FP8",
         why=NO_EQUIVALENT, later=True),
    _key("model.fp8_multi_head_attention", False, "attention is never computed in FP8",
         why=NO_EQUIVALENT, later=True),
    _key("model.use_emha", False, "attention is torch's scaled_dot_product_attention",
         why=NO_EQUIVALENT),
    _key("model.data.data_impl", "mmap",
         "data is in Megatron's indexed format and mapped into memory", why=NO_EQUIVALENT),
    _key("model.data.mmap_bin_files", True,
         "data is in Megatron's indexed format and mapped into memory", why=NO_EQUIVALENT),
    _key("model.data.skip_warmup", True, "mapped files are not read before training"),
    _key("model.data.no_seqlen_plus_one_input_tokens", False,
         "each sample has model.data.seq_length + 1 tokens", why=NO_EQUIVALENT),
    _key("model.data.pad_samples_to_global_batch_size", False,
         "every training batch is full"),
    _key("model.data.exchange_indices_distributed", False,
         "each node reads or builds its own index maps"),
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
         "a polynomial schedule could begin again only after the run's last step", later=True),
    _key("model.optim.sched.last_epoch", -1, "a run continues at the step of its checkpoint",
         later=True),
)  # fmt: skip


@cache
def nemo_keys() -> Mapping[str, NemoKey]:
    """Return every key of NeMo that has no effect, by its dotted path."""
    return {key.path: key for key in _KEYS}


@cache
def nemo_sections() -> frozenset[str]:
    """Return every section that contains such keys: `model`, `model.nsys_profile`, …"""
    parts = [path.split(".") for path in nemo_keys()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
