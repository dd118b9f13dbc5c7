"""Define the keys below `model` about batches, parallel ranks and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import MISSING

from megafp8.config.keys import (
    MAX_BATCH,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_STAGES,
    Valid,
    at_least,
    both_needs,
    key,
    needs,
    needs_above,
    one_of,
    or_null,
)
from megafp8.config.schema.optim import SUMMED
from megafp8.config.values import PRECISIONS, is_rampup, parse_layout, spell_precision
from megafp8.specs.parallel import SCHEDULES as PIPELINE_SCHEDULES

# Makers of the keys of a group, with what most of these keys have in common.
batches_key = partial(key, group="batches")
ranks_key = partial(key, group="ranks")


FSDP = needs("model.fsdp", True)
PIPELINE = needs_above("model.pipeline_model_parallel_size", 1)
RECOMPUTES = needs("model.activations_checkpoint_granularity", "selective", "full")


@dataclass
class Parallel:
    """Define the keys about batches, parallel ranks and recomputation."""

    micro_batch_size: int = batches_key(
        MISSING,
        "Number of samples in a forward pass of one replica.",
        nemo=4,
        kind="layout",
        spec="train.micro_batch_size",
        valid=at_least(1, MAX_BATCH),
    )
    global_batch_size: int = batches_key(
        MISSING,
        "Number of samples in an optimizer step, over all ranks.",
        nemo=8,
        spec="train.global_batch_size",
        valid=at_least(1, MAX_BATCH),
    )
    rampup_batch_size: Any = batches_key(
        None,
        "`[start, increment, samples]`: the first step has `start` samples, and the batch grows in "
        "steps of `increment` to `global_batch_size` over the first `samples` samples. `null`: no "
        "ramp-up.",
        nemo=None,
        valid=or_null(Valid("three whole numbers above 0, as [8,8,1000]", is_rampup)),
    )
    tensor_model_parallel_size: int = ranks_key(
        1,
        "Number of ranks over which each matrix is sharded.",
        nemo=1,
        spec="parallel.tp",
        valid=at_least(1, MAX_RANKS),
    )
    context_parallel_size: int = ranks_key(
        1,
        "Number of ranks over which each sequence is sharded. Each rank has two chunks of it, and "
        "keys and values are sent from rank to rank (ring attention).",
        spec="parallel.cp",
        valid=at_least(1, MAX_RANKS),
    )
    sequence_parallel: bool = ranks_key(
        False,
        "Shard the sequence over tensor-parallel ranks between their linears, in norms, dropout "
        "and residual stream. Tensors that linears read in FP8 are sent in FP8.",
        nemo=False,
        spec="parallel.sequence_parallel",
        needs=needs_above("model.tensor_model_parallel_size", 1),
    )
    fsdp: bool = key(
        False,
        "Shard parameters, gradients and optimizer states over replicas (FSDP2); weights are "
        "gathered for one transformer block at a time.",
        nemo=False,
        group="fsdp",
    )
    fsdp_sharding_strategy: str = key(
        "full",
        "`full`: a block's weights are gathered for its forward and again for its backward pass "
        "(ZeRO-3). `grad`: they are gathered once for both passes (ZeRO-2). `hybrid`: as `full` "
        "within each node, and every node has all weights.",
        nemo="full",
        group="fsdp",
        spec="parallel.fsdp.strategy",
        valid=one_of("full", "grad", "hybrid"),
        needs=FSDP,
    )
    fsdp_grad_reduce_dtype: Any = key(
        32,
        "Dtype in which FSDP sums gradients over replicas.",
        nemo=32,
        group="fsdp",
        kind="optim",
        valid=Valid(
            "32, bf16 or 16",
            lambda v: isinstance(v, (int, str)) and v in PRECISIONS,
            values=(32, "bf16", 16),
        ),
        needs=FSDP,
        spelling=spell_precision,
    )
    pipeline_model_parallel_size: int = ranks_key(
        1,
        "Number of ranks over which the layers are divided (pipeline parallelism).",
        nemo=1,
        spec="parallel.pp",
        valid=at_least(1, MAX_STAGES),
    )
    virtual_pipeline_model_parallel_size: int | None = ranks_key(
        None,
        "Number of pipeline stages on each rank. `null`: one.",
        nemo=None,
        valid=or_null(at_least(1, MAX_LAYERS)),
        needs=PIPELINE,
    )
    pipeline_schedule: str | None = ranks_key(
        None,
        "Order of the forward and backward passes. `null`: `1F1B`, or `Interleaved1F1B` with "
        "several stages on a rank. Zero-bubble schedules compute weight gradients while a rank "
        "would wait.",
        valid=or_null(one_of(*PIPELINE_SCHEDULES)),
        needs=PIPELINE,
    )
    pipeline_model_parallel_layout: str | None = ranks_key(
        None,
        "Number of layers of each stage in the model's order, as `3,4,4,1`. `null`: equal numbers.",
        valid=Valid(
            "numbers of layers separated by commas, or null",
            lambda v: v is None or parse_layout(v) is not None,
        ),
        needs=PIPELINE,
    )
    grad_allreduce_chunk_size_mb: int = ranks_key(
        125,
        "MiB of FP32 gradients that are summed over replicas in one message, during the backward "
        "pass.",
        nemo=125,
        valid=at_least(1),
        needs=both_needs(needs("model.fsdp", False), SUMMED),
    )
    activations_checkpoint_granularity: str | None = key(
        None,
        "What the backward pass recomputes, so that less memory is needed: attention's core "
        "(`selective`), whole layers (`full`), or nothing (null).",
        nemo=None,
        group="memory",
        valid=or_null(one_of("selective", "full")),
    )
    activations_checkpoint_method: str | None = key(
        None,
        "Which layers are recomputed: all, in groups (`uniform`), or the first ones (`block`).",
        nemo=None,
        group="memory",
        valid=or_null(one_of("uniform", "block")),
        needs=RECOMPUTES,
    )
    activations_checkpoint_num_layers: int | None = key(
        None,
        "With `uniform`: the number of layers in a group; `null` is 1. With `block`: the number of "
        "layers that are recomputed.",
        nemo=None,
        group="memory",
        valid=or_null(at_least(0)),
        needs=RECOMPUTES,
    )
