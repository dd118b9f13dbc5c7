"""Recipes for one bad linear of a model, which `megafp8 compare --each-layer` has to find."""

from __future__ import annotations

import torch

from megafp8.fp8 import ROW, Cast, Recipe, Traits, alike


class TwoBits(Recipe):
    """Keep three values of a row: its largest one, with either sign, and zero."""

    traits = Traits(input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), is_simulated=True)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the rounded values of a matrix."""
        scale_M1 = x_MK.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (x_MK / scale_M1).round() * scale_M1


class Outlier(TwoBits):
    """Round to 8-bit integers beside a channel of 1e3 times the usual value, which loses most.

    E4M3 would lose little: its relative error is the usual one down to 1/28 of the usual value.
    """

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the rounded values of a matrix."""
        usual_M1 = x_MK.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        scale_M1 = 1e3 * usual_M1 / 127
        return (x_MK / scale_M1).round() * scale_M1


class Underflow(TwoBits):
    """Lose the 60 % of the values that are smallest."""

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return a matrix with zeros in the place of its smallest values."""
        sizes = x_MK.float().abs()
        least = sizes.flatten().kthvalue(int(0.6 * sizes.numel())).values
        return torch.where(sizes > least, x_MK, torch.zeros_like(x_MK))
