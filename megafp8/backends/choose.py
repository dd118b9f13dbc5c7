"""Choose who computes the layers: our own FP8 linears, Transformer Engine or torchao.

A backend that cannot run what was asked for is refused with the reason. The files of one backend,
and the package that it needs, are imported where it was chosen only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8_numerics.dtypes import DTYPES
from fp8_numerics.gemm import GemmCounter
from megafp8.backends.protocol import Backend
from megafp8.errors import ConfigError
from megafp8.fp8.grad_sink import GradSink
from megafp8.models.random import RandomStreams
from megafp8.parallel.agreement import first_known
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import PartsArgs
from megafp8.specs import RunSpec
from megafp8.specs.precision import AutoBackend
from megafp8.specs.recipes import find_recipe


def backend_of(spec: RunSpec) -> type[Backend]:
    """Return the class of the backend that a spec names."""
    if spec.precision.backend == "te":
        from megafp8.backends.te.backend import TeBackend

        return TeBackend
    if spec.precision.backend == "torchao":
        from megafp8.backends.torchao import TorchaoBackend

        return TorchaoBackend
    from megafp8.backends.native import NativeBackend

    return NativeBackend


def settle(spec: RunSpec, mesh: Mesh) -> RunSpec:
    """Return the spec with the backend that `model.fp8_backend=auto` means on this machine.

    On a GPU it is Transformer Engine where the package is installed on all ranks and its layers can
    run this model, recipe and layout; otherwise it is our own engine, and the spec keeps the reason
    of the first rank that has one. All ranks call this together.
    """
    auto = spec.precision.auto
    if auto is None:
        return spec
    from megafp8.backends.te.backend import as_te, reasons_against

    settled = as_te(spec)
    reasons = reasons_against(settled, mesh.device, auto.why_not_te)
    reason = first_known(mesh, "; ".join(reasons) or None)
    if reason is not None:
        return replace(spec, precision=replace(spec.precision, auto=AutoBackend(reason)))
    recipe = spec.precision.fp8
    shows_casts = recipe is None or find_recipe(recipe.name).traits.has_history
    if not shows_casts:
        health = replace(spec.observe.health, mode="off")
        settled = replace(settled, observe=replace(spec.observe, health=health))
    return settled


def check_backend(spec: RunSpec, device: torch.device) -> None:
    """Raise `ConfigError` with all reasons where the asked backend cannot run here.

    Raises:
        ConfigError: `CombinedConfigError` where several settings rule it out.
    """
    if reasons := list(backend_of(spec).why_not(spec, device)):
        hint = "model.fp8_backend=native runs on any device"
        raise ConfigError("model.fp8_backend", spec.precision.backend, "; ".join(reasons), hint)


def make_backend(
    spec: RunSpec, mesh: Mesh, streams: RandomStreams, sink: GradSink, counter: GemmCounter
) -> Backend:
    """Return the chosen backend, with its parts and its scaling state."""
    parts_args = PartsArgs(
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
        ep=mesh.ep,
    )
    return backend_of(spec)(spec, mesh, parts_args)
