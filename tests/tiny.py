"""Build a GPT that is small enough for a test, and random text for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megafp8.data.loader import Microbatch
from megafp8.parallel.mesh import Mesh, single_rank
from megafp8.specs import (
    CheckpointSpec,
    DataSpec,
    Fp8Recipe,
    GPTSpec,
    LossScaleSpec,
    MoESpec,
    ObserveSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    ScheduleSpec,
    TokenizerSpec,
    TrainSpec,
)
from megafp8.train.build import build
from megafp8.train.report.fp8 import PrecisionShare, linear_flops, share_of_ranks
from megafp8.train.state import TrainState

SEQ, VOCAB = 16, 96


def gpt_spec(**changes: Any) -> GPTSpec:
    sizes = dict(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=SEQ,
        vocab_size=VOCAB,
        init_method_std=0.02,
        use_scaled_init_method=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
        layernorm_epsilon=1e-5,
    )
    return GPTSpec(**(sizes | changes))


def moe_spec(**changes: Any) -> MoESpec:
    """Four experts in the second of two layers, of which a token visits two."""
    sizes = dict(num_experts=4, top_k=2, ffn_hidden_size=32, layers=(False, True))
    return MoESpec(**(sizes | changes))


def of_heads(size: int) -> GPTSpec:
    """A model with rotary positions of so many features of a head."""
    return gpt_spec(kv_channels=size, position_embedding_type="rope")


def beside(name: str) -> str:
    """The tensor whose gradient measures the rounding of another one's.

    Softmax does not see what all keys have in common: where positions are not rotated, the gradient
    of the keys' bias is 0 but for rounding, and as small as that of the queries' bias allows.
    """
    return name.replace("key.bias", "query.bias").replace("key_norm.bias", "query_norm.bias")


def optim_spec(**changes: Any) -> OptimSpec:
    schedule = ScheduleSpec(
        name="CosineAnnealing", warmup_steps=0, constant_steps=0, min_lr=1e-3, max_steps=1000
    )
    values = dict(
        name="adamw",
        lr=3e-3,
        weight_decay=0.01,
        betas=(0.9, 0.98),
        eps=1e-8,
        clip_grad_norm=1.0,
        schedule=schedule,
    )
    return OptimSpec(**(values | changes))


def run_spec(
    *,
    compute: str = "fp32",
    fp8: Fp8Recipe | None = None,
    tp: int = 1,
    world: int = 1,
    model: GPTSpec | None = None,
    optim: OptimSpec | None = None,
    compile: str = "off",
    parallel: ParallelSpec | None = None,
    loss_scale: LossScaleSpec | None = None,
) -> RunSpec:
    return RunSpec(
        model=model or gpt_spec(),
        precision=PrecisionSpec(compute=compute, fp8=fp8, loss_scale=loss_scale),  # type: ignore[arg-type]
        parallel=parallel or ParallelSpec(devices_per_node=world, tp=tp),
        optim=optim or optim_spec(),
        data=DataSpec(
            prefix="builtin",
            cache_dir=None,
            splits=(1.0, 0.0, 0.0),
            seq_length=SEQ,
            tokenizer=TokenizerSpec(library="builtin", vocab_size=VOCAB),
            seed=1,
        ),
        train=TrainSpec(
            max_steps=1000,
            micro_batch_size=2,
            global_batch_size=4,
            log_every_n_steps=1,
            val_check_interval=1000,
            limit_val_batches=1,
            seed=1234,
            nonfinite_policy="stop",
            compile=compile,  # type: ignore[arg-type]
        ),
        checkpoint=CheckpointSpec(
            every_n_train_steps=None, train_time_interval_seconds=None, save_last=False, keep=1
        ),
        observe=ObserveSpec(
            exp_dir="runs",
            name=None,
            explicit_log_dir=None,
            resume_if_exists=False,
            create_tensorboard_logger=False,
            create_wandb_logger=False,
            wandb_project=None,
            wandb_name=None,
        ),
        vocab_divisible_by=1,
        resolved={},
    )


def build_run(mesh: Mesh | None = None, **choices: Any) -> TrainState:
    """Return the state of step 0; `choices` are the arguments of `run_spec`."""
    return build(run_spec(**choices), mesh or single_rank())


def microbatch(seed: int, batch: int = 2, ignored: float = 0.0) -> Microbatch:
    """Return random text with a pattern to learn: a token is often its predecessor plus one."""
    rng = np.random.default_rng(seed)
    jumps = rng.integers(0, VOCAB, (batch, SEQ + 1))
    jumps[:, 1:][rng.random((batch, SEQ)) < 0.8] = 1
    text = np.cumsum(jumps, axis=1) % VOCAB
    targets = np.where(rng.random((batch, SEQ)) < ignored, -100, text[:, 1:])
    return Microbatch(np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(targets))


def precision_share(state: TrainState, spec: GPTSpec) -> PrecisionShare:
    """Return the FP8 fraction of a model that is on one rank."""
    return share_of_ranks([linear_flops(state.backend.planned(state.model))], spec, num_replicas=1)
