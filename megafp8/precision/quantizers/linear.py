"""A linear's three quantizers together: which product reads which tensor in which precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megafp8.precision.engine import Engine
from megafp8.precision.formats import Fp8Format
from megafp8.precision.producers import Producer
from megafp8.precision.quantizers.base import (
    READERS,
    Fp8Operands,
    Need,
    Operand,
    Role,
    SavedForm,
    StoringQuantizer,
    TensorQuantizer,
    column_sum,
)
from megafp8.precision.quantizers.delayed import DelayedQuantizer
from megafp8.precision.scaling import ScalingState
from megafp8.precision.tensor import Fp8Tensor
from megafp8.specs.precision import GEMMS, GemmName


class Operands(NamedTuple):
    """One tensor as its two products read it: in FP8, or as it is."""

    along_last: Operand
    along_first: Operand


@dataclass(frozen=True)
class LinearQuantizer:
    """`high_precision`: the products that are not done in FP8. `name` is the linear's."""

    name: str
    state: ScalingState
    tensors: dict[Role, TensorQuantizer]
    high_precision: frozenset[GemmName]

    def products(self, gemm: GemmName) -> tuple[Engine, bool]:
        """Where this product runs, and whether it may accumulate fast there."""
        return self.state.engine, gemm in self.state.recipe.fast_accumulation

    def is_fp8(self, gemm: GemmName) -> bool:
        return gemm not in self.high_precision

    @property
    def fp8_gemms(self) -> tuple[GemmName, ...]:
        return tuple(gemm for gemm in GEMMS if self.is_fp8(gemm))

    def operands(self, role: Role, x_MN: torch.Tensor, *, with_first: bool = True) -> Operands:
        """`with_first` False: only the product of the forward pass will be done."""
        need = self._need(role, with_first)
        if not need.any:
            return Operands(x_MN, x_MN)
        return self._chosen(role, x_MN, self.tensors[role].quantize(x_MN, need))

    def operands_and_sum(self, role: Role, x_MN: torch.Tensor) -> tuple[Operands, torch.Tensor]:
        """With the FP32 sum of each column of the tensor that was not quantized, [N]."""
        need = self._need(role, with_first=True)
        if not need.any:
            return Operands(x_MN, x_MN), column_sum(x_MN)
        quantized, total_N = self.tensors[role].quantize_and_sum(x_MN, need)
        return self._chosen(role, x_MN, quantized), total_N

    def saved_form(self) -> SavedForm:
        """Of the input between forward and backward."""
        if not self.is_fp8("grad_weight"):
            return SavedForm()
        return self.tensors["input"].saved_form()

    def fuses(self, *, with_first: bool) -> bool:
        """Whether what makes the input may cast it in the same pass."""
        need = self._need("input", with_first)
        is_whole = need.last and need.first == with_first  # else a product reads it as it is
        of_input = self.tensors["input"]
        return is_whole and isinstance(of_input, DelayedQuantizer) and self.state.engine.uses_triton

    def produce(
        self, producer: Producer, x_MX: torch.Tensor, *, with_first: bool
    ) -> tuple[Operands, tuple[torch.Tensor, ...]]:
        """The input as `producer` makes it of `x_MX`, and what its backward needs."""
        of_input = self.tensors["input"]
        assert isinstance(of_input, DelayedQuantizer)
        need, watched = self._need("input", with_first), bool(self.state.observers)
        quantized, made = of_input.produce(producer, x_MX, need, with_plain=watched)
        if made.plain is not None:
            self._observe("input", made.plain, quantized)
        last, first = quantized
        assert last is not None
        return Operands(last, last if first is None else first), made.kept

    def store(self, weight_OI: torch.Tensor) -> Fp8Tensor:
        """A weight that is to be kept in FP8 alone."""
        quantized = self.tensors["weight"].quantize(weight_OI, Need(True, True))
        stored = self._chosen("weight", weight_OI, quantized).along_last
        assert isinstance(stored, Fp8Tensor) and quantized.along_first is not None
        same = stored.dequant_scale.data_ptr() == quantized.along_first.dequant_scale.data_ptr()
        assert same, "one quantization serves both products"
        return stored

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """What to cast a weight with that is kept in FP8 alone and of which several ranks hold
        parts; `amax` (0-d, may be overwritten) is that of them all."""
        quantizer = self.tensors["weight"]
        assert isinstance(quantizer, StoringQuantizer), "one scale serves the whole weight"
        return quantizer.store_scale(amax)

    def observe_part(self, part_MN: torch.Tensor, stored: Fp8Tensor) -> None:
        """Show the observers a part of a weight that is kept in FP8 alone."""
        for observe in self.state.observers:
            observe(f"{self.name}.weight", part_MN, stored, stored)

    def _chosen(self, role: Role, x_MN: torch.Tensor, quantized: Fp8Operands) -> Operands:
        self._observe(role, x_MN, quantized)
        last, first = quantized
        return Operands(x_MN if last is None else last, x_MN if first is None else first)

    def _observe(self, role: Role, x_MN: torch.Tensor, quantized: Fp8Operands) -> None:
        for observe in self.state.observers:
            observe(f"{self.name}.{role}", x_MN, quantized.along_last, quantized.along_first)

    def _need(self, role: Role, with_first: bool) -> Need:
        last, first = READERS[role]
        enabled = self.state.fp8_enabled
        return Need(enabled and self.is_fp8(last), enabled and with_first and self.is_fp8(first))
