"""Define the formats in which gradients, master weights and moments are stored (FP8-LM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8_numerics.formats import E4M3, E5M2
from megafp8.specs.optim import StorageName


@dataclass(frozen=True)
class StorageFormat:
    """Describe how a gradient, a master weight or a moment is stored.

    `max` is the largest finite magnitude, to which the tensor's amax is scaled; None says that the
    format has FP32's range and needs no scale.
    """

    name: StorageName
    dtype: torch.dtype
    max: float | None = None


STORAGE_FORMATS: dict[StorageName, StorageFormat] = {
    "fp32": StorageFormat("fp32", torch.float32),
    "bf16": StorageFormat("bf16", torch.bfloat16),
    "fp16": StorageFormat("fp16", torch.float16, 65504.0),
    "fp8": StorageFormat("fp8", E4M3.dtype, E4M3.max),
    "fp8_e5m2": StorageFormat("fp8_e5m2", E5M2.dtype, E5M2.max),
}
