"""The tree of settings under NeMo's names: the one place where a key is named and explained.

What is `???` (`MISSING`) shapes the job: a YAML must give it (`conf/pretrain_gpt.yaml` does).
`nemo=` is the default in NeMo's `megatron_gpt_config.yaml`; keys of our own leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import MISSING

from megafp8.config.data_prefix import PREFIX_TEXT, parse_data_prefix
from megafp8.config.keys import (
    Key,
    Valid,
    above,
    at_least,
    between,
    from_to_below,
    key,
    keys_of,
    one_of,
    or_null,
)
from megafp8.config.values import (
    LATER_OPTIMIZERS,
    LATER_SCHEDULES,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    is_rampup,
    parse_interval_seconds,
    parse_layout,
    parse_modules,
    parse_splits,
)
from megafp8.specs.parallel import SCHEDULES as PIPELINE_SCHEDULES
from megafp8.specs.precision import RECIPES


def _is_interval(value: object) -> bool:
    seconds = parse_interval_seconds(value)
    return value is None or (seconds is not None and seconds > 0)


def _is_splits(value: object) -> bool:
    splits = parse_splits(value)
    return splits is not None and len(splits) == 3 and min(splits[:2]) > 0 and splits[2] >= 0


def _are_betas(value: list[float]) -> bool:
    return len(value) == 2 and all(0 <= beta < 1 for beta in value)


def _is_directory_name(value: str | None) -> bool:
    return value is None or (value not in ("", ".", "..") and not set(value) & set("/\\\0"))


_PATH = Valid("a path", bool)


@dataclass
class Trainer:
    """Devices, precision, length of the run and how often it reports."""

    devices: int = key(
        1, "Ranks (processes) on this node.", nemo=1, kind="layout", valid=at_least(1)
    )
    num_nodes: int = key(
        1,
        "Nodes of the run.",
        nemo=1,
        kind="layout",
        valid=at_least(1),
    )
    accelerator: str = key(
        "auto",
        "`auto` takes the GPU if there is one, else the CPU.",
        nemo="gpu",
        kind="layout",
        valid=one_of("auto", "cpu", "gpu"),
    )
    precision: int | str = key(
        "bf16",
        "Dtype of GEMMs and of the weights that they read; master weights are FP32. 16 comes with "
        "a dynamic loss scale, bf16 needs none.",
        nemo=16,
        kind="model",
        valid=one_of(*PRECISIONS),
    )
    max_steps: int = key(
        MISSING,
        "Optimizer steps of the whole run.",
        nemo=100000,
        kind="length",
        valid=at_least(1),
    )
    log_every_n_steps: int = key(
        10, "Steps between two lines of metrics.", nemo=10, kind="logging", valid=at_least(1)
    )
    val_check_interval: int = key(
        MISSING, "Steps between two validations.", nemo=100, kind="logging", valid=at_least(1)
    )
    limit_val_batches: int = key(
        MISSING,
        "Global batches of one validation during training; the last one of a run is whole. 0: no "
        "validation, at the end neither.",
        nemo=50,
        kind="logging",
        valid=at_least(0),
    )
    gradient_clip_val: float | None = key(
        1.0,
        "Largest global norm of the gradients; null or 0 does not clip.",
        nemo=1.0,
        kind="optim",
        valid=or_null(at_least(0)),
    )
    max_time: int | float | str | None = key(
        None,
        'Time by which this process has saved and left (exit code 75), as "DD:HH:MM:SS", '
        '"HH:MM:SS" or seconds; null for none. The same command continues.',
        kind="policy",
        valid=Valid('seconds above 0, "DD:HH:MM:SS", "HH:MM:SS", or null', _is_interval),
    )
    step_timeout: float | None = key(
        None,
        "Seconds without a sign of life from a rank after which its stacks are shown and all "
        "leave; longer than the longest step, validation and save. Null: no watch.",
        kind="policy",
        valid=or_null(above(0)),
    )
    gradient_clip_algorithm: str = key(
        "norm",
        "`norm` shrinks all gradients together until their norm is `gradient_clip_val`; `value` "
        "cuts each element off at it.",
        kind="optim",
        valid=one_of("norm", "value"),
    )
    nonfinite_policy: str = key(
        "stop",
        "What a NaN or infinity in loss or gradients does: end the run, skip the step, or go back "
        "to the last checkpoint.",
        kind="policy",
        valid=one_of("stop", "skip", "rollback"),
    )
    fast_dev_run: bool | int = key(
        False,
        "A trial of this many steps (True for one), with validations of as many global batches and "
        "neither checkpoints nor loggers, in a directory of its own.",
        kind="length",
        valid=Valid("True, False or a number of steps", lambda v: v >= 0),
    )
    overfit_batches: int = key(
        0,
        "Train on the first N global batches over and over; 0 for all data.",
        kind="data",
        valid=at_least(0),
    )
    num_sanity_val_steps: int = key(
        0,
        "Global batches validated before the first step, so that a failure comes early.",
        kind="logging",
        valid=at_least(0),
    )
    enable_progress_bar: bool = key(
        True, "Draw a live block on a terminal; without it, plain lines.", kind="logging"
    )
    deterministic: bool = key(
        False,
        "Refuse operations that have no deterministic algorithm (torch, cuBLAS).",
        kind="layout",
    )
    memory_snapshot_on_oom: bool = key(
        False,
        "With CUDA: when memory runs out, write what held it into the run's directory.",
        kind="logging",
    )


@dataclass
class WandbLogger:
    """Where Weights & Biases puts the run."""

    project: str | None = key(None, "Weights & Biases project.", nemo=None, kind="logging")
    name: str | None = key(None, "Weights & Biases name of the run.", nemo=None, kind="logging")


@dataclass
class CheckpointCallback:
    """When checkpoints are written."""

    every_n_train_steps: int | None = key(
        200, "Steps between two checkpoints; null for none.", kind="logging",
        valid=or_null(at_least(1)),
    )  # fmt: skip
    train_time_interval: int | float | str | None = key(
        None,
        'Time between two checkpoints, in seconds or as "HH:MM:SS"; null for none.',
        kind="logging",
        valid=Valid('seconds above 0, "HH:MM:SS", "DD:HH:MM:SS", or null', _is_interval),
    )
    save_last: bool = key(True, "Save the last step of the run.", kind="logging")
    keep: int = key(
        3,
        "Newest checkpoints kept; older ones go once a newer one is verified.",
        kind="logging",
        valid=at_least(1),
    )
    save_top_k: int = key(
        0,
        "Best checkpoints kept besides the newest `keep`, by `monitor`; -1 keeps all.",
        nemo=10,
        kind="logging",
        valid=at_least(-1),
    )
    monitor: str = key(
        "val_loss",
        "What ranks checkpoints: `val_loss`, or `reduced_train_loss`, the last one logged before "
        "the save.",
        nemo="val_loss",
        kind="logging",
        valid=one_of("val_loss", "reduced_train_loss"),
    )
    mode: str = key(
        "min",
        "Whether the smallest or the largest `monitor` is best.",
        nemo="min",
        kind="logging",
        valid=one_of("min", "max"),
    )


@dataclass
class ExpManager:
    """The directory of a run, its loggers and its checkpoints."""

    exp_dir: str | None = key(
        "runs",
        "Directory in which runs get their own directories; null for `runs`.",
        nemo=None,
        kind="logging",
        valid=or_null(_PATH),
    )
    name: str | None = key(
        None,
        "Name of the run: the same name continues it. Without one, the same configuration does.",
        nemo="megatron_gpt",
        kind="logging",
        valid=Valid("a directory's name without / and \\, or null", _is_directory_name),
    )
    explicit_log_dir: str | None = key(
        None,
        "Exactly this directory instead of one in `exp_dir`.",
        nemo=None,
        kind="logging",
        valid=or_null(_PATH),
    )
    resume_if_exists: bool = key(
        True, "Continue from the newest good checkpoint.", nemo=True, kind="logging"
    )
    resume_from_checkpoint: str | None = key(
        "${model.resume_from_checkpoint}",
        "The same as `model.resume_from_checkpoint`: either is enough.",
        nemo="${model.resume_from_checkpoint}",
        kind="policy",
        valid=or_null(_PATH),
    )
    create_checkpoint_callback: bool = key(
        True,
        "Write checkpoints while training; without it only a signal does.",
        nemo=True,
        kind="logging",
    )
    create_tensorboard_logger: bool = key(True, "Write TensorBoard files.", kind="logging")
    create_wandb_logger: bool = key(
        False, "Write to Weights & Biases (offline works).", nemo=False, kind="logging"
    )
    wandb_logger_kwargs: WandbLogger = field(default_factory=WandbLogger)
    checkpoint_callback_params: CheckpointCallback = field(default_factory=CheckpointCallback)


@dataclass
class Tokenizer:
    """How text becomes tokens."""

    library: str = key(
        "builtin",
        "`builtin`: the one recorded with the data; a byte-level BPE for the built-in corpus. The "
        "others name one, which must be that of the data: `huggingface` by `type`, "
        "`sentencepiece` and `tiktoken` by `model`, `megatron` by `vocab_file` and `merge_file`.",
        nemo="megatron",
        kind="data",
        valid=one_of("builtin", "huggingface", "megatron", "sentencepiece", "tiktoken"),
    )
    type: str | None = key(
        None,
        "With `huggingface`: a name on the Hub or a folder. With `megatron`: GPT2BPETokenizer.",
        nemo="GPT2BPETokenizer",
        kind="data",
    )
    model: str | None = key(
        None,
        "With `sentencepiece`: the `.model` file. With `tiktoken`: a file of ranks, or the name of "
        "one of its encodings.",
        nemo=None,
        kind="data",
        valid=or_null(_PATH),
    )
    vocab_file: str | None = key(
        None, "With `megatron`: GPT-2's `vocab.json`.", nemo=None, kind="data",
        valid=or_null(_PATH),
    )  # fmt: skip
    merge_file: str | None = key(
        None, "With `megatron`: GPT-2's `merges.txt`.", nemo=None, kind="data",
        valid=or_null(_PATH),
    )  # fmt: skip
    vocab_size: int = key(
        4096,
        "Tokens of the built-in corpus's tokenizer, before padding; 256 of them are the bytes, one "
        "ends a document.",
        kind="data",
        valid=at_least(257),
    )


@dataclass
class Data:
    """Where the text comes from and how it becomes samples."""

    data_prefix: Any = key(
        MISSING,
        "`builtin` for the corpus that comes along; or an indexed dataset's path without "
        "`.bin`/`.idx`; or a blend `[0.3, path, 0.7, path]`, whose weights hold in training to "
        "within one sample at every point; or `{train: [...], validation: [...], test: [...]}`, "
        "which leaves `splits_string` unused.",
        nemo=MISSING,
        kind="data",
        valid=Valid(PREFIX_TEXT, lambda value: parse_data_prefix(value) is not None),
    )
    index_mapping_dir: str | None = key(
        None,
        "Where index maps and the built-in dataset are kept; null: the user's cache.",
        nemo=None,
        kind="layout",
        valid=or_null(_PATH),
    )
    splits_string: Any = key(
        "900,50,50",
        "Relative sizes of train, validation and test data. Quote it on the command line: "
        "`'model.data.splits_string=\"900,50,50\"'`.",
        nemo="900,50,50",
        kind="data",
        valid=Valid(
            "three numbers, the first two above 0 and the third at least 0, as "
            '"900,50,50" or [900,50,50]',
            _is_splits,
        ),
    )
    seq_length: int = key(
        "${model.encoder_seq_length}",
        "Tokens of one sample; the same as `model.encoder_seq_length`.",
        nemo="${model.encoder_seq_length}",
        kind="data",
        valid=at_least(1),
    )
    num_workers: int = key(
        2,
        "Threads that read samples ahead; 0 reads them where they are needed.",
        nemo=2,
        kind="layout",
        valid=between(0, 64),
    )
    dataloader_type: str = key(
        "single",
        "`single`: each epoch cuts its own samples out of its own order of documents. `cyclic`: "
        "those of the first epoch come again, in another order each epoch.",
        nemo="single",
        kind="data",
        valid=one_of("single", "cyclic"),
    )
    reset_position_ids: bool = key(
        False, "Positions start anew after the end of a document.", nemo=False, kind="data"
    )
    reset_attention_mask: bool = key(
        False, "No attention from one document of a sample to another.", nemo=False, kind="data"
    )
    eod_mask_loss: bool = key(
        False, "Nothing is predicted from the end of a document.", nemo=False, kind="data"
    )
    validation_drop_last: bool = key(
        True,
        "Validation during training takes whole samples and whole global batches only; that at a "
        "run's end takes every token.",
        nemo=True,
        kind="logging",
    )
    shuffle_documents: bool = key(
        True,
        "Shuffle documents before samples are cut from them; the order of samples is shuffled "
        "either way.",
        nemo=True,
        kind="data",
    )


@dataclass
class Sched:
    """The learning rate over the run."""

    name: str = key(
        "CosineAnnealing",
        "NeMo's schedule of this name: a linear warm-up, then what its name says.",
        nemo="CosineAnnealing",
        kind="optim",
        valid=one_of(
            *SCHEDULES,
            later=LATER_SCHEDULES,
            suggestion=f"Use {', '.join(list(SCHEDULES)[:-1])} or {list(SCHEDULES)[-1]}",
        ),
    )
    warmup_steps: int | None = key(
        None,
        "Steps of linear warm-up; null for a tenth of `trainer.max_steps`.",
        nemo=500,
        kind="optim",
        valid=or_null(at_least(0)),
    )
    warmup_ratio: float | None = key(
        None,
        "Instead of `warmup_steps`, their share of `trainer.max_steps`.",
        kind="optim",
        valid=or_null(between(0, 1)),
    )
    constant_steps: int = key(
        0,
        "CosineAnnealing's last steps, all at `min_lr`; with them its warm-up starts at 0.",
        nemo=0,
        kind="optim",
        valid=at_least(0),
    )
    constant_ratio: float | None = key(
        None,
        "Instead of `constant_steps`, their share of `trainer.max_steps`.",
        kind="optim",
        valid=or_null(between(0, 1)),
    )
    hold_steps: int | None = key(
        None,
        "Steps at `model.optim.lr` after the warm-up, for PolynomialHoldDecayAnnealing and "
        "NoamHoldAnnealing.",
        kind="optim",
        valid=or_null(at_least(0)),
    )
    hold_ratio: float | None = key(
        None,
        "Instead of `hold_steps`, their share of `trainer.max_steps`.",
        kind="optim",
        valid=or_null(between(0, 1)),
    )
    power: float = key(
        1.0, "The polynomial schedules' exponent; 1 is a line.", kind="optim", valid=above(0)
    )
    decay_rate: float = key(
        0.5, "NoamHoldAnnealing's exponent of the decay.", kind="optim", valid=above(0)
    )
    d_model: int | None = key(
        None,
        "NoamAnnealing divides the rate by its root; null for `model.hidden_size`.",
        kind="optim",
        valid=or_null(at_least(1)),
    )
    min_lr: float = key(
        MISSING, "Lowest learning rate.", nemo=2e-5, kind="optim", valid=at_least(0)
    )


@dataclass
class Optim:
    """The optimizer."""

    name: str = key(
        "adamw",
        "`adamw` has decoupled weight decay, `adam` adds it to the gradient (L2). `fused_adam` is "
        "adamw by Apex's or Transformer Engine's kernel where there is one.",
        nemo="fused_adam",
        kind="optim",
        valid=one_of(
            *OPTIMIZERS,
            later=LATER_OPTIMIZERS,
            suggestion="Use adamw, or fused_adam, which is the same (decoupled weight decay)",
        ),
    )
    lr: float = key(MISSING, "Highest learning rate.", nemo=2e-4, kind="optim", valid=above(0))
    weight_decay: float = key(
        0.01, "Weight decay of matrices.", nemo=0.01, kind="optim", valid=at_least(0)
    )
    betas: list[float] = key(
        [0.9, 0.98],
        "Decay rates of the first and second moments.",
        nemo=[0.9, 0.98],
        kind="optim",
        valid=Valid("two numbers, each from 0 to below 1", _are_betas),
    )
    eps: float = key(1e-8, "Added to the root of the second moment.", kind="optim", valid=above(0))
    grad_sync_dtype: str = key(
        "fp32",
        "In which gradients are summed over replicas; `bf16` sends half as much.",
        kind="optim",
        valid=one_of("fp32", "bf16"),
    )
    sched: Sched = field(default_factory=Sched)


@dataclass
class NsysProfile:
    """A profile of some steps: NVTX ranges for Nsight Systems, a Chrome trace without CUDA."""

    enabled: bool = key(
        False, "Profile the steps from `start_step` to `end_step`.", nemo=False, kind="logging"
    )
    start_step: int = key(
        10, "First step that is profiled, counted from 0.", nemo=10, kind="logging",
        valid=at_least(0),
    )  # fmt: skip
    end_step: int = key(
        10, "Last step that is profiled, counted from 0.", nemo=10, kind="logging",
        valid=at_least(0),
    )  # fmt: skip
    ranks: list[int] = key(
        [0],
        "Ranks that are profiled.",
        nemo=[0],
        kind="logging",
        valid=Valid("a list of ranks, each from 0", lambda v: bool(v) and min(v) >= 0),
    )
    gen_shape: bool = key(
        False, "Record the shapes of operations' inputs.", nemo=False, kind="logging"
    )


@dataclass
class Model:
    """The GPT, its batches, its FP8 recipe, its data and its optimizer."""

    micro_batch_size: int = key(
        MISSING,
        "Samples of one forward pass on one data-parallel rank.",
        nemo=4,
        kind="layout",
        valid=at_least(1),
    )
    global_batch_size: int = key(
        MISSING,
        "Samples of one optimizer step over all ranks.",
        nemo=8,
        kind="optim",
        valid=at_least(1),
    )
    rampup_batch_size: Any = key(
        None,
        "`[start, increment, samples]`: the first step has `start` samples, and the batch grows by "
        "`increment` to `global_batch_size` over the first `samples` samples; null for no ramp-up.",
        nemo=None,
        kind="optim",
        valid=or_null(Valid("three whole numbers above 0, as [8,8,1000]", is_rampup)),
    )
    tensor_model_parallel_size: int = key(
        1, "Ranks that share each matrix.", nemo=1, kind="layout", valid=at_least(1)
    )
    sequence_parallel: bool = key(
        False,
        "Tensor-parallel ranks share out the sequence between their linears (norms, dropout, "
        "residual stream); what linears read in FP8 crosses in FP8.",
        nemo=False,
        kind="layout",
    )
    pipeline_model_parallel_size: int = key(
        1,
        "Ranks that hold the layers in turn (pipeline stages).",
        nemo=1,
        kind="layout",
        valid=at_least(1),
    )
    virtual_pipeline_model_parallel_size: int | None = key(
        None,
        "Stages on each pipeline rank; null: one.",
        nemo=None,
        kind="layout",
        valid=or_null(at_least(1)),
    )
    pipeline_schedule: str | None = key(
        None,
        "Order of the pipeline's work. Null: `1F1B`, with several stages on a rank "
        "`Interleaved1F1B`. The zero-bubble ones compute weight gradients where a rank would wait.",
        kind="layout",
        valid=or_null(one_of(*PIPELINE_SCHEDULES)),
    )
    pipeline_model_parallel_layout: str | None = key(
        None,
        "Layers of each stage in the model's order, as `3,4,4,1`; null: equal numbers.",
        kind="layout",
        valid=Valid(
            "numbers of layers with commas between, or null",
            lambda v: v is None or parse_layout(v) is not None,
        ),
    )
    grad_allreduce_chunk_size_mb: int = key(
        125,
        "MiB of FP32 gradients that are summed over replicas at once, while backward still runs.",
        nemo=125,
        kind="layout",
        valid=at_least(1),
    )
    encoder_seq_length: int = key(
        MISSING, "Tokens of a sequence.", nemo=512, kind="model", valid=at_least(1)
    )
    max_position_embeddings: int = key(
        "${.encoder_seq_length}",
        "Learned positions; at least the tokens of a sequence.",
        nemo="${.encoder_seq_length}",
        kind="model",
        valid=at_least(1),
    )
    num_layers: int = key(MISSING, "Transformer layers.", nemo=12, kind="model", valid=at_least(1))
    hidden_size: int = key(
        MISSING, "Width of the residual stream.", nemo=768, kind="model", valid=at_least(1)
    )
    ffn_hidden_size: int = key(
        MISSING, "Width inside the MLP.", nemo=3072, kind="model", valid=at_least(1)
    )
    num_attention_heads: int = key(
        MISSING, "Attention heads.", nemo=12, kind="model", valid=at_least(1)
    )
    kv_channels: int | None = key(
        None,
        "Width of a head; null for `hidden_size / num_attention_heads`.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
    )
    num_query_groups: int | None = key(
        None,
        "Heads of keys and values, each shared by a group of query heads; null for one each.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
    )
    init_method_std: float = key(
        0.02, "Standard deviation of initial weights.", nemo=0.02, kind="model", valid=above(0)
    )
    use_scaled_init_method: bool = key(
        True,
        "Divide that of the projections into the residual stream by sqrt(2 * num_layers).",
        nemo=True,
        kind="model",
    )
    hidden_dropout: float = key(
        0.0,
        "Dropout before each residual addition and after the embedding.",
        nemo=0.1,
        kind="model",
        valid=from_to_below(0, 1),
    )
    attention_dropout: float = key(
        0.0, "Dropout of attention weights.", nemo=0.1, kind="model", valid=from_to_below(0, 1)
    )
    ffn_dropout: float = key(
        0.0, "Dropout inside the MLP.", nemo=0.0, kind="model", valid=from_to_below(0, 1)
    )
    normalization: str = key(
        "layernorm",
        "LayerNorm, or RMSNorm, which has no mean and no bias.",
        nemo="layernorm",
        kind="model",
        valid=one_of(
            "layernorm",
            "rmsnorm",
            later=("layernorm1p", "low_precision_layernorm"),
            suggestion="Use layernorm or rmsnorm",
        ),
    )
    layernorm_epsilon: float = key(
        1e-5,
        "Added to the variance, or mean square, in norms.",
        nemo=1e-5,
        kind="model",
        valid=above(0),
    )
    bias: bool = key(True, "Biases of the linears; norms keep theirs.", nemo=True, kind="model")
    activation: str = key(
        "gelu",
        "Of the MLP. geglu, swiglu and reglu are gated: FC1 makes `2 * ffn_hidden_size` features. "
        "`fast-` ones are the same (NeMo: one GEMM instead of two; here it is always one).",
        nemo="gelu",
        kind="model",
        valid=one_of(
            "gelu",
            "geglu",
            "swiglu",
            "reglu",
            "squared-relu",
            "fast-geglu",
            "fast-swiglu",
            "fast-reglu",
        ),
    )
    openai_gelu: bool = key(
        False, "GELU by tanh, as GPT-2 has it, instead of erf.", nemo=False, kind="model"
    )
    transformer_block_type: str = key(
        "pre_ln",
        "Norms before attention and MLP, or (`post_ln`) after each residual addition.",
        nemo="pre_ln",
        kind="model",
        valid=one_of(
            "pre_ln", "post_ln", later=("normformer",), suggestion="Use pre_ln or post_ln"
        ),
    )
    position_embedding_type: str = key(
        "learned_absolute",
        "Learned positions, rotary ones (RoPE), linear biases (ALiBi), or none.",
        nemo="learned_absolute",
        kind="model",
        valid=one_of(
            "learned_absolute",
            "rope",
            "alibi",
            "none",
            later=("kerple", "xpos", "sandwich", "learned_parameters"),
            suggestion="Use rope or alibi",
        ),
    )
    rotary_percentage: float = key(
        1.0,
        "Part of a head's width that RoPE turns.",
        nemo=1.0,
        kind="model",
        valid=Valid("above 0 and at most 1", lambda x: 0 < x <= 1),
    )
    rotary_base: float = key(
        10000.0, "RoPE's base: larger ones turn more slowly.", kind="model", valid=above(1)
    )
    seq_len_interpolation_factor: float | None = key(
        None,
        "RoPE's positions are divided by it, to reach longer sequences; null for no division.",
        nemo=None,
        kind="model",
        valid=or_null(at_least(1)),
    )
    share_embeddings_and_output_weights: bool = key(
        True, "Input and output have one embedding.", nemo=True, kind="model"
    )
    apply_query_key_layer_scaling: bool = key(
        False,
        "Divide queries by the layer's number and multiply scores by it in the softmax: the same "
        "but for rounding (made for FP16 softmax; here it is FP32).",
        nemo=False,
        kind="model",
    )
    fp32_residual_connection: bool = key(
        False, "Keep the residual stream in FP32.", nemo=False, kind="model"
    )
    activations_checkpoint_granularity: str | None = key(
        None,
        "What backward computes again instead of keeping it: attention's core (`selective`), "
        "whole layers (`full`), or nothing.",
        nemo=None,
        kind="layout",
        valid=or_null(one_of("selective", "full")),
    )
    activations_checkpoint_method: str | None = key(
        None,
        "`uniform`: all layers, in groups; `block`: only the first layers.",
        nemo=None,
        kind="layout",
        valid=or_null(one_of("uniform", "block")),
    )
    activations_checkpoint_num_layers: int | None = key(
        None,
        "With uniform, the layers of a group (null: 1); with block, how many are computed again.",
        nemo=None,
        kind="layout",
        valid=or_null(at_least(1)),
    )
    make_vocab_size_divisible_by: int = key(
        128, "The vocabulary is padded to a multiple.", nemo=128, kind="model", valid=at_least(1)
    )
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    seed: int = key(
        1234,
        "Seed of initial weights, dropout and the order of samples.",
        nemo=1234,
        kind="model",
        valid=between(0, 2**32 - 1),
    )
    resume_from_checkpoint: str | None = key(
        None,
        "The checkpoint, or the run, whose state a new run goes on from: weights, optimizer, "
        "scales, step and place in the data. A run that has a checkpoint of its own continues it.",
        nemo=None,
        kind="policy",
        valid=or_null(_PATH),
    )
    gc_interval: int = key(
        0,
        "Collect Python's garbage every so many steps and at no other time, on all ranks at once; "
        "0: when Python does.",
        nemo=0,
        kind="layout",
        valid=at_least(0),
    )
    native_amp_init_scale: int = key(
        4294967296,
        "FP16's first loss scale.",
        nemo=4294967296,
        kind="model",
        valid=at_least(1),
    )
    native_amp_growth_interval: int = key(
        1000,
        "Finite steps in a row that double FP16's loss scale.",
        nemo=1000,
        kind="model",
        valid=at_least(1),
    )
    hysteresis: int = key(
        2,
        "Overflows in a row from which on each halves FP16's loss scale.",
        nemo=2,
        kind="model",
        valid=at_least(1),
    )
    megatron_amp_O2: bool = key(  # noqa: N815 (NeMo's name)
        True,
        "Embeddings, norms and the residual stream have `trainer.precision` too. Without, they are "
        "FP32 and only GEMMs and attention have it, as under `torch.autocast`.",
        nemo=False,
        kind="model",
    )
    transformer_engine: bool = key(
        True, "Transformer Engine's layer semantics; FP8 needs them.", nemo=False, kind="model"
    )
    fp8: bool = key(False, "Run the linear layers of all blocks in FP8.", nemo=False, kind="model")
    fp8_e4m3: bool = key(
        False, "E4M3 in forward and backward. Wins over `fp8_hybrid`.", nemo=False, kind="model"
    )
    fp8_hybrid: bool = key(
        True, "E4M3 in forward, E5M2 for output gradients.", nemo=True, kind="model"
    )
    fp8_margin: int = key(
        0,
        "Scales leave 2**margin of head room.",
        nemo=0,
        kind="model",
        valid=between(-16, 32),
    )
    fp8_interval: int = key(
        1,
        "Updates from one recomputation of a scale to the next.",
        nemo=1,
        kind="model",
        valid=between(1, 65536),
    )
    fp8_amax_history_len: int = key(
        1024,
        "Updates that an amax stays in the window from which scales come.",
        nemo=1024,
        kind="model",
        valid=between(1, 65536),
    )
    fp8_amax_compute_algo: str = key(
        "max",
        "The window's largest amax, or its newest.",
        nemo="max",
        kind="model",
        valid=one_of("max", "most_recent"),
    )
    reduce_amax: bool = key(
        True, "Largest amax over the ranks that share a tensor.", nemo=True, kind="model"
    )
    tp_only_amax_red: bool = key(
        False, "Not over replicas: those keep scales of their own.", kind="model"
    )
    fp8_recipe: str = key(
        "delayed",
        "Where scales come from: earlier amaxes of the tensor (`delayed`), its own amax "
        "(`tensorwise`), those of its rows and columns (`rowwise`; `rowwise_with_gw_hp` keeps "
        "weight gradients in high precision), those of its blocks (`blockwise`).",
        kind="model",
        valid=one_of(
            *RECIPES, later=("mxfp8", "nvfp4", "custom"), suggestion="Blockwise is nearest to mxfp8"
        ),
    )
    fp8_power_2_scale: bool | None = key(
        None,
        "Scales rounded down to powers of two. Null: as the recipe's source has it (not for "
        "`tensorwise`, else so).",
        kind="model",
    )
    fp8_params: bool = key(
        False,
        "Keep the linears' weights in FP8 alone, beside their FP32 masters.",
        kind="model",
    )
    fp8_wgrad: bool = key(True, "Weight gradients are FP8 products too.", kind="model")
    override_linear_precision: list[bool] = key(
        [False, False, False],
        "Which products stay in high precision: output, input gradient, weight gradient.",
        kind="model",
        valid=Valid("three of True and False", lambda v: len(v) == 3),
    )
    fp8_split_accumulator: list[bool] = key(
        [False, True, True],
        "Which products add up precisely on FP8 tensor cores: output, input gradient, weight "
        "gradient. Elsewhere all do.",
        kind="model",
        valid=Valid("three of True and False", lambda v: len(v) == 3),
    )
    first_last_layers_bf16: bool = key(
        False, "Keep the first and the last layers out of FP8.", kind="model"
    )
    num_layers_at_start_in_bf16: int = key(
        1, "How many, at the start.", kind="model", valid=at_least(0)
    )
    num_layers_at_end_in_bf16: int = key(
        1, "How many, at the end.", kind="model", valid=at_least(0)
    )
    fp8_modules: list[str] = key(
        [],
        "Choices for linears by name, `PATTERN:CHOICE`, the first that matches: a recipe, or "
        "`high_precision`. An example: `*.mlp.fc2:high_precision`.",
        kind="model",
        valid=Valid("a list of PATTERN:CHOICE", lambda v: parse_modules(v) is not None),
    )
    use_autocast_during_eval: bool = key(
        True, "Validate in FP8 too, with the scales of training.", kind="model"
    )
    fp8_health: str = key(
        "scales",
        "At log steps, of each FP8 tensor: its amax and scale (`scales`), or also what it loses "
        "(`full`: such a step takes about three times as long on a CPU). Into health.jsonl and the "
        "trackers.",
        kind="logging",
        valid=one_of("off", "scales", "full"),
    )
    fp8_health_max_underflow: float = key(
        0.5,
        "Warn of tensors of which a larger share of non-zero values became zero.",
        kind="logging",
        valid=between(0, 1),
    )
    fp8_health_max_overflow: float = key(
        0.01,
        "Warn of tensors of which a larger share of values saturated.",
        kind="logging",
        valid=between(0, 1),
    )
    fp8_health_min_snr_db: float = key(
        5.0,
        "Warn of tensors whose worst row has less signal to noise, in decibel.",
        kind="logging",
        valid=between(-200, 200),
    )
    pad_inner_dim: bool = key(
        False,
        "Allow sizes that are no multiple of what FP8 tensor cores take; there, operands are "
        "padded with zeros.",
        kind="model",
    )
    fp8_backend: str = key(
        "auto",
        "Who runs the layers: `native` is our own, on any device; `te` (Transformer Engine, BF16 "
        "too), `torchao`; `auto` is `native`.",
        kind="layout",
        valid=one_of("auto", "native", "te", "torchao"),
    )
    enable_fsdp_float8_all_gather: bool = key(
        False,
        "torchao's FP8 all-gather of weights that FSDP shards; there is no FSDP yet.",
        kind="layout",
    )
    compile: str = key(
        "off",
        "`block`: torch compiles a transformer layer, and all of them use it; training alone.",
        kind="layout",
        valid=one_of("off", "block"),
    )
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    nsys_profile: NsysProfile = field(default_factory=NsysProfile)


@dataclass
class Config:
    """The whole tree."""

    restore_from_path: str | None = key(
        None,
        "Weights to start from: a run's directory, one of its checkpoints, or what "
        "`megafp8.cli.import_hf` wrote. A run that has a checkpoint of its own continues it.",
        nemo=None,
        kind="model",
        valid=or_null(_PATH),
    )
    trainer: Trainer = field(default_factory=Trainer)
    exp_manager: ExpManager = field(default_factory=ExpManager)
    model: Model = field(default_factory=Model)


@cache
def all_keys() -> dict[str, Key]:
    """Every setting by its dotted path, in the order of this file."""
    return keys_of(Config)


@cache
def all_sections() -> frozenset[str]:
    """Every inner node by its dotted path: `model`, `model.optim`, …"""
    parents = (path.rpartition(".")[0] for path in all_keys() if "." in path)
    return frozenset(p[:end] for p in parents for end in _ends(p))


def _ends(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
