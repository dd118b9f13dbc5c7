"""Choose who computes the layers: our own FP8 linears, Transformer Engine or torchao.

A backend that cannot run what was asked for is refused with the reason. Neither package is
imported before it was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megafp8 import te_cpu
from megafp8.backends import torchao
from megafp8.backends.native_block import FusedParts
from megafp8.backends.te import names as te_names
from megafp8.backends.te import parts as te_parts
from megafp8.backends.te import recipe as te_recipe
from megafp8.backends.te.parts import TransformerEngineParts
from megafp8.backends.te.state import TeEvents, TeRegion, TeScaling
from megafp8.config import te_environment
from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.te_layers import findings
from megafp8.config.te_settings import settings_of
from megafp8.config.values import plain
from megafp8.errors import ConfigError
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.parallel.agreement import first_known
from megafp8.parallel.mesh import Mesh, group_of
from megafp8.parallel.parts import Given, NativeParts
from megafp8.precision.formats import DTYPES
from megafp8.precision.gemm import GemmCounter
from megafp8.precision.grad_sink import GradSink
from megafp8.precision.scaling import NoScaling, ScalingState
from megafp8.specs import RunSpec
from megafp8.specs.precision import AttentionInFp8, AutoBackend
from megafp8.specs.recipes import find_recipe, te_class

KEY = "model.fp8_backend"


@dataclass(frozen=True)
class Backend:
    """Holds the parts that a backend makes a model of, and their scaling state."""

    parts: Parts
    scaling: ScalingState | NoScaling


def settle(spec: RunSpec, mesh: Mesh) -> RunSpec:
    """Return the spec with the backend that `model.fp8_backend=auto` means on this machine.

    On a GPU it is Transformer Engine where the package is installed on all ranks and its layers can
    run this model, recipe and layout; otherwise it is our own engine, and the spec keeps the reason
    of the first rank that has one. All ranks call this together.
    """
    auto = spec.precision.auto
    if auto is None:
        return spec
    as_te = _as_te(spec)
    reasons = [] if auto.why_not_te is None else [auto.why_not_te]
    if auto.why_not_te is None:
        reasons += _settings_of_te(as_te)
    reasons += _machine_of_te(as_te, mesh.device, load=not reasons)
    reason = first_known(mesh, "; ".join(reasons) or None)
    if reason is not None:
        return replace(spec, precision=replace(spec.precision, auto=AutoBackend(reason)))
    recipe = spec.precision.fp8
    shows_casts = recipe is None or find_recipe(recipe.name).traits.has_history
    if not shows_casts:
        health = replace(spec.observe.health, mode="off")
        as_te = replace(as_te, observe=replace(spec.observe, health=health))
    return as_te


def forget(spec: RunSpec) -> None:
    """Forget what the backend keeps for the whole process of the model that was built last."""
    if spec.precision.backend == "te" and spec.precision.fp8 is not None:
        te_names.load().global_state.reset()


def describe_choice(spec: RunSpec) -> str:
    """Return why `model.fp8_backend=auto` has chosen this backend; empty where one was named."""
    auto = spec.precision.auto
    if auto is None:
        return ""
    if auto.why_not_te is None:
        return "chosen by model.fp8_backend=auto"
    return f"not Transformer Engine: {auto.why_not_te}"


def check(spec: RunSpec, device: torch.device) -> None:
    """Raise `ConfigError` with all reasons where the asked backend cannot run here.

    Transformer Engine's Python is loaded over its CPU kernels where that is what was asked for.

    Raises:
        ConfigError: `CombinedConfigError` where several settings rule Transformer Engine out; the
            checks of settings refuse the same, so only a program that made the spec meets it.
    """
    asked = spec.precision.backend
    recipe = spec.precision.fp8
    reasons: list[str] = []
    if asked == "te":
        values = settings_of(spec)
        raise_if_any(
            [SettingError(f.key, values[f.key], f.reason, f.hint) for f in findings(values)]
        )
        reasons = list(_machine_of_te(spec, device, load=True))
    elif asked == "torchao":
        reason = "torchao runs FP8 alone" if recipe is None else torchao.why_not(recipe, device)
        reasons = [] if reason is None else [reason]
    if reasons:
        hint = "model.fp8_backend=native runs on any device"
        raise ConfigError(KEY, asked, "; ".join(reasons), hint)


def _as_te(spec: RunSpec) -> RunSpec:
    """Return the spec for Transformer Engine, which decides itself how block scaling adds up."""
    recipe = spec.precision.fp8
    if recipe is not None and te_class(recipe.name) == "Float8BlockScaling":
        recipe = replace(recipe, fast_accumulation=frozenset())
    return replace(spec, precision=replace(spec.precision, backend="te", fp8=recipe))


def _settings_of_te(spec: RunSpec) -> list[str]:
    """Return what rules Transformer Engine out in a spec, whoever made it."""
    values = settings_of(spec)
    return [f"{f.key}={plain(values[f.key])}: {f.reason}" for f in findings(values)]


def _machine_of_te(spec: RunSpec, device: torch.device, *, load: bool) -> Iterator[str]:
    """Yield why Transformer Engine cannot run on this rank: variables, package, GPU, version.

    It is imported last, and only with `load`: that takes seconds, and a CPU may have to fetch it.
    """
    precision = spec.precision
    for finding in te_environment.findings(settings_of(spec), os.environ):
        yield f"{finding.reason}. {finding.hint}"
        load = False
    if device.type != "cpu":
        why_not = te_names.why_not_installed(device)
        if why_not is None and load:
            why_not = te_names.why_not(device, fp8=precision.fp8 is not None)
        if why_not is not None:
            yield why_not
            load = False
    if not load:
        return
    if device.type == "cpu":
        te_cpu.load(precision.te_version or te_cpu.DEFAULT_VERSION)
    if precision.fp8 is not None:
        try:
            te_recipe.make(precision.fp8, te_names.load().recipe, attention_in_fp8(spec, device))
        except ValueError as error:
            yield str(error)


def make(
    spec: RunSpec, mesh: Mesh, streams: RandomStreams, sink: GradSink, counter: GemmCounter
) -> Backend:
    """Return the parts and the scaling state of the chosen backend."""
    given = Given(
        spec=spec.model,
        dtype=DTYPES[spec.precision.compute],
        seed=spec.train.seed,
        streams=streams,
        tp=mesh.tp,
        sink=sink,
        counter=counter,
        half_weights=spec.precision.half_weights,
        sequence_parallel=spec.parallel.sequence_parallel,
        gathers_weights=spec.parallel.fsdp is not None,
        cp=mesh.cp,
    )
    makers = {"te": _transformer_engine, "torchao": _torchao, "native": _native}
    return makers[spec.precision.backend](spec, mesh, given)


def _native(spec: RunSpec, mesh: Mesh, given: Given) -> Backend:
    """Our own: amaxes are reduced over every rank that holds part of the same tensors."""
    recipe, scaling = spec.precision.fp8, None
    if recipe is not None:
        reduces = mesh.amax.size > 1
        scaling = ScalingState(recipe, mesh.amax.start_all_reduce_max if reduces else None)
        scaling.draws.seed = spec.train.seed
        if mesh.device.type == "meta":
            scaling.to(mesh.device)  # no numbers to start with: rows come without memory
    parts = NativeParts(given) if scaling is None else FusedParts(given, scaling)
    return Backend(parts, scaling or NoScaling())


def _transformer_engine(spec: RunSpec, mesh: Mesh, given: Given) -> Backend:
    names, recipe = te_names.load(), spec.precision.fp8
    attention = attention_in_fp8(spec, mesh.device)
    made = None if recipe is None else te_recipe.make(recipe, names.recipe, attention)
    region = TeRegion(names, made, group_of(mesh.amax))
    scaling: TeScaling | TeEvents
    if recipe is not None and find_recipe(recipe.name).traits.has_history:
        scaling = TeScaling(recipe, region)
    else:
        in_evaluation = recipe is not None and recipe.fp8_in_evaluation
        scaling = TeEvents(region, fp8_in_evaluation=in_evaluation)
    user_buffers = spec.precision.user_buffers and mesh.device.type == "cuda"
    if user_buffers:
        names.initialize_user_buffers(
            spec.train.micro_batch_size * spec.data.seq_length,
            spec.model.hidden_size,
            mesh.tp.size,
            DTYPES[spec.precision.compute],
            in_fp8=te_parts.kinds_of_layers(spec.model, recipe),
        )
    parts = TransformerEngineParts(
        given,
        user_buffers=user_buffers,
        region=region,
        te_scaling=scaling if isinstance(scaling, TeScaling) else None,
        device=mesh.device,
        recipe=recipe,
        attention_in_fp8=attention,
    )
    return Backend(parts, scaling)


def attention_in_fp8(spec: RunSpec, device: torch.device) -> AttentionInFp8:
    """Return what of attention Transformer Engine computes in FP8 here: on a GPU, what was asked.

    It needs cuDNN's attention; a dry run counts attention in the compute dtype.
    """
    return spec.precision.attention_in_fp8 if device.type == "cuda" else "none"


def _torchao(spec: RunSpec, mesh: Mesh, given: Given) -> Backend:
    recipe, fsdp = spec.precision.fp8, spec.parallel.fsdp
    assert recipe is not None
    seen_by = ScalingState(recipe)  # torchao keeps none: this one is what health looks through
    seen_by.to(mesh.device)
    parts = torchao.TorchaoParts(
        given,
        recipe=recipe,
        seen_by=seen_by,
        emulate=mesh.device.type == "cpu",
        gathers_in_fp8=fsdp is not None and fsdp.torchao_in_fp8,
    )
    return Backend(parts, seen_by)


def fp8_kernel(spec: RunSpec, device: torch.device) -> str:
    """Return the backend and the kernel of the FP8 products of another engine than our own."""
    backend = spec.precision.backend
    return f"{backend} {'emulated' if device.type == 'cpu' else 'tensor cores'}"


def describe(spec: RunSpec, device: torch.device) -> str:
    """Return the other engine's name, version and way of running, for the header and summary."""
    if spec.precision.backend == "te":
        on_cpu = device.type == "cpu" and te_cpu.loaded() is not None
        return te_cpu.describe() if on_cpu else te_names.describe(te_names.load().version)
    emulated = ", emulated: FP32 GEMMs over the same casts" if device.type == "cpu" else ""
    kept = "first and last linear in high precision unless model.fp8_modules names them"
    version = torchao.version()
    return f"torchao {version}{emulated}; {kept}"
