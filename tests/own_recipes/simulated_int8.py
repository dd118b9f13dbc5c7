"""A recipe as a user writes it first: values of INT8 with a scale for each row, not their bytes."""

from __future__ import annotations

import torch

from megafp8.fp8 import ROW, Cast, Recipe, Traits, alike


class Int8(Recipe):
    """Round each row to 255 levels."""

    traits = Traits(input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), is_simulated=True)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the values of INT8 numbers with a scale for each row."""
        scale = x_MK.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (x_MK / scale).round().clamp(-127, 127) * scale
