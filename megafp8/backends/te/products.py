"""Counts Transformer Engine's matrix products where they run.

That is the one function which its Python calls for all of them,
`transformer_engine_torch.generic_gemm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8_numerics.dtypes import DTYPE_NAMES
from fp8_numerics.gemm import GemmCounter
from megafp8.backends.te.quantized import bytes_of, size_of
from megafp8.specs.traits import GemmName

# By (transA, transB): "TN" is input @ weight^T, "NN" grad_output @ weight, "NT" grad_output^T @
# input.
PLACES: dict[tuple[bool, bool], GemmName] = {
    (True, False): "output",
    (False, False): "grad_input",
    (False, True): "grad_weight",
}


class CountedProducts:
    """Stand before `generic_gemm` and add what runs to `counter`.

    A layer sets that to its own when its forward or backward pass begins.
    """

    def __init__(self, generic_gemm: Callable[..., Any]) -> None:
        self._run = generic_gemm
        self.counter: GemmCounter | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._run(*args, **kwargs)
        if self.counter is not None:
            a, trans_a, b, trans_b = args[:4]
            place = PLACES[bool(trans_a), bool(trans_b)]
            self.counter.add(_precision(a, b), place, _flops(a, b, results[0]))
        return results


def observe_products(extension: Any) -> CountedProducts:
    """Return the observer of this process, put before the extension at the first call."""
    observer = extension.generic_gemm
    if not isinstance(observer, CountedProducts):
        observer = extension.generic_gemm = CountedProducts(observer)
    return observer


def _precision(a: Any, b: Any) -> str:
    if bytes_of(a) is not None and bytes_of(b) is not None:
        return "fp8"
    return DTYPE_NAMES[a.dtype if bytes_of(a) is None else b.dtype]


def _flops(a: Any, b: Any, out: Any) -> int:
    """Return 2 M N K: the sizes of the three matrices are MK, KN and MN."""
    return 2 * math.isqrt(math.prod(size_of(x) for x in (a, b, out)))
