"""The parts of a GPT whose linears are torchao's, on one rank of each model."""

from __future__ import annotations

from typing import Any

from megafp8.models.init import constant, parameter
from megafp8.parallel.parts import NativeParts
from megafp8.precision.backends.torchao_linear import TorchaoLinear, make_config
from megafp8.precision.linear import LinearComm
from megafp8.specs import Fp8Recipe
from megafp8.specs.placement import Piece


class TorchaoParts(NativeParts):
    """Every linear of the blocks but the model's first and last is torchao's.

    Those two stay in the compute dtype (as in Accelerate's use of torchao), and so do embedding
    and head.
    """

    def __init__(
        self, *args: Any, recipe: Fp8Recipe, emulate: bool, pad_inner_dim: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, scaling=None, **kwargs)
        assert self.tp.size == 1, "torchao's linears are not tensor-parallel"
        self.recipe = recipe
        self.config = make_config(recipe, emulate=emulate, pad_inner_dim=pad_inner_dim)

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        weights: list[Piece],
        biases: list[Piece],
        std: float,
        comm: LinearComm,
    ) -> Any:
        if name in high_precision_names(self.spec.num_layers):
            return super()._linear(name, shape, weights, biases, std, comm)
        return TorchaoLinear(
            self.normal_parameter(shape, weights, std),
            parameter(shape[:1], biases, constant(0.0), self.dtype),
            self.config,
            self.counter,
            fp8_in_evaluation=self.recipe.fp8_in_evaluation,
        )


def high_precision_names(num_layers: int) -> tuple[str, str]:
    """The first and the last linear of the blocks, by the names of their FP8 tensors."""
    return "layers.0.attention.qkv", f"layers.{num_layers - 1}.mlp.fc2"
