"""Run our own FP8 linears, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from fp8_numerics.dtypes import DTYPE_NAMES, DTYPES
from fp8_numerics.gemm import Engine, GemmCounter, wide_dtype
from fp8_numerics.kernels.compile import library
from fp8_numerics.kernels.triton_launch import runs_triton
from megafp8.backends.native_block import FusedParts
from megafp8.backends.native_dryrun import as_on_a_gpu
from megafp8.backends.protocol import Backend, Stores
from megafp8.fp8.linear import Linear
from megafp8.fp8.scaled import ScaledTensor
from megafp8.fp8.scaling import NoScaling, ScalingState
from megafp8.fp8.weights import (
    CachedFp8,
    LowPrecisionWeight,
    PlainLowPrecisionWeight,
    RecastFp8,
    StoredFp8,
)
from megafp8.optim.fp8_weights import Fp8Weights, OwnFp8Weights
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import LinearElsewhere, NativeParts, PartsArgs, linears_of
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.precision import GEMMS, PlannedGemms
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, label_of
from megafp8.specs.traits import GemmName


class NativeBackend(Backend):
    """Our own linears."""

    def __init__(self, spec: RunSpec, mesh: Mesh, parts_args: PartsArgs) -> None:
        super().__init__(spec, mesh, parts_args)
        recipe, scaling = spec.precision.fp8, None
        if recipe is not None:
            # An amax is reduced over every rank that holds a part of the same tensor.
            reduces = mesh.amax.size > 1
            scaling = ScalingState(recipe, mesh.amax.start_all_reduce_max if reduces else None)
            scaling.draws.seed = spec.train.seed  # of stochastic rounding
            if mesh.device.type == "meta":
                scaling.to(mesh.device)  # no numbers to start with: rows come without memory
        # Where no kernel can cast in a norm or an activation, the model is made of plain layers.
        fuses = scaling is not None and runs_triton(mesh.device)
        self.parts = (FusedParts if fuses else NativeParts)(parts_args, scaling)
        self.scaling = scaling or NoScaling()

    @classmethod
    def why_not(cls, spec: RunSpec, device: torch.device) -> Iterable[str]:
        return ()

    def _in_fp8(self, model: nn.Module) -> dict[nn.Parameter, StoredFp8]:
        """Return how the weights that exist in FP8 alone are stored (`fp8_params`)."""
        return {
            linear.weight: linear.weight_form
            for linear in linears_of(model)
            if isinstance(linear.weight_form, StoredFp8)
        }

    def stores(self, model: nn.Module) -> Stores:
        return {weight: form.store for weight, form in self._in_fp8(model).items()}

    def fp8_weights(self, model: nn.Module) -> Fp8Weights:
        return OwnFp8Weights(self._in_fp8(model))

    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        return [linear.weight for linear in linears_of(model)]

    def read_stored(self, model: nn.Module, stored: Mapping[nn.Parameter, ScaledTensor]) -> None:
        dtype = DTYPES[self.spec.precision.compute]
        for linear in linears_of(model):
            if (stored_weight := stored.get(linear.weight)) is None:
                continue
            if linear.quantizer is None:
                linear.weight_form = PlainLowPrecisionWeight(stored_weight, dtype)
            else:
                linear.weight_form = LowPrecisionWeight(stored_weight, linear.quantizer, dtype)

    def change_recipe(self, model: nn.Module, recipe: Fp8Recipe) -> None:
        assert isinstance(self.scaling, ScalingState)
        precision = replace(self.spec.precision, fp8=recipe)
        self.spec = replace(self.spec, precision=precision)

        def requantize() -> None:
            for module in model.modules():  # in their order, which is that of the tables' rows
                if isinstance(module, Linear | LinearElsewhere):
                    module.take_recipe()

        self.scaling.change_recipe(recipe, requantize)

    def describe(self) -> str:
        recipe = self.spec.precision.fp8
        if recipe is None or recipe.is_unused:
            return ""
        return f"native, {self._kernels(recipe)}"

    def kernel(self) -> str:
        assert self.spec.precision.fp8 is not None
        kernels = self._kernels(self.spec.precision.fp8)
        return f"native {' and '.join(k for k in ('tensor cores', 'emulated') if k in kernels)}"

    def _kernels(self, recipe: Fp8Recipe) -> str:
        work = DTYPES[self.spec.precision.compute]
        return kernels_of(recipe, self.scaling.engine, self.device, work)

    def planned(self, model: nn.Module) -> Iterable[PlannedGemms]:
        assert self.spec.precision.fp8 is not None
        return planned_of(model, self.spec.precision.fp8)

    def fp8_flops(self, counter: GemmCounter) -> dict[str, int]:
        return {f"native {kind}": flops for kind, flops in counter.fp8_backends.items()}

    def without_values(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.spec.parallel.accelerator != "gpu" or not isinstance(self.scaling, ScalingState):
            return nullcontext()
        return as_on_a_gpu(model, self.scaling)

    def weight_copies(self, model: nn.Module) -> int | None:
        """Return the bytes of the FP8 copies of weights that tensor cores read.

        A weight has one in each orientation in which a product in FP8 reads it, packed for a recipe
        whose kernels pack. A weight that is kept in FP8 only has no copy.
        """
        if self.spec.parallel.accelerator != "gpu":
            return None
        recipe, total = self.spec.precision.fp8, 0
        for linear in linears_of(model):
            is_copied = isinstance(linear.weight_form, CachedFp8 | RecastFp8)
            if recipe is not None and linear.quantizer is not None and is_copied:
                traits = find_recipe(recipe.precision_of(linear.name)).traits
                out_features, in_features = linear.weight.shape
                total += traits.weight_bytes(out_features, in_features, linear.quantizer.fp8_gemms)
        return total


def planned_of(model: nn.Module, recipe: Fp8Recipe, *, unnamed: str = "") -> Iterator[PlannedGemms]:
    """Yield which products of our linears in a model run in FP8, and why the others do not.

    `unnamed` says why a linear that no rule names is not in FP8.
    """
    for linear in linears_of(model):
        fp8: tuple[GemmName, ...] = ()
        if linear.quantizer is None:
            rule = recipe.rule_of(linear.name)
            reasons: tuple[str, ...] = (unnamed if rule is None else rule.source,)
        else:
            fp8 = linear.quantizer.fp8_gemms
            high_gemms = find_recipe(recipe.precision_of(linear.name)).traits.high_precision
            reasons = tuple(
                f"{gemm}, {'model.fp8_recipe' if gemm in high_gemms else 'chosen by product'}"
                for gemm in GEMMS
                if gemm not in fp8
            )
        flops = int(2 * linear.weight.numel() * linear.visits)
        yield PlannedGemms(linear.name, flops, fp8, reasons)


def kernels_of(recipe: Fp8Recipe, engine: Engine, device: torch.device, work: torch.dtype) -> str:
    """Return a description of the kernels that run the recipe's products and casts on `device`.

    `engine` is the scaling state's; `work` is the dtype of the products' results.
    """
    named = [recipe.name, *(rule.precision for rule in recipe.modules)]
    recipes = [name for name in dict.fromkeys(named) if name != HIGH_PRECISION]
    in_hardware = [
        all(
            layout is not None and engine.multiplies(layout, work)
            for layout in find_recipe(name).traits.layouts
        )
        for name in recipes
    ]
    wide = DTYPE_NAMES[wide_dtype(device, work)].upper()
    kinds = " and ".join(dict.fromkeys(find_recipe(name).traits.kind for name in recipes))
    over = f"{kinds} bytes"
    if kinds == "simulated":
        wide, over = "FP32", "the values of the rule"
    cores, emulated = f"{kinds} tensor cores", f"emulated: {wide} GEMMs over {over}"
    if all(in_hardware):
        products = cores
    elif not any(in_hardware):
        products = emulated
    else:
        mixed = zip(recipes, in_hardware, strict=True)
        products = ", ".join(f"{label_of(name)} on {cores}" for name, runs in mixed if runs)
        products += f", the others {emulated}"
    casts = _caster(engine, device)
    in_c = casts == "C"
    in_torch = [
        name
        for name in recipes
        if not find_recipe(name).has_kernels() and not (in_c and find_recipe(name).has_casts_in_c())
    ]
    if in_torch and casts != "torch":
        casts = (
            "torch"
            if len(in_torch) == len(recipes)
            else f"{casts}, of {label_of(in_torch[0])} in torch"
        )
    elif casts == "torch" and device.type == "cpu":
        casts += f" ({library().note})"  # why they are not in C
    return f"{products}, casts in {casts}"


def _caster(engine: Engine, device: torch.device) -> str:
    if engine.uses_triton:
        return "Triton"
    return "C" if device.type == "cpu" and library().lib is not None else "torch"
