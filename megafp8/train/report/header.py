"""Describe a run before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fp8_numerics import bf16, cpu
from fp8_numerics.dtypes import DTYPE_NAMES, DTYPES
from fp8_numerics.gemm import wide_dtype
from megafp8.models.packed import uses_varlen
from megafp8.observe.units import plural
from megafp8.observe.utilization import Peak, peak_of_gpu
from megafp8.ops.peak import measured_tflops
from megafp8.optim.masters import Masters
from megafp8.optim.partitions import Segment
from megafp8.parallel.agreement import from_main
from megafp8.parallel.mesh import Mesh
from megafp8.runs.run_data import RunData, epochs_of
from megafp8.specs import Fp8Recipe, GPTSpec, RunSpec, TrainSpec
from megafp8.specs.geometry import EXPERTS
from megafp8.specs.parameters import num_active_parameters, num_parameters
from megafp8.specs.precision import RecipeName
from megafp8.specs.recipes import find_recipe, label_of
from megafp8.train.graphs import WARMUP_STEPS
from megafp8.train.live_bytes import MemoryOf
from megafp8.train.phases import phase_of
from megafp8.train.report.fp8 import PrecisionShare
from megafp8.train.state import TrainState


def describe_run(
    spec: RunSpec,
    state: TrainState,
    data: RunData,
    share: PrecisionShare | None,
    peak: Peak,
) -> list[str]:
    """Return a few lines that describe a run. All ranks call it together.

    `share` is the fraction of the run's FLOPs in FP8, or None for a run without FP8. `peak` is what
    the utilization of a rank is a fraction of.
    """
    model, train = spec.model, spec.train
    present = state.backend.spec
    layout = f"{plural(spec.parallel.world_size, 'rank')} on {state.mesh.device.type}"
    layout += f", tensor parallel {spec.parallel.tp}" if spec.parallel.tp > 1 else ""
    layout += " with sequence parallelism" if state.sequence_parallel else ""
    layout += _plain_tokens(present) if state.sequence_parallel else ""
    layout += f", context parallel {spec.parallel.cp}" if spec.parallel.cp > 1 else ""
    layout += f", expert parallel {spec.parallel.ep}" if spec.parallel.ep > 1 else ""
    if spec.parallel.pp > 1:
        layout += f", pipeline parallel {spec.parallel.pp} ({spec.parallel.pipeline.schedule})"
    layout += sharing(spec, state.mesh.device.type)
    return [
        f"model: {plural(model.num_layers, 'layer')} x {model.hidden_size}, "
        f"{num_parameters(model) / 1e6:.2f} M parameters{_active(model)}, "
        f"vocabulary {model.vocab_size}",
        *experts_of(model),
        f"data: {_tokens(data.num_train_tokens)} training tokens, "
        f"{_tokens(data.num_validation_tokens)} validation tokens",
        *_epochs(spec, state, data),
        f"precision: {precision_of(spec, state)}",
        *schedule_lines(state),
        f"batch: {train.global_batch_size} x {spec.data.seq_length} tokens in microbatches of "
        f"{train.micro_batch_size}{_rampup(train)}; {layout}",
        f"optimizer: {spec.optim.name} by {state.optimizer.describe()}; "
        f"learning rate: {spec.optim.schedule.name}",
        *shares_of(spec, state),
        *storage_lines(spec, state),
        *documents_of(spec, state),
        *graphs_of(spec, state),
        *smoke_options(spec),
        *_fp8_share(present, state, share),
        f"peak for MFU: {peak.text(fp8=share is not None)}"
        + ("; FLOPs are those of the active parameters" if model.moe else ""),
    ]


def _epochs(spec: RunSpec, state: TrainState, data: RunData) -> list[str]:
    """Return a line on how often the training data are read by the end of the run."""
    train, consumed, step = spec.train, state.consumed_samples, state.step
    while train.rampup and step < train.max_steps and consumed <= train.rampup.samples:
        consumed, step = consumed + train.batch_size_at(consumed), step + 1
    consumed += max(0, train.max_steps - step) * train.global_batch_size
    epochs = None if train.overfit_batches else epochs_of(data, consumed)
    return [] if epochs is None else [f"epochs until step {train.max_steps}: {epochs}"]


def _plain_tokens(spec: RunSpec) -> str:
    """Return for which products of FP8 linears tokens cross ranks in the compute dtype, if any."""
    recipe = spec.precision.fp8
    kept = sorted(recipe.kept_high(recipe.name)) if recipe is not None else []
    return (
        f" (tokens for {', '.join(kept)} cross ranks in {spec.precision.compute})" if kept else ""
    )


def schedule_lines(state: TrainState) -> list[str]:
    """Return a line on the changes of precision that are to come, for a run that has a schedule."""
    later = (phase for phase in state.phases if phase.after >= state.step and phase.changes)
    changes = [f"{phase.text} after step {phase.after}" for phase in later]
    return [f"precision schedule: {'; then '.join(changes)}"] if changes else []


def documents_of(spec: RunSpec, state: TrainState) -> list[str]:
    """Return a line about how attention keeps documents apart, for a run that asks for it."""
    if not spec.data.reset_attention_mask:
        return []
    model, line = spec.model, "documents: attention within each one, "
    traits = (state.mesh.device, DTYPES[spec.precision.compute], model.head_size)
    has_bias = model.position_embedding_type == "alibi"
    has_groups = model.num_kv_heads < model.num_attention_heads
    if state.graphs is not None:
        return [line + "by a mask of all scores, as CUDA graphs have fixed shapes"]
    if how := state.backend.documents():
        return [line + how]
    dropout = model.attention_dropout
    if uses_varlen(*traits, dropout=dropout, has_bias=has_bias, has_groups=has_groups):
        return [line + "by torch's varlen_attn; unproven: no GPU has run this yet"]
    return [line + "in blocks of the scores that are seen"]


def graphs_of(spec: RunSpec, state: TrainState) -> list[str]:
    """Return a line about CUDA graphs, for a run that captures them."""
    if state.graphs is None:
        return []
    warmup = plural(WARMUP_STEPS, "step")
    line = f"CUDA graphs: forward and backward pass of a microbatch, after {warmup}"
    if spec.health_stops_graphs:
        every = plural(spec.train.log_every_n_steps, "step")
        line += f", not in the logged steps (every {every}), which measure FP8 health"
    return [f"{line}; unproven: no GPU has run this yet"]


def peak_of_ranks(spec: RunSpec, mesh: Mesh) -> Peak:
    """Return the peak of one rank, as the main rank finds it. All ranks call it together.

    The main rank measures alone, while the others wait.
    """
    peak: Peak = from_main(mesh, peak_of(spec, mesh.device) if mesh.is_main else None)
    return peak


def peak_of(spec: RunSpec, device: torch.device) -> Peak:
    """Return the peak of one rank: a data sheet's, or a rate that is measured now.

    On a CPU the product has the dtype in which the run's products run there, which for FP8 is a
    wider one. On a GPU that is not known it is BF16.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = peak_of_gpu(name)
        if known is not None:
            return known
        where, dtype = name, torch.bfloat16
        how = "measured now"
    else:
        where = "CPU"
        dtype = wide_dtype(device, DTYPES[spec.precision.compute])
        how = f"measured now with {plural(torch.get_num_threads(), 'thread')}"
    return Peak(
        device=where,
        tflops=measured_tflops(device, dtype),
        products=DTYPE_NAMES[dtype].upper(),
        fp8_tflops=None,
        source=how,
    )


