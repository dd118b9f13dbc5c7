"""Quantize one tensor of a linear by the rule of its recipe."""

from __future__ import annotations

from typing import Any

import torch

from megafp8.fp8.quantizer import LinearQuantizer, Operands, Role, WantsFp8

BOTH = WantsFp8(True, True)


def quantized(
    quantizer: LinearQuantizer,
    role: Role,
    x_MN: torch.Tensor,
    need: WantsFp8 = BOTH,
    **options: Any,
) -> tuple[Operands, torch.Tensor | None]:
    """Operands and sums, also for products that the recipe keeps out of FP8."""
    tensor = quantizer.tensors[role]
    found: tuple[Operands, torch.Tensor | None] = tensor.rule.operands(
        tensor, x_MN, need, **options
    )
    return found
