"""Keep the private names of torch that FP8 products use; tried with torch 2.11, 2.13 to 2.15."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_aten = torch.ops.aten


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, **options: Any
) -> torch.Tensor:
    """Return the FP8 product of tensor cores, or that of FP4, whose scales are pairs of tensors.

    The second tensor of such a pair is a factor of the whole operand. The refusals of both products
    were tried on CPUs and on meta, their results never.
    """
    if isinstance(scale_a, torch.Tensor):
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, **options)
    blocks = [int(F.ScalingType.BlockWise1x16.value), int(F.ScalingType.TensorWise.value)]
    tiles = [int(F.SwizzleType.SWIZZLE_32_4_4.value), int(F.SwizzleType.NO_SWIZZLE.value)]
    scales = (list(scale_a), blocks, tiles, list(scale_b), blocks, tiles)
    rest: tuple[Any, ...] = (options["bias"], options["out_dtype"], [], options["use_fast_accum"])
    out = options.get("out")
    product: torch.Tensor = (
        _aten._scaled_mm_v2(a, b, *scales, *rest)
        if out is None
        else _aten._scaled_mm_v2.out(a, b, *scales, *rest, out=out)
    )
    return product
