"""Put plain torch in the place of functions whose kernels are in Triton, which needs a GPU.

Triton's interpreter would run those kernels on a CPU, but it takes seconds for a thousand tokens,
it must be chosen before Triton is imported, for all code of the process, and Triton may be absent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from te_cpu import cross_entropy, grouped, nv, permute
from te_cpu.extension import as_compiled
from te_cpu.missing import FromAbsentPackage, MissingTriton

MODULES = "transformer_engine.pytorch.triton"
KERNELS = "transformer_engine.common.triton"


def supply(release: tuple[int, ...]) -> None:
    """Replace the functions of this release wherever they are, and refuse other kernels by name."""
    ours: dict[str, dict[str, Callable[..., Any]]] = {
        "permutation": permute.in_triton(release),
        "cross_entropy": cross_entropy.in_triton(release),
        "grouped_dbias_dscales": {"_launch_grouped_dbias": grouped.launch_grouped_dbias},
        "pad": {"pad_columnwise_scale_inv": nv.padded_scales},
    }
    loaded = {name: m for name, m in sys.modules.items() if name.startswith("transformer_engine.")}
    for name, functions in ours.items():
        if (module := loaded.get(f"{MODULES}.{name}")) is not None:
            for key, function in functions.items():
                if key in vars(module):
                    _replace(vars(module)[key], as_compiled(function), loaded.values())
    for name, module in loaded.items():
        if name.startswith((KERNELS, MODULES)):
            for key, kernel in list(vars(module).items()):
                if _is_kernel(kernel):
                    _replace(kernel, MissingTriton(key), loaded.values())


def _is_kernel(value: object) -> bool:
    """Whether it is a kernel of Triton, or stands for one where Triton is not installed."""
    of_triton = any(kind.__name__ == "KernelInterface" for kind in type(value).__mro__)
    return of_triton or isinstance(value, FromAbsentPackage)


def _replace(old: Any, new: Any, modules: Any) -> None:
    for module in modules:
        for key, value in list(vars(module).items()):
            if value is old:
                setattr(module, key, new)