def experts_of(model: GPTSpec) -> list[str]:
    """Return a line about a model's experts and their router; none for a dense model."""
    moe = model.moe
    if moe is None:
        return []
    layers = plural(sum(moe.layers), "layer")
    where = f"each of {layers}" if all(moe.layers) else f"{layers} of {model.num_layers}"
    parts = [
        f"{moe.num_experts} of width {moe.ffn_hidden_size} in {where}, {moe.top_k} for a token"
    ]
    if moe.shared_ffn_hidden_size is not None:
        parts.append(f"an MLP of width {moe.shared_ffn_hidden_size} for all tokens")
    before = "before" if moe.pre_softmax else "after"
    softmax = f"softmax {before} top-k"
    router = [softmax if moe.score_function == "softmax" else moe.score_function]
    router += [f"weights x {moe.scaling_factor:g}"] if moe.scaling_factor != 1 else []
    router += [f"a bias that moves by {moe.bias_update_rate:g}"] if moe.has_expert_bias else []
    router += [f"{moe.router_loss} x {moe.router_loss_coeff:g}"] if moe.router_loss_coeff else []
    router += [f"z-loss x {moe.z_loss_coeff:g}"] if moe.z_loss_coeff else []
    return [f"experts: {'; '.join(parts)}; router: {', '.join(router)}"]


def _active(model: GPTSpec) -> str:
    """Return how many parameters a token visits, for a model with experts."""
    active = num_active_parameters(model)
    return "" if active == num_parameters(model) else f", {active / 1e6:.2f} M active"


def _tokens(count: int) -> str:
    """Return a number of tokens in millions, or as it is where it is small."""
    return f"{count / 1e6:.3g} M" if count >= 100_000 else str(count)


