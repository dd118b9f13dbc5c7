"""Represent an FP8 tensor: its bytes, its format, and the scales that undo the quantization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megafp8.fp8.cast import decode, quantize, quantize_and_sum
from megafp8.fp8.formats import SIMULATED, Fp8Format
from megafp8.ops.scaled_mm import Layout


@dataclass
class Fp8Tensor:
    """Hold an FP8 tensor, whose value is payload * dequant_scale.

    `dequant_scale` (FP32) never changes, although a scale table moves on between a microbatch's
    forward and its backward pass. It is 0-d (one scale), or a matrix with one scale for each block
    of `block` elements of the payload; blocks at the end may be cut off. `is_power_2` says that
    every scale is a power of two. `grid`, where kept, is the payload in the dtype of the GEMMs that
    FP8 hardware does not do; it is dropped before the tensor is saved for backward.

    Shapes are the tensor's own, [M, N]; where tensor cores will sum along M, the payload lies in
    memory as [N, M]. `layout` names the scales as `scaled_mm` does, since shapes alone cannot
    distinguish a row from a block of the same length. `outer` (0-d FP32) is one more factor of the
    whole tensor, for scales of two levels. `rotation` names the matrix that the values are
    multiplied by, which a product with an operand of the same rotation cancels.
    """

    payload: torch.Tensor
    dequant_scale: torch.Tensor
    fmt: Fp8Format
    grid: torch.Tensor | None = None
    block: tuple[int, int] | None = None
    is_power_2: bool = False
    layout: Layout = "tensor"
    outer: torch.Tensor | None = None
    rotation: str | None = None

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
        """Quantize `x` with one scale; `amax` and `grid_dtype` work as in `cast.quantize`."""
        payload, grid = quantize(x, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype)
        return cls(payload, quant_scale.reciprocal(), fmt, grid)

    @classmethod
    def quantize_and_sum(
        cls,
        x_MN: torch.Tensor,
        quant_scale: torch.Tensor,
        fmt: Fp8Format,
        *,
        amax: torch.Tensor | None = None,
        grid_dtype: torch.dtype,
    ) -> tuple[Fp8Tensor, torch.Tensor]:
        """Return a matrix quantized with one scale, and the FP32 sum of each column, [N]."""
        (payload, grid), column_sum = quantize_and_sum(
            x_MN, quant_scale, fmt, amax=amax, grid_dtype=grid_dtype
        )
        return cls(payload, quant_scale.reciprocal(), fmt, grid), column_sum

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
            is_power_2=self.is_power_2,
            layout=self.layout,
            rotation=self.rotation,
        )

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the payload's numbers in BF16 or FP32, not yet multiplied by `dequant_scale`."""
        if self.fmt is SIMULATED:
            return self.payload.to(dtype)
        return decode(self.payload, self.fmt, dtype) if self.grid is None else self.grid.to(dtype)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, rounded once to `dtype`."""
        scale = self.dequant_scale
        if self.is_power_2 and dtype == torch.bfloat16:  # moves exponents alone: no FP32 needed
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
