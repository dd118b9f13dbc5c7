"""Define the keys below `model.optim`: the optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from omegaconf import MISSING

from megafp8.config.keys import (
    BELOW_ONE,
    Need,
    Valid,
    Values,
    above,
    at_least,
    between,
    both_needs,
    key,
    needs,
    needs_above,
    one_of,
    or_null,
)
from megafp8.config.values import (
    LATER_OPTIMIZERS,
    LATER_SCHEDULES,
    SCHEDULES,
    SIZES_WITHOUT_CONTEXT,
    STATES_OF_LEVEL,
    ranks_beside,
    storage_of,
)
from megafp8.specs.optim import MUON, OPTIMIZERS, STORAGE_NAMES

LEVEL = "model.optim.fp8_opt_level"
NEEDS_MUON = needs(
    "model.optim.name", *(name for name, named in OPTIMIZERS.items() if named.optimizers == MUON)
)

# Makers of the keys of a group, with what most of these keys have in common.
schedule_key = partial(key, group="schedule")
optimizer_key = partial(key, group="optimizer", spec="optim.*")
muon_key = partial(key, group="optimizer", needs=NEEDS_MUON)
fp8_lm_key = partial(key, group="fp8_lm")


SUMMED = Need(
    "trainer.devices",
    "several data- or context-parallel ranks",
    lambda v: ranks_beside(v, *SIZES_WITHOUT_CONTEXT) != 1,
    "Leave it out; one rank sums no gradients, and trainer.devices sets the number of ranks",
)
"""The need for ranks whose gradients are summed."""


def read_by(name: str) -> Need | None:
    """Return what a key of the schedule needs: a schedule that reads it. None if all read it."""
    readers = [schedule for schedule, keys in SCHEDULES.items() if name in keys]
    return needs("model.optim.sched.name", *readers) if len(readers) < len(SCHEDULES) else None


def _are_betas(value: list[float]) -> bool:
    return len(value) == 2 and all(0 <= beta < 1 for beta in value)


def _stores(
    *parts: str,
    named: str = "",
    holds: Callable[[str], bool] = lambda name: name != "fp32",
    hint: str = "",
) -> Need:
    """Return the need for one of `parts` of the states to be stored so that `holds` is true.

    Args:
        parts: Names of states, as `exp_avg`.
        named: What to set besides a level, in words; by default a format below FP32.
        holds: Whether a format meets the need.
        hint: Replaces the usual hint "Set …, or leave it out".
    """
    levels = [
        level
        for level, of in STATES_OF_LEVEL.items()
        if any(holds(of.get(p, "fp32")) for p in parts)
    ]
    own = tuple(f"model.optim.{part}_dtype" for part in parts)
    otherwise = named or f"{own[0]} below fp32"
    text = f"a level of {', '.join(levels[:-1])} or {levels[-1]} ({LEVEL}, or {otherwise})"

    def is_met(values: Values) -> bool:
        return any(holds(storage_of(values)[part]) for part in parts)

    return Need(LEVEL, text, is_met, hint, others=own)


SUMMED_IN_FP8 = both_needs(
    _stores(
        "main_grads",
        named="model.optim.main_grads_dtype=fp8",
        hint="Leave it out, or set model.optim.main_grads_dtype=fp8 or a level "
        f"({LEVEL}); gradients in FP32 go by model.optim.grad_sync_dtype",
    ),
    SUMMED,
)
"""The need for ranks that sum gradients in FP8."""

SHARDS_LOW_PRECISION = both_needs(
    needs("model.optim.name", "distributed_fused_adam"),
    both_needs(
        _stores(
            "main_grads",
            "main_params",
            "exp_avg",
            "exp_avg_sq",
            named="a dtype of states below fp32",
            hint=f"Leave it out, or set a level ({LEVEL}); for states in FP32, model.fsdp=True "
            "model.fsdp_sharding_strategy=grad is ZeRO-2",
        ),
        SUMMED,
    ),
)
"""The need for a sharded optimizer with states in low precision."""


@dataclass
class Sched:
    """Define the keys below `model.optim.sched`: the learning rate over the run."""

    name: str = schedule_key(
        "CosineAnnealing",
        "Schedule of the learning rate, as NeMo has it under this name: a linear warm-up, then the "
        "decay of the name. `WSD` is Megatron's (its `lr_decay_style`): warm-up, stable, decay.",
        nemo="CosineAnnealing",
        spec="optim.schedule.name",
        valid=one_of(
            *SCHEDULES,
            later=LATER_SCHEDULES,
            suggestion=f"Use {', '.join(list(SCHEDULES)[:-1])} or {list(SCHEDULES)[-1]}",
        ),
    )
    max_steps: int | None = schedule_key(
        None,
        "Steps of the whole schedule, as in NeMo. `null`: `trainer.max_steps`. With more of them "
        "the run ends before the schedule does; with fewer its last steps have the rate `min_lr`.",
        kind="length",
        valid=or_null(at_least(1)),
    )
    warmup_steps: int | None = schedule_key(
        None,
        "Steps of the linear warm-up. `null`: a tenth of the schedule's steps.",
        nemo=500,
        valid=or_null(at_least(0)),
        needs=read_by("warmup_steps"),
    )
    warmup_ratio: float | None = schedule_key(
        None,
        "Warm-up as a fraction of the schedule's steps, instead of `warmup_steps`.",
        valid=or_null(between(0, 1)),
        needs=read_by("warmup_ratio"),
    )
    constant_steps: int = schedule_key(
        0,
        "With CosineAnnealing: the number of last steps, which have the rate `min_lr`. Above 0, "
        "the warm-up starts at a rate of 0.",
        nemo=0,
        valid=at_least(0),
        needs=read_by("constant_steps"),
    )
    constant_ratio: float | None = schedule_key(
        None,
        "Constant steps as a fraction of the schedule's steps, instead of `constant_steps`.",
        valid=or_null(between(0, 1)),
        needs=read_by("constant_ratio"),
    )
    hold_steps: int | None = schedule_key(
        None,
        "With PolynomialHoldDecayAnnealing and NoamHoldAnnealing: steps at `model.optim.lr` after "
        "the warm-up.",
        valid=or_null(at_least(0)),
        needs=read_by("hold_steps"),
    )
    hold_ratio: float | None = schedule_key(
        None,
        "Held steps as a fraction of the schedule's steps, instead of `hold_steps`.",
        valid=or_null(between(0, 1)),
        needs=read_by("hold_ratio"),
    )
    power: float = schedule_key(
        1.0,
        "With the polynomial schedules: the exponent of the decay. 1 is linear.",
        spec="optim.schedule.power",
        valid=above(0),
        needs=read_by("power"),
    )
    decay_rate: float = schedule_key(
        0.5,
        "With NoamHoldAnnealing: the exponent of the decay.",
        spec="optim.schedule.decay_rate",
        valid=above(0, 16),
        needs=read_by("decay_rate"),
    )
    d_model: int | None = schedule_key(
        None,
        "With NoamAnnealing: the width by whose square root the rate is divided. `null`: "
        "`model.hidden_size`.",
        valid=or_null(at_least(1)),
        needs=read_by("d_model"),
    )
    wsd_decay_steps: int | None = schedule_key(
        None,
        "With WSD (warm-up, stable, decay): the last steps, in which the rate falls from "
        "`model.optim.lr` to `min_lr`; Megatron's `lr_wsd_decay_iters`. Before them the rate does "
        "not depend on the schedule's length, but for a warm-up that is a share of it, so that a "
        "run with another end continues there without a jump. `null`: a fifth of these steps.",
        kind="length",
        valid=or_null(at_least(0)),
        needs=read_by("wsd_decay_steps"),
    )
    wsd_decay_ratio: float | None = schedule_key(
        None,
        "WSD's decay as a fraction of the schedule's steps, instead of `wsd_decay_steps`.",
        kind="length",
        valid=or_null(between(0, 1)),
        needs=read_by("wsd_decay_ratio"),
    )
    wsd_decay_style: str = schedule_key(
        "exponential",
        "With WSD: how the rate falls, as with Megatron's `lr_wsd_decay_style`. With p from 0 to 1 "
        "over the decay, what is left of the difference from `min_lr` is `2 * 0.5^p - 1` "
        "(`exponential`), `1 - p` (`linear`), half a cosine, or `1 - sqrt(p)` (`minus_sqrt`).",
        kind="length",
        spec="optim.schedule.wsd_decay_style",
        valid=one_of("exponential", "linear", "cosine", "minus_sqrt"),
        needs=read_by("wsd_decay_style"),
    )
    min_lr: float = schedule_key(
        MISSING,
        "Lowest learning rate of the decay.",
        nemo=2e-5,
        spec="optim.schedule.min_lr",
        valid=at_least(0),
    )


@dataclass
class Optim:
    """Define the keys below `model.optim`: the optimizer."""

    name: str = optimizer_key(
        "adamw",
        "The optimizer. `adamw` decouples weight decay; `adam` adds it to the gradient (L2). "
        "`fused_adam` is adamw with Apex's or Transformer Engine's kernel, if one is installed. "
        "`distributed_fused_adam` also shards master weights and moments over replicas (ZeRO-1). A "
        "run may continue with another one of the three kinds of adamw. `muon` updates the weights "
        "of the layers' linears with Muon (torch's rule; query, key and value apart, as with "
        "Megatron's `muon_split_qkv`) and the rest with adamw; `dist_muon` also shards weights and "
        "states over replicas by whole tensors.",
        nemo="fused_adam",
        valid=one_of(
            *OPTIMIZERS,
            later=LATER_OPTIMIZERS,
            suggestion="Use adamw, or fused_adam, which is the same (decoupled weight decay)",
        ),
    )
    lr: float = optimizer_key(
        MISSING,
        "Highest learning rate.",
        nemo=2e-4,
        valid=above(0),
    )
    weight_decay: float = optimizer_key(
        0.01,
        "Weight decay of matrices; norms and biases have none, unless "
        "`model.do_layer_norm_weight_decay` is set.",
        nemo=0.01,
        valid=at_least(0),
    )
    betas: list[float] = optimizer_key(
        [0.9, 0.98],
        "Decay rates of Adam's first and second moments.",
        nemo=[0.9, 0.98],
        valid=Valid("two numbers, each from 0 to below 1", _are_betas),
    )
    eps: float = optimizer_key(
        1e-8,
        "Number that Adam adds to the root of the second moment.",
        valid=above(0),
    )
    muon_momentum: float = muon_key(
        0.95,
        "With Muon: decay rate of the momentum of matrices.",
        spec="optim.muon.momentum",
        valid=BELOW_ONE,
    )
    muon_use_nesterov: bool = muon_key(
        True,
        "With Muon: orthogonalize the gradient with its momentum ahead (Nesterov). False: the "
        "momentum alone, which is Megatron's default; Megatron-core 0.20 calls the key "
        "`muon_nesterov`.",
        spec="optim.muon.nesterov",
    )
    muon_num_ns_steps: int = muon_key(
        5,
        "With Muon: steps of the Newton-Schulz iteration that orthogonalizes.",
        spec="optim.muon.num_steps",
        valid=between(1, 99),
    )
    muon_scale_mode: str = muon_key(
        "spectral",
        "With Muon: the factor of a matrix's update, by its shape, under Megatron's names. "
        "`spectral`: the root of the larger size. `shape_scaling`: the root of output / input, at "
        "least 1. `unit_rms_norm`: the root of output / input.",
        spec="optim.muon.scale_mode",
        valid=one_of("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = muon_key(
        0.2,
        "With Muon: another factor of the update. 0.2 with `spectral` gives updates the size of "
        "AdamW's, so that `model.optim.lr` fits both (torch's `match_rms_adamw`); Megatron's "
        "default is 1.",
        spec="optim.muon.extra_scale_factor",
        valid=above(0),
    )
    muon_tp_mode: str = optimizer_key(
        "duplicated",
        "With Muon on tensor-parallel ranks. `duplicated`: every rank gathers whole matrices and "
        "orthogonalizes them, so that the result is that of one rank. `blockwise`: each its own "
        "part alone, scaled by its own shape, without messages. That is another optimizer with "
        "each number of ranks, and was Megatron's default before Megatron-core 0.20.",
        spec="optim.muon.tp_mode",
        valid=one_of(
            "duplicated",
            "blockwise",
            later=("distributed",),
            suggestion="Use duplicated, which has the same result",
        ),
        needs=both_needs(NEEDS_MUON, needs_above("model.tensor_model_parallel_size", 1)),
    )
    grad_sync_dtype: str = optimizer_key(
        "fp32",
        "Dtype in which gradients are summed over replicas. `bf16` sends half the bytes.",
        spec="parallel.grad_reduce_dtype",
        valid=one_of("fp32", "bf16"),
        needs=both_needs(
            needs("model.fsdp", False, hint="Leave it out; FSDP has model.fsdp_grad_reduce_dtype"),
            SUMMED,
        ),
    )
    data_parallel_sharding_strategy: str = fp8_lm_key(
        "optim",
        "What `distributed_fused_adam` shards over replicas where states are in low precision, "
        "under Megatron's names. `optim`: master weights and moments (ZeRO-1). `optim_grads`: "
        "summed gradients too; a rank frees the others as soon as they were sent, in the backward "
        "pass of the last microbatch of a step (ZeRO-2).",
        valid=one_of(
            "optim",
            "optim_grads",
            later=("no_shard", "optim_grads_params"),
            suggestion="Use optim or optim_grads; model.optim.name=fused_adam shards nothing, and "
            "model.fsdp=True shards FP32 parameters too",
        ),
        needs=SHARDS_LOW_PRECISION,
    )
    shard_by: str = fp8_lm_key(
        "tensors",
        "What a rank owns where `distributed_fused_adam` shards states in low precision. "
        "`tensors`: whole tensors with their scales, the largest first to the rank with the "
        "fewest elements. `elements`: an equal number of elements, whose scales ranks agree on by "
        "amaxes. `auto`: `elements` where the fullest rank would own over 10 % more than an equal "
        "share. The stored numbers are the same, but for stochastic rounding and, once clipping "
        "acts, its factor (1e-7).",
        spec="optim.shard_by",
        valid=one_of("tensors", "elements", "auto"),
        needs=SHARDS_LOW_PRECISION,
    )
    fp8_opt_level: str = fp8_lm_key(
        "O0",
        "FP8-LM's level: what is stored in low precision, with one scale a tensor. `O1`: the "
        "linears' gradients in FP8, their weights in FP16, without another master. `O2`: the "
        "moments of all parameters too, in FP8 and FP16. `O3`: also the linears' weights in FP8, "
        "beside FP16 masters. See [fp8_lm.md](fp8_lm.md).",
        valid=one_of(*STATES_OF_LEVEL),
        needs=needs("model.fp8", True),
    )
    main_grads_dtype: str | None = fp8_lm_key(
        None,
        "In which format the gradients of the linears' weights are stored; null as "
        "`fp8_opt_level` says.",
        valid=or_null(one_of("fp32", "fp8", later=("bf16",), suggestion="Use fp32 or fp8")),
    )
    main_params_dtype: str | None = fp8_lm_key(
        None,
        "In which format the linears' master weights are stored; null as `fp8_opt_level` says. "
        "Below fp32 a weight is its own master, unless `model.fp8_params` keeps it in FP8.",
        valid=or_null(one_of("fp32", "fp16", "bf16", "fp8")),
    )
    exp_avg_dtype: str | None = fp8_lm_key(
        None,
        "In which format the first moments are stored (`fp8` is E4M3); null as `fp8_opt_level` "
        "says.",
        valid=or_null(one_of(*STORAGE_NAMES)),
    )
    exp_avg_sq_dtype: str | None = fp8_lm_key(
        None,
        "In which format the second moments are stored; null as `fp8_opt_level` says. `fp8` is "
        "E4M3, with which small models ended 5 % worse (docs/evidence/orderings.md).",
        valid=or_null(one_of(*STORAGE_NAMES)),
    )
    low_precision_moments_of: str = fp8_lm_key(
        "all",
        "Whose moments are stored so: those of all parameters, or of the weights of `linears` "
        "alone.",
        valid=one_of("all", "linears"),
        needs=_stores("exp_avg", "exp_avg_sq"),
    )
    main_grads_sum_dtype: str = fp8_lm_key(
        "fp8",
        "In which format the gradients of a step's microbatches are added up where they are stored "
        "in FP8: `fp8` rounds after each microbatch, `fp32` once, and needs 4 bytes a weight "
        "during the step.",
        valid=one_of("fp8", "fp32"),
        needs=_stores("main_grads", named="model.optim.main_grads_dtype=fp8"),
    )
    fp8_grad_reduction: str = fp8_lm_key(
        "fp32",
        "How gradients in FP8 are summed over replicas; ranks send bytes in any case. `fp32`: each "
        "rank adds up its part in FP32, and the sum is quantized once. The others add in FP8, "
        "rounding after each rank, as FP8-LM does, from a scale that the ranks share times a "
        "factor: `auto` adapts it for each tensor to how many values saturate, `pre` is 1/ranks, "
        "`post` is 1.",
        spec="optim.storage.reduction",
        valid=one_of("fp32", "auto", "pre", "post"),
        needs=SUMMED_IN_FP8,
    )
    stochastic_rounding: bool = fp8_lm_key(
        False,
        "Round master weights and moments below FP32 stochastically.",
        spec="optim.storage.stochastic_rounding",
        needs=_stores("main_params", "exp_avg", "exp_avg_sq"),
    )
    sched: Sched = field(default_factory=Sched)
