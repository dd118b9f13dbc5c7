"""Describe, before a run begins, which products of a backend's module will run in FP8."""

from __future__ import annotations

from typing import NamedTuple

from megafp8.specs.precision import GemmName


class PlannedGemms(NamedTuple):
    """Say which of a linear's three products will run in FP8, and why the others will not.

    `flops` counts one product for one token; the three products are of the same size.
    """

    name: str
    flops: int
    fp8: tuple[GemmName, ...]  # the products that run in FP8
    reason: str  # why the other products do not
