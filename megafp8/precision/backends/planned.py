"""What a backend's module says of itself before a run begins."""

from __future__ import annotations

from typing import NamedTuple

from megafp8.specs.precision import GemmName


class PlannedGemms(NamedTuple):
    """`flops` of one product for one token; the three products are of the same size."""

    name: str
    flops: int
    fp8: tuple[GemmName, ...]  # which of the products are
    reason: str  # why the others are not
