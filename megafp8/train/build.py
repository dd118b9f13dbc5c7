"""Assemble a run from its spec. Only this module knows every part of a run."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8_numerics.dtypes import DTYPES
from fp8_numerics.gemm import GemmCounter
from megafp8.backends import choose
from megafp8.backends.protocol import Backend
from megafp8.fp8.grad_sink import DeferringSink, GradSink, MainGradSink
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.models.gpt import GPT
from megafp8.models.init import give_values, values_later
from megafp8.models.random import RandomStreams
from megafp8.optim.fp8_weights import WholeFp8Weights
from megafp8.optim.fsdp_masters import FsdpMasters
from megafp8.optim.loss_scale import LossScale
from megafp8.optim.masters import Masters
from megafp8.optim.partitions import Partition
from megafp8.optim.protocol import Optimizers
from megafp8.parallel.agreement import agree_on_parameters, agree_on_rows
from megafp8.parallel.collectives import Axis
from megafp8.parallel.fsdp import shard_model
from megafp8.parallel.grad_reduce import GradReducer, NotingSink
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import PipelinedGPT
from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.parallel import ZERO_BUBBLE_SCHEDULES
from megafp8.specs.rank_shape import way_of
from megafp8.train.compile import compile_layers
from megafp8.train.graphs import MicrobatchGraphs
from megafp8.train.state import TrainState

if TYPE_CHECKING:
    from megafp8.parallel.pipeline_runner import PipelineRunner


def build(spec: RunSpec, mesh: Mesh) -> TrainState:
    """Return the state of step 0. `spec.model.vocab_size` must be known."""
    assert spec.model.vocab_size > 0, "the tokenizer decides the vocabulary first"
    if spec.model.has_experts:
        mesh = mesh.with_experts()
    streams = RandomStreams(spec.train.seed, mesh.tp.rank, mesh.cp.rank)
    counter = GemmCounter()
    sinks = make_sinks(spec, mesh)
    backend = choose.make_backend(spec, mesh, streams, sinks.outer, counter)
    model = make_model(spec, mesh, backend)
    agree_on_parameters(mesh, model.parameters())
    agree_on_rows(mesh, backend.scaling)
    graphs = make_graphs(spec, mesh, model, backend.scaling, sinks, counter)
    compiled = None
    if spec.train.compile == "block":
        compiled = compile_layers(
            model,
            mesh.device,
            is_sharded=spec.parallel.fsdp is not None,
            has_documents=spec.data.reset_attention_mask,
        )
    masters = make_masters(spec, mesh, model, backend)
    connect_gradients(spec, sinks, masters)
    backend.connect(model, sinks.main)
    scale = spec.precision.loss_scale
    return TrainState(
        model=model,
        masters=masters,
        optimizer=Optimizers(masters, spec.optim, spec.train.seed, mesh.tp),
        backend=backend,
        scaling=backend.scaling,
        streams=streams,
        sink=sinks.main,
        counter=counter,
        mesh=mesh,
        reducer=sinks.reducer,
        sequence_parallel=spec.parallel.sequence_parallel and mesh.tp.size > 1,
        pipeline=make_pipeline(spec, mesh, model, backend.scaling, streams, sinks.deferring),
        loss_scale=None if scale is None else LossScale(scale),
        compiled=compiled,
        graphs=graphs,
        phases=spec.precision.schedule,
    )


def start_only(spec: RunSpec, mesh: Mesh) -> Backend:
    """Make what `build` makes before its optimizer, as a dry run counts it; return the backend."""
    if spec.model.has_experts:
        mesh = mesh.with_experts()
    streams = RandomStreams(spec.train.seed, mesh.tp.rank, mesh.cp.rank)
    backend = choose.make_backend(spec, mesh, streams, make_sinks(spec, mesh).outer, GemmCounter())
    make_masters(spec, mesh, make_model(spec, mesh, backend), backend)
    return backend


def settle_backend(spec: RunSpec, mesh: Mesh) -> RunSpec:
    """Return the spec with the backend that `auto` means here; all ranks call this together.

    Raises:
        ConfigError: The backend cannot run here.
    """
    spec = choose.settle(spec, mesh)
    choose.check_backend(spec, mesh.device)
    return spec


def check_on_cpu(spec: RunSpec) -> None:
    """Raise `ConfigError` if a dry run cannot build the backend's layers on a CPU."""
    choose.check_backend(spec, torch.device("cpu"))


def make_graphs(
    spec: RunSpec,
    mesh: Mesh,
    model: GPT | PipelinedGPT,
    scaling: ScalingState | NoScaling,
    sinks: Sinks,
    counter: GemmCounter,
) -> MicrobatchGraphs | None:
    """Return what captures microbatches, or None. It is made before anything stores FP8 weights.

    Gradients are then reduced after the last replay, and not while it runs.
    """
    if not spec.train.cuda_graph:
        return None
    if isinstance(scaling, ScalingState):
        scaling.keeps_addresses = True
    if sinks.reducer is not None:
        sinks.reducer.at_the_end = True
    return MicrobatchGraphs(model, scaling, sinks.main, counter, mesh.device)


