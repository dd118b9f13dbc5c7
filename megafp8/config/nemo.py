"""List NeMo's keys that have no effect in megafp8, with the values that are accepted.

Such a key is *inert*: with an accepted value, mostly NeMo's default, it is named at the start of
the run and changes nothing. Any other value is refused with the reason and a hint. The keys that
have an effect are in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

from omegaconf import MISSING

from megafp8.config.errors import Origin, SettingError
from megafp8.config.gelu import FUSION, GELU, can_fuse
from megafp8.config.keys import Values
from megafp8.config.launcher_paths import LAUNCHER_PATHS
from megafp8.config.nemo_table import rows
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
        free: The values that are accepted besides, by their type; None if there are none.
        where: Whether a further value is accepted with the keys that have an effect.
        in_megatron_gpt_config: Whether NeMo's `megatron_gpt_config.yaml` has the key.
    """

    path: str
    nemo: Any
    accepts: tuple[Any, ...]
    why: str
    hint: str
    note: str
    same_as: Callable[[Values], Any] | None = None
    free: Free | None = None
    where: Callable[[Any, Values], bool] | None = None
    in_megatron_gpt_config: bool = True

    @property
    def ours(self) -> Any:
        """Return the value in the composed tree if no layer gives one."""
        return self.accepts[0]

    @property
    def passes_map(self) -> bool:
        """Whether the key accepts a section of any keys."""
        return self.free is ANY_MAP

    def passes(self, value: Any, values: Values) -> bool:
        """Whether a value is accepted, since megafp8 does what the value asks for anyway."""
        if self.free is not None and self.free.accepts(value):
            return True
        if any(_same(value, good) for good in self.accepts):
            return True
        try:
            if self.where is not None and self.where(value, values):
                return True
            return self.same_as is not None and _same(value, self.same_as(values))
        except (KeyError, ZeroDivisionError):
            return True  # a key that the value is computed from is refused already

    def problem(self, value: Any, origin: str) -> SettingError:
        """Return the error for a value that is not accepted."""
        return SettingError(
            self.path, "null" if value is None else value, self.why, self.hint, origin=origin
        )


class Free(NamedTuple):
    """Name the values of one type, as `any text`."""

    text: str
    accepts: Callable[[Any], bool]


ANY_TEXT = Free("any text", lambda value: value is None or isinstance(value, str))
NO_FALCON = Free(
    "any text but `megatron_falcon_gpt`",
    lambda value: value is None or (isinstance(value, str) and value != "megatron_falcon_gpt"),
)
ANY_NUMBER = Free(
    "any number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
)
ANY_FLAG = Free("True or False", lambda value: isinstance(value, bool))
ANY_MAP = Free("null or any section", lambda value: value is None or isinstance(value, dict))
ANY_TEXTS = Free(
    "any list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)


def _same(value: Any, good: Any) -> bool:
    """Whether two values mean the same: 1.0 and 1 do; 0 and False, or "1" and 1, do not."""
    if isinstance(value, bool) or isinstance(good, bool):
        return value is good
    return bool(value == good)


NO_EQUIVALENT = "has no equivalent in megafp8"
LOGGERS = (
    "Use exp_manager.create_tensorboard_logger, exp_manager.create_wandb_logger or metrics.jsonl"
)
FUSED_GELU = "NeMo's fused GELU is the tanh form, which here model.openai_gelu asks for"
NO_MASK = "with it NeMo drops model.data.reset_attention_mask of a file; attention is causal"
KERNELS = "torch and the backend choose the kernels; results differ only by rounding"
CHECKPOINTS = "checkpoints are sharded safetensors, which load into any layout"
USER_BUFFERS = "user buffers, which change times only, have Transformer Engine's own configuration"
NO_EXPERTS = "models have no experts"
DENSE = "Leave it out, which trains the dense model; a mixture of experts needs Megatron itself"
ONE_ATTENTION = "attention scores are scaled by 1 / sqrt(head size), without a window or a cap"
CORE_LAYER = (
    "Leave it out, which trains Megatron Core's layer; Falcon's layer, with attention and MLP side "
    "by side, is not in megafp8"
)
LAUNCHER = "about the job that NVIDIA's launcher submits; see docs/slurm.md for jobs here"
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
    free: Free | None = None,
    where: Callable[[Any, Values], bool] | None = None,
    later: bool = False,
) -> NemoKey:
    """Return the description of one key; the arguments are those of `NemoKey`.

    `passes` are the accepted values, if NeMo's default is not the only one. `why` and `hint` are
    given if there is more to say than that the key has no effect and can be left out. `later` marks
    keys of later versions of NeMo, or of Megatron, which `megatron_gpt_config.yaml` does not have.
    """
    accepts = (nemo,) if passes is None else passes
    reason = why or "is not supported"
    reason += f"; {note}" if why else f": {note}"
    return NemoKey(
        path=path,
        nemo=nemo,
        accepts=accepts,
        why=reason,
        hint=hint or f"Leave it out, or give {path}={plain(accepts[0])}",
        note=note,
        same_as=same_as,
        free=free,
        where=where,
        in_megatron_gpt_config=not later,
    )


