"""Quantize to FP8 and back: the casts, and the tensor of bytes, format and scales.

The rule, on every device and for FP32, BF16 and FP16 input, is Transformer Engine's cast
(`cvt.rn.satfinite`): y = float32(x) * quant_scale in FP32; clamp to the largest finite magnitude,
so that infinities saturate; round to the nearest FP8 number, ties to even. A NaN stays a NaN. The
amax is max|x| of the unscaled input; a NaN anywhere makes it +inf, so that it survives a MAX
reduction. E4M3FNUZ and E5M2FNUZ have no negative zero, and are cast by torch operations alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8_numerics.block_casts import block_values
from fp8_numerics.dtypes import described
from fp8_numerics.formats import E2M1, E4M3, SIMULATED, Fp8Format, not_a_format
from fp8_numerics.kernels.compile import IN_C, KINDS, library, library_for
from fp8_numerics.kernels.triton_launch import runs_triton
from fp8_numerics.scaled_mm import PACKED, Layout
from fp8_numerics.swizzle import fp4_numbers, swizzled, unswizzled

_KINDS: dict[object, int] = {dtype: number for number, dtype in enumerate(KINDS)}
_NO_GRID = len(KINDS)
IN_MEMORY = (torch.Tensor, torch.nn.Parameter)  # other classes may stand for parts of a tensor
_CODES = {fmt.dtype: number for number, fmt in enumerate(IN_C)}


class Quantized(NamedTuple):
    """Hold the result of a cast; both tensors have the shape of the input.

    `payload` has an FP8 dtype. `grid`, if it was asked for, has exactly the same numbers in FP32 or
    BF16, not yet divided by the scale.
    """

    payload: torch.Tensor
    grid: torch.Tensor | None


def quantize(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype | None,
    column_sum: torch.Tensor | None = None,
) -> Quantized:
    """Cast `x` (any shape) with a 0-d FP32 `quant_scale` on its device.

    `amax`, a 0-d FP32 tensor, is raised in place to max(amax, max|x|); None records nothing.
    `grid_dtype` is FP32 or BF16, which both hold every FP8 number; None makes no grid.
    `column_sum` (FP32 [N]) asks for the sums of the columns of a matrix [M, N] in the same pass:
    the gradient of a bias. It is overwritten.

    Raises:
        TypeError: A tensor has another dtype than FP32, BF16 or FP16 (`x`) or FP32 (all others), or
            `quant_scale` or `amax` has not one number, or `fmt` is no format.
        ValueError: The format is FP4, which has a scale for each block, or `column_sum` has another
            shape or is not contiguous.
    """
    kind = _KINDS.get(getattr(x, "dtype", None))
    if kind is None:
        raise TypeError(f"x is {described(x)}, and casts read {', '.join(map(str, KINDS))}")
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    for tensor in (quant_scale, amax):
        if tensor is not None and (
            getattr(tensor, "dtype", None) != torch.float32
            or tensor.numel() != 1
            or (not tensor.is_cpu and x.is_cpu)
        ):
            raise TypeError(
                f"a scale or amax is {described(tensor)}, and not one torch.float32 in a tensor on "
                f"{x.device}"
            )
    if column_sum is not None and (
        column_sum.dtype != torch.float32
        or column_sum.shape != x.shape[1:]
        or not column_sum.is_contiguous()
    ):
        raise ValueError(
            f"column_sum is {described(column_sum)} with strides {column_sum.stride()} for x "
            f"{list(x.shape)}, and sums are written to contiguous torch.float32 {list(x.shape[1:])}"
        )
    lib = library().lib if x.is_cpu else library_for(x)  # one call less where casts are many
    if lib is None or not fmt.has_kernels:
        if column_sum is not None:
            column_sum.copy_(x.float().sum(0))
        return quantize_torch(x, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
    x = x.contiguous()
    payload, grid = torch.empty_like(x, dtype=fmt.dtype), None
    if grid_dtype is not None or column_sum is not None:  # what adds columns up writes a grid, too
        # the kernels write BF16 for BF16 tensors alone
        is_bf16 = grid_dtype == x.dtype == torch.bfloat16
        grid = torch.empty_like(x, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    scale_and_results = (
        kind,
        0 if fmt.is_e4m3 else 1,
        quant_scale.data_ptr(),
        payload.data_ptr(),
        None if grid is None else grid.data_ptr(),
        _NO_GRID if grid is None else _KINDS[grid.dtype],
        None if amax is None else amax.data_ptr(),
    )
    at, threads = x.data_ptr(), torch.get_num_threads()
    if column_sum is None:
        lib.megafp8_quantize(at, x.numel(), *scale_and_results, threads)
    else:
        sums = column_sum.data_ptr()
        lib.megafp8_quantize_and_sum(at, *x.shape, *scale_and_results, sums, threads)
    if grid is None or grid_dtype is None:
        return Quantized(payload, None)
    return Quantized(payload, grid if grid.dtype == grid_dtype else grid.to(grid_dtype))


def decode(payload: torch.Tensor, fmt: Fp8Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of an FP8 payload in FP32 or BF16; both hold every FP8 number exactly.

    Raises:
        TypeError: `payload` has not the dtype of `fmt`, `dtype` is another, or `fmt` is no format.
    """
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    if getattr(payload, "dtype", None) != fmt.dtype:
        raise TypeError(f"payload is {described(payload)}, and that of {fmt.name} is {fmt.dtype}")
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        raise TypeError(f"dtype is {dtype}: numbers are read in torch.float32 or torch.bfloat16")
    lib = library().lib if payload.is_cpu else library_for(payload)
    number = _CODES.get(fmt.dtype)
    if lib is not None and number is not None:
        payload = payload.contiguous()
        grid = torch.empty_like(payload, dtype=dtype)
        lib.megafp8_decode(
            payload.data_ptr(),
            payload.numel(),
            number,
            grid.data_ptr(),
            _KINDS[dtype],
            torch.get_num_threads(),
        )
        return grid
    return payload.to(dtype)