def _fp8_share(spec: RunSpec, state: TrainState, share: PrecisionShare | None) -> list[str]:
    if share is None:
        return []
    assert spec.precision.fp8 is not None
    kind = find_recipe(spec.precision.fp8.name).traits.kind
    return [
        f"{kind}: {share.share:.1%} of the GEMM FLOPs of a step without attention "
        f"({state.backend.kernel()}); in higher precision: {'; '.join(share.higher)}"
    ]


def shares_of(spec: RunSpec, state: TrainState) -> list[str]:
    """Return a line on the part of a sharded state that this rank has, counted in its tensors."""
    fsdp = spec.parallel.fsdp
    if fsdp is None and not spec.optim.shards_states:
        return []
    held = state_bytes(state)
    if not spec.optim.storage.is_plain and fsdp is None:
        return [_shares_of_stored(state.masters, held)]
    masters, states_of = state.masters, spec.optim.states_of
    counts = (1 + len(states_of(masters.kind_of(param))) for param in masters.params)
    whole = sum(4 * n * param.numel() for n, param in zip(counts, masters.params, strict=True))
    name = "ZeRO-1" if fsdp is None else f"FSDP ({fsdp.strategy})"
    own = f"{(held.masters + held.moments) / 2**20:.1f}"
    kept = f"{own} of {whole / 2**20:.1f} MiB of FP32 weights and moments"
    if not spec.optim.storage.is_plain:
        kept = f"{own} MiB of weights and moments, which are {whole / 2**20:.1f} MiB in FP32"
    gradients = "and all gradients" if fsdp is None else "and the same part of the gradients"
    over = plural(masters.shards.size, "rank")
    if (experts := masters.shards_of.get(EXPERTS)) is not None:
        over += f", of experts over {experts.size}"
    return [f"{name} over {over}: this one keeps {kept}, {gradients}"]


def _shares_of_stored(masters: Masters, held: StateBytes) -> str:
    own = sum(segment.end - segment.begin for segment in masters.segments)
    whole = sum(param.numel() for param in masters.params)
    stage = "ZeRO-2" if masters.partition.frees_grads else "ZeRO-1"
    how, parts = "whole tensors by size", f"{len(masters.segments)} of "
    if masters.partition.divides:
        how, parts = "equal numbers of elements", f"parts of {len(masters.segments)} of "
    return (
        f"{stage} over {plural(masters.shards.size, 'rank')}, {how}: this one owns "
        f"{parts}{plural(len(masters.params), 'tensor')}, {own / whole:.1%} of "
        f"the elements ({held.moments / 2**20:.1f} MiB of moments); padding adds "
        f"{masters.padding:.1%} to the weights"
    )


def storage_lines(spec: RunSpec, state: TrainState) -> list[str]:
    """Return a line about gradients, masters and moments that are stored below FP32, if any are.

    The bytes are counted from the live tensors, each memory once.
    """
    storage, masters = spec.optim.storage, state.masters
    if storage.is_plain:
        return []
    total = num_params = 0
    states_of = state.optimizer.states_of_rows()
    for row, segment in enumerate(masters.segments):
        if segment.param in masters.linears:
            weight: list[torch.Tensor] = []  # FSDP gathers it from the master
            if not masters.holds_rows:
                weight = _weight_of(segment, state.backend.memory_of)
            held = [masters.masters[row], masters.stored_grads[row].payload, *weight]
            held += [tensor for each in states_of[row].values() for tensor in each.held]
            total += storage_bytes_of_views(held)
            num_params += segment.end - segment.begin
    grads = f"gradients of linears in {storage.main_grads}"
    grads += ", summed in fp32" if storage.sums_in_fp32 else ""
    whose = " of linears" if storage.linears_only else ""
    line = (
        f"FP8-LM: {grads}, their masters in {storage.main_params}; "
        f"first moments{whose} in {storage.exp_avg}, second in {storage.exp_avg_sq}"
    )
    line += ", rounded stochastically" if storage.stochastic_rounding else ""
    replicas = state.mesh.data.size
    if replicas > 1 and storage.main_grads != "fp32":
        how = {"fp32": "in FP32, sent as bytes"}.get(
            storage.reduction, f"in FP8, factor {storage.reduction}"
        )
        line += f"; summed over {plural(replicas, 'rank')} {how}"
    if not num_params:  # other ranks own all linears
        return [line]
    return [f"{line}: {total / num_params:.1f} bytes a parameter of the linears"]


def _weight_of(segment: Segment, memory_of: MemoryOf) -> list[torch.Tensor]:
    """Return the weights of a segment; Transformer Engine may keep FP8 bytes in two orientations.

    Their scales are left out.
    """
    return [
        memory.detach().view(-1)[segment.begin : segment.end]
        for memory in memory_of(segment.param)
        if memory.numel() == segment.param.numel()
    ]


