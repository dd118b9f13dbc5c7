"""Scale the loss of FP16 training dynamically."""

from __future__ import annotations

import math
from typing import Any

from megafp8.specs import LossScaleSpec

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Hold the factor on the loss that keeps FP16 gradients from underflowing to zero.

    The rule is NeMo's: after `growth_interval` finite steps in a row the scale doubles; from the
    `hysteresis`-th overflow in a row on, each overflow halves it, down to `min_scale`. A finite
    step ends a row of overflows (in Megatron's `DynamicGradScaler`, only a growth does).
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self.spec = spec
        self.scale = spec.init_scale
        self.num_finite = 0  # finite steps since the last overflow or growth
        self.num_overflows = 0  # overflows in a row

    @property
    def is_at_minimum(self) -> bool:
        """Whether the scale cannot be reduced any more after an overflow."""
        return self.scale <= self.spec.min_scale

    def update(self, *, overflowed: bool) -> None:
        """Change the scale after a step; every rank calls this with the same value.

        `overflowed` says whether the step's gradients held a NaN or an infinity.
        """
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
            # Beyond FP32's range the scale would become infinite (torch has the same rule).
            self.scale = self.scale * GROWTH if self.scale < 2.0**127 else self.scale

    def state(self) -> dict[str, float | int]:
        """Return the scale and the two counts, for a checkpoint's manifest."""
        return {
            "scale": self.scale,
            "num_finite": self.num_finite,
            "num_overflows": self.num_overflows,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            ValueError: The scale is not a positive finite number.
        """
        scale = float(state["scale"])
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"a loss scale of {scale} is no positive finite number")
        self.scale = scale
        self.num_finite = int(state["num_finite"])
        self.num_overflows = int(state["num_overflows"])