def quantize_torch(
    x: torch.Tensor,
    quant_scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    grid_dtype: torch.dtype | None,
) -> Quantized:
    """Run `quantize` with torch operations: the same bits, on GPUs and without a compiler."""
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    if fmt is E2M1 or fmt is SIMULATED:
        raise ValueError(f"{fmt.name}: casts with one scale are to FP8 alone")
    if amax is not None:
        amax.copy_(torch.maximum(amax, _amax_in_torch(x)))
    scaled = (x.float() * quant_scale).clamp_(-fmt.max, fmt.max)
    payload = scaled.to(fmt.dtype)
    return Quantized(payload, None if grid_dtype is None else payload.to(grid_dtype))


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| as a 0-d FP32 tensor: 0 for an empty tensor, +inf if there is a NaN."""
    kind = _KINDS.get(x.dtype)
    if x.is_cpu and kind is not None and type(x) in IN_MEMORY and x.is_contiguous():
        if (lib := library().lib) is not None:
            amax = x.new_empty((), dtype=torch.float32)
            at = amax.data_ptr()
            lib.megafp8_amax(x.data_ptr(), x.numel(), kind, at, torch.get_num_threads())
            if amax:  # a zero has the sign that torch gives it
                return amax
    return _amax_in_torch(x)


def _amax_in_torch(x: torch.Tensor) -> torch.Tensor:
    """Return the same by torch operations, on other devices and for tensors of other kinds."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def column_sums(x_MN: torch.Tensor) -> torch.Tensor:
    """Return the FP32 sum of each column of a matrix, [1, N]: the gradient of a bias.

    On CPUs tensors of 16 bits are added up in the order of the rows, as `quantize` does, within
    M * 2**-24 of the sum of magnitudes. torch would make a copy in FP32 first.
    """
    kind = _KINDS.get(x_MN.dtype)
    lib = library().lib if x_MN.is_cpu else library_for(x_MN)
    if lib is not None and kind is not None and x_MN.dtype != torch.float32:
        x_MN, sums = x_MN.contiguous(), x_MN.new_empty((1, x_MN.shape[1]), dtype=torch.float32)
        at, threads = sums.data_ptr(), torch.get_num_threads()
        lib.megafp8_column_sums(x_MN.data_ptr(), *x_MN.shape, kind, at, threads)
        return sums
    return x_MN.sum(0, keepdim=True, dtype=torch.float32)


