"""The scaling tensors of the stand-in for Transformer Engine, and weights that it keeps in FP8."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import nn


class State:
    """`scale` and `amax_history` of one module and direction."""

    def __init__(self, recipe: Any, count: int, fp8_max: float) -> None:
        self.recipe, self.fp8_max = recipe, fp8_max
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(recipe.amax_history_len, count)

    def update(self) -> None:
        length = self.amax_history.shape[0]
        for column in range(self.amax_history.shape[1]):
            old = self.amax_history[:, column].tolist()
            staged = old[0]
            if staged == 0 and not int(os.getenv("NVTE_UNFUSED_FP8_UPDATE", "0")):
                continue
            new = [0.0, *old[2:], staged] if length > 1 else [0.0]
            self.amax_history[:, column] = torch.tensor(new)
            amax = max(*old[1:], staged, 0.0) if length > 1 else staged
            amax = staged if self.recipe.amax_compute_algo == "most_recent" else amax
            if math.isfinite(amax) and amax > 0:
                target = torch.tensor(self.fp8_max * 2.0**-self.recipe.margin)
                scale = target / torch.tensor(amax)
                self.scale[column] = scale.clamp(max=torch.finfo(torch.float32).max)

    def cast(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Values after the cast by the scale as it stands; the amax is staged."""
        x, staged = x.detach(), self.amax_history[0, column]
        staged.copy_(torch.maximum(staged, x.abs().max().float()))
        dtype = torch.float8_e4m3fn if self.fp8_max == 448 else torch.float8_e5m2
        scaled = (x.float() * self.scale[column]).clamp(-self.fp8_max, self.fp8_max)
        return scaled.to(dtype).float() / self.scale[column]


class Quantizer:
    """`Float8Quantizer`: views of one tensor's scale and of its staged amax."""

    def __init__(self, state: State, column: int) -> None:
        self.state, self.column = state, column
        self.scale = state.scale[column : column + 1]
        self.amax = state.amax_history[0][column : column + 1]


class Quantized(nn.Parameter):
    """A weight that is kept in FP8 alone: what it is made of, and what is copied in, is rounded and
    its amax staged. `quant_scale` is that of the newest cast; without a quantizer it is 1."""

    def __new__(cls, data: torch.Tensor, quantizer: Quantizer | None) -> Quantized:
        made = torch.Tensor._make_subclass(cls, torch.empty_like(data), True)
        made._quantizer = quantizer
        return made.copy_(data)

    def copy_(self, source: torch.Tensor) -> Quantized:  # type: ignore[override]
        quantizer, source = self._quantizer, source.detach()
        if quantizer is None:
            self.quant_scale = torch.ones(1)
            rounded = source.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            self.quant_scale = quantizer.scale.clone()
            rounded = quantizer.state.cast(source, quantizer.column)
        with torch.no_grad():
            self.data.copy_(rounded.to(self.dtype))
        return self
