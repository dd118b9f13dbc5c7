"""A recipe with everything at once: FP4, two levels of scales, a rotation, stochastic rounding."""

from __future__ import annotations

import torch

from megafp8.fp8 import Cast, Casts, Recipe, Scaled, Scales, Traits

LINE, SQUARE = Scales(1, 16, has_outer=True), Scales(16, 16, has_outer=True)


class FourBits(Recipe):
    """Blocks of 16 elements have a scale in E4M3, and the whole tensor has one in FP32."""

    traits = Traits(
        input=Casts(LINE, LINE, rotation="hadamard"),
        weight=Casts(SQUARE, SQUARE, serves_both=True),
        grad_output=Casts(LINE, LINE, is_random=True, rotation="hadamard"),
        numbers="e2m1",
        agrees=True,
        commutes=True,
        power_2="never",
        max_saturated=0.2,
    )

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> Scaled:
        """Quantize blocks; a row's or a square's elements share a scale."""
        if cast.along == "first" and cast.role != "weight":
            x_MK = rotated(x_MK)
        rows, (m, k) = cast.scales.across or 1, x_MK.shape
        tiles = x_MK.float().reshape(m // rows, rows, k // 16, 16)
        each = tiles.abs().nan_to_num(nan=0.0, posinf=0.0).amax((1, 3))
        amax = each.amax()
        if cast.reduce_max is not None:
            cast.reduce_max(amax)
        outer = amax.clamp(min=1e-30) / (6 * 448)
        scale = (each / (6 * outer)).to(torch.float8_e4m3fn).float()
        numbers = tiles / (scale * outer).clamp(min=1e-37)[:, None, :, None]
        byte = cast.draw((m, k)) if cast.role == "grad_output" else None
        return Scaled(e2m1(numbers.reshape(m, k), byte).to(cast.fmt.dtype), scale, outer)


def rotated(x_MK: torch.Tensor) -> torch.Tensor:
    """Return x with each group of 16 elements times an orthogonal matrix."""
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (x_MK.float().unflatten(1, (-1, 16)) @ h / 4).flatten(1)


def e2m1(x: torch.Tensor, byte: torch.Tensor | None) -> torch.Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6: to nearest, or up with the chance byte / 256."""
    a = x.abs().clamp(max=6.0)
    step = torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))
    part = a / step
    whole = part.round() if byte is None else (part + byte / 256).floor()
    return (whole * step).clamp(max=6.0).copysign(x)