def with_nans(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with NaN in the place of infinities, or `x` itself where it has none.

    Casts saturate infinities, so that a later check would not see that a number has overflowed. A
    NaN stays one. A finite sum of a tensor says that its elements are finite; the host asks for it
    on CPUs alone.
    """
    if x.is_cpu and math.isfinite(x.sum().item()):
        return x
    return x.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)


def raise_amax(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise `amax`, 0-d FP32, in place to max(amax, `amax_of(x)`); by one kernel on GPUs."""
    if runs_triton(x.device):
        from fp8_numerics.kernels.triton_current import raise_amax_of

        raise_amax_of(amax, x.contiguous())
    else:
        amax.copy_(torch.maximum(amax, amax_of(x)))


def amax_along(x_MN: torch.Tensor, dim: int) -> torch.Tensor:
    """Return max|x| along one dim of a matrix, in FP32; that dim is kept with size 1.

    A NaN gives +inf, and a dim of size 0 gives 0.
    """
    if x_MN.shape[dim] == 0:
        return x_MN.new_zeros((x_MN.shape[0], 1) if dim == 1 else (1, x_MN.shape[1])).float()
    amax = x_MN.abs().amax(dim=dim, keepdim=True).float()
    return amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def quantize_scaled(scaled: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Return the payload of an FP32 tensor that is scaled already."""
    if scaled.device.type in ("cpu", "meta"):
        one = torch.ones((), dtype=torch.float32, device="cpu")
        return quantize(scaled, one, fmt, amax=None, grid_dtype=None).payload
    return scaled.clamp(-fmt.max, fmt.max).to(fmt.dtype)


@dataclass
class Fp8Tensor:
    """Hold an FP8 tensor, whose value is payload * dequant_scale.

    `dequant_scale` (FP32) never changes, although a scale table moves on between a microbatch's
    forward and its backward pass. It is 0-d (one scale), or a matrix with one scale for each block
    of `block` elements of the payload; blocks at the end may be cut off. `is_exact_in_bf16` says
    that number * scale is a BF16 number everywhere: scales are powers of two, or so short (E4M3,
    for numbers of E2M1). `grid`, where kept, is the payload in the dtype of the GEMMs that FP8
    hardware does not do, and with scales of blocks it is the values; it is dropped before the
    tensor is saved for backward.

    Shapes are the tensor's own, [M, N]; where tensor cores will sum along M, the payload lies in
    memory as [N, M]. `layout` names the scales as `scaled_mm` does, since shapes alone cannot
    distinguish a row from a block of the same length. With the layouts in `PACKED` the scales are
    flat bytes, in tiles as tensor cores read them, and a payload of FP4 has two numbers in a byte,
    along the dim that is summed over; `plain` is the tensor without that. `outer` (0-d FP32) is one
    more factor of the whole tensor, for scales of two levels. `rotation` names the matrix that the
    values are multiplied by, which a product with an operand of the same rotation cancels.
    """

    payload: torch.Tensor
    dequant_scale: torch.Tensor
    fmt: Fp8Format
    grid: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    is_exact_in_bf16: bool = False
    layout: Layout = "tensor"
    outer: torch.Tensor | None = None
    rotation: str | None = None

    @property
    def is_packed(self) -> bool:
        """Whether scales lie in tiles of bytes, and numbers of FP4 two in a byte."""
        return self.layout in PACKED

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns of numbers."""
        rows, cols = self.payload.shape
        if self.payload.dtype != torch.float4_e2m1fn_x2:
            return rows, cols
        return (rows, 2 * cols) if self._sums_last else (2 * rows, cols)

    @property
    def _sums_last(self) -> bool:
        assert self.block is not None
        return self.block[0] < self.block[1]

    def scale_matrix(self) -> torch.Tensor:
        """Return the scales of blocks as a matrix, in the tensor's orientation, also from tiles."""
        assert self.block is not None
        if not self.is_packed:
            return self.dequant_scale
        down, right = (-(-n // step) for n, step in zip(self.shape, self.block, strict=True))
        if self._sums_last:
            return unswizzled(self.dequant_scale, down, right)
        return unswizzled(self.dequant_scale, right, down).t()

    def with_scale_matrix(self, scale: torch.Tensor) -> Fp8Tensor:
        """Return the tensor with other scales; they are as `scale_matrix` returns them."""
        if self.is_packed:
            scale = swizzled(scale if self._sums_last else scale.t())
        return replace(self, dequant_scale=scale, grid=None)

    def plain(self) -> Fp8Tensor:
        """Return the tensor with a byte a number and a matrix of scales in FP32."""
        if not self.is_packed:
            return self
        payload = self.payload
        if payload.dtype == torch.float4_e2m1fn_x2:
            payload = fp4_numbers(payload) if self._sums_last else fp4_numbers(payload.t()).t()
        scale = self.scale_matrix().float()
        return replace(self, payload=payload, dequant_scale=scale, layout="other")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what is kept of the tensor between forward and backward; see `factory`."""
        outer = () if self.outer is None else (self.outer,)
        return self.payload, self.dequant_scale, *outer

    @classmethod
    def quantize(
        cls,
        x: torch.Tensor,
        quant_scale: torch.Tensor,
        fmt: Fp8Format,
        *,
        amax: torch.Tensor | None = None,
        grid_dtype: torch.dtype | None = None,
    ) -> Fp8Tensor:
        """Quantize `x` with one scale; `amax` and `grid_dtype` work as in `quantize` above."""
        payload, grid = quantize(x, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
        return cls(payload, quant_scale.reciprocal(), fmt, grid)

    def without_grid(self) -> Fp8Tensor:
        """Return the same tensor without its `grid`."""
        return replace(self, grid=None)

    def factory(self) -> Callable[..., Fp8Tensor]:
        """Return a function that makes such a tensor of its `tensors`.

        The function holds no tensor itself.
        """
        return partial(
            _remake,
            has_outer=self.outer is not None,
            fmt=self.fmt,
            block=self.block,
            is_exact_in_bf16=self.is_exact_in_bf16,
            layout=self.layout,
            rotation=self.rotation,
        )

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the payload's numbers in BF16 or FP32, not yet multiplied by `dequant_scale`."""
        if self.fmt is SIMULATED:
            return self.payload.to(dtype)
        if self.grid is None or self.block is not None:
            return decode(self.payload, self.fmt, dtype)
        # `to` costs a microsecond also where it has nothing to do, three times a product.
        return self.grid if self.grid.dtype == dtype else self.grid.to(dtype)

    def scale_over(self, shape: torch.Size) -> torch.Tensor:
        """Return the factors from numbers to values, FP32, which broadcast over `shape`."""
        scale = spread(self.dequant_scale, shape, self.block)
        return scale if self.outer is None else scale * self.outer

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, rounded once to `dtype`."""
        if self.is_packed:
            return self.plain().dequantize(dtype)
        scale = self.dequant_scale
        if self.block is not None and self.grid is not None and self.grid.dtype == dtype:
            return self.grid
        if self.block is not None and self.fmt in (E4M3, E2M1):
            values = block_values(self.payload, scale, self.block, dtype)
            if values is not None:
                return values
        if self.is_exact_in_bf16 and dtype == torch.bfloat16:  # nothing to round
            return times_scale(self.numbers(dtype), scale.to(dtype), self.block)
        return times_scale(self.numbers(torch.float32), scale, self.block).to(dtype)


def _remake(
    payload: torch.Tensor,
    dequant_scale: torch.Tensor,
    outer: torch.Tensor | None = None,
    *,
    has_outer: bool,
    **known: Any,
) -> Fp8Tensor:
    """Return an FP8 tensor of the tensors that autograd has kept; `known` is all the rest of it."""
    assert has_outer == (outer is not None), "the factor of the whole tensor was not kept"
    return Fp8Tensor(payload, dequant_scale, outer=outer, **known)


def times_scale(
    x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> torch.Tensor:
    """Return x * scale, with one scale for each block of a matrix (None: one scale for all)."""
    if block is None or x.shape != (scale.shape[0] * block[0], scale.shape[1] * block[1]):
        return x * spread(scale, x.shape, block)
    tiles = x.reshape(scale.shape[0], block[0], scale.shape[1], block[1])
    return (tiles * scale[:, None, :, None]).view(x.shape)


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None) -> torch.Tensor:
    """Return a scale that broadcasts over a matrix of `shape`, repeated inside each block.

    Along a dim that one block covers whole, the size stays 1.
    """
    if block is None:
        return scale
    for dim, (step, size) in enumerate(zip(block, shape, strict=True)):
        if step > 1 and scale.shape[dim] > 1:
            scale = scale.repeat_interleave(step, dim).narrow(dim, 0, size)
    return scale
