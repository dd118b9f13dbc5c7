"""Dropout with a random byte for each element, and a mask of one bit for each.

The bytes of a GPU come from CUDA's generator; here they come from torch's default one of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from te_cpu.enums import DType
from te_cpu.quantize import dequantize
from te_cpu.tensors import is_quantized

BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def dropout_fwd(
    input: Any, dropout_probability: float, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return what is kept, times 1 / (1 - probability), and the mask: bits, the lowest first.

    An element is dropped where its byte is less than the probability in 256 parts.
    """
    dtype = input.dtype
    is_fp8 = is_quantized(input)
    x = dequantize(input, DType.kFloat32) if is_fp8 else input.detach().float()
    drawn = torch.randint(256, x.shape, device="cpu")
    kept = drawn >= int(dropout_probability * 256)
    made = _kept(x, kept, dropout_probability).to(dtype)
    mask = (kept.reshape(-1, 8) * BITS).sum(1, dtype=torch.uint8)
    return [made if out is None else out.copy_(made), mask]


def dropout_bwd(
    grad_output: torch.Tensor,
    mask: torch.Tensor,
    dropout_probability: float,
    grad_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of what was kept, times 1 / (1 - probability)."""
    kept = ((mask[:, None] & BITS) != 0).reshape(grad_output.shape)
    made = _kept(grad_output.float(), kept, dropout_probability).to(grad_output.dtype)
    return made if grad_input is None else grad_input.copy_(made)


def _kept(x: torch.Tensor, kept: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.where(kept, x, 0.0) * (1.0 / (1.0 - probability))


KERNELS = (dropout_fwd, dropout_bwd)
