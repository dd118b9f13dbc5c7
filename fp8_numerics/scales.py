"""Compute scales from a tensor's own amaxes ("current" scaling).

Transformer Engine's rule (`compute_scale_from_amax` in recipe_common.cuh):

    amax 0 or not finite    quant_scale = 1
    else                    quant_scale = fp8_max / amax in FP32, FLT_MAX where that overflows
    power_2_scale           its mantissa is cut off: the next power of two below

torchao's rule (`amax_to_scale` in float8_utils.py), for the rowwise recipes:

    quant_scale = fp8_max / max(amax, 1e-12) in FP64, rounded to FP32
    power_2_scale           2**floor(log2(quant_scale))

One point differs: an amax that is not finite (a NaN counts as +inf) gives 1 under both rules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8_numerics.dtypes import DTYPE_NAMES, described
from fp8_numerics.formats import Fp8Format, not_a_format

FLOAT32_MAX = torch.finfo(torch.float32).max
TORCHAO_SMALLEST_AMAX = 1e-12


def scale_of_amax(amax: torch.Tensor, fmt: Fp8Format, *, power_2: bool) -> torch.Tensor:
    """Return scales by Transformer Engine's rule, elementwise over FP32 amaxes of any shape.

    Amaxes in BF16 or FP16 are widened, which is exact.

    Raises:
        TypeError: `amax` has another dtype, or `fmt` is no format.
    """
    if getattr(amax, "dtype", None) != torch.float32:
        amax = widened(amax)
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    target = torch.full_like(amax, fmt.max)
    scale = torch.div(target, amax).clamp_(max=FLOAT32_MAX)
    if power_2:
        scale = power_2_below(scale)
    is_good = amax.isfinite() & (amax > 0)
    return torch.where(is_good, scale, torch.ones_like(scale))


def scale_of_amax_torchao(amax: torch.Tensor, fmt: Fp8Format, *, power_2: bool) -> torch.Tensor:
    """Return scales by torchao's rule, elementwise over amaxes as `scale_of_amax` takes them."""
    if getattr(amax, "dtype", None) != torch.float32:
        amax = widened(amax)
    if not isinstance(fmt, Fp8Format):
        raise not_a_format(fmt)
    clamped = amax.double().clamp(min=TORCHAO_SMALLEST_AMAX)
    scale = (fmt.max / clamped).float()
    if power_2:
        scale = power_2_below(scale)
    return torch.where(amax.isfinite(), scale, torch.ones_like(scale))


def widened(x: torch.Tensor, name: str = "amax") -> torch.Tensor:
    """Return amaxes, or what `name` says, in FP32; those in BF16 and FP16 stay the same numbers.

    Raises:
        TypeError: They have another dtype, whose numbers FP32 may not hold.
    """
    dtype = getattr(x, "dtype", None)
    if dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} is {described(x)}, and rules read torch.float32: {name}.float()")
    return x if dtype == torch.float32 else x.float()


def power_2_below(scale: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is not above each FP32 scale; subnormals become 0."""
    if scale.dtype != torch.float32:
        raise TypeError(
            f"scale is {described(scale)}, and its bits are read in FP32: scale.float()"
        )
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def finite_or_inf(amax: torch.Tensor) -> torch.Tensor:
    """Replace NaN by +inf, in place, so that a MAX over ranks cannot lose it."""
    return amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def amax_of_blocks(x_MN: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the amax of each block, FP32 [blocks along M, blocks along N]; a NaN gives +inf."""
    rows, cols = x_MN.shape
    missing = (0, -cols % block[1], 0, -rows % block[0])
    padded = F.pad(x_MN, missing) if any(missing) else x_MN.contiguous()
    tiles = padded.view(
        padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1]
    )
    return finite_or_inf(tiles.abs().amax(dim=(1, 3)).float())
