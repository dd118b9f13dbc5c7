"""NeMo's keys that megafp8 knows and does not act on: which values pass, and why no other does.

A key here is *inert* where NeMo's own default is among the values that pass: given so, it is
accepted and named at the start of the run. Any other value is refused with the reason and the way
out. The keys that do something are in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megafp8.config.problems import SettingError
from megafp8.config.values import plain

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class NemoKey:
    """One key that changes nothing here. `nemo` is its default in NeMo, as it is written there."""

    path: str
    nemo: Any
    accepts: tuple[Any, ...]  # first the value that says what megafp8 does
    why: str  # of any other value: "… " after "key=value (origin): "
    way_out: str
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
            self.path, "null" if value is None else value, self.why, self.way_out, origin=origin
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


@dataclass
class _Table:
    keys: dict[str, NemoKey] = field(default_factory=dict)
    prefix: str = ""

    def add(
        self,
        name: str,
        nemo: Any,
        note: str,
        *,
        also: tuple[Any, ...] = (),
        ours: tuple[Any, ...] | None = None,
        why: str = "",
        way_out: str = "",
        same_as: Callable[[Values], Any] | None = None,
        any_text: bool = False,
        extra: bool = False,
    ) -> None:
        accepts = (nemo, *also) if ours is None else ours
        path = f"{self.prefix}.{name}" if self.prefix else name
        reason = why or "would change nothing"
        if not any_text:
            reason += f": {note}" if not why else f"; {note}"
        default_way = f"Leave it out, or give {path}={plain(accepts[0])}"
        self.keys[path] = NemoKey(
            path=path,
            nemo=nemo,
            accepts=accepts,
            why=reason,
            way_out=way_out or default_way,
            note=note,
            same_as=same_as,
            any_text=any_text,
            in_megatron_gpt_config=not extra,
        )


@cache
def nemo_keys() -> Mapping[str, NemoKey]:
    """Every key that is known and not in the schema, by its dotted path."""
    table = _Table()
    _root(table)
    _trainer(table)
    _exp_manager(table)
    _model(table)
    _model_memory_and_speed(table)
    _model_fp8(table)
    _model_sections(table)
    return table.keys


@cache
def nemo_sections() -> frozenset[str]:
    """Every inner node above the keys: `model`, `model.nsys_profile`, …"""
    parts = [path.split(".") for path in nemo_keys()]
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


def _root(t: _Table) -> None:
    t.prefix = ""
    t.add("name", "megatron_gpt", "a label, for ${name} in other keys", any_text=True)


def _trainer(t: _Table) -> None:
    t.prefix = "trainer"
    t.add(
        "logger", False, "the loggers are exp_manager's",
        way_out="Use exp_manager.create_tensorboard_logger or exp_manager.create_wandb_logger",
    )  # fmt: skip
    t.add(
        "enable_checkpointing", False, "checkpoints are exp_manager's",
        way_out="Use exp_manager.create_checkpoint_callback and checkpoint_callback_params",
    )  # fmt: skip
    t.add("use_distributed_sampler", False, "the data of each rank follows from its place")
    t.add(
        "max_epochs", -1, "the length of a run is counted in steps", also=(None,),
        way_out="Use trainer.max_steps",
    )  # fmt: skip
    t.add("limit_test_batches", 500, "pretraining has no test stage", also=(0,))
    t.add(
        "accumulate_grad_batches", 1, "it follows from the batch sizes",
        way_out="Use model.global_batch_size: its microbatches are accumulated",
    )  # fmt: skip
    t.add(
        "limit_train_batches", None, "the length of a run is counted in steps", also=(1.0,),
        extra=True, way_out="Use trainer.max_steps, or trainer.overfit_batches for a few batches",
    )  # fmt: skip
    t.add("benchmark", False, "there are no convolutions for cuDNN to choose")
    t.add("enable_model_summary", False, "a run says its shape at the start")


def _exp_manager(t: _Table) -> None:
    t.prefix = "exp_manager"
    neptune = "Use create_tensorboard_logger, create_wandb_logger or metrics.jsonl"
    t.add("create_neptune_logger", False, "there is no Neptune logger", way_out=neptune)
    for name, nemo in (
        ("project", None), ("name", None), ("prefix", "train"),
        ("log_model_checkpoints", False), ("tags", None), ("description", None),
    ):  # fmt: skip
        t.add(f"neptune_logger_kwargs.{name}", nemo, "there is no Neptune logger", way_out=neptune)
    t.add(
        "resume_ignore_no_checkpoint", True, "a run without a checkpoint begins at step 0",
        way_out="Look into the run's checkpoints/ before, where it must exist",
    )  # fmt: skip
    t.prefix = "exp_manager.checkpoint_callback_params"
    own_format = "Checkpoints are safetensors with a manifest; nothing else is written"
    t.add("always_save_nemo", False, "no .nemo files are written", way_out=own_format)
    t.add("save_nemo_on_train_end", False, "no .nemo files are written", way_out=own_format)
    t.add(
        "filename", "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}",
        "checkpoints are named step_NNN by their step",
    )  # fmt: skip
    t.add(
        "model_parallel_size",
        "${multiply:${model.tensor_model_parallel_size}, ${model.pipeline_model_parallel_size}}",
        "it follows from the parallel sizes", ours=(1,),
        same_as=lambda v: (
            v["model.tensor_model_parallel_size"] * v["model.pipeline_model_parallel_size"]
        ),
        way_out="Leave it out",
    )  # fmt: skip
    t.add(
        "dirpath", None, "checkpoints are in the run's own directory", extra=True,
        way_out="Use exp_manager.explicit_log_dir",
    )  # fmt: skip
    t.add(
        "every_n_epochs", None, "the length of a run is counted in steps", extra=True,
        way_out="Use exp_manager.checkpoint_callback_params.every_n_train_steps",
    )  # fmt: skip
    t.add(
        "save_best_model", False, "a run ends with its last step's weights", extra=True,
        way_out="Use exp_manager.checkpoint_callback_params.save_top_k=1, which keeps the best",
    )  # fmt: skip
    t.add("save_weights_only", False, "checkpoints hold all that continues a run", extra=True)
    t.add("verbose", False, "each checkpoint is reported", also=(True,), extra=True)


def _model(t: _Table) -> None:
    t.prefix = "model"
    t.add("mcore_gpt", False, "there is one implementation, of Megatron core's shape",
          ours=(True, False))  # fmt: skip
    t.add("expert_model_parallel_size", 1, "there are no experts", why="has no equivalent here")
    t.add(
        "do_layer_norm_weight_decay", False, "norms and biases do not decay",
        why="has no equivalent here",
    )  # fmt: skip
    t.add("pre_process", True, "the embedding is always there")
    t.add("post_process", True, "the head is always there")
    t.add("persist_layer_norm", True, "torch chooses the kernel")
    t.add("headscale", False, "heads are not scaled", why="has no equivalent here")
    t.add("normalize_attention_scores", True, "scores are scaled by 1 / sqrt(head size)",
          why="has no equivalent here")  # fmt: skip
    t.add("attention_type", "multihead", "attention is multi-head", why="has no equivalent here")
    other = "the tokenizer's own files say how it cuts text"
    for name, nemo in (("delimiter", None), ("sentencepiece_legacy", False)):
        t.add(f"tokenizer.{name}", nemo, other, why="has no equivalent here")
    t.add("fp16_lm_cross_entropy", False, "the loss is computed in FP32",
          why="has no equivalent here")  # fmt: skip
    t.add("use_cpu_initialization", False, "weights are equal whatever device makes them",
          also=(True,))  # fmt: skip
    t.add("onnx_safe", False, "nothing is exported to ONNX", why="has no equivalent here")
    t.add("apex_transformer_log_level", 30, "Apex logs nothing here")
    t.add("sharp", False, "the network decides", why="has no equivalent here")
    t.add("enable_megatron_timers", False, "the times of a step are in metrics.jsonl",
          why="has no equivalent here")  # fmt: skip
    timers: dict[str, Any] = {"log_every_n_steps": 10, "log_mode": "minmax", "barrier": False}
    for name, nemo in timers.items():
        t.add(f"megatron_timer_kwargs.{name}", nemo, "the times of a step are in metrics.jsonl",
              why="has no equivalent here")  # fmt: skip


def _model_memory_and_speed(t: _Table) -> None:
    t.prefix = "model"
    order = "messages between stages are ordered by model.pipeline_schedule"
    t.add("overlap_p2p_comm", False, order)
    t.add("batch_p2p_comm", True, order)
    reduce = "gradients are one flat FP32 buffer, divided once after its reduction"
    t.add("grad_div_ar_fusion", True, reduce)
    t.add("gradient_accumulation_fusion", False,
          "a weight gradient is rounded to the compute dtype, then added to its FP32 sum",
          also=(True,))  # fmt: skip
    t.add("gradient_as_bucket_view", True, reduce)
    t.add("sync_batch_comm", False, reduce)
    t.add("nccl_communicator_config_path", None, "NCCL has its defaults", why="is not read",
          way_out="Leave it out; NCCL reads its NCCL_* environment variables")  # fmt: skip
    t.add("validation_param_sync_overlap", False, "there is nothing to synchronize")
    for name in ("bias_activation_fusion", "bias_dropout_add_fusion", "masked_softmax_fusion",
                 "get_attention_mask_from_fusion"):  # fmt: skip
        t.add(name, True, "torch chooses the kernels, with the same results")
    t.add("apply_rope_fusion", False, "torch chooses the kernels", why="cannot be promised")
    own = "checkpoints are sharded safetensors, which load into any layout"
    t.add("fsdp_sharded_checkpoint", False, own, also=(True,))
    t.add("dist_ckpt_format", "zarr", own)
    t.add("dist_ckpt_load_on_device", True, own)
    memory = "Use model.activations_checkpoint_granularity, or a smaller model.micro_batch_size"
    for name in (
        "num_micro_batches_with_partial_activation_checkpoints",
        "activations_checkpoint_layers_per_pipeline",
    ):  # fmt: skip
        t.add(name, None, "what is computed again is the same in every microbatch and stage",
              why="has no equivalent here", way_out=memory)  # fmt: skip
    buffers = "Transformer Engine's user buffers are not used"
    for name, nemo in (("ub_tp_comm_overlap", False), ("ub_tp_comm_overlap_cfg", None)):
        t.add(name, nemo, buffers, why="has no equivalent here")
    t.add("use_flash_attention", False, "torch's scaled_dot_product_attention chooses the kernel",
          why="cannot be promised")  # fmt: skip
    no_offloading = "has no equivalent here"
    t.add("cpu_offloading", False, "nothing is moved to the host's memory", why=no_offloading,
          way_out=memory)  # fmt: skip
    t.add(
        "cpu_offloading_num_layers", "${sum:${.num_layers},-1}",
        "nothing is moved to the host's memory", why=no_offloading, ours=(None,),
        same_as=lambda v: v["model.num_layers"] - 1, way_out="Leave it out",
    )  # fmt: skip
    for name in ("cpu_offloading_activations", "cpu_offloading_weights"):
        t.add(name, True, "nothing is moved to the host's memory", also=(False,))


def _model_fp8(t: _Table) -> None:
    t.prefix = "model"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        t.add(name, False, "attention is never in FP8", why="has no equivalent here", extra=True)
    t.add("use_emha", False, "attention is torch's", why="has no equivalent here")


def _model_sections(t: _Table) -> None:
    t.prefix = "model.data"
    indexed = "data is Megatron's indexed format, mapped into memory"
    t.add("data_impl", "mmap", indexed, why="has no equivalent here")
    t.add("mmap_bin_files", True, indexed, why="has no equivalent here")
    t.add("skip_warmup", True, "mapped files are not read ahead")
    t.add("no_seqlen_plus_one_input_tokens", False, "a sample has one token more than its targets",
          why="has no equivalent here")  # fmt: skip
    t.add("pad_samples_to_global_batch_size", False, "training never ends within a batch")
    t.add("exchange_indices_distributed", False, "each node reads or makes its own indices")
    t.prefix = "model.optim"
    reduced = "a bucket of gradients is reduced as soon as it is complete"
    t.add("overlap_grad_sync", True, reduced, extra=True)
    t.add("overlap_param_sync", False, "weights are gathered before the next step", extra=True)
    flat = "with distributed_fused_adam gradients and weights lie in flat buffers"
    for name in ("contiguous_grad_buffer", "contiguous_param_buffer"):
        t.add(name, True, flat, also=(False,), extra=True)
    t.add("bucket_cap_mb", 100, "the size of a bucket is model.grad_allreduce_chunk_size_mb",
          extra=True, way_out="Use model.grad_allreduce_chunk_size_mb")  # fmt: skip
    t.prefix = "model.optim.sched"
    t.add("cycle", False, "a polynomial would begin again only after the run's last step",
          extra=True)  # fmt: skip
    t.add("last_epoch", -1, "a run continues at the step of its checkpoint", extra=True)
