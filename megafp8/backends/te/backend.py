"""Run Transformer Engine's layers, on GPUs or over the kernels of `te_cpu`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fp8_numerics.dtypes import DTYPES
from megafp8.backends.protocol import Backend, Stores
from megafp8.backends.te import names as te_names
from megafp8.backends.te import parts as te_parts
from megafp8.backends.te import recipe as te_recipe
from megafp8.backends.te.dryrun import scaling_tensors, without_values
from megafp8.backends.te.layer import layers_in
from megafp8.backends.te.parts import TransformerEngineParts
from megafp8.backends.te.quantized import memory_of
from megafp8.backends.te.state import TeEvents, TeRegion, TeScaling
from megafp8.backends.te.stored_weights import StoredWeights
from megafp8.backends.te.weights import TeFp8Weights, fp8_weights
from megafp8.config import te_environment
from megafp8.config.errors import SettingError, raise_if_any
from megafp8.config.te_layers import findings
from megafp8.config.te_settings import settings_of
from megafp8.config.values import plain
from megafp8.fp8.grad_sink import MainGradSink
from megafp8.fp8.scaled import ScaledTensor
from megafp8.optim.fp8_weights import Fp8Weights
from megafp8.parallel.mesh import Mesh, group_of
from megafp8.parallel.parts import PartsArgs
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.precision import AttentionInFp8, PlannedGemms
from megafp8.specs.recipes import find_recipe, te_class


class TeBackend(Backend):
    """Transformer Engine's layers; embedding, final norm and head are our own."""

    shows_casts = False

    def __init__(self, spec: RunSpec, mesh: Mesh, parts_args: PartsArgs) -> None:
        """Open no region yet; its amaxes are reduced over the ranks of `mesh.amax`."""
        super().__init__(spec, mesh, parts_args)
        names, recipe = te_names.import_te(), spec.precision.fp8
        attention = attention_in_fp8(spec, mesh.device)
        te_fp8_recipe = (
            None if recipe is None else te_recipe.make_te_recipe(recipe, names.recipe, attention)
        )
        self._region = region = TeRegion(names, te_fp8_recipe, group_of(mesh.amax))
        self._tables: TeScaling | None = None
        if recipe is not None and find_recipe(recipe.name).traits.has_history:
            self.scaling = self._tables = TeScaling(recipe, region)
        else:
            in_evaluation = recipe is not None and recipe.fp8_in_evaluation
            self.scaling = TeEvents(
                region,
                fp8_in_evaluation=in_evaluation,
                seed=spec.train.seed,
                draws=None if mesh.device.type == "cuda" else te_names.kernels_on_cpu().DRAWS,
            )
        user_buffers = spec.precision.user_buffers and mesh.device.type == "cuda"
        if user_buffers:
            names.initialize_user_buffers(
                spec.train.micro_batch_size * spec.data.seq_length,
                spec.model.hidden_size,
                mesh.tp.size,
                DTYPES[spec.precision.compute],
                in_fp8=te_parts.kinds_of_layers(spec.model, recipe),
            )
        self.parts = TransformerEngineParts(
            parts_args,
            user_buffers=user_buffers,
            region=region,
            te_scaling=self._tables,
            device=mesh.device,
            recipe=recipe,
            attention_in_fp8=attention,
            packs=spec.data.reset_attention_mask,
        )

    @classmethod
    def why_not(cls, spec: RunSpec, device: torch.device) -> Iterable[str]:
        values = settings_of(spec)  # of a program, maybe: the checks of settings refuse the same
        raise_if_any(
            [SettingError(f.key, values[f.key], f.reason, f.hint) for f in findings(values)]
        )
        return _why_not_here(spec, device, load=True)

    def stores(self, model: nn.Module) -> Stores:
        """Round a master to the compute dtype, as ours are; the weight's own `copy_` quantizes."""

        def store(param: nn.Parameter, dtype: torch.dtype, master: torch.Tensor) -> None:
            param.copy_(master.to(dtype))

        weights = fp8_weights(model)
        return {param: partial(store, param, layer.dtype) for param, layer in weights.items()}

    def fp8_weights(self, model: nn.Module) -> Fp8Weights:
        return TeFp8Weights(model)

    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        return [weight for layer in layers_in(model) for weight in layer.weights]

    def read_stored(self, model: nn.Module, stored: Mapping[nn.Parameter, ScaledTensor]) -> None:
        for layer in layers_in(model):
            of_layer = {weight: stored[weight] for weight in layer.weights if weight in stored}
            layer.stored = StoredWeights(of_layer, layer.dtype)

    def change_recipe(self, model: nn.Module, recipe: Fp8Recipe) -> None:
        """Open later regions with another recipe; layers out of FP8 switch them off.

        Transformer Engine's modules then drop what they keep of the old recipe.
        """
        precision = replace(self.spec.precision, fp8=recipe)
        self.spec = replace(self.spec, precision=precision)
        if not recipe.is_unused:
            self._region.change(te_recipe.make_te_recipe(recipe, te_names.import_te().recipe))
        for layer in layers_in(model):
            layer.in_fp8 = te_parts.is_layer_in_fp8(recipe, layer.index)

    def connect(self, model: nn.Module, sink: MainGradSink) -> None:
        """Let products add gradients to the sums; in a dry run autograd delivers them."""
        for layer in layers_in(model):
            if layer.summed_in_products:
                sink.sum_in_products(layer.summed_in_products)
                layer.begin_products = partial(sink.begin_products, layer.summed_in_products)
            else:
                sink.collect(layer.weights)

    def after_load(self) -> None:
        if self._tables is not None:
            self._tables.push()

    def forget(self) -> None:
        with torch.no_grad():
            self._region.end()  # a dry run leaves it open; without gradients no scale is updated
        if self.spec.precision.fp8 is not None:
            te_names.import_te().global_state.reset()

    def documents(self) -> str:
        unproven = "; unproven: no GPU has run this yet" if self.device.type == "cuda" else ""
        return f"by Transformer Engine's thd and padding_causal{unproven}"

    def describe(self) -> str:
        kernels = te_names.kernels_on_cpu().describe() if self.device.type == "cpu" else None
        return kernels or te_names.describe_version(te_names.import_te().version)

    def planned(self, model: nn.Module) -> Iterator[PlannedGemms]:
        return (layer.planned() for layer in layers_in(model))

    def memory_of(self, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        return memory_of(tensor)

    def scaling_tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """Return Transformer Engine's own; the tables that mirror them are on the CPU."""
        mirror = super().scaling_tensors(model) if self.spec.parallel.accelerator == "cpu" else []
        return [*mirror, *scaling_tensors(model)]

    def token_multiple(self) -> int:
        recipe = self.spec.precision.fp8
        return 1 if recipe is None else find_recipe(recipe.name).traits.multiple

    def without_values(self, model: nn.Module) -> AbstractContextManager[None]:
        return without_values(model, on_gpu=self.spec.parallel.accelerator == "gpu")


def attention_in_fp8(spec: RunSpec, device: torch.device) -> AttentionInFp8:
    """Return what of attention Transformer Engine computes in FP8 here: on a GPU, what was asked.

    It needs cuDNN's attention; a dry run counts attention in the compute dtype.
    """
    return spec.precision.attention_in_fp8 if device.type == "cuda" else "none"


def as_te(spec: RunSpec) -> RunSpec:
    """Return the spec for Transformer Engine, which decides itself how block scaling adds up."""
    recipe = spec.precision.fp8
    if recipe is not None and te_class(recipe.name) == "Float8BlockScaling":
        recipe = replace(recipe, fast_accumulation=frozenset())
    return replace(spec, precision=replace(spec.precision, backend="te", fp8=recipe))


def reasons_against(spec: RunSpec, device: torch.device, known: str | None) -> list[str]:
    """Return why Transformer Engine cannot take the place of `auto` on this rank.

    `known` is what the settings have said already; a spec that a program made is judged here.
    """
    reasons = [] if known is None else [known]
    if known is None:
        values = settings_of(spec)
        reasons += [f"{f.key}={plain(values[f.key])}: {f.reason}" for f in findings(values)]
    return reasons + list(_why_not_here(spec, device, load=not reasons))


def _why_not_here(spec: RunSpec, device: torch.device, *, load: bool) -> Iterator[str]:
    """Yield why Transformer Engine cannot run on this rank: variables, package, GPU, version.

    It is imported last, and only with `load`: that takes seconds, and a CPU may have to fetch it.
    """
    precision = spec.precision
    for finding in te_environment.findings(settings_of(spec), os.environ):
        yield f"{finding.reason}. {finding.hint}"
        load = False
    recipes = dict.fromkeys((precision.fp8, *(phase.recipe for phase in precision.schedule)))
    if device.type != "cpu":
        why_not = te_names.why_not_installed(device)
        if why_not is None and load:
            reasons = (
                te_names.why_te_cannot(device, te_class(recipe.name), recipe.power_2_scale)
                if recipe is not None
                else te_names.why_te_cannot(device, None)
                for recipe in recipes
            )
            why_not = next((reason for reason in reasons if reason is not None), None)
        if why_not is not None:
            yield why_not
            load = False
    if not load:
        return
    if device.type == "cpu":
        te_names.kernels_on_cpu().load(precision.te_version)
    for recipe in recipes:
        if recipe is None or recipe.is_unused:
            continue
        try:
            te_recipe.make_te_recipe(
                recipe, te_names.import_te().recipe, attention_in_fp8(spec, device)
            )
        except ValueError as error:
            yield str(error)
