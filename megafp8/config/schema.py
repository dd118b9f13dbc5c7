"""The tree of settings under NeMo's names: the one place where a key is named and explained.

What is `???` (`MISSING`) shapes the job: a YAML must give it (`conf/pretrain_gpt.yaml` does).
`nemo=` is the default in NeMo's `megatron_gpt_config.yaml`; keys of our own leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import MISSING

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
        valid=one_of(1, later=range(2, 2**53), suggestion="Run on one node, trainer.num_nodes=1"),
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
        "Global batches of one validation during training; the last one of a run is whole.",
        nemo=50,
        kind="logging",
        valid=at_least(1),
    )
    gradient_clip_val: float | None = key(
        1.0,
        "Largest global norm of the gradients; null or 0 does not clip.",
        nemo=1.0,
        kind="optim",
        valid=or_null(at_least(0)),
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
        "`builtin`: a byte-level BPE trained on the corpus itself.",
        nemo="megatron",
        kind="data",
        valid=one_of(
            "builtin",
            later=("megatron", "huggingface", "sentencepiece", "tiktoken"),
            suggestion="Use builtin",
        ),
    )
    vocab_size: int = key(
        4096,
        "Tokens of the tokenizer, before padding; 256 of them are the bytes, one ends a document.",
        kind="data",
        valid=at_least(257),
    )


@dataclass
class Data:
    """Where the text comes from and how it becomes samples."""

    data_prefix: str = key(
        MISSING,
        "`builtin` for the corpus that comes along, or an indexed dataset's path without "
        "`.bin`/`.idx`.",
        nemo=MISSING,
        kind="data",
        valid=Valid("builtin, or a path", bool),
    )
    index_mapping_dir: str | None = key(
        None,
        "Where prepared indices are kept; null: the user's cache.",
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
    layernorm_epsilon: float = key(
        1e-5, "Added to the variance in LayerNorm.", nemo=1e-5, kind="model", valid=above(0)
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
        "(`full`: a step then takes up to twice as long). Into health.jsonl and the trackers.",
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
        "Who runs FP8: `native` is our own, on any device; `auto` chooses and reports.",
        kind="layout",
        valid=one_of("auto", "native", later=("te", "torchao"), suggestion="Use auto or native"),
    )
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)


@dataclass
class Config:
    """The whole tree."""

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
    parents = (path.rpartition(".")[0] for path in all_keys())
    return frozenset(p[:end] for p in parents for end in _ends(p))


def _ends(path: str) -> list[int]:
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
