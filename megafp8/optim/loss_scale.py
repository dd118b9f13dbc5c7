"""FP16's dynamic loss scale."""

from __future__ import annotations

import math
from typing import Any

from megafp8.specs import LossScaleSpec

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """By what the gradients of FP16's backward pass are multiplied, so that they do not vanish.

    NeMo's rule: after `growth_interval` finite steps in a row the scale doubles; from the
    `hysteresis`-th overflow in a row on, each halves it, down to `min_scale`. A finite step ends
    the row (in Megatron's `DynamicGradScaler` only growth does).
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self.spec = spec
        self.scale = spec.init_scale
        self.num_finite = 0  # since the last overflow or growth
        self.num_overflows = 0  # in a row

    @property
    def is_at_minimum(self) -> bool:
        """Whether an overflow cannot be met with a smaller scale any more."""
        return self.scale <= self.spec.min_scale

    def update(self, *, overflowed: bool) -> None:
        """Every rank calls it with the same answer, after each step."""
        if overflowed:
            self.num_finite = 0
            self.num_overflows += 1
            if self.num_overflows >= self.spec.hysteresis:
                self.scale = max(self.scale * BACKOFF, self.spec.min_scale)
            return
        self.num_overflows = 0
        self.num_finite += 1
        if self.num_finite == self.spec.growth_interval:
            self.num_finite = 0
            # Beyond FP32's range it would stop being a number (torch's rule as well).
            self.scale = self.scale * GROWTH if self.scale < 2.0**127 else self.scale

    def state(self) -> dict[str, float | int]:
        """For a checkpoint's manifest."""
        return {
            "scale": self.scale,
            "num_finite": self.num_finite,
            "num_overflows": self.num_overflows,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        assert math.isfinite(self.scale) and self.scale > 0, state
        self.num_finite = int(state["num_finite"])
        self.num_overflows = int(state["num_overflows"])
