"""Quantize a linear's three tensors: which product reads which tensor in which precision.

Each tensor is read by two products, in one of which the sum runs along its last dim, in the other
along its first:

    tensor              along last                along first
    input [T, I]        output (over I)           grad_weight (over T)
    weight [O, I]       output (over I)           grad_input (over O)
    grad_output [T, O]  grad_input (over O)       grad_weight (over T)

How a tensor becomes FP8 is the rule of a recipe (`recipes/`); casts with one scale for the whole
tensor, which several recipes have, are here.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8_numerics.cast import Fp8Tensor, column_sums, quantize, with_nans
from fp8_numerics.formats import Fp8Format
from fp8_numerics.gemm import wide_dtype
from fp8_numerics.philox import Rows
from fp8_numerics.swizzle import swizzled_size
from megafp8.fp8.draws import WHOLE, Part, TokenOrder
from megafp8.fp8.fused import Make, Produced
from megafp8.fp8.scaling import ReduceMax, ScalingState, Slot
from megafp8.specs.precision import GEMMS
from megafp8.specs.recipe import Recipe
from megafp8.specs.traits import TENSOR, GemmName, Scales
from megafp8.specs.traits import Role as Role

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


class WantsFp8(NamedTuple):
    """Say for which of a tensor's two products FP8 is wanted.

    `last` is the product that sums along the tensor's last dim, `first` the other.
    """

    last: bool
    first: bool


@dataclass(frozen=True)
class SavedForm:
    """Say how an input [T, I] is kept for the product for `grad_weight`.

    `scales` None keeps the input itself. Otherwise it is kept in FP8 of `dtype`, with such scales
    along T. `is_transposed` says that its bytes lie in memory as [I, T], and `is_packed` that it is
    packed for tensor cores. The tokens are filled up with zeros to a multiple of `fill`.
    """

    scales: Scales | None = None
    dtype: torch.dtype = torch.uint8
    is_transposed: bool = False
    is_packed: bool = False
    fill: int = 1

    @property
    def scale_dtype(self) -> torch.dtype:
        """Return the dtype in which the scales are kept; packed ones are bytes."""
        return torch.uint8 if self.is_packed else torch.float32

    def payload_shape(self, tokens: int, features: int) -> list[int]:
        """Return the payload's shape as it lies in memory; [0] where the input itself is kept."""
        if self.scales is None:
            return [0]
        tokens += -tokens % self.fill
        if self.is_packed and self.dtype == torch.float4_e2m1fn_x2:
            return [features, tokens // 2]
        return [features, tokens] if self.is_transposed else [tokens, features]

    def scale_shape(self, tokens: int, features: int) -> list[int]:
        """Return the shape of the scales; [0] where the input itself is kept.

        Scales of blocks under a factor of the whole tensor (NVFP4) are flat, with the factor at the
        end. So are packed ones, which are bytes, with the 4 bytes of an FP32 factor.
        """
        if self.scales is None:
            return [0]
        if self.scales.is_one:
            return []
        tokens += -tokens % self.fill
        along, across = self.scales.along or tokens, self.scales.across or features
        along_blocks, across_blocks = -(-tokens // along), -(-features // across)
        if self.is_packed:  # a row of scales for each feature
            return [swizzled_size(features, along_blocks) + 4 * self.scales.has_outer]
        if self.scales.has_outer:
            return [along_blocks * across_blocks + 1]
        return [along_blocks, across_blocks]


@dataclass(frozen=True)
class TensorQuantizer:
    """Say what is quantized (the tensor `role` of the linear `name`), and by which recipe's rule.

    `reduce_max` takes the maximum over the ranks that hold parts of the tensor, in place; None says
    that this rank has all of it. `reduce_columns` does so for amaxes of columns [1, N], over the
    ranks that hold the same columns of other tokens. `slot` is the tensor's row in a table, if the
    recipe has a history. `part` says which elements of the whole tensor this rank has, by which
    random bytes are drawn. What else is kept between calls is in the `ScalingState`.
    """

    rule: Recipe
    state: ScalingState
    name: str
    role: Role
    fmt: Fp8Format
    power_2: bool
    reduce_max: ReduceMax | None = None
    reduce_columns: ReduceMax | None = None
    slot: Slot | None = None
    part: Part = WHOLE


class LinearQuantizer:
    """Quantize the three tensors of the linear `name`, each by its `TensorQuantizer`.

    `high_precision` are the products that are not done in FP8 (`fp8_gemms` are the others); the
    tensors that they read stay as they are.
    """

    def __init__(
        self,
        name: str,
        state: ScalingState,
        tensors: dict[Role, TensorQuantizer],
        high_precision: frozenset[GemmName],
    ) -> None:
        self.name, self.state, self.tensors = name, state, tensors
        self.fp8_gemms = tuple(gemm for gemm in GEMMS if gemm not in high_precision)
        self.fast_accumulation = state.recipe.fast_accumulation
        self._needs = {
            (role, with_first): WantsFp8(
                last in self.fp8_gemms, with_first and first in self.fp8_gemms
            )
            for role, (last, first) in READERS.items()
            for with_first in (True, False)
        }

    def rows_of(self, number: int, order: TokenOrder, device: torch.device) -> Rows | None:
        """Return the places of this rank's tokens as `Draws.rows_of`, or None if no cast draws."""
        draws = self.state.recipe.draws_in([self.name])
        return self.state.draws.rows_of(number, order, device) if draws else None

    def operands(
        self,
        role: Role,
        x_MN: torch.Tensor,
        *,
        with_first: bool = True,
        with_sum: bool = False,
        rows: Rows | None = None,
    ) -> tuple[Operands, torch.Tensor | None]:
        """Return one of the linear's tensors as its products read it, and sums of its columns.

        The recipe makes FP8 operands of it, for the products that run in FP8. `with_first` False
        says that only the product of the forward pass will be done. `with_sum` asks for FP32 sums
        of the columns, [P, N], in which each row has the sums over a group of the tensor's rows.
        `rows` say which tokens the rows are, for casts that draw; None stands for all tokens of
        this rank's microbatch in their order.
        """
        need = self._needs[role, with_first]
        if not (any(need) and self.state.fp8_enabled):
            return Operands(x_MN, x_MN), column_sums(x_MN) if with_sum else None
        tensor = self.tensors[role]
        # A cast saturates infinities, and would hide from the user of a converted model that a
        # number has overflowed. NaN stay.
        if self.state.marks_infinities and not (x_MN.is_cpu and tensor.rule.casts_whole):
            x_MN = with_nans(x_MN)
        quantized: tuple[Operands, torch.Tensor | None]
        with self.state.draws.of_rows(rows) if rows is not None else nullcontext():
            quantized = tensor.rule.operands(tensor, x_MN, need, with_sum=with_sum)
        if self.state.observers:
            self._observe(role, x_MN, quantized[0])
        return quantized

    def saved_form(self) -> SavedForm:
        """Return how the input is kept between forward and backward."""
        if "grad_weight" not in self.fp8_gemms:
            return SavedForm()
        tensor = self.tensors["input"]
        form: SavedForm = tensor.rule.saved_form(tensor)
        return form

    def fuses(self, role: Role, *, with_first: bool = True) -> bool:
        """Whether the kernel that computes this tensor may cast it in the same pass."""
        need, tensor = self._needs[role, with_first], self.tensors[role]
        is_whole = need.last and need.first == with_first  # no product reads it as it is
        return is_whole and self.state.fp8_enabled and bool(tensor.rule.can_fuse(tensor))

    def produce(
        self, role: Role, make: Make, *, with_first: bool = True, with_sum: bool = False
    ) -> tuple[Operands, Produced]:
        """Return one of the linear's tensors as `make` computes and casts it, and all it made."""
        need, tensor = self._needs[role, with_first], self.tensors[role]
        is_observed = bool(self.state.observers)
        operands: Operands
        produced: Produced
        operands, produced = tensor.rule.produce(
            tensor, make, need, with_plain=is_observed, with_sum=with_sum
        )
        if produced.plain is not None:
            self._observe(role, produced.plain, operands)
        return operands, produced

    def store(self, weight_OI: torch.Tensor) -> Fp8Tensor:
        """Return a weight [O, I] in FP8, to be kept in FP8 alone.

        One quantization serves both products.
        """
        tensor = self.tensors["weight"]
        operands, _ = tensor.rule.operands(tensor, weight_OI, WantsFp8(True, True))
        self._observe("weight", weight_OI, operands)
        last, first = operands
        assert isinstance(last, Fp8Tensor) and isinstance(first, Fp8Tensor)
        assert last.dequant_scale.data_ptr() == first.dequant_scale.data_ptr(), "one scale for both"
        return last

    def store_scale(self, amax: torch.Tensor) -> tuple[torch.Tensor, Fp8Format]:
        """Return the scale (0-d FP32) and format to cast a weight with of which ranks hold parts.

        `amax` (0-d FP32, may be overwritten) is that of all parts.
        """
        tensor = self.tensors["weight"]
        scale: torch.Tensor = tensor.rule.store_scale(tensor, amax)
        return scale, tensor.fmt

    def observe_part(self, part_MN: torch.Tensor, stored: Fp8Tensor) -> None:
        """Show the observers a part of a weight that is kept in FP8 alone."""
        for observe in self.state.observers:
            observe(f"{self.name}.weight", part_MN, stored, stored)

    def _observe(self, role: Role, x_MN: torch.Tensor, operands: Operands) -> None:
        last, first = (o.plain() if isinstance(o, Fp8Tensor) else None for o in operands)
        x_MN = with_nans(x_MN) if self.state.marks_infinities else x_MN
        for observe in self.state.observers:
            observe(f"{self.name}.{role}", x_MN, last, first)


def operands_of(x_MN: torch.Tensor, last: Fp8Tensor | None, first: Fp8Tensor | None) -> Operands:
    """Return the operands of a tensor; None where its product reads the tensor as it is."""
    return Operands(x_MN if last is None else last, x_MN if first is None else first)


def values_dtype(
    tensor: TensorQuantizer, x_MN: torch.Tensor, *, along_first: bool, is_exact: bool = True
) -> torch.dtype | None:
    """Return the dtype of the values by blocks that a cast on a CPU may write too.

    None: they are not read soon. An input is kept for the backward pass without its values, which
    need more memory. `is_exact` as in `Fp8Tensor.is_exact_in_bf16`.
    """
    if along_first and tensor.role == "input":
        return None
    return wide_dtype(x_MN.device, x_MN.dtype) if is_exact else torch.float32


def cast_whole(
    tensor: TensorQuantizer,
    x_MN: torch.Tensor,
    quant_scale: torch.Tensor,
    need: WantsFp8,
    *,
    amax: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    with_sum: bool = False,
) -> tuple[Operands, torch.Tensor | None]:
    """Cast `x_MN` with one 0-d FP32 `quant_scale`; `amax` works as in `cast.quantize`.

    `dequant_scale` is the reciprocal of the scale, for a caller that has it already.
    The second result has the FP32 sums of each column of `x_MN` itself over groups of rows, [P, N],
    if `with_sum` is set. On a CPU a tensor whose infinities are to be NaN is cast once more if the
    amax says that it may have some.
    """
    engine, fmt = tensor.state.engine, tensor.fmt
    if engine.uses_triton:
        from fp8_numerics.kernels.triton_cast import cast

        # One pass writes each orientation that is needed, or one payload for both products.
        orients = engine.orients("tensor")
        payload, payload_t, sums_PN, _ = cast(
            x_MN.contiguous(),
            quant_scale,
            fmt,
            amax=amax,
            with_rows=need.last or not orients,
            with_columns=need.first and orients,
            with_sums=with_sum,
        )
        last, first = tensors_of_cast(payload, payload_t, quant_scale, fmt, need, dequant_scale)
        return operands_of(x_MN, last, first), sums_PN
    sum_N = x_MN.new_empty(x_MN.shape[1:], dtype=torch.float32) if with_sum else None
    looks = tensor.state.marks_infinities and x_MN.is_cpu  # elsewhere `operands` has looked
    if amax is None and looks:
        amax = x_MN.new_zeros((), dtype=torch.float32)
    # Without FP8 tensor cores products read `grid`, the FP8 numbers in the dtype of the products:
    # the cast writes it in the same pass.
    grid_dtype = wide_dtype(x_MN.device, x_MN.dtype)
    made = quantize(x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype, column_sum=sum_N)
    if amax is not None and looks and not math.isfinite(amax):
        x_MN = with_nans(x_MN)  # an infinity has been seen in this step, or a NaN
        made = quantize(x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype, column_sum=sum_N)
    if dequant_scale is None:
        dequant_scale = quant_scale.reciprocal()
    x_fp8 = Fp8Tensor(made.payload, dequant_scale, fmt, made.grid)
    operands = Operands(x_fp8 if need.last else x_MN, x_fp8 if need.first else x_MN)
    return operands, None if sum_N is None else sum_N[None]


def whole_form(tensor: TensorQuantizer) -> SavedForm:
    """Return the form of an input in FP8 with one scale: one cast for both products, or two."""
    is_transposed = tensor.state.engine.orients("tensor")
    return SavedForm(TENSOR, tensor.fmt.dtype, is_transposed=is_transposed)


def tensors_of_cast(
    payload: torch.Tensor | None,
    payload_t: torch.Tensor | None,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    need: WantsFp8,
    dequant_scale: torch.Tensor | None = None,
) -> tuple[Fp8Tensor | None, Fp8Tensor | None]:
    """Return one cast as the products (along the last dim, along the first) read it.

    `payload` [M, N] serves both products where there is no `payload_t` [N, M]. None stands for a
    product that is not in FP8.
    """
    if dequant_scale is None:
        dequant_scale = quant_scale.reciprocal()
    last = None if payload is None else Fp8Tensor(payload, dequant_scale, fmt)
    if payload_t is not None:
        return last, Fp8Tensor(payload_t.t(), dequant_scale, fmt)
    return last if need.last else None, last if need.first else None
