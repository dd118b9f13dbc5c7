"""Assemble a run from its spec: the only place that knows every part."""

from __future__ import annotations

import torch

from megafp8.models.gpt import GPT
from megafp8.models.random import RandomStreams
from megafp8.optim.adamw import AdamW
from megafp8.optim.loss_scale import LossScale
from megafp8.optim.masters import Masters
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import NativeParts, linears_of
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import MainGradSink
from megafp8.precision.scaling import NoScaling, ScalingState
from megafp8.specs import RunSpec
from megafp8.train.state import TrainState

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(spec: RunSpec, mesh: Mesh) -> TrainState:
    """The state of step 0. `spec.model.vocab_size` must be known."""
    assert spec.model.vocab_size > 0, "the tokenizer decides the vocabulary first"
    streams = RandomStreams(spec.train.seed, mesh.tp.rank)
    scaling = build_scaling(spec, mesh)
    sink, counter = MainGradSink(), GemmCounter()
    model = GPT(
        NativeParts(
            spec.model,
            COMPUTE_DTYPES[spec.precision.compute],
            spec.train.seed,
            streams,
            scaling=scaling,
            tp=mesh.tp,
            sink=sink,
            counter=counter,
            half_weights=spec.precision.half_weights,
        )
    ).to(mesh.device)
    if scaling is not None:
        scaling.to(mesh.device)
    stores = {
        linear.weight: linear.store_weight
        for linear in linears_of(model)
        if linear.weight_compute_dtype is not None
    }
    masters = Masters(model.parameters(), stores)
    masters.write_back()  # fills weights that are kept in FP8; to others it changes nothing
    sink.attach(zip(masters.params, masters.grads, strict=True))
    optimizer = AdamW(masters, spec.optim)
    loss_scale = spec.precision.loss_scale
    return TrainState(
        model,
        masters,
        optimizer,
        scaling or NoScaling(),
        streams,
        sink,
        counter,
        mesh,
        loss_scale=None if loss_scale is None else LossScale(loss_scale),
    )


def build_scaling(spec: RunSpec, mesh: Mesh) -> ScalingState | None:
    """The scaling state, its amaxes reduced over every rank that holds part of the same tensors."""
    recipe = spec.precision.fp8
    if recipe is None:
        return None
    reduce_max = mesh.world.all_reduce_max if mesh.world.size > 1 else None
    return ScalingState(recipe, reduce_max)
