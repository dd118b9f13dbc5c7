"""Assemble a run from its spec: the only place that knows every part."""

from __future__ import annotations

import torch

from megafp8.models.gpt import GPT
from megafp8.models.random import RandomStreams
from megafp8.optim.adamw import AdamW
from megafp8.optim.fsdp import FsdpMasters
from megafp8.optim.loss_scale import LossScale
from megafp8.optim.masters import Masters
from megafp8.optim.zero import ShardedMasters
from megafp8.parallel.data import GradReducer, NotingSink, buckets_of
from megafp8.parallel.deferred import DeferringSink
from megafp8.parallel.fsdp import shard_model
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import linears_of
from megafp8.parallel.pipeline import PipelinedGPT, PipelineRunner
from megafp8.parallel.te_parts import stores_of as te_stores
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import GradSink, MainGradSink
from megafp8.precision.scaling import ScalingState
from megafp8.precision.weights import StoredFp8
from megafp8.specs import RunSpec
from megafp8.specs.parallel import ZERO_BUBBLE_SCHEDULES
from megafp8.train import backends
from megafp8.train.compile import compile_layers
from megafp8.train.state import TrainState

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(spec: RunSpec, mesh: Mesh) -> TrainState:
    """The state of step 0. `spec.model.vocab_size` must be known."""
    assert spec.model.vocab_size > 0, "the tokenizer decides the vocabulary first"
    streams = RandomStreams(spec.train.seed, mesh.tp.rank, mesh.cp.rank)
    sink, counter, parallel = MainGradSink(), GemmCounter(), spec.parallel
    outer: GradSink = sink
    is_reduced_here = mesh.data.size > 1 and parallel.fsdp is None
    noting = NotingSink(outer) if is_reduced_here else None
    outer = noting or outer
    is_split = mesh.pp.size > 1 and parallel.pipeline.schedule in ZERO_BUBBLE_SCHEDULES
    deferring = DeferringSink(outer) if is_split else None
    engine = backends.make(
        spec,
        mesh,
        streams,
        deferring or outer,
        counter,
        COMPUTE_DTYPES[spec.precision.compute],
        build_scaling(spec, mesh),
    )
    parts = engine.parts
    model = GPT(parts) if mesh.pp.size == 1 else PipelinedGPT(parts, parallel, mesh.pp)
    model.to(mesh.device)
    if isinstance(engine.scaling, ScalingState):
        engine.scaling.to(mesh.device)
    in_fp8 = {
        linear.weight: linear.weight_form
        for linear in linears_of(model)
        if isinstance(linear.weight_form, StoredFp8)
    }
    compiled = None
    if spec.train.compile == "block":
        compiled = compile_layers(model, mesh.device)
    masters: Masters
    if parallel.fsdp is not None:
        assert isinstance(model, GPT), "pipelines are refused"
        masters = FsdpMasters(shard_model(model, mesh, parallel, spec.precision.compute))
    elif spec.optim.shards_states:
        tied = model.tied_copy() if isinstance(model, PipelinedGPT) else None
        masters = ShardedMasters(
            model.parameters(),
            in_fp8,
            mesh.data,
            bucket_bytes=parallel.grad_bucket_bytes,
            alone=[] if tied is None else [tied],
        )
    else:
        stores = {weight: form.store for weight, form in in_fp8.items()}
        masters = Masters(model.parameters(), stores | te_stores(model))
    masters.write_back()  # fills weights that are kept in FP8; to others it changes nothing
    if parallel.fsdp is None:  # else autograd and FSDP do it
        sink.attach(zip(masters.params, masters.param_grads, strict=True))
    if noting is not None:
        noting.reducer = GradReducer(
            masters.reducer_buckets()
            if isinstance(masters, ShardedMasters)
            else buckets_of(masters.flat_grad, masters.params, parallel.grad_bucket_bytes),
            mesh.data,
            dtype=COMPUTE_DTYPES[parallel.grad_reduce_dtype],
        )
    optimizer = AdamW(masters, spec.optim)
    state = TrainState(model, masters, optimizer, engine.scaling, streams, sink, counter, mesh)
    state.compiled = compiled
    if spec.precision.loss_scale is not None:
        state.loss_scale = LossScale(spec.precision.loss_scale)
    state.sequence_parallel = parallel.sequence_parallel and mesh.tp.size > 1
    state.reducer = None if noting is None else noting.reducer
    if isinstance(model, PipelinedGPT):
        state.pipeline = PipelineRunner(
            model,
            model.boundary(spec.train.micro_batch_size, spec.data.seq_length // mesh.cp.size),
            scaling=engine.scaling,
            streams=streams,
            deferring=deferring,
            device=mesh.device,
        )
    return state


def build_scaling(spec: RunSpec, mesh: Mesh) -> ScalingState | None:
    """Our own engine's, its amaxes reduced over every rank that holds part of the same tensors."""
    recipe = spec.precision.fp8
    if recipe is None or spec.precision.backend != "native":
        return None
    scaling = ScalingState(recipe, mesh.amax.start_all_reduce_max if mesh.amax.size > 1 else None)
    if mesh.device.type == "meta":
        scaling.to(mesh.device)  # no numbers to start with: rows come without memory
    return scaling
