"""Run torchao's Float8 linears under our recipe.

torchao computes scales from each tensor itself, so it keeps no state. Without FP8 tensor cores its
own `emulate` runs the very same casts and multiplies their values in FP32; no recipe is replaced by
another.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8_numerics import bf16
from fp8_numerics.dtypes import DTYPE_NAMES
from fp8_numerics.gemm import GemmCounter
from megafp8.backends.native import NativeBackend, planned_of
from megafp8.backends.protocol import Backend
from megafp8.fp8.build import linear_quantizer
from megafp8.fp8.linear import Linear, LinearComm
from megafp8.fp8.quantizer import LinearQuantizer, Role
from megafp8.fp8.scaling import ScalingState, formats_of
from megafp8.fp8.weights import GatheredFp8
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.parts import NativeParts, PartsArgs
from megafp8.specs import Fp8Recipe, RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.precision import GEMMS, PlannedGemms
from megafp8.specs.recipes import HIGH_PRECISION, find_recipe, names_where
from megafp8.specs.traits import GemmName

OLDEST = (0, 14)
TRAITS = BACKENDS["torchao"]
INSTALL = "Install `torchao`, or use model.fp8_backend=native"


def import_torchao() -> ModuleType:
    """Import `torchao.float8` without the messages that it logs at its import.

    They concern kernels that it cannot load and enums that torch knows by now, not the run.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torchao.float8")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def version() -> str:
    """Return the version of the installed torchao."""
    return importlib.metadata.version("torchao")


def why_torchao_cannot(recipe: Fp8Recipe, device: torch.device) -> str | None:
    """Return why torchao cannot run this recipe here, or None where it can."""
    try:
        installed = version()
    except importlib.metadata.PackageNotFoundError:
        return f"the package torchao is not installed. {INSTALL}"
    if tuple(int(n) for n in installed.split(".")[:2]) < OLDEST:
        return f"torchao {installed} is older than {'.'.join(map(str, OLDEST))}"
    if "torchao" not in find_recipe(recipe.name).traits.backends:
        known = names_where(lambda traits: "torchao" in traits.backends)
        return f"torchao has no {recipe.name} recipe; it has {', '.join(known)}"
    if recipe.params_in_fp8:
        return "torchao keeps weights in high precision (model.fp8_params=True is not for it)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no FP8 tensor cores (compute capability 8.9 or above has)"
    return None


def make_config(recipe: Fp8Recipe, *, emulate: bool) -> Any:
    """Return the `Float8LinearConfig` that means the same as `recipe`.

    It starts from torchao's recipe of that name; formats, power-of-two scales, accumulation,
    padding and GEMMs in high precision are then what our recipe says.
    """
    float8 = import_torchao()
    config = importlib.import_module("torchao.float8.config")
    named = float8.Float8LinearConfig.from_recipe_name(
        find_recipe(recipe.name).traits.backends["torchao"]
    )
    forward, backward = (fmt.dtype for fmt in formats_of(recipe))
    high = set(recipe.high_precision_gemms)

    def cast(base: Any, dtype: torch.dtype, place: GemmName) -> Any:
        if place in high:
            return config.CastConfig(scaling_type=config.ScalingType.DISABLED, target_dtype=dtype)
        return dataclasses.replace(base, target_dtype=dtype)

    def accumulation(place: GemmName) -> Any:
        return config.Float8GemmConfig(use_fast_accum=place in recipe.fast_accumulation)

    return float8.Float8LinearConfig(
        cast_config_input=cast(named.cast_config_input, forward, "output"),
        cast_config_input_for_grad_weight=cast(
            named.cast_config_input_for_grad_weight, forward, "grad_weight"
        ),
        cast_config_weight=cast(named.cast_config_weight, forward, "output"),
        cast_config_weight_for_grad_input=cast(
            named.cast_config_weight_for_grad_input, forward, "grad_input"
        ),
        cast_config_grad_output=cast(named.cast_config_grad_output, backward, "grad_input"),
        cast_config_grad_output_for_grad_weight=cast(
            named.cast_config_grad_output_for_grad_weight, backward, "grad_weight"
        ),
        gemm_config_output=accumulation("output"),
        gemm_config_grad_input=accumulation("grad_input"),
        gemm_config_grad_weight=accumulation("grad_weight"),
        round_scales_to_power_of_2=recipe.power_2_scale,
        pad_inner_dim=recipe.pad_inner_dim,
        emulate=emulate,
    )


