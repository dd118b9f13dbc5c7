"""Compute positions within attention: rotary embedding (RoPE) and linear biases (ALiBi)."""

# B batch  S sequence  K keys  H heads  E head width  R rotated width

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Holds the rotation angles, their cosines and sines, [S, R] or [B, 1, S, R], in FP32."""

    angles: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x_BHSE: torch.Tensor) -> torch.Tensor:
        """Return `x_BHSE` with the first R features of each head rotated.

        Feature i is paired with feature i + R/2, as in GPT-NeoX.
        """
        work = torch.promote_types(x_BHSE.dtype, torch.float32)
        size = self.cos.shape[-1]
        turned, rest = x_BHSE[..., :size].to(work), x_BHSE[..., size:]
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        turned = (turned * self.cos + crossed * self.sin).to(x_BHSE.dtype)
        return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)


def rotary(
    positions: torch.Tensor, size: int, base: float, interpolation_factor: float | None
) -> Rotary:
    """Return the rotation of RoPE (Su et al., arXiv 2104.09864) for positions [S] or [B, S].

    The angles are FP32 in every run, as in Megatron and transformers, so that their weights mean
    the same here. An interpolation factor f (arXiv 2306.15595) divides the positions by f.
    """
    exponents = torch.arange(0, size, 2, device=positions.device).float() / size
    scaled = positions.float() / (interpolation_factor or 1.0)
    half = scaled[..., None] * (1.0 / base**exponents)
    angles = torch.cat((half, half), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return Rotary(angles, angles.cos(), angles.sin())


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head (Press et al., arXiv 2108.12409).

    For 2^n heads the slopes are the geometric series that starts at 2^(-8/2^n). For other numbers,
    the heads beyond the largest power of two take every second slope of the next longer series.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]


def alibi_bias(
    slopes_H: torch.Tensor, queries_S: torch.Tensor, keys_K: torch.Tensor
) -> torch.Tensor:
    """Return the bias [H, S, K] of queries and keys at these positions: -slope * distance.

    The bias is 0 above the diagonal, where the causal mask applies.
    """
    distance_SK = (queries_S[:, None] - keys_K).clamp(min=0)
    return -slopes_H[:, None, None] * distance_SK
