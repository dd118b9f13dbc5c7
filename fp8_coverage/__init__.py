"""Record every matrix product of any torch program, and say which of them ran in FP8.

    from fp8_coverage import coverage

    with coverage(model) as c:
        model(batch).loss.backward()
    print(c.table())
    c.assert_at_least(0.85)

A public name loads torch when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8_coverage.record import coverage
    from fp8_coverage.table import Coverage, CoverageError, Product
    from fp8_coverage.trainer import trainer_callback

__all__ = ["Coverage", "CoverageError", "Product", "coverage", "trainer_callback"]
_HOMES = {"coverage": "record", "trainer_callback": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'table')}"), name)
