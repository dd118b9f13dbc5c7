"""Keys of `model` about batches and how they and the model lie on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from megafp8.config.keys import Valid, at_least, key, needs, needs_above, one_of, or_null
from megafp8.config.values import PRECISIONS, is_rampup, parse_layout, spell_precision
from megafp8.specs.parallel import SCHEDULES as PIPELINE_SCHEDULES

FSDP = needs("model.fsdp", True)
PIPELINE = needs_above("model.pipeline_model_parallel_size", 1)
RECOMPUTES = needs("model.activations_checkpoint_granularity", "selective", "full")


@dataclass
class Parallel:
    """Batches, parallel ranks, recomputation."""

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
    context_parallel_size: int = key(
        1,
        "Ranks that share each sequence: every rank has two parts of it, and keys and values go "
        "round the ranks (ring attention).",
        kind="layout",
        valid=at_least(1),
    )
    sequence_parallel: bool = key(
        False,
        "Tensor-parallel ranks share out the sequence between their linears (norms, dropout, "
        "residual stream); what linears read in FP8 crosses in FP8.",
        nemo=False,
        kind="layout",
        needs=needs_above("model.tensor_model_parallel_size", 1),
    )
    fsdp: bool = key(
        False,
        "Replicas share out parameters, gradients and optimizer states (FSDP2), a transformer "
        "block at a time.",
        nemo=False,
        kind="layout",
    )
    fsdp_sharding_strategy: str = key(
        "full",
        "`full`: a block's weights are gathered for its forward and again for its backward pass "
        "(ZeRO-3). `grad`: they stay in between (ZeRO-2). `hybrid`: as `full` within a node; nodes "
        "are replicas.",
        nemo="full",
        kind="layout",
        valid=one_of("full", "grad", "hybrid"),
        needs=FSDP,
    )
    fsdp_grad_reduce_dtype: Any = key(
        32,
        "In which FSDP sums gradients over replicas: 32, bf16 or 16.",
        nemo=32,
        kind="optim",
        valid=Valid("32, bf16 or 16", lambda v: isinstance(v, (int, str)) and v in PRECISIONS),
        needs=FSDP,
        spelling=spell_precision,
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
        needs=PIPELINE,
    )
    pipeline_schedule: str | None = key(
        None,
        "Order of the pipeline's work. Null: `1F1B`, with several stages on a rank "
        "`Interleaved1F1B`. The zero-bubble ones compute weight gradients where a rank would wait.",
        kind="layout",
        valid=or_null(one_of(*PIPELINE_SCHEDULES)),
        needs=PIPELINE,
    )
    pipeline_model_parallel_layout: str | None = key(
        None,
        "Layers of each stage in the model's order, as `3,4,4,1`; null: equal numbers.",
        kind="layout",
        valid=Valid(
            "numbers of layers with commas between, or null",
            lambda v: v is None or parse_layout(v) is not None,
        ),
        needs=PIPELINE,
    )
    grad_allreduce_chunk_size_mb: int = key(
        125,
        "MiB of FP32 gradients that are summed over replicas at once, while backward still runs.",
        nemo=125,
        kind="layout",
        valid=at_least(1),
        needs=needs("model.fsdp", False),
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
        needs=RECOMPUTES,
    )
    activations_checkpoint_num_layers: int | None = key(
        None,
        "With uniform, the layers of a group (null: 1); with block, how many are computed again.",
        nemo=None,
        kind="layout",
        valid=or_null(at_least(1)),
        needs=RECOMPUTES,
    )
