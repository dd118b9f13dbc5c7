"""Define what a recipe does with one tensor of one linear.

Each of a linear's three tensors is read by two products, in one of which the sum runs along its
last dim, in the other along its first:

    tensor              along last                along first
    input [T, I]        output (over I)           grad_weight (over T)
    weight [O, I]       output (over I)           grad_input (over O)
    grad_output [T, O]  grad_input (over O)       grad_weight (over T)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.fused import Make, Produced
from megafp8.fp8.tensor import Fp8Tensor
from megafp8.specs.traits import GemmName, Scales
from megafp8.specs.traits import Role as Role

if TYPE_CHECKING:
    from megafp8.fp8.scaling import ReduceMax, ScalingState

Operand = torch.Tensor | Fp8Tensor

# (the product that sums along the last dim, the one that sums along the first)
READERS: dict[Role, tuple[GemmName, GemmName]] = {
    "input": ("output", "grad_weight"),
    "weight": ("output", "grad_input"),
    "grad_output": ("grad_input", "grad_weight"),
}


class Operands(NamedTuple):
    """Hold one tensor as its two products read it: in FP8, or as it is.

    `along_last` is for the product that sums along the tensor's last dim, `along_first` for the
    other.
    """

    along_last: Operand
    along_first: Operand


class Need(NamedTuple):
    """Say for which of a tensor's two products FP8 is wanted.

    `last` is the product that sums along the tensor's last dim, `first` the other.
    """

    last: bool
    first: bool

    @property
    def any(self) -> bool:
        """Whether FP8 is wanted for a product."""
        return self.last or self.first


@dataclass(frozen=True)
class SavedForm:
    """Say how an input [T, I] is kept for the product for `grad_weight`.

    `scales` None keeps the input itself. Otherwise it is kept in FP8 of `dtype`, with such scales
    along T. `is_transposed` says that its bytes lie in memory as [I, T].
    """

    scales: Scales | None = None
    dtype: torch.dtype = torch.uint8
    is_transposed: bool = False

    def payload_shape(self, tokens: int, features: int) -> list[int]:
        """Return the payload's shape as it lies in memory; [0] where the input itself is kept."""
        if self.scales is None:
            return [0]
        return [features, tokens] if self.is_transposed else [tokens, features]

    def scale_shape(self, tokens: int, features: int) -> list[int]:
        """Return the shape of the scales; [0] where the input itself is kept."""
        if self.scales is None:
            return [0]
        if self.scales.is_one:
            return []
        along, across = self.scales.along or tokens, self.scales.across or features
        return [-(-tokens // along), -(-features // across)]


class Quantizing(NamedTuple):
    """Say what a recipe makes a quantizer for: the tensor `role` of the linear `name`.

    `reduce_max` takes the maximum over the ranks that hold parts of the tensor, in place; None says
    that this rank has all of it.
    """

    state: ScalingState
    name: str
    role: Role
    fmt: Fp8Format
    power_2: bool
    reduce_max: ReduceMax | None


class TensorQuantizer(ABC):
    """Quantize one tensor of one linear, by the rule of one recipe.

    Each linear has one for its input, its weight and its output gradient. What is kept between
    calls (amaxes and scales of `delayed`) is in the `ScalingState`. To add a recipe, implement
    `quantize` and `saved_form` and name the class in `recipes.build`.
    """

    @abstractmethod
    def quantize(
        self, x_MN: torch.Tensor, need: Need, *, with_sum: bool = False
    ) -> tuple[Operands, torch.Tensor | None]:
        """Return `x_MN` in FP8 for the products in `need`, and as it is for the others.

        `x_MN` is FP32, BF16 or FP16 and stays unchanged. With `with_sum` the second result has the
        FP32 sums of each column of `x_MN` itself over groups of rows, [P, N] with P >= 1; without
        it, it is None. It is called once for each
        microbatch's input and output gradient, and for a weight as often as its form (`weights`)
        asks.
        """

    @abstractmethod
    def saved_form(self) -> SavedForm:
        """Return the form of the operand that the product along the first dim reads.

        It is called only for the input, when a layer is compiled: the graph must know what is kept.
        """

    @property
    def can_fuse(self) -> bool:
        """Whether a kernel that computes the tensor may cast it too (`produce`)."""
        return False

    def produce(
        self, make: Make, need: Need, *, with_plain: bool, with_sum: bool = False
    ) -> tuple[Operands, Produced]:
        """Return the FP8 operands of the tensor that `make` computes, and all that it made.

        `need.last` must be set. `with_plain` asks for the tensor in high precision as well,
        `with_sum` for the sums of its columns. It is called only where `can_fuse` is set.
        """
        raise AssertionError(f"{type(self).__name__} needs its tensor before it knows the scale")

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """Return the scale (0-d FP32) and format to cast a whole tensor of this amax with.

        `amax` (0-d FP32, may be overwritten) is known before all parts of the tensor are there. It
        is called for weights that ranks hold parts of; recipes with several scales per tensor have
        no such scale.
        """
        raise AssertionError(f"{type(self).__name__} has no single scale for a tensor")


def column_sum(x_MN: torch.Tensor) -> torch.Tensor:
    """Return the FP32 sum of each column, [1, N]: the gradient of a bias."""
    return x_MN.sum(0, keepdim=True, dtype=torch.float32)


def operands_of(x_MN: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None) -> Operands:
    """Return the operands of a tensor; None where its product reads the tensor as it is."""
    return Operands(x_MN if last is None else last, x_MN if first is None else first)


def serving_both(x_MN: torch.Tensor, x_fp8: Fp8Tensor, need: Need) -> Operands:
    """Return the operands where one quantization serves both products."""
    return operands_of(x_MN, x_fp8 if need.last else None, x_fp8 if need.first else None)
