"""Define the parts of a GPT whose linears are torchao's, without tensor parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any

from megafp8.backends.torchao.linear import TorchaoLinear, make_config
from megafp8.models.init import constant, parameter
from megafp8.parallel.parts import Given, NativeParts
from megafp8.precision.linear import LinearComm
from megafp8.precision.recipes.build import linear_quantizer
from megafp8.precision.scaling import ScalingState
from megafp8.specs import Fp8Recipe
from megafp8.specs.geometry import Piece
from megafp8.specs.precision import HIGH_PRECISION, ModulePrecision


class TorchaoParts(NativeParts):
    """Makes every linear of the blocks with torchao, except the model's first and last linear.

    The first and last linear stay in the compute dtype, as in Accelerate's use of torchao, unless a
    module rule of the recipe names them. Embedding and head always stay in the compute dtype.
    """

    def __init__(
        self,
        given: Given,
        *,
        recipe: Fp8Recipe,
        seen_by: ScalingState,
        emulate: bool,
        gathers_in_fp8: bool = False,
    ) -> None:
        super().__init__(given)
        assert self.tp.size == 1, "torchao's linears are not tensor-parallel"
        self.recipe, self.seen_by, self.emulate = recipe, seen_by, emulate
        self.gathers_in_fp8 = gathers_in_fp8

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        weights: list[Piece],
        biases: list[Piece],
        std: float,
        comm: LinearComm,
    ) -> Any:
        chosen = precision_of(self.recipe, name, self.spec.num_layers)
        if chosen == HIGH_PRECISION:
            return super()._linear(name, shape, weights, biases, std, comm)
        bias = parameter(shape[:1], biases, constant(0.0), self.dtype) if self.spec.bias else None
        return TorchaoLinear(
            self.normal_parameter(shape, weights, std),
            bias,
            make_config(dataclasses.replace(self.recipe, name=chosen), emulate=self.emulate),
            self.counter,
            name=name,
            fp8_in_evaluation=self.recipe.fp8_in_evaluation,
            witness=linear_quantizer(self.seen_by, name),
            gathered_dtype=self.dtype if self.gathers_in_fp8 else None,
        )


def precision_of(recipe: Fp8Recipe, name: str, num_layers: int) -> ModulePrecision:
    """Return the precision of linear `name`: that of its rule, else the default.

    Without a rule the first and the last linear stay out of FP8.
    """
    is_named = any(rule.matches(name) for rule in recipe.modules)
    if not is_named and name in first_and_last(num_layers):
        return HIGH_PRECISION
    return recipe.precision_of(name)


def first_and_last(num_layers: int) -> tuple[str, str]:
    """Return the names of the blocks' first and last linear."""
    return "layers.0.attention.qkv", f"layers.{num_layers - 1}.mlp.fc2"
