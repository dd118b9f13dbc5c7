"""Compute positions within attention: rotary embedding (RoPE) and linear biases (ALiBi)."""

# B batch  S sequence  K keys  H heads  E head width  R rotated width

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megafp8.specs import GPTSpec


@dataclass(frozen=True)
class Rotary:
    """Hold the rotation angles, their cosines and sines, [S, R] or [B, 1, S, R], in FP32."""

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


def rotary(positions: torch.Tensor, spec: GPTSpec) -> Rotary:
    """Return the rotation of RoPE (Su et al., arXiv 2104.09864) for positions [S] or [B, S].

    The angles are FP32 in every run, as in Megatron and transformers, so that their weights mean
    the same here. An interpolation factor f (arXiv 2306.15595) divides the positions by f. YaRN
    also multiplies cosines and sines by a factor, so that scores grow with its square.
    """
    scaled = positions.float() / (spec.seq_len_interpolation_factor or 1.0)
    half = scaled[..., None] * frequencies(spec, positions.device)
    angles = torch.cat((half, half), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    if (factor := yarn_attention_factor(spec)) != 1:
        cos, sin = cos * factor, sin * factor
    return Rotary(angles, cos, sin)


def frequencies(spec: GPTSpec, device: torch.device) -> torch.Tensor:
    """Return the angle between two positions of each pair of features: FP32 [R/2]."""
    exponents = torch.arange(0, spec.rotary_size, 2, device=device).float() / spec.rotary_size
    powers = spec.rotary_base**exponents
    if spec.scale_positional_embedding:
        return _scaled(1.0 / powers, spec)
    if spec.yarn_rotary_scaling_factor is not None:
        return _by_yarn(powers, spec, spec.yarn_rotary_scaling_factor)
    return 1.0 / powers


def _scaled(plain: torch.Tensor, spec: GPTSpec) -> torch.Tensor:
    """Return the frequencies of Llama 3.1 (Dubey et al., arXiv 2407.21783), as transformers does.

    Those that turn less than `rope_low_freq_factor` times within the original length are divided by
    the factor, those that turn more than `rope_high_freq_factor` times stay, and those between are
    a mean of both that is linear in the number of turns.
    """
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    turns = spec.original_max_position_embeddings / (2 * math.pi / plain)
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * plain / spec.rope_scaling_factor + kept_share * plain


def _by_yarn(powers: torch.Tensor, spec: GPTSpec, factor: float) -> torch.Tensor:
    """Return YaRN's frequencies (Peng et al., arXiv 2309.00071), given 1 / frequency without it.

    The first pairs of features turn fast and keep their frequency, the last ones are divided by the
    factor. Between them a ramp is linear in the pair's number; its ends are whole numbers.
    """

    def pair_that_turns(times: float) -> float:
        ratio = spec.original_max_position_embeddings / (times * 2 * math.pi)
        return spec.rotary_size * math.log(ratio) / (2 * math.log(spec.rotary_base))

    first = max(math.floor(pair_that_turns(spec.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(spec.yarn_beta_slow)), spec.rotary_size - 1)
    span = last - first or 0.001  # transformers' width of a ramp whose ends fall together
    pairs = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept_share = 1 - ((pairs - first) / span).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept_share) + 1.0 / powers * kept_share


def yarn_attention_factor(spec: GPTSpec) -> float:
    """Return the number by which YaRN multiplies cosines and sines; 1 without YaRN."""
    factor, given = spec.yarn_rotary_scaling_factor, spec.yarn_attention_factor
    if factor is None:
        return 1.0
    return 0.1 * math.log(factor) + 1.0 if given is None else given


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
