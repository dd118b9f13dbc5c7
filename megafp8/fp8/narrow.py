"""Quantize MXFP8 and NVFP4 on CPUs by the C kernels; elsewhere the recipes' own rules run."""

# M, N the tensor's own dims

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megafp8.fp8 import block_casts
from megafp8.fp8.cast import Fp8Tensor
from megafp8.fp8.quantizer import SavedForm, TensorQuantizer
from megafp8.fp8.rule import Along, CastRule
from megafp8.specs.traits import Scales


class NarrowRule(CastRule):
    """Cast by a recipe's `in_c`, along both dims as the tensor lies in memory."""

    recipe: Any  # one with `in_c`

    def saved_form(self, tensor: TensorQuantizer) -> SavedForm:
        """Return the operand with its scales along tokens; C leaves it in the tensor's own order.

        A tensor that lies elsewhere than on a CPU is cast by the rule, and is transposed.
        """
        form = super().saved_form(tensor)
        is_in_c = block_casts.runs_in_c(torch.empty(0))
        return replace(form, is_transposed=form.is_transposed and not is_in_c)

    def _cast(self, x_MK: torch.Tensor, scales: Scales, along: Along) -> Fp8Tensor:
        found = self._in_c(x_MK, scales, along) if along == "last" else None
        return super()._cast(x_MK, scales, along) if found is None else found

    def _along_first(self, x_MN: torch.Tensor) -> Fp8Tensor:
        found = self._in_c(x_MN, self._casts.first, "first")
        return super()._along_first(x_MN) if found is None else found

    def _in_c(self, x_MN: torch.Tensor, scales: Scales, along: Along) -> Fp8Tensor | None:
        if not x_MN.numel() or not block_casts.runs_in_c(x_MN):
            return None
        across, right = scales.across or 1, scales.along or 1
        block = (across, right) if along == "last" else (right, across)
        result = self.recipe.in_c(x_MN, block, self._asked(scales, along))
        if result is None:
            return None
        return Fp8Tensor(
            result.payload,
            result.dequant_scale,
            self.given.fmt,
            block=block,
            is_power_2=True,
            layout=scales.layout or "other",
            outer=result.outer,
            rotation=self._casts.rotation if along == "first" else None,
        )