class TorchaoLinear(nn.Module):
    """Run torchao's linear over our parameters, and count its GEMMs.

    `witness` is our own quantizer of this linear, whose casts equal torchao's bit for bit: while
    observers are attached, it repeats the casts for them, and training uses torchao's. With
    `gathered_dtype` the weight is gathered from FP8 parts for each use, in that dtype
    (`weight_form`): the largest element is exact there, so torchao's cast finds the same scale and
    numbers again.
    """

    def __init__(
        self,
        weight_OI: nn.Parameter,
        bias_O: nn.Parameter | None,
        config: Any,
        counter: GemmCounter,
        *,
        name: str,
        fp8_in_evaluation: bool,
        witness: LinearQuantizer | None = None,
        gathered_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        out_features, in_features = weight_OI.shape
        # On meta it allocates nothing: torchao converts a module, and the parameters are there.
        plain = nn.Linear(in_features, out_features, bias=False, device="meta")
        plain.weight, plain.bias = weight_OI, bias_O  # type: ignore[assignment]  # None is allowed
        self.linear: nn.Linear = import_torchao().convert_to_float8_training(plain, config=config)
        self.counter, self.fp8_in_evaluation = counter, fp8_in_evaluation
        self.witness = witness
        self.weight_form: GatheredFp8 | None = None  # None if the weight crosses ranks as it is
        if gathered_dtype is not None:
            assert witness is not None
            self.weight_form = GatheredFp8(witness, gathered_dtype, fills_weight=True)
        disabled = importlib.import_module("torchao.float8.config").ScalingType.DISABLED
        casts = {
            "output": config.cast_config_input,
            "grad_input": config.cast_config_grad_output,
            "grad_weight": config.cast_config_input_for_grad_weight,
        }
        self._high = frozenset(p for p, cast in casts.items() if cast.scaling_type is disabled)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output, [..., I] -> [..., O], in the input's dtype."""
        in_fp8 = self.training or self.fp8_in_evaluation
        if in_fp8:
            output: torch.Tensor = self.linear(input)
        else:
            output = bf16.linear(input, self.linear.weight, self.linear.bias)
        is_seen = in_fp8 and self._is_observed()
        if is_seen:
            self._show("input", input)
            if self.weight_form is None:  # `agree_on_scale` has shown it before it was rounded
                self._show("weight", self.linear.weight)
        flops = 2 * input.numel() * self.linear.out_features
        self._count("output", flops, input.dtype, in_fp8)
        if output.requires_grad:
            dtype, needs_input = input.dtype, input.requires_grad

            def count_backward(grad: torch.Tensor) -> None:
                if is_seen:
                    self._show("grad_output", grad)
                if needs_input:
                    self._count("grad_input", flops, dtype, in_fp8)
                self._count("grad_weight", flops, dtype, in_fp8)

            output.register_hook(count_backward)
        return output

    def _is_observed(self) -> bool:
        if self.witness is None or torch.compiler.is_compiling():
            return False
        state = self.witness.state
        return state.recording and bool(state.observers)

    @torch.no_grad()
    def _show(self, role: Role, x: torch.Tensor) -> None:
        assert self.witness is not None
        self.witness.operands(role, x.detach().flatten(0, -2))

    @property
    def weight(self) -> nn.Parameter:
        """Return the weight [O, I], a plain tensor while FSDP has gathered it."""
        weight: Any = self.linear.weight  # FSDP gathers a plain tensor
        return weight  # type: ignore[no-any-return]

    def planned(self) -> PlannedGemms:
        """Return which of the linear's products run in FP8."""
        fp8 = tuple(gemm for gemm in GEMMS if gemm not in self._high)
        high = ", ".join(gemm for gemm in GEMMS if gemm in self._high)
        reasons = (f"{high}, chosen by product",) if high else ()
        return PlannedGemms(self.name, 2 * self.linear.weight.numel(), fp8, reasons)

    def _count(self, place: GemmName, flops: int, dtype: torch.dtype, in_fp8: bool) -> None:
        wide = DTYPE_NAMES[dtype]
        self.counter.add("fp8" if in_fp8 and place not in self._high else wide, place, flops)


class TorchaoParts(NativeParts):
    """Make every linear of the blocks with torchao, except the model's first and last linear.

    The first and last linear stay in the compute dtype, as in Accelerate's use of torchao, unless a
    module rule of the recipe names them. Embedding and head always stay in the compute dtype.
    """

    def __init__(
        self,
        parts_args: PartsArgs,
        *,
        recipe: Fp8Recipe,
        seen_by: ScalingState,
        emulate: bool,
        gathers_in_fp8: bool = False,
    ) -> None:
        super().__init__(parts_args)
        assert self.tp.size == 1, "torchao's linears are not tensor-parallel"
        self.recipe, self.seen_by, self.emulate = recipe, seen_by, emulate
        self.gathers_in_fp8 = gathers_in_fp8

    def _linear(
        self, name: str, weight: nn.Parameter, bias: nn.Parameter | None, comm: LinearComm
    ) -> Any:
        chosen = TRAITS.precision_of(self.recipe, name, self.spec.num_layers)
        if chosen == HIGH_PRECISION:
            return super()._linear(name, weight, bias, comm)
        return TorchaoLinear(
            weight,
            bias,
            make_config(dataclasses.replace(self.recipe, name=chosen), emulate=self.emulate),
            self.counter,
            name=name,
            fp8_in_evaluation=self.recipe.fp8_in_evaluation,
            witness=linear_quantizer(self.seen_by, name),
            gathered_dtype=self.dtype if self.gathers_in_fp8 else None,
        )


class TorchaoBackend(NativeBackend):
    """torchao's linears, and our own where it keeps high precision."""

    def __init__(self, spec: RunSpec, mesh: Mesh, parts_args: PartsArgs) -> None:
        """Let health look through a scaling state of ours, as torchao keeps none."""
        Backend.__init__(self, spec, mesh, parts_args)
        recipe, fsdp = spec.precision.fp8, spec.parallel.fsdp
        assert recipe is not None
        self.scaling = seen_by = ScalingState(recipe)
        seen_by.to(mesh.device)
        self.parts = TorchaoParts(
            parts_args,
            recipe=recipe,
            seen_by=seen_by,
            emulate=mesh.device.type == "cpu",
            gathers_in_fp8=fsdp is not None and fsdp.torchao_in_fp8,
        )

    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for module in model.modules():
            if isinstance(module, TorchaoLinear):
                module = module.linear
            elif not isinstance(module, Linear):
                continue
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            found.append(weight)
        return found

    kernel, fp8_flops, weight_copies = Backend.kernel, Backend.fp8_flops, Backend.weight_copies

    @classmethod
    def why_not(cls, spec: RunSpec, device: torch.device) -> Iterable[str]:
        recipe = spec.precision.fp8
        reason = "torchao runs FP8 alone" if recipe is None else why_torchao_cannot(recipe, device)
        return () if reason is None else (reason,)

    def describe(self) -> str:
        emulated = ", emulated: FP32 GEMMs over the same casts"
        return (
            f"torchao {version()}{emulated if self.device.type == 'cpu' else ''}; first and last "
            "linear in high precision unless model.fp8_modules names them"
        )

    def planned(self, model: nn.Module) -> Iterator[PlannedGemms]:
        assert self.spec.precision.fp8 is not None
        reason = "first or last, kept by torchao's default"
        yield from planned_of(model, self.spec.precision.fp8, unnamed=reason)
        for module in model.modules():
            if isinstance(module, TorchaoLinear):
                yield module.planned()
