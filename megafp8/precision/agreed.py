"""A weight that ranks hold parts of, and that crosses between them as FP8 bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.precision.formats import Fp8Format
from megafp8.precision.tensor import Fp8Tensor


@dataclass(frozen=True)
class AgreedScale:
    """The scale that the amax of all parts leads to; every rank casts its part with it."""

    quant_scale: torch.Tensor  # 0-d FP32
    fmt: Fp8Format

    def quantized(self, part: torch.Tensor) -> Fp8Tensor:
        return Fp8Tensor.quantize(part, self.quant_scale, self.fmt)
