"""What a recipe does with one tensor of one linear.

Each of a linear's three tensors is read by two products, in one of which the sum runs along its
last dim, in the other along its first:

    tensor              along last                along first
    input [T, I]        output (over I)           grad_weight (over T)
    weight [O, I]       output (over I)           grad_input (over O)
    grad_output [T, O]  grad_input (over O)       grad_weight (over T)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from megafp8.precision.formats import Fp8Format
from megafp8.precision.tensor import Fp8Tensor
from megafp8.specs.precision import BLOCK, GemmName

Operand = torch.Tensor | Fp8Tensor
Role = Literal["input", "weight", "grad_output"]

# (the product that sums along the last dim, the one that sums along the first)
READERS: dict[Role, tuple[GemmName, GemmName]] = {
    "input": ("output", "grad_weight"),
    "weight": ("output", "grad_input"),
    "grad_output": ("grad_input", "grad_weight"),
}


class Fp8Operands(NamedTuple):
    """One tensor in FP8 as its two products read it; None where that product is not in FP8."""

    along_last: Fp8Tensor | None
    along_first: Fp8Tensor | None


class Need(NamedTuple):
    """For which of the two products FP8 is wanted."""

    last: bool
    first: bool

    @property
    def any(self) -> bool:
        return self.last or self.first


@dataclass(frozen=True)
class SavedForm:
    """How an input [T, I] is kept for the weight gradient: as it is (`scales` None), or in FP8 of
    `dtype` with one scale, one for each column, or one for each 128 elements of a column.

    `is_transposed`: its bytes lie in memory as [I, T].
    """

    scales: Literal["tensor", "row", "block"] | None = None
    dtype: torch.dtype = torch.uint8
    is_transposed: bool = False

    def payload_shape(self, tokens: int, features: int) -> list[int]:
        """As it lies in memory; nothing where the input itself is kept."""
        if self.scales is None:
            return [0]
        return [features, tokens] if self.is_transposed else [tokens, features]

    def scale_shape(self, tokens: int, features: int) -> list[int]:
        if self.scales is None:
            return [0]
        if self.scales == "tensor":
            return []
        return [1 if self.scales == "row" else -(-tokens // BLOCK), features]


class TensorQuantizer(Protocol):
    """Quantizes one tensor of one linear; what it keeps between calls is in the `ScalingState`."""

    def quantize(self, x_MN: torch.Tensor, need: Need) -> Fp8Operands: ...

    def quantize_and_sum(self, x_MN: torch.Tensor, need: Need) -> tuple[Fp8Operands, torch.Tensor]:
        """With the FP32 sum of each column of the tensor that was not quantized, [N]."""
        ...

    def saved_form(self) -> SavedForm:
        """Of what the product that sums along the first dim reads."""
        ...


@runtime_checkable
class StoringQuantizer(Protocol):
    """One scale for the whole tensor, known before all of it is there."""

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]: ...


def column_sum(x_MN: torch.Tensor) -> torch.Tensor:
    """A bias gradient: FP32 [N]."""
    return x_MN.sum(0, dtype=torch.float32)


def both(x_fp8: Fp8Tensor, need: Need) -> Fp8Operands:
    """One quantization that serves both products."""
    return Fp8Operands(x_fp8 if need.last else None, x_fp8 if need.first else None)
