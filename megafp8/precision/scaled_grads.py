"""Accumulate the gradients of linears' weights over microbatches in FP8 (FP8-LM)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megafp8.precision.grad_sink import ComputeGrad, GradSum, MainGradSink
from megafp8.precision.scaled import ScaledTensor


class ScaledGradSink(MainGradSink):
    """Store gradients in few bits from the moment a microbatch's product has ended.

    Each microbatch reads the sum, adds its gradient in FP32, finds the amax, and writes the sum
    with a new scale: one rounding a microbatch, and no FP32 sum that stays. With `sums_in_fp32`
    the sums of a step are FP32 tensors, which are quantized once when the step ends, and freed.
    Parameters that are not attached so go the way of `MainGradSink`.
    """

    def __init__(self, *, sums_in_fp32: bool = False) -> None:
        super().__init__()
        self.scaled_grads: dict[nn.Parameter, ScaledTensor] = {}
        self._sums_in_fp32 = sums_in_fp32
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._fresh: set[nn.Parameter] = set()

    def attach_scaled(self, scaled_grads: Iterable[tuple[nn.Parameter, ScaledTensor]]) -> None:
        """Start collecting in few bits for these parameters, which only linears use."""
        self.scaled_grads |= dict(scaled_grads)

    def begin_step(self) -> None:
        """Begin a step: the next gradient of each parameter overwrites."""
        super().begin_step()
        self._fresh = set(self.scaled_grads)
        self._sums.clear()

    def end_step(self) -> None:
        """End a step: quantize FP32 sums, and zero the gradients of parameters that got none."""
        super().end_step()
        for param, total in self._sums.items():
            self.scaled_grads[param].add(total, is_first=True)
        self._sums.clear()
        for param in self._fresh:
            self.scaled_grads[param].zero_()
        self._fresh.clear()

    def add(self, weight: nn.Parameter, compute: ComputeGrad) -> torch.Tensor | None:
        """Add the gradient to the sum of `weight`."""
        if weight not in self.scaled_grads:
            return super().add(weight, compute)
        is_first = weight in self._fresh
        self._fresh.discard(weight)
        if self._sums_in_fp32:
            if is_first:
                self._sums[weight] = torch.empty(weight.shape, device=weight.device)
            into = GradSum(self._sums[weight], is_first)
            into.add(compute(into))
        else:  # the product writes FP32 numbers, of this weight alone and for this moment
            product = GradSum(torch.empty(weight.shape, device=weight.device), is_first=True)
            self.scaled_grads[weight].add(compute(product), is_first=is_first)
        return None