def _model_ranks(v: Values) -> int:
    ranks: int = v["model.tensor_model_parallel_size"] * v["model.pipeline_model_parallel_size"]
    return ranks


def _layers_but_one(v: Values) -> int:
    layers: int = v["model.num_layers"] - 1
    return layers


def _sees_whole_sequence(window: Any, v: Values) -> bool:
    """Whether `[left, right]`, as mcore has a causal window, covers every earlier token."""
    if not isinstance(window, list) or len(window) != 2:
        return False
    left, right = window
    return type(left) is int and right == 0 and left >= v["model.encoder_seq_length"] - 1


_late = partial(_key, later=True)

_FREE = {"number": ANY_NUMBER, "text": ANY_TEXT, "section": ANY_MAP}

_KEYS = (
    _key("name", "megatron_gpt", "a label, which other keys can use as ${name}", free=NO_FALCON,
         hint=CORE_LAYER),
    _key("trainer.logger", False, "loggers are chosen under exp_manager",
         hint="Use exp_manager.create_tensorboard_logger or exp_manager.create_wandb_logger"),
    _key("trainer.enable_checkpointing", False, "checkpoints are configured under exp_manager",
         hint="Use exp_manager.create_checkpoint_callback and checkpoint_callback_params"),
    _key("trainer.use_distributed_sampler", False, "each rank reads its own part of the data"),
    _key("trainer.max_epochs", -1, "the length of a run is counted in steps",
         passes=(-1, None, 1000), hint="Use trainer.max_steps"),
    _key("trainer.limit_test_batches", 500, "pretraining has no test stage", free=ANY_NUMBER),
    _key("trainer.accumulate_grad_batches", 1,
         "the number of microbatches follows from the batch sizes",
         hint="Use model.global_batch_size, whose microbatches are accumulated"),
    _late("trainer.limit_train_batches", None, "the length of a run is counted in steps",
          passes=(None, 1.0),
          hint="Use trainer.max_steps, or trainer.overfit_batches for a few batches"),
    _key("trainer.benchmark", False, "a GPT has no convolutions, which cuDNN's benchmark is for"),
    _key("trainer.enable_model_summary", False, "every run prints its model's size at the start"),
    _key("exp_manager.create_neptune_logger", False, "there is no Neptune logger", hint=LOGGERS),
    *(_key(f"exp_manager.neptune_logger_kwargs.{name}", default, "there is no Neptune logger",
           hint=LOGGERS)
      for name, default in (
          ("project", None), ("name", None), ("prefix", "train"), ("log_model_checkpoints", False),
          ("tags", None), ("description", None))),
    _key("exp_manager.resume_ignore_no_checkpoint", True,
         "a run without a checkpoint begins at step 0",
         hint="Look into the run's checkpoints/ before the start if one must exist"),
    _key("exp_manager.checkpoint_callback_params.always_save_nemo", False,
         "no .nemo files are written; megafp8.cli.export writes the format of Hugging Face",
         free=ANY_FLAG),
    _key("exp_manager.checkpoint_callback_params.save_nemo_on_train_end", False,
         "no .nemo files are written; megafp8.cli.export writes the format of Hugging Face",
         free=ANY_FLAG),
    _key("exp_manager.checkpoint_callback_params.filename",
         "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}",
         "checkpoints are named step_NNN by their step", free=ANY_TEXT),
    _key("exp_manager.checkpoint_callback_params.model_parallel_size",
         "${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}",
         "the size follows from the parallel sizes", passes=(1,), same_as=_model_ranks,
         free=ANY_NUMBER),
    _late("exp_manager.checkpoint_callback_params.dirpath", None,
          "checkpoints are in the run's own directory", hint="Use exp_manager.explicit_log_dir"),
    _late("exp_manager.checkpoint_callback_params.every_n_epochs", None,
          "the length of a run is counted in steps",
          hint="Use exp_manager.checkpoint_callback_params.every_n_train_steps"),
    _late("exp_manager.checkpoint_callback_params.save_best_model", False,
          "a run ends with its last step's weights",
          hint="Use exp_manager.checkpoint_callback_params.save_top_k=1, which keeps the best"),
    _late("exp_manager.checkpoint_callback_params.save_weights_only", False,
          "checkpoints hold everything that a run needs to continue"),
    _late("exp_manager.checkpoint_callback_params.verbose", False, "each checkpoint is reported",
          passes=(False, True)),
    _key("model.mcore_gpt", False, "the one implementation has Megatron Core's architecture",
         passes=(True, False)),
    _key("model.expert_model_parallel_size", 1, "models have no experts", why=NO_EQUIVALENT),
    _key("model.pre_process", True, "a model always has its embedding"),
    _key("model.post_process", True, "a model always has its output layer"),
    _key("model.persist_layer_norm", True, KERNELS, free=ANY_FLAG),
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
    _key("model.apex_transformer_log_level", 30, "Apex's transformer layers are not used",
         free=ANY_NUMBER),
    _key("model.sharp", False, "NCCL decides whether the network reduces", why=NO_EQUIVALENT),
    _key("model.enable_megatron_timers", False, "step times are in metrics.jsonl",
         why=NO_EQUIVALENT),
    *(_key(f"model.megatron_timer_kwargs.{name}", default, "step times are in metrics.jsonl",
           why=NO_EQUIVALENT)
      for name, default in (("log_every_n_steps", 10), ("log_mode", "minmax"), ("barrier", False))),
    _key("model.overlap_p2p_comm", False,
         "model.pipeline_schedule determines the order of messages between stages", free=ANY_FLAG),
    _key("model.batch_p2p_comm", True,
         "model.pipeline_schedule determines the order of messages between stages", free=ANY_FLAG),
    _key("model.grad_div_ar_fusion", True,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction",
         free=ANY_FLAG),
    _key("model.gradient_accumulation_fusion", False,
         "weight gradients are added to FP32 sums, unrounded where the device has such a product",
         passes=(False, True)),
    _key("model.gradient_as_bucket_view", True,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction",
         free=ANY_FLAG),
    _key("model.sync_batch_comm", False,
         "gradients are in one flat FP32 buffer, which is divided once, after its reduction",
         free=ANY_FLAG),
    _key("model.nccl_communicator_config_path", None, "NCCL runs with its defaults",
         why="is not read", hint="Leave it out; NCCL reads its NCCL_* environment variables"),
    _key("model.validation_param_sync_overlap", False, "validation does not synchronize parameters",
         free=ANY_FLAG),
    _key(FUSION, True, FUSED_GELU, passes=(False,), where=can_fuse,
         why="is refused by NeMo with model.activation=gelu and model.bias=False",
         hint=f"Give {FUSION}=False for the exact form of GELU, with {GELU}=True for the other"),
    *(_key(f"model.{what}_fusion", True, KERNELS, free=ANY_FLAG)
      for what in ("bias_dropout_add", "masked_softmax")),
    _key("model.get_attention_mask_from_fusion", True, NO_MASK, free=ANY_FLAG),
    _key("model.apply_rope_fusion", False, KERNELS, free=ANY_FLAG),
    _key("model.fsdp_sharded_checkpoint", False,
         "checkpoints are sharded safetensors, which load into any layout", passes=(False, True)),
    _key("model.dist_ckpt_format", "zarr", CHECKPOINTS, passes=("zarr", "torch_dist")),
    _key("model.dist_ckpt_load_on_device", True, CHECKPOINTS, free=ANY_FLAG),
    _key("model.num_micro_batches_with_partial_activation_checkpoints", None,
         "recomputation is the same in every microbatch and stage", passes=(None, 0),
         why=NO_EQUIVALENT, hint=LESS_MEMORY),
    _key("model.activations_checkpoint_layers_per_pipeline", None,
         "recomputation is the same in every microbatch and stage", passes=(None, 0),
         why=NO_EQUIVALENT, hint=LESS_MEMORY),
    _key("model.ub_tp_comm_overlap_cfg", None, USER_BUFFERS, free=ANY_MAP),
    _key("model.use_flash_attention", False,
         "torch's scaled_dot_product_attention chooses the kernel", free=ANY_FLAG),
    _key("model.cpu_offloading", False, "nothing is moved to the host's memory", why=NO_EQUIVALENT,
         hint=LESS_MEMORY),
    _key("model.cpu_offloading_num_layers", "${sum:${.num_layers},-1}",
         "nothing is moved to the host's memory", passes=(None,), same_as=_layers_but_one,
         free=ANY_NUMBER),
    *(_key(f"model.cpu_offloading_{what}", True, "nothing is moved to the host's memory",
           passes=(True, False))
      for what in ("activations", "weights")),
    _key("model.use_emha", False, "attention is torch's scaled_dot_product_attention",
         why=NO_EQUIVALENT),
    _key("model.data.data_impl", "mmap",
         "data is in Megatron's indexed format and mapped into memory", why=NO_EQUIVALENT,
         hint="Leave it out, or give mmap, or mock for random tokens"),
    _key("model.data.mmap_bin_files", True,
         "data is in Megatron's indexed format and mapped into memory", why=NO_EQUIVALENT),
    _key("model.data.skip_warmup", True, "mapped files are not read before training",
         free=ANY_FLAG),
    _key("model.data.no_seqlen_plus_one_input_tokens", False,
         "each sample has model.data.seq_length + 1 tokens", why=NO_EQUIVALENT),
    _key("model.data.pad_samples_to_global_batch_size", False, "every training batch is full"),
    _key("model.data.exchange_indices_distributed", False,
         "each node reads or builds its own index maps", free=ANY_FLAG),
    _late("model.optim.overlap_grad_sync", True,
          "a bucket of gradients is reduced as soon as it is complete", free=ANY_FLAG),
    _late("model.optim.overlap_param_sync", False, "weights are gathered before the next step",
          free=ANY_FLAG),
    *(_late(f"model.optim.contiguous_{what}_buffer", True,
            "with distributed_fused_adam gradients and weights lie in flat buffers",
            passes=(True, False))
      for what in ("grad", "param")),
    _late("model.optim.bucket_cap_mb", 100,
          "the size of a bucket is model.grad_allreduce_chunk_size_mb", free=ANY_NUMBER,
          hint="Use model.grad_allreduce_chunk_size_mb"),
    _late("model.optim.sched.cycle", False,
          "a polynomial schedule could begin again only after the run's last step"),
    _late("model.optim.sched.last_epoch", -1, "a run continues at the step of its checkpoint"),
    # --- NeMo's launcher -------------------------------------------------------------------------
    *(_late(f"run.{name}", None, LAUNCHER, free=ANY_TEXT)
      for name in ("name", "results_dir", "time_limit", "dependency")),
    _late("env_vars", None, "environment variables are set outside of a run", free=ANY_MAP),
    *(_late(path, MISSING, "a path that other keys can use", free=ANY_TEXT)
      for path in LAUNCHER_PATHS),
    # --- keys of NeMo's later files and of its other models --------------------------------------
    _late("s3_checkpointing", None, "checkpoints are written to a file system", free=ANY_MAP),
    _late("trainer.replace_sampler_ddp", False, "each rank reads its own part of the data"),
    _late("exp_manager.checkpoint_callback_params.save_last_n_optim_states", -1,
          "every checkpoint has its optimizer states",
          hint="Use exp_manager.checkpoint_callback_params.keep for fewer checkpoints"),
    _late("model.name", None, "the one implementation has Megatron Core's layer", free=NO_FALCON,
          hint=CORE_LAYER),
    _late("model.precision", None, "trainer.precision is the model's too",
          same_as=lambda v: v["trainer.precision"], why="differs from trainer.precision",
          hint="Leave it out"),
    _late("model.restore_from_path", None, "the key is restore_from_path, without model",
          hint="Use restore_from_path"),
    _late("model.restore_from_ckpt", None, "the key is model.resume_from_checkpoint",
          hint="Use model.resume_from_checkpoint"),
    _late("model.reset_lr", False, "a run that continues keeps its schedule", why=NO_EQUIVALENT,
          hint="Start a new run with restore_from_path, which loads weights only"),
    _late("model.reset_lr_steps", False, "a run that continues keeps its schedule",
          why=NO_EQUIVALENT,
          hint="Start a new run with restore_from_path, which loads weights only"),
    _late("model.skip_train", False, "a run trains", why=NO_EQUIVALENT,
          hint="Use trainer.fast_dev_run for a short trial with a validation"),
    _late("model.drop_layers", None, "all layers of a checkpoint are loaded", passes=(None, []),
          why=NO_EQUIVALENT),
    _late("model.deterministic_mode", False, "trainer.deterministic asks torch for it",
          hint="Use trainer.deterministic=True"),
    _late("model.deteministic_mode", False, "NeMo reads no key of this name", free=ANY_FLAG),
    _late("model.cross_entropy_loss_fusion", False, KERNELS, free=ANY_FLAG),
    _late("model.use_te_rng_tracker", False, "dropout's numbers follow from model.seed",
          free=ANY_FLAG),
    _late("model.defer_embedding_wgrad_compute", False,
          "model.pipeline_schedule determines when weight gradients are computed", free=ANY_FLAG),
    _late("model.wgrad_deferral_limit", 0,
          "model.pipeline_schedule determines when weight gradients are computed", free=ANY_NUMBER),
    _late("model.tp_comm_overlap_ag", True, USER_BUFFERS, free=ANY_FLAG),
    _late("model.tp_comm_overlap_rs", True, USER_BUFFERS, free=ANY_FLAG),
    _late("model.use_tp_pp_dp_mapping", False, "replicas are inside a pipeline stage"),
    *(_late(f"model.dist_ckpt_{name}", default, CHECKPOINTS, free=free)
      for name, default, free in (
          ("assume_constant_structure", False, ANY_FLAG), ("load_strictness", None, ANY_TEXT),
          ("parallel_dist_opt", True, ANY_FLAG), ("parallel_load", False, ANY_FLAG),
          ("parallel_save", True, ANY_FLAG), ("parallel_save_within_dp", False, ANY_FLAG),
          ("torch_dist_multiproc", 2, ANY_NUMBER))),
    _late("model.nsys_profile.trace", None, "a profile has NVTX ranges and CUDA's kernels",
          free=ANY_TEXTS),
    _late("model.qkv_bias", False, "model.bias gives all linears a bias, or none",
          same_as=lambda v: v["model.bias"], why=NO_EQUIVALENT,
          hint="Leave it out, which trains without these biases, or use model.bias=True"),
    _late("model.rotary_interleaved", False, "RoPE rotates the two halves of a head",
          why=NO_EQUIVALENT,
          hint="Leave it out; the model is the same but for the order of a head's features"),
    _late("model.scale_positional_embedding", False, "RoPE's frequencies are not scaled by length",
          why=NO_EQUIVALENT,
          hint="Leave it out: without it the model is Llama 3's. "
          "model.seq_len_interpolation_factor divides all positions"),
    _late("model.apply_embedding_scaling", False, "embeddings are not scaled", why=NO_EQUIVALENT),
    _late("model.override_vocab_size", None, "the data's tokenizer determines the vocabulary",
          why=NO_EQUIVALENT,
          hint="Use model.make_vocab_size_divisible_by, which pads the vocabulary"),
    _late("model.window_size", None, ONE_ATTENTION, where=_sees_whole_sequence, why=NO_EQUIVALENT,
          hint="Leave it out, or use a model.encoder_seq_length of at most the window"),
    _late("model.num_moe_experts", None, NO_EXPERTS, why=NO_EQUIVALENT, hint=DENSE),
    *(_late(f"model.moe_{name}", None, NO_EXPERTS, why=NO_EQUIVALENT, hint=DENSE)
      for name in ("aux_loss_coeff", "expert_capacity_factor", "grouped_gemm",
                   "pad_expert_input_to_capacity", "router_topk", "token_dispatcher_type")),
    *(_late(f"model.mcore_customization_config.{name}", False,
           "only Falcon's layer (model.name=megatron_falcon_gpt) reads it", free=ANY_FLAG)
      for name in ("new_decoder_architecture", "parallel_attention")),
    *(_late(f"model.mcore_customization_config.{name}", None, ONE_ATTENTION, why=NO_EQUIVALENT,
           hint="Leave it out; Gemma 2 needs its own layer, which megafp8 does not have")
      for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
                   "window_size")),
    _late("model.tokenizer.use_fast", True, "the tokenizers library reads tokenizer.json",
          free=ANY_FLAG),
    _late("model.tokenizer.trust_remote_code", False, "no code of a tokenizer's repository is run",
          why="is not allowed",
          hint="Leave it out, and give a tokenizer that has a tokenizer.json"),
    _late("model.data.add_fim", False, "samples are not rearranged to fill in the middle",
          why=NO_EQUIVALENT),
    _late("model.data.fim", None, "without model.data.add_fim nothing reads it", free=ANY_MAP),
    _late("model.data.mock_dataset", False, "data is read", why=NO_EQUIVALENT,
          hint="Use model.data.data_impl=mock, which makes random tokens"),
    _late("model.data.data_cache_generation_only", False, "a run trains", why=NO_EQUIVALENT,
          hint="Leave it out; the first start writes the index maps"),
    _late("model.data.num_dataset_builder_threads", 1, "index maps are built by one process",
          free=ANY_NUMBER),
    *(_late(f"model.data.delay_data_{what}", False, "files are mapped when a run starts",
            free=ANY_FLAG)
      for what in ("init", "mmap")),
    _late("model.optim.lock_timeout", None, "no lock is shared with hooks", free=ANY_NUMBER),
    _late("model.optim.nccl_ub", False, "NCCL registers no buffers; it changes times only",
          free=ANY_FLAG),
    _late("model.optim.dtype", "fp32", "the optimizer's states are in FP32", why=NO_EQUIVALENT),
    *(_late(path, row.accepts[0], row.note, passes=tuple(row.accepts), why=row.why, hint=row.hint,
            free=_FREE[row.free] if row.free else None,
            same_as=itemgetter(row.same_as) if row.same_as else None)
      for path, row in rows()),
)  # fmt: skip


@cache
def nemo_keys() -> Mapping[str, NemoKey]:
    """Return every key of NeMo that has no effect, by its dotted path."""
    return {key.path: key for key in _KEYS}


def nemos_file(origins: Mapping[str, Origin]) -> Origin | None:
    """Return the weakest layer that is a file of NeMo; None if there is none.

    A file that builds on the default job is ours. So is one without any key that only NeMo has,
    such as the settings that a run has recorded.
    """
    found = [origin for key, origin in origins.items() if origin.is_nemos and key in nemo_keys()]
    return min(found, key=lambda origin: origin.strength, default=None)


@cache
def nemo_sections() -> frozenset[str]:
    """Return every section that contains such keys: `model`, `model.nsys_profile`, …"""
    parts = [path.split(".") for path in nemo_keys()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))
