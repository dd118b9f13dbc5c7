"""Define number formats: torch's dtypes by their names in settings, FP8, and stored states'.

The FP8 formats are those of Micikevicius et al. 2022 (arXiv 2209.05433), table 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megafp8.specs import Fp8Recipe
from megafp8.specs.optim import StorageName
from megafp8.specs.traits import FormatName

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

NumbersName = FormatName | Literal["e2m1", "simulated"]


@dataclass(frozen=True)
class Fp8Format:
    """Describe an FP8 format; `max` is its largest finite magnitude.

    There is one object of each format, since casts ask which one it is: `copy.deepcopy` and pickle
    return that object.
    """

    name: NumbersName
    dtype: torch.dtype
    max: float

    def __reduce__(self) -> tuple[Callable[[NumbersName], Fp8Format], tuple[NumbersName]]:
        """Return how pickle and `copy.deepcopy` find the format again."""
        return _format_named, (self.name,)


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0)
E2M1 = Fp8Format("e2m1", torch.float8_e4m3fn, 6.0)
"""FP4: its numbers are kept as those of E4M3, which has all of them."""
SIMULATED = Fp8Format("simulated", torch.float32, math.inf)
"""The values that a rule returned in place of bytes and scales."""
FORMATS: dict[FormatName, Fp8Format] = {"e4m3": E4M3, "e5m2": E5M2}


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


def _format_named(name: NumbersName) -> Fp8Format:
    return next(fmt for fmt in (E4M3, E5M2, E2M1, SIMULATED) if fmt.name == name)


def formats_of(recipe: Fp8Recipe) -> tuple[Fp8Format, Fp8Format]:
    """Return the formats of (inputs and weights, output gradients) under a recipe."""
    return FORMATS[recipe.forward_format], FORMATS[recipe.backward_format]
