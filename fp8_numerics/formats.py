"""Define the formats of FP8 and FP4 numbers; this file does not import torch.

E4M3 and E5M2 are those of Micikevicius et al. 2022 (arXiv 2209.05433), table 1. E4M3FNUZ and
E5M2FNUZ are AMD's, from Noune et al. 2022 (arXiv 2206.02915): their bias is larger by one, they
have no infinity, and the code of the negative zero is their only NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

FormatName = Literal["e4m3", "e5m2"]
NumbersName = FormatName | Literal["e4m3fnuz", "e5m2fnuz", "e2m1", "simulated"]


@dataclass(frozen=True)
class Fp8Format:
    """Describe an FP8 format.

    `dtype_name` is the name in torch of the dtype of its numbers, and `max` its largest finite
    magnitude. Without `has_kernels` only torch operations cast to it and read it.

    There is one object of each format, since casts ask which one it is: `copy.deepcopy` and pickle
    return that object.
    """

    name: NumbersName
    dtype_name: str
    max: float
    has_kernels: bool = True

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its numbers."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @cached_property
    def is_e4m3(self) -> bool:
        """Whether kernels cast to E4M3, and not to E5M2.

        Raises:
            ValueError: Kernels do not have the format.
        """
        if self.name not in FORMATS:
            names = " and ".join(FORMATS)
            hint = "" if self.has_kernels else ". Use fp8_numerics.cast.quantize_torch"
            raise ValueError(f"{self.name}: kernels cast to {names} alone{hint}")
        return self is E4M3

    def __reduce__(self) -> tuple[Callable[[NumbersName], Fp8Format], tuple[NumbersName]]:
        """Return how pickle and `copy.deepcopy` find the format again."""
        return _format_named, (self.name,)


E4M3 = Fp8Format("e4m3", "float8_e4m3fn", 448.0)
E5M2 = Fp8Format("e5m2", "float8_e5m2", 57344.0)
E4M3FNUZ = Fp8Format("e4m3fnuz", "float8_e4m3fnuz", 240.0, has_kernels=False)
E5M2FNUZ = Fp8Format("e5m2fnuz", "float8_e5m2fnuz", 57344.0, has_kernels=False)
E2M1 = Fp8Format("e2m1", "float8_e4m3fn", 6.0)
"""FP4: its numbers are kept as those of E4M3, which has all of them."""
SIMULATED = Fp8Format("simulated", "float32", math.inf)
"""The values that a rule returned in place of bytes and scales."""
FORMATS: dict[FormatName, Fp8Format] = {"e4m3": E4M3, "e5m2": E5M2}
"""The formats that recipes, kernels and tensor cores have."""
ALL_FORMATS: dict[str, Fp8Format] = {
    fmt.name: fmt for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, SIMULATED)
}


def not_a_format(given: object) -> TypeError:
    """Return the error of what stands where a format is needed, and is none."""
    return TypeError(f"fmt is {given!r}, and not a format as fp8_numerics.formats.E4M3 is one")


def _format_named(name: NumbersName) -> Fp8Format:
    return ALL_FORMATS[name]
