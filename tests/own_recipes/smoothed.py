"""A recipe with a history of its own: the largest amax so far, which decays by a tenth a time."""

from __future__ import annotations

import torch

from megafp8.fp8 import TENSOR, Recipe, Seen, Traits, alike

WHOLE = alike(TENSOR, serves_both=True)


class Smoothed(Recipe):
    """Scale by an amax that rises at once and falls slowly."""

    traits = Traits(
        input=WHOLE,
        weight=WHOLE,
        grad_output=WHOLE,
        backward_formats=("e5m2", "e4m3"),
        has_history=True,
        shares_weight=True,
        power_2="never",
    )

    def update(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the amax in the newest entry of the history; the others are not used."""
        amax = torch.maximum(seen.amax, 0.9 * seen.history[:, -1])
        return torch.cat([seen.history[:, 1:], amax[:, None]], 1), seen.fmt.max / amax
