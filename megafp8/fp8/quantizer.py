"""Quantize a linear's three tensors: which product reads which tensor in which precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.engine import Engine
from megafp8.fp8.formats import Fp8Format
from megafp8.fp8.fused import Make, Produced
from megafp8.fp8.quantizers.base import (
    READERS,
    Need,
    Operands,
    Role,
    SavedForm,
    TensorQuantizer,
    column_sum,
)
from megafp8.fp8.scaling import ScalingState
from megafp8.fp8.tensor import Fp8Tensor
from megafp8.specs.precision import GEMMS
from megafp8.specs.traits import GemmName


@dataclass(frozen=True)
class LinearQuantizer:
    """Quantize the three tensors of the linear `name`, each by its `TensorQuantizer`.

    `high_precision` are the products that are not done in FP8; the tensors that they read stay as
    they are.
    """

    name: str
    state: ScalingState
    tensors: dict[Role, TensorQuantizer]
    high_precision: frozenset[GemmName]

    def products(self, gemm: GemmName) -> tuple[Engine, bool]:
        """Return the engine of this product, and whether it may accumulate fast there."""
        return self.state.engine, gemm in self.state.recipe.fast_accumulation

    def is_fp8(self, gemm: GemmName) -> bool:
        """Whether this product runs in FP8."""
        return gemm not in self.high_precision

    @property
    def fp8_gemms(self) -> tuple[GemmName, ...]:
        """Return the products that run in FP8."""
        return tuple(gemm for gemm in GEMMS if self.is_fp8(gemm))

    def operands(self, role: Role, x_MN: torch.Tensor, *, with_first: bool = True) -> Operands:
        """Return one of the linear's tensors as its products read it.

        `with_first` False says that only the product of the forward pass will be done.
        """
        return self._quantized(role, x_MN, with_first=with_first, with_sum=False)[0]

    def operands_and_sums(
        self, role: Role, x_MN: torch.Tensor, *, with_sum: bool = True
    ) -> tuple[Operands, torch.Tensor | None]:
        """Return `operands`, and FP32 sums of the tensor's columns, [P, N], or None.

        Each of the P rows has the sums over a group of the tensor's rows. `with_sum` asks for them.
        """
        return self._quantized(role, x_MN, with_first=True, with_sum=with_sum)

    def _quantized(
        self, role: Role, x_MN: torch.Tensor, *, with_first: bool, with_sum: bool
    ) -> tuple[Operands, torch.Tensor | None]:
        need = self._need(role, with_first)
        if not need.any:
            return Operands(x_MN, x_MN), column_sum(x_MN) if with_sum else None
        operands, sums_PN = self.tensors[role].quantize(x_MN, need, with_sum=with_sum)
        self._observe(role, x_MN, operands)
        return operands, sums_PN

    def saved_form(self) -> SavedForm:
        """Return how the input is kept between forward and backward."""
        if not self.is_fp8("grad_weight"):
            return SavedForm()
        return self.tensors["input"].saved_form()

    def fuses(self, role: Role, *, with_first: bool = True) -> bool:
        """Whether the kernel that computes this tensor may cast it in the same pass."""
        need = self._need(role, with_first)
        is_whole = need.last and need.first == with_first  # no product reads it as it is
        return is_whole and self.tensors[role].can_fuse

    def produce(
        self, role: Role, make: Make, *, with_first: bool = True, with_sum: bool = False
    ) -> tuple[Operands, Produced]:
        """Return one of the linear's tensors as `make` computes and casts it, and all it made."""
        need, is_observed = self._need(role, with_first), bool(self.state.observers)
        operands, made = self.tensors[role].produce(
            make, need, with_plain=is_observed, with_sum=with_sum
        )
        if made.plain is not None:
            self._observe(role, made.plain, operands)
        return operands, made

    def store(self, weight_OI: torch.Tensor) -> Fp8Tensor:
        """Return a weight [O, I] in FP8, to be kept in FP8 alone.

        One quantization serves both products.
        """
        operands, _ = self.tensors["weight"].quantize(weight_OI, Need(True, True))
        self._observe("weight", weight_OI, operands)
        last, first = operands
        assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
        assert last.dequant_scale.data_ptr() == first.dequant_scale.data_ptr(), "one scale for both"
        return last

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """Return the scale (0-d FP32) and format to cast a weight with of which ranks hold parts.

        `amax` (0-d FP32, may be overwritten) is that of all parts.
        """
        return self.tensors["weight"].store_scale(amax)

    def observe_part(self, part_MN: torch.Tensor, stored: Fp8Tensor) -> None:
        """Show the observers a part of a weight that is kept in FP8 alone."""
        for observe in self.state.observers:
            observe(f"{self.name}.weight", part_MN, stored, stored)

    def _observe(self, role: Role, x_MN: torch.Tensor, operands: Operands) -> None:
        last, first = (o if isinstance(o, Fp8Tensor) else None for o in operands)
        for observe in self.state.observers:
            observe(f"{self.name}.{role}", x_MN, last, first)

    def _need(self, role: Role, with_first: bool) -> Need:
        last, first = READERS[role]
        enabled = self.state.fp8_enabled
        return Need(enabled and self.is_fp8(last), enabled and with_first and self.is_fp8(first))