@dataclass(frozen=True)
class Sinks:
    """Hold the sinks that a weight's gradient passes, from `outer` to `main`.

    `outer` hands the gradient to the sink within it, and so on; `main` accumulates it.
    """

    main: MainGradSink
    outer: GradSink
    reducer: GradReducer | None  # for replicas, except with FSDP, which reduces by itself
    deferring: DeferringSink | None  # for schedules that compute weight gradients later


def make_sinks(spec: RunSpec, mesh: Mesh) -> Sinks:
    """Return the objects that receive weight gradients (`GradSink`), as `spec` needs them.

    `connect_gradients` gives them their buffers later.
    """
    main = MainGradSink()
    outer: GradSink = main
    reducer: GradReducer | None = None
    deferring: DeferringSink | None = None
    sums = mesh.data.size > 1 or any(group.data.size > 1 for group in mesh.groups.values())
    if sums and spec.parallel.fsdp is None:
        reducer = GradReducer(dtype=DTYPES[spec.parallel.grad_reduce_dtype])
        outer = NotingSink(outer, reducer)
    if mesh.pp.size > 1 and spec.parallel.pipeline.schedule in ZERO_BUBBLE_SCHEDULES:
        outer = deferring = DeferringSink(outer)
    return Sinks(main, outer, reducer, deferring)


def make_model(spec: RunSpec, mesh: Mesh, backend: Backend) -> GPT | PipelinedGPT:
    """Return the GPT, or this rank's stage of it, on its device; move the scaling state there.

    With FSDP its parameters may have no values yet: each layer gets them when it is sharded.
    """
    parts, at_once = backend.parts, BACKENDS[spec.precision.backend].draws_at_once
    is_later = spec.parallel.fsdp is not None or not (at_once or mesh.device.type == "meta")
    with values_later() if is_later else nullcontext():
        model = GPT(parts) if mesh.pp.size == 1 else PipelinedGPT(parts, spec.parallel, mesh.pp)
    if not is_later:
        model.to(mesh.device)
    elif spec.parallel.fsdp is None:
        give_values(model.parameters(), mesh.device)
    if isinstance(scaling := backend.scaling, ScalingState):
        scaling.to(mesh.device)
    return model


def make_masters(spec: RunSpec, mesh: Mesh, model: GPT | PipelinedGPT, backend: Backend) -> Masters:
    """Return the optimizer's master weights, whole or this rank's part of them.

    They are in FP32, or in the formats of `spec.optim.storage`.
    """
    parallel, storage = spec.parallel, spec.optim.storage
    masters: Masters
    if parallel.fsdp is not None:
        sharded = shard_model(model, mesh, parallel, spec.precision.compute)
        masters = FsdpMasters(sharded, storage, backend.weights(model))
    else:
        shards = spec.optim.shards_states
        masters = Masters(
            model.parameters(),
            storage,
            make_partition(spec, mesh.data, tied_of(model)),
            others={name: make_partition(spec, group.data) for name, group in mesh.groups.items()},
            linears=backend.weights(model),
            fp8=backend.fp8_weights(model) if shards else WholeFp8Weights(backend.stores(model)),
            bucket_bytes=parallel.grad_bucket_bytes,
        )
        if not storage.is_plain:
            backend.read_stored(model, masters.own_weights)
    masters.write_back()  # fills weights that are kept in FP8; others do not change
    return masters


def make_partition(
    spec: RunSpec, data: Axis, tied: Collection[nn.Parameter] = frozenset()
) -> Partition:
    """Return how the replicas `data` of a group divide master weights, moments and gradients."""
    frees_grads = spec.optim.shards_grads and not spec.optim.storage.is_plain
    return Partition(way_of(spec), data, tied, frees_grads=frees_grads)


def tied_of(model: GPT | PipelinedGPT) -> list[nn.Parameter]:
    """Return the embedding that another pipeline stage has a copy of, if there is one."""
    tied = model.tied_copy() if isinstance(model, PipelinedGPT) else None
    return [] if tied is None else [tied]


def connect_gradients(spec: RunSpec, sinks: Sinks, masters: Masters) -> None:
    """Give the gradient buffers of the masters to the sinks.

    With FSDP the sinks have no buffers, since autograd and FSDP fill the gradients.
    """
    if spec.parallel.fsdp is not None:
        return
    if masters.partition.frees_grads:
        sinks.main.hold = masters.hold_grad
    sinks.main.attach(masters.plain_grads())
    in_fp32 = spec.optim.storage.sums_in_fp32
    sinks.main.attach_scaled(masters.scaled_grads(), sums_in_fp32=in_fp32)
    if sinks.reducer is not None:
        for data, buckets in masters.reducer_buckets():
            sinks.reducer.attach(buckets, data)


def make_pipeline(
    spec: RunSpec,
    mesh: Mesh,
    model: GPT | PipelinedGPT,
    scaling: ScalingState | NoScaling,
    streams: RandomStreams,
    deferring: DeferringSink | None,
) -> PipelineRunner | None:
    """Return the runner of a step over the pipeline's stages, or None for a whole model."""
    if not isinstance(model, PipelinedGPT):
        return None
    from megafp8.parallel.pipeline_runner import PipelineRunner  # other runs start sooner without

    return PipelineRunner(
        model,
        model.boundary(spec.train.micro_batch_size, spec.data.seq_length // mesh.cp.size),
        scaling=scaling,
        streams=streams,
        deferring=deferring,
        device=mesh.device,
    )