def sharing(spec: RunSpec, device: str) -> str:
    """Return that the ranks of a CPU share its cores, where it has fewer of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = spec.parallel.devices_per_node
    if device != "cpu" or cores is None or cores >= ranks:
        return ""
    return f"; {ranks} ranks share {plural(cores, 'core')}, so a step takes longer"


def _rampup(train: TrainSpec) -> str:
    ramp = train.rampup
    if ramp is None:
        return ""
    return f", from {ramp.start} in steps of {ramp.increment} over {ramp.samples} samples"


def smoke_options(spec: RunSpec) -> list[str]:
    """Return a line for each option that makes this run differ from an ordinary one."""
    train, lines = spec.train, []
    if train.fast_dev_run:
        steps = f"fast_dev_run: {plural(train.max_steps, 'step')}"
        batches = plural(train.limit_val_batches, "global batch", "global batches")
        short = f"validation on {batches}"
        lines.append(f"{steps}, {short}; no checkpoints, no loggers, a directory of its own")
    if not train.limit_val_batches:
        lines.append("limit_val_batches=0: no validation")
    if train.overfit_batches:
        lines.append(f"overfit_batches: the first {train.overfit_batches} global batches repeat")
    if train.gc_interval:
        interval = plural(train.gc_interval, "step")
        lines.append(f"gc_interval: garbage is collected every {interval} only")
    if train.deterministic:
        lines.append("deterministic: operations without a deterministic algorithm are errors")
    return lines


def precision_of(spec: RunSpec, state: TrainState) -> str:
    """Return the number formats of a run, and the kernels that run them on this machine."""
    formats = _formats_of(state.backend.spec)  # its recipe is the present one
    if changes := phase_of(state, state.step, has_run=True):
        since = state.phases[changes].after + 1
        formats += f" since step {since}, after {plural(changes, 'change')} of precision"
    parts = [part for part in (formats, state.backend.describe()) if part]
    if spec.precision.compute == "bf16" and bf16.fp32_products(state.mesh.device):
        parts.append(f"BF16 values, FP32 products: {cpu.why_slow_at_bf16()}")
    if spec.precision.auto is not None:
        parts.append(spec.precision.auto.text)
    return "; ".join(parts)


def _formats_of(spec: RunSpec) -> str:
    compute = spec.precision.compute.upper()
    if not spec.precision.half_weights:
        compute += " GEMMs over FP32 weights and residual stream"
    elif spec.precision.compute != "fp32" and spec.precision.fp8 is None:
        compute += ", FP32 masters"
    if spec.precision.loss_scale is not None:
        compute += ", dynamic loss scale"
    recipe = spec.precision.fp8
    if recipe is None or recipe.is_unused:
        return compute
    where = "".join([", in QKV, projection, FC1, FC2", *_others_of(recipe)])
    return f"{recipe_and_numbers(recipe, recipe.name)}{where}; the rest {compute}"


def _others_of(recipe: Fp8Recipe) -> Iterator[str]:
    """Yield which linears have other recipes: `, but *.experts.* in FP8 mxfp8, E4M3`."""
    for name in sorted(recipe.names - {recipe.name}):
        patterns = [rule.pattern for rule in recipe.modules if rule.precision == name]
        more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
        yield f", but {', '.join(patterns[:2])}{more} in {recipe_and_numbers(recipe, name)}"


def recipe_and_numbers(recipe: Fp8Recipe, chosen: RecipeName) -> str:
    """Return one of a run's recipes and its numbers: `FP8 delayed, hybrid E4M3/E5M2`."""
    name, traits = label_of(chosen), find_recipe(chosen).traits
    if traits.is_simulated:
        return f"simulated {name}, values of its rule"
    if traits.numbers == "e2m1":
        return f"{traits.kind} {name}, E2M1"
    formats = "E4M3" if recipe.gradients_in(chosen) == "e4m3" else "hybrid E4M3/E5M2"
    return f"{traits.kind} {name}, {formats}"


@dataclass(frozen=True)
class StateBytes:
    """Hold the bytes of this rank's state.

    An FP32 weight that is its own master weight counts as both.
    """

    weights: int
    masters: int
    moments: int
    gradients: int


def state_bytes(state: TrainState) -> StateBytes:
    """Return the bytes that this rank's state takes, counted in its tensors."""
    masters, optimizer = state.masters, state.optimizer
    return StateBytes(
        weights=storage_bytes(t for p in masters.held_params for t in state.backend.memory_of(p)),
        masters=storage_bytes(masters.masters),
        moments=storage_bytes(optimizer.all_state_tensors()),
        gradients=storage_bytes([*masters.own_grads, *masters.param_grads, *masters.grads]),
    )


def storage_bytes_of_views(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors that may be parts of larger memory, equal ones once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, padding included, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
